"""Replicas: groups of ranks that act as one worker, with the user's own parallelism inside."""
