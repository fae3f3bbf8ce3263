"""Who is alive, who is a member, who takes over whose state, when the end is reached: a pure state machine."""
