"""The worlds in which the checks run a method: any order of events, the virtual cluster, real processes."""
