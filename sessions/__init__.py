"""Who is talking: session identity, scoped by tenant. It imports only prefix_cache."""
