"""Gossamer."""
