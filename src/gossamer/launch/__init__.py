"""Workers that run a user's own script: how they are started, watched and started again."""
