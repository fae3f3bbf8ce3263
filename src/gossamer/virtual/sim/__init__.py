"""Simulated time: event queue, clocks, workers, the cluster."""
