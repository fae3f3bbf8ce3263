"""The virtual world: any number of workers in one process, real gradients, simulated time."""
