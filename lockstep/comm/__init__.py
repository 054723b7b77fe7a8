"""Communication of processes: typed messages, pipes with a deadline on every wait, and groups."""
