"""A task trained by real workers: what each of them does, how they are started, watched, stopped and resumed."""
