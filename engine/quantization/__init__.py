"""Weights in fewer bits: what a quantised matrix is, and how one is made."""
