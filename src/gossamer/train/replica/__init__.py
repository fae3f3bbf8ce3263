"""Replicas that ``gossamer train`` starts: their ranks, the parallelism among them, their checkpoints and status."""
