"""The front door: HTTP APIs, rendering, routing, supervision, streaming and telemetry.

It never imports torch: it meets the engine only at the worker protocol (`gateway.workers.protocol`).
"""
