"""Watches over a running worker: its weights, its optimizer, its peers, and waits that last too long."""
