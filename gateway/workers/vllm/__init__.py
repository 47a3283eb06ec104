"""vLLM as a worker: token ids in and out over its completions API, load from its metrics, residency from its KV events."""
