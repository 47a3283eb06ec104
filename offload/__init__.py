"""Tiers below the device: where KV blocks will go when the pool needs their place. Nothing is here yet but the room."""
