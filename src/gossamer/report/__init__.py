"""Reports of a run: the page, the summary that the terminal shows too, TensorBoard and other trackers."""
