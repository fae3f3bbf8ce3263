"""Simulated communication: pairing, exchanges, collectives, and what workers get wrong about them."""
