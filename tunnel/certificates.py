"""Which certificates and keys TLS is spoken with: paths of PEM files, and what the ssl module makes out of them.

Rules that hold here:

- Making one of these reads nothing; ``load`` reads everything, each time it is called.
- Every failure of it is a ``ConfigError`` that names the file. Nobody is ever asked for a passphrase.
- What is loaded belongs together: a file that is replaced while it is read is bad, and good at the next try.
- TLS 1.2 at least. Nothing is resumed: links are few and long, and each proves anew who it is.
- The ssl module is imported by whoever loads, and so by nobody who does without TLS.

This file must not know sockets, links, or when files change.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tunnel.address import canonical_host
from tunnel.configfile import read_text
from tunnel.errors import ConfigError

if TYPE_CHECKING:
    import ssl

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_MISMATCH = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")  # the last for another kind of key

File = str | Path


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What connections are accepted with.

    Attributes:
        context: for the ssl module.
        binding: what names our certificate, see ``binding_of``.
    """

    context: ssl.SSLContext
    binding: bytes


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What a server shows, and whom it takes.

    Attributes:
        cert: its certificate, and after it those that lead to the authority.
        key: the private key of that, which nobody but its owner may use.
        client_ca: the authorities of which every client must show a certificate; None takes clients without one.
    """

    cert: File
    key: File
    client_ca: File | None = None

    @property
    def paths(self) -> tuple[File, ...]:
        """What ``load`` reads."""
        return tuple(path for path in (self.cert, self.key, self.client_ca) if path is not None)

    def load(self) -> ServerContext:
        """Read the files as they are now.

        Raises:
            ConfigError: one cannot be read, holds something else, or others may use the key; or key and certificate
                are not of one pair.
        """
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
        context.num_tickets = 0
        binding = _show(context, self.cert, self.key)
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            _trust(context, self.client_ca)
        return ServerContext(context, binding)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Whom a client or an agent takes for a server, and what it shows.

    Attributes:
        ca: the authorities of which the server must show a certificate; None for those of the system.
        cert: our own certificate, for servers that want one, and after it those that lead to the authority.
        key: the private key of that, which nobody but its owner may use.
        name: the host name or address that the server's certificate must be for; None for the one that is dialled.

    Raises:
        ConfigError: there is a certificate without a key, or the other way round; or the name is none.
    """

    ca: File | None = None
    cert: File | None = None
    key: File | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) is not (self.key is None):
            raise ConfigError(f"{self.cert or self.key}: taken: a certificate and its key, or neither")
        if self.name is not None:
            object.__setattr__(self, "name", canonical_host(self.name))

    @property
    def paths(self) -> tuple[File, ...]:
        """What ``load`` reads, but for what the system has."""
        return tuple(path for path in (self.ca, self.cert, self.key) if path is not None)

    def load(self) -> ssl.SSLContext:
        """Read the files as they are now.

        Raises:
            ConfigError: one cannot be read, holds something else, or others may use the key; or key and certificate
                are not of one pair.
        """
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which checks certificate and name
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.ca is None:
            context.load_default_certs()
        else:
            _trust(context, self.ca)
        if self.cert is not None and self.key is not None:
            _show(context, self.cert, self.key)
        return context


def binding_of(certificate: bytes) -> bytes:
    """What both ends can know of a server's certificate (DER) without a word about it: its SHA-256 hash.

    It is the channel binding ``tls-server-end-point`` of RFC 5929, but with this hash for every certificate.
    """
    return hashlib.sha256(certificate).digest()


def _trust(context: ssl.SSLContext, path: File) -> None:
    import ssl

    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise ConfigError(f"{path}: holds no certificate; taken: PEM") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _show(context: ssl.SSLContext, cert: File, key: File) -> bytes:
    """Have a certificate shown; its binding."""
    import ssl

    before = read_text(cert, errors="replace")
    _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), cert)  # says more about a bad one than loading the pair does
    _check_key(key)
    _load_pair(context, cert, key)
    if read_text(cert, errors="replace") != before:  # the ssl module read it by itself, and does not say what it got
        raise ConfigError(f"{cert}: was replaced while it was read")
    return _binding(cert, before)


def _binding(path: File, text: str) -> bytes:
    import ssl

    found = _CERTIFICATE.search(text)
    if not found:  # there are older words for it
        raise ConfigError(f"{path}: holds no certificate; taken: PEM that begins with BEGIN CERTIFICATE")
    return binding_of(ssl.PEM_cert_to_DER_cert(found[0]))


def _check_key(path: File) -> None:
    if "PRIVATE KEY-----" not in read_text(path, private=True, errors="replace"):
        raise ConfigError(f"{path}: holds no private key; taken: PEM")


def _load_pair(context: ssl.SSLContext, cert: File, key: File) -> None:
    import ssl

    def ask() -> NoReturn:
        raise ConfigError(f"{key}: has a passphrase; taken: a key without one")

    try:
        context.load_cert_chain(cert, key, ask)
    except ssl.SSLError as error:
        if error.reason in _MISMATCH:
            raise ConfigError(f"{key}: is not the key of the certificate in {cert}") from error
        if error.reason is None:
            raise ConfigError(f"{key}: holds no private key; taken: PEM") from error
        raise ConfigError(f"{cert}: is not taken: {error.reason.lower().replace('_', ' ')}") from error
    except OSError as error:  # one went away since it was read
        raise ConfigError(f"{cert}, {key}: {error.strerror}") from error
