"""The first packets of a link, without I/O: who are you, and do we speak the same protocol.

    dialling side:   START --first()--> HELLO SENT --WELCOME--> DONE
                                             +-----CLOSE(0)---> refused
    accepting side:  START --HELLO--> DONE (and answers WELCOME)
                       +--HELLO that cannot be taken--> refused (and answers CLOSE of stream 0)

Rules that hold here:

- Nothing of the peer is believed before it is checked for shape, and nothing else is legal before DONE.
- A version mismatch names both versions, on both sides.
- Unknown entries of a HELLO or WELCOME are ignored: features are how later versions find each other.

CHALLENGE (type 2) and AUTH (type 3) have their place between HELLO and WELCOME; no credentials exist yet, and a peer
that sends either is refused. This file must not know sockets, streams or time.
"""

from __future__ import annotations

import re
import reprlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tunnel import frames
from tunnel.address import Identifier
from tunnel.config import Claims, Limits, parse_agent_name
from tunnel.errors import ConfigError, HandshakeRefused, RemoteProtocolError
from tunnel.frames import Close, Hello, Packet, Welcome

ROLES = ("agent", "client")
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


def _read_identity(info: dict[str, Any], roles: tuple[str, ...]) -> Identity:
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
    if type(body) is not int or body < Limits().body_before_auth:
        raise RemoteProtocolError(f"limits is {reprlib.repr(limits):.60}, not a map with a body of 4096 or more")
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


def _check_version(version: int) -> None:
    if version != frames.VERSION:
        raise RemoteProtocolError(f"the peer speaks protocol version {version}, this side {frames.VERSION}")


def welcome(me: Identity, servers: int) -> Welcome:
    """A WELCOME; sent again on a link, it says that the number of servers has changed."""
    return Welcome(frames.VERSION, {**me.to_info(), "servers": servers})


class DiallingHandshake:
    """The side that opened the connection: an agent or a client.

    Attributes:
        peer: the server, once DONE.
        servers: how many servers there are in all, as the server says.
    """

    def __init__(self, me: Identity) -> None:
        self.me = me
        self.peer: Identity | None = None
        self.servers = 1

    @property
    def opens(self) -> bool:
        """Whether this side opens the streams of the link."""
        return self.me.role == "client"

    def first(self) -> Packet:
        """What to send before anything is received."""
        return Hello(frames.VERSION, self.me.to_info())

    def receive(self, packet: Packet) -> Packet | None:
        """Take a packet; the answer to send, if any.

        Raises:
            HandshakeRefused: the server said no; code and text are the server's.
            RemoteProtocolError: the packet is not a WELCOME, or not one that can be believed.
        """
        if isinstance(packet, Close) and packet.stream == 0:
            raise HandshakeRefused(packet.code, packet.text)
        if not isinstance(packet, Welcome):
            raise RemoteProtocolError(f"{type(packet).__name__} before WELCOME")
        _check_version(packet.version)
        self.recount(packet)
        self.peer = _read_identity(packet.info, ("server",))
        return None

    def recount(self, packet: Welcome) -> None:
        """Take a WELCOME that comes later on: the number of servers has changed.

        Raises:
            RemoteProtocolError: it does not say a positive number.
        """
        servers = packet.info.get("servers", 1)
        if type(servers) is not int or servers < 1:
            raise RemoteProtocolError(f"servers is {reprlib.repr(servers):.60}, not a positive number")
        self.servers = servers


class AcceptingHandshake:
    """The side that was dialled: the server.

    Args:
        me: who this server is.
        servers: how many servers there are in all.
        admit: called with who wants to link; raises ``HandshakeRefused`` if it may not.

    Attributes:
        peer: the agent or client, once DONE.
    """

    def __init__(self, me: Identity, servers: int = 1, admit: Callable[[Identity], None] = lambda _peer: None) -> None:
        self.me = me
        self.servers = servers
        self.peer: Identity | None = None
        self._admit = admit

    @property
    def opens(self) -> bool:
        """Whether this side opens the streams of the link, once DONE."""
        return self.peer is not None and self.peer.role == "agent"

    def first(self) -> Packet | None:
        """Nothing: the dialling side speaks first."""
        return None

    def receive(self, packet: Packet) -> Packet | None:
        """Take a packet; the answer to send, if any.

        Raises:
            RemoteProtocolError: the packet is not a HELLO, or not one that can be taken.
            HandshakeRefused: ``admit`` said so.
        """
        if not isinstance(packet, Hello):
            raise RemoteProtocolError(f"{type(packet).__name__} before HELLO")
        _check_version(packet.version)
        peer = _read_identity(packet.info, ROLES)
        self._admit(peer)
        self.peer = peer
        return welcome(self.me, self.servers)

    def recount(self, packet: Welcome) -> None:
        """A WELCOME that comes later on.

        Raises:
            RemoteProtocolError: always; only servers say it.
        """
        raise RemoteProtocolError("WELCOME from the side that dialled")


Handshake = DiallingHandshake | AcceptingHandshake
