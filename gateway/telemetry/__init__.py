"""What the gateway tells the outside about its turns: spans (OTLP) and metrics (Prometheus)."""
