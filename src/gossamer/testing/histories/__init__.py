"""Histories of the protocol between workers: simulated processes and links that fail, drawn from a seed."""
