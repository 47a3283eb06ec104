"""SGLang as a worker: token ids in and out over its native /generate, load from its metrics, residency from its KV events."""
