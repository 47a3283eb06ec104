"""The `turnkeep` command: the one place that composes the rooms. Nothing imports it."""
