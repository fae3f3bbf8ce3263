"""One real worker: its flat model, the driver of its method, and the swarm that users see."""
