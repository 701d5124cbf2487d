"""An authority that issues certificates into files, for tests of TLS and of what lies below it."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import trustme

from tunnel.certificates import ClientTls, ServerTls

NAME = "server.test"


class Authority:
    """Issues certificates into files."""

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        self._folder = folder
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(self, file: str, name: str = NAME, expires: datetime.datetime | None = None) -> tuple[Path, Path]:
        """A certificate and its key."""
        issued = self._authority.issue_cert(name, not_after=expires)
        cert, key = self._folder / f"{file}.pem", self._folder / f"{file}.key"
        cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        key.chmod(0o600)
        return cert, key

    def server(self, file: str = "server", name: str = NAME, expires: datetime.datetime | None = None) -> ServerTls:
        return ServerTls(*self.issue(file, name, expires))

    def client(self, file: str = "client") -> ClientTls:
        return ClientTls(self.ca, *self.issue(file, "client.test"))


def der(cert: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(cert.read_text())
