"""The arithmetic of many workers at once: the tape, its executors, gradients, optimizers."""
