"""How workers find each other: ranks, addresses, a key-value store that fails over."""
