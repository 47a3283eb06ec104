"""Any OpenAI-compatible server as a worker: it takes the client's body as it is, and nothing else is known of it."""
