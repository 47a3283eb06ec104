"""Attention over paged KV: the interface, and the implementations that stand beside each other behind it."""
