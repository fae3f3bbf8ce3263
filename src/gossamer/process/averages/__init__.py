"""Averages over the workers outside the methods: the final model, buffers, numbers, and batch-norm statistics."""
