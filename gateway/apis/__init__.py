"""API dialects. One codec each: a body to a Turn, deltas back to that dialect's JSON and events."""
