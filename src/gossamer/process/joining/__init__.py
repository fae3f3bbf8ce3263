"""Joining a run: what is checked on each worker, and what all workers compare before the first step."""
