"""How processes talk: typed messages over pipes whose every wait has a deadline, and groups of processes."""
