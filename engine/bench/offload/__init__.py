"""Measures what keeping KV below the device is worth."""
