"""Connections between processes of one run: one listening port per worker, and nobody in who has not proved itself."""
