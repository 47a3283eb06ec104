"""The certificate of the HTTPS port: read at the start, and again when its files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from gateway.access.watched_file import WatchedFile

log = logging.getLogger(__name__)

_LOOK_EVERY = 5.0


class TlsError(ValueError):
    """The certificate or its key cannot be used. The message says why."""


class Certificate:
    """A chain and its private key, as PEM files. TLS 1.2 at least. New connections get what was read last; one that cannot be
    used, as when only one of the two files is new yet, leaves the former in force."""

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain = chain
        self._key = key
        self._files = (WatchedFile(chain), WatchedFile(key))
        self._context: ssl.SSLContext | None = None

    def load(self) -> ssl.SSLContext:
        """Raises TlsError."""
        self._changed()
        self._context = self._read()
        return self._context

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        pending = False
        while True:
            await asyncio.sleep(_LOOK_EVERY)
            pending = await asyncio.to_thread(self._changed) or pending
            if not pending or self._context is None:
                continue
            pending = False
            try:
                await asyncio.to_thread(self._read)
            except TlsError as error:
                log.error("%s; the certificate that was read before stays in use", error)
                continue
            # OpenSSL gives what was loaded last to every handshake that begins from now on.
            self._context.load_cert_chain(self._chain, self._key, password=_no_password)
            log.info("the certificate %s was read again", self._chain)

    def _changed(self) -> bool:
        chain, key = (file.changed() for file in self._files)
        return chain or key

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._chain, self._key, password=_no_password)
        except (OSError, ValueError) as error:
            # ssl.SSLError is an OSError.
            why = getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
            raise TlsError(f"The certificate {self._chain} with the key {self._key} cannot be used: {why}.") from error
        return context


def _no_password() -> str:
    """Without this OpenSSL would ask on the terminal."""
    raise ValueError("the key is encrypted; give one without a password")
