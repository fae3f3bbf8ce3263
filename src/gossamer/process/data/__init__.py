"""The data of a user's own loop: dealt among the workers, counted, and the schedules that follow the count."""
