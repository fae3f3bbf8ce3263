"""Runs of real workers: what each publishes, who monitors them, and what is written into the run folder."""
