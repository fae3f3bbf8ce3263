"""The process world: real workers, one process each, on torch.distributed."""
