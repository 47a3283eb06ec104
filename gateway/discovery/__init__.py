"""Where workers come from, beside the command line: a file, DNS, Kubernetes, and workers that register themselves."""
