"""Simulated time: event queue, clocks, network, pairing, workers, the cluster."""
