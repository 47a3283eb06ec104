"""Recorded agent trajectories: their format, the recorder, replay, reports, and the bundled samples."""
