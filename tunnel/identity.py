"""Who one side of a link says it is: the entries of HELLO and WELCOME.

Rules that hold here:

- Nothing of the peer is believed before it is checked for shape; what is wrong is named.
- Unknown entries are ignored: features are how later versions find each other.

This file must not know when any of it is said, or whether it is allowed.
"""

from __future__ import annotations

import re
import reprlib
import secrets
from dataclasses import dataclass, field
from typing import Any

from tunnel.address import Identifier
from tunnel.config import Claims, parse_agent_name
from tunnel.errors import ConfigError, RemoteProtocolError
from tunnel.limits import Limits

_INSTANCE = re.compile(r"[0-9a-f]{32}\Z")


def new_instance() -> str:
    """An id for this process start: 128 random bits, as 32 hexadecimal digits."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Identity:
    """What one side says of itself.

    Attributes:
        role: ``agent``, ``client`` or ``server``.
        name: chosen by whoever runs it; not unique.
        instance: unique to one process start.
        features: words for what else it can do.
        draining: it is about to leave, and wants nothing new while others can serve.
        body_limit: longest frame body it takes once linked, in bytes.
        claims: what an agent says it can serve.
        linked: ids of the servers that an agent has a link to already.
    """

    role: str
    name: str
    instance: str = field(default_factory=new_instance)
    features: tuple[str, ...] = ()
    draining: bool = False
    body_limit: int = Limits().body
    claims: Claims = field(default_factory=Claims)
    linked: tuple[str, ...] = ()

    def to_info(self) -> dict[str, Any]:
        """The entries of HELLO or WELCOME that say it."""
        info = {
            "role": self.role,
            "name": self.name,
            "instance": self.instance,
            "features": list(self.features),
            "draining": self.draining,
            "limits": {"body": self.body_limit},
        }
        if self.role != "agent":
            return info
        return info | {
            "identifiers": [str(identifier) for identifier in self.claims.identifiers],
            "default_route": self.claims.default_route,
            "priority": self.claims.priority,
            "linked": list(self.linked),
        }


def read_identity(info: dict[str, Any], *roles: str) -> Identity:
    """What HELLO or WELCOME says.

    Raises:
        RemoteProtocolError: it is none of these roles, or an entry is missing or of another shape.
    """
    role, name, instance = info.get("role"), info.get("name"), info.get("instance")
    if role not in roles:
        raise RemoteProtocolError(f"role is {reprlib.repr(role):.60}, not one of {', '.join(roles)}")
    if not isinstance(name, str):
        raise RemoteProtocolError(f"name is {reprlib.repr(name):.60}, not a text")
    try:
        parse_agent_name(name)
    except ConfigError as error:
        raise RemoteProtocolError(f"name: {error}") from None
    if not isinstance(instance, str) or not _INSTANCE.match(instance):
        raise RemoteProtocolError(f"instance is {reprlib.repr(instance):.60}, not 32 hexadecimal digits")
    return Identity(
        str(role),
        name,
        instance,
        features=_read_words(info, "features"),
        draining=_read_flag(info, "draining"),
        body_limit=_read_body_limit(info),
        claims=_read_claims(info),
        linked=_read_words(info, "linked"),
    )


def _read_words(info: dict[str, Any], entry: str) -> tuple[str, ...]:
    words = info.get(entry, [])
    if type(words) is not list or not all(type(word) is str for word in words):
        raise RemoteProtocolError(f"{entry} is {reprlib.repr(words):.60}, not a list of words")
    return tuple(words)


def _read_flag(info: dict[str, Any], entry: str) -> bool:
    flag = info.get(entry, False)
    if type(flag) is not bool:
        raise RemoteProtocolError(f"{entry} is {reprlib.repr(flag):.60}, not true or false")
    return flag


def _read_body_limit(info: dict[str, Any]) -> int:
    limits = info.get("limits", {})
    body = limits.get("body", Limits().body) if type(limits) is dict else None
    least = Limits().body_before_auth
    if type(body) is not int or body < least:
        raise RemoteProtocolError(f"limits is {reprlib.repr(limits):.60}, not a map with a body of {least} or more")
    return body


def _read_claims(info: dict[str, Any]) -> Claims:
    priority = info.get("priority", 0)
    if type(priority) is not int:
        raise RemoteProtocolError(f"priority is {reprlib.repr(priority):.60}, not a number")
    try:
        identifiers = tuple(map(Identifier.parse, _read_words(info, "identifiers")))
        return Claims(identifiers, _read_flag(info, "default_route"), priority)
    except ConfigError as error:
        raise RemoteProtocolError(f"claims: {error}") from None
