"""The runtime model: how long a step takes on a given cluster, in closed form or by running the virtual cluster."""
