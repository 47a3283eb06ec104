"""What routers and autoscalers made for vLLM want of a worker: KV events over ZMQ as vLLM publishes them, and its metric
names."""
