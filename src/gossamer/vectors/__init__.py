"""Models as flat vectors, and arithmetic on them."""
