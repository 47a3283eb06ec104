"""Turns in flight that several requests may share: a retry attaches to the generation that is already running."""
