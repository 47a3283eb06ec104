"""Who may use the gateway, as which tenant, and how much of it."""
