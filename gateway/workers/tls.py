"""TLS to workers: whom the gateway trusts, and what is wrong with a worker's certificate in words."""

from __future__ import annotations

import ssl
from pathlib import Path

_OTHER_NAME = frozenset({62, 64})  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_NOT_NOW = frozenset({9, 10})  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")


def worker_tls(ca_file: str | None) -> ssl.SSLContext:
    """For connections to workers: the system's authorities are trusted, and those of a PEM file beside them. Reads the file
    once. Raises ValueError with a sentence."""
    context = ssl.create_default_context()
    if ca_file is None:
        return context
    try:
        context.load_verify_locations(cafile=Path(ca_file))
    except (OSError, ValueError) as error:
        # ssl.SSLError is an OSError.
        why = getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
        raise ValueError(
            f"pool.ca_file (--worker-ca): {ca_file} cannot be used: {why}; give the certificates of authorities as PEM."
        ) from error
    return context


def tls_trouble(error: BaseException) -> str | None:
    """What an error of a connection says of the worker's TLS, and the remedy; None where it is about something else."""
    found = _ssl_error(error)
    if found is None:
        return None
    if isinstance(found, ssl.SSLCertVerificationError):
        said = found.verify_message.rstrip(".")
        if found.verify_code in _OTHER_NAME:
            return f"its certificate is for another name ({said}); call it by one that stands in it"
        if found.verify_code in _NOT_NOW:
            return f"its certificate is not valid now ({said}); renew it, or set the clock"
        return f"its certificate is not trusted ({said}); name who signed it with --worker-ca FILE (pool.ca_file)"
    if found.reason in _NO_TLS:
        return f"it does not speak TLS there ({found.reason}); write http:// instead of https://"
    return None


def _ssl_error(error: BaseException) -> ssl.SSLError | None:
    """HTTP clients wrap it."""
    seen = 0
    at: BaseException | None = error
    while at is not None and seen < 8:
        # aiohttp's own error calls itself one of ssl's, and lacks what those say.
        for name in ("certificate_error", "os_error"):
            inner = getattr(at, name, None)
            if isinstance(inner, ssl.SSLError):
                return inner
        if isinstance(at, ssl.SSLError):
            return at
        at = at.__cause__
        seen += 1
    return None
