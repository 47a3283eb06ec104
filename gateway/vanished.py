"""Clients that vanish without a word: their machine went down, or something between forgot the connection."""

from __future__ import annotations

import socket
from collections.abc import Iterable

_IDLE, _INTERVAL, _COUNT = 30, 10, 3


def notice_the_vanished(listening: Iterable[socket.socket], after: float) -> None:
    """Connections that these sockets accept break where nothing that was sent is acknowledged for `after` seconds; a stream
    sends a comment every few, so that its generation is ended soon after. Idle ones are asked whether anybody is there.

    Does what the system can (all of it on Linux, where accepted sockets inherit the options); 0 seconds: only keep-alive.
    """
    for one in listening:
        if one.family not in (socket.AF_INET, socket.AF_INET6):
            continue
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", _IDLE),
            ("TCP_KEEPINTVL", _INTERVAL),
            ("TCP_KEEPCNT", _COUNT),
            ("TCP_USER_TIMEOUT", int(after * 1000)),
        ):
            if hasattr(socket, name):
                one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
