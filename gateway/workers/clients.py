"""From what a gateway is told of a worker to a client that speaks with it."""

from __future__ import annotations

import dataclasses
import ssl

from gateway.workers.base import Worker
from gateway.workers.opaque.client import OpaqueClient
from gateway.workers.replica import ReplicaClient
from gateway.workers.spec import WorkerSpec
from gateway.workers.transport import Patience

_OPAQUE_SILENCE = 600.0
"""Seconds between two pieces of an answer: a long prefill is silent, and nobody else watches."""


def open_client(spec: WorkerSpec, patience: Patience, tls: ssl.SSLContext | None = None) -> Worker:
    """A client for a worker of this kind. Use it on one event loop. tls: for https; None: as the system trusts."""
    match spec.kind:
        case "turnkeep":
            return ReplicaClient(
                spec.url,
                connect_timeout=patience.connect,
                reply_timeout=patience.reply,
                accept_timeout=patience.accept,
                tls=tls,
            )
        case "vllm":
            # ZMQ comes with it, which a gateway with none of them need not load.
            from gateway.workers.vllm.client import VllmClient

            return VllmClient(spec, patience, tls)
        case "sglang":
            from gateway.workers.sglang.client import SglangClient

            return SglangClient(spec, patience, tls)
        case "openai":
            return OpaqueClient(spec, dataclasses.replace(patience, idle=_OPAQUE_SILENCE), tls)
