"""Turns for workers that take no token ids: the client's body goes through byte for byte, and so does the answer."""
