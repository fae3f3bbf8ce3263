"""Who is alive, and how far: workers tell each other, and pass on what they have heard."""
