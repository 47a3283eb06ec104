"""Certificates for tests, made by openssl."""

import shutil
import subprocess

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


def self_signed(folder, name, valid_for="IP:127.0.0.1"):
    """folder/cert.pem and folder/key.pem, of an authority that signs itself."""
    files = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    _openssl(f"req -x509 {_KEY} -days 2 -addext subjectAltName={valid_for}", *files, "-subj", f"/CN={name}")


class Authority:
    """`ca`: its certificate. It signs those of servers."""

    def __init__(self, folder):
        self._folder = folder
        self.ca = folder / "ca.pem"
        files = ["-keyout", folder / "ca-key.pem", "-out", self.ca]
        _openssl(f"req -x509 {_KEY} -days 2", *files, "-subj", "/CN=an authority of the tests")

    def sign(self, name, valid_for="IP:127.0.0.1"):
        """(certificate, key) of a server."""
        key, asked, extra, signed = (self._folder / f"{name}.{kind}" for kind in ("key", "csr", "ext", "pem"))
        _openssl(f"req {_KEY}", "-keyout", key, "-out", asked, "-subj", f"/CN={name}")
        extra.write_text(f"subjectAltName={valid_for}\n")
        authority = ["-CA", self.ca, "-CAkey", self._folder / "ca-key.pem"]
        _openssl("x509 -req -CAcreateserial -days 2", "-in", asked, *authority, "-extfile", extra, "-out", signed)
        return signed, key


def _openssl(command, *more):
    subprocess.run(["openssl", *command.split(), *map(str, more)], check=True, capture_output=True)
