"""The planner: measure a cluster, predict what each method would do on it, recommend one, and be held to it."""
