"""Published experiments, as files: what a paper did, what it reports, and how to do it again."""
