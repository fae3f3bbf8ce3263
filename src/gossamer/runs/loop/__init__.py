"""The run folder of a loop of one's own: what was asked for, what each worker writes, and who monitors."""
