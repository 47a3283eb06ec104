"""A fleet of replicas on a virtual clock: the gateway's router and index and the engine's block pool over simulated time."""
