"""The states of members: who is behind, what is taken over, and what is averaged after a partition."""
