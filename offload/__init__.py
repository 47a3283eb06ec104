"""Tiers below the device: shared memory for all replicas of a machine, disk, remote. What they give back they have verified."""
