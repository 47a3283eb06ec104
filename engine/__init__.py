"""Tokens in, tokens out: models, kernels, KV memory, scheduler, sampler and the replica server."""
