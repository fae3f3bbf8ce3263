"""How workers find each other: ranks, a key-value store that fails over, heartbeats."""
