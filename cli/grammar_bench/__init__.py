"""The parts of `turnkeep bench grammar`."""
