"""Which worker takes a turn, and why."""
