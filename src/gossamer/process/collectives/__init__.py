"""Averages over groups of workers: membership, process groups, state transfer."""
