"""Gossamer in the training loops of other libraries: each module needs its library, and is imported by name only."""
