"""Tool gaps: how long sessions are away between turns, by the tool that they called."""
