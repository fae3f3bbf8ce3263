"""Who belongs to a run: the workers that it began with and those that came later, without those that left for good."""
