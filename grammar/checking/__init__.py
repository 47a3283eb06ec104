"""Finished arguments and answers against their whole schemas, for what a grammar does not hold."""
