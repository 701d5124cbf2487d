"""Who may use the CONNECT front-end: names and passwords, one ``NAME:PASSWORD`` a line in a file of its owner alone.

Rules that hold here:

- A password is in no ``repr``, message or log, and is compared in constant time, whether or not the name is known.

This file must not know HTTP beyond what ``Basic`` credentials look like.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tunnel.configfile import read_text
from tunnel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Users:
    """Hashes of passwords, by name."""

    _hashes: Mapping[str, bytes] = field(repr=False)

    def takes(self, credentials: str) -> bool:
        """Whether the value of an HTTP header, like ``Basic bmFtZTpwYXNzd29yZA==``, names one with the password."""
        scheme, _, encoded = credentials.partition(" ")
        try:
            name, colon, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
        except ValueError:  # it is not base64, or not UTF-8
            return False
        known = self._hashes.get(name)
        same = hmac.compare_digest(known or _hash(""), _hash(password))
        return same and known is not None and bool(colon) and scheme.lower() == "basic"


def read_users(path: str | Path) -> Users:
    """The users of a file; empty lines and those that begin with ``#`` are left out.

    Raises:
        ConfigError: it cannot be read, others may use it, or a line is not ``NAME:PASSWORD``; it is named by number.
    """
    hashes = {}
    for number, line in enumerate(read_text(path, private=True).splitlines(), 1):
        name, _, password = line.strip().partition(":")
        if not line.strip() or name.startswith("#"):
            continue
        if not name or not password or name in hashes:
            raise ConfigError(f"{path}:{number}: taken: NAME:PASSWORD, each name once")
        hashes[name] = _hash(password)
    if not hashes:
        raise ConfigError(f"{path}: holds no users; taken: one or more lines NAME:PASSWORD")
    return Users(hashes)


def _hash(password: str) -> bytes:
    """Of one length for all passwords, so that comparing does not tell how long they are."""
    return hashlib.sha256(password.encode()).digest()
