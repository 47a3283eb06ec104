"""Where a replica listens: a TCP port or a unix socket."""

from __future__ import annotations

import errno
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

BACKLOG = 1024
_MAX_UNIX_PATH = 107  # bytes, by Linux's sockaddr_un
_KEEPALIVE_IDLE, _KEEPALIVE_INTERVAL, _KEEPALIVE_COUNT = 30, 10, 3


class ListenError(Exception):
    """The address cannot be listened on. The message is a sentence for the operator."""


@dataclass(frozen=True, slots=True)
class TCPAddress:
    """Port 0: a free one."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: Path


Address = TCPAddress | UnixAddress


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket. `url` is what clients are told: `unix:PATH`, or `http://host:port` with the port that was chosen."""

    socket: socket.socket
    url: str
    path: Path | None = None
    inode: int | None = None

    def close(self) -> None:
        """Closes it. A unix socket's file goes too, unless another process has put its own there meanwhile. Idempotent."""
        self.socket.close()
        if self.path is not None:
            try:
                if self.path.lstat().st_ino == self.inode:
                    self.path.unlink()
            except FileNotFoundError:
                pass


def listen(address: Address, dead_after: float) -> Listener:
    """Listens on `address`. Raises ListenError.

    `dead_after`: seconds without an acknowledgement after which a TCP peer with data under way counts as gone.
    """
    return _listen_unix(address.path) if isinstance(address, UnixAddress) else _listen_tcp(address, dead_after)


def _listen_tcp(address: TCPAddress, dead_after: float) -> Listener:
    try:
        found = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )
    except OSError as error:
        raise ListenError(f"{address.host} is not an address of this machine: {error.strerror or error}.") from error
    # "localhost" may name both; IPv4 is what clients try.
    family, kind, protocol, _, target = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit these. They find peers that vanished without a word: while nothing is sent, and while
        # what was sent is not acknowledged.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", _KEEPALIVE_IDLE),
            ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL),
            ("TCP_KEEPCNT", _KEEPALIVE_COUNT),
            ("TCP_USER_TIMEOUT", int(dead_after * 1000)),
        ):
            if hasattr(socket, name):
                listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        listening.bind(target)
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        raise ListenError(_why_not(error, f"{address.host}:{address.port}")) from error
    listening.setblocking(False)
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)
    port = listening.getsockname()[1]
    return Listener(listening, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")


def _why_not(error: Exception, where: str) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        return f"{where} is in use by another process; choose another port, or port 0 for a free one."
    if code == errno.EADDRNOTAVAIL:
        return f"{where} is not an address of this machine; choose one that is, or 0.0.0.0 for all."
    if code == errno.EACCES:
        return f"This user may not listen on {where}; choose a port above 1023."
    return f"{where} cannot be listened on: {error}."


def _listen_unix(path: Path) -> Listener:
    if len(os.fsencode(path)) > _MAX_UNIX_PATH:
        raise ListenError(f"{path} is too long for a unix socket, which takes {_MAX_UNIX_PATH} bytes; choose a shorter path.")
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(os.fspath(path))
        path.chmod(0o600)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.ENOENT:
            raise ListenError(f"The directory of {path} does not exist; create it first.") from error
        raise ListenError(f"{path} cannot be listened on: {error.strerror or error}.") from error
    listening.setblocking(False)
    return Listener(listening, f"unix:{path.absolute()}", path.absolute(), path.lstat().st_ino)


def _remove_stale(path: Path) -> None:
    """Removes a socket that nobody listens on any more. Raises ListenError for one that is alive, or no socket."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return  # not there, or bind will say why
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"{path} exists and is not a socket; move it away or choose another path.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            # EAGAIN: its backlog is full; a timeout: it is stopped. Either way somebody holds it.
            raise ListenError(f"{path} is held by another process ({error.strerror or error}); choose another path.") from error
    raise ListenError(f"{path} is in use by another process; stop it or choose another path.")
