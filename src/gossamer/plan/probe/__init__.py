"""Measure a real cluster: compute times, links, collectives."""
