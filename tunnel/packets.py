"""What links say to each other: every packet but DATA, its fields, and its body in msgpack.

A body is one msgpack array ``[type, field, ...]``; how bodies follow each other on the wire: ``frames.py``.

Rules that hold here:

- A type is never given twice. A class lists its fields in the order of the wire.
- Fields beyond the known ones are ignored, so that a later version can add some; missing or wrong ones are refused.
- What people are to read is cut to a length that fits into any frame.
- A packet is not changed once it is made. It is not frozen: making one would take more than twice as long.

This file must not know when a packet is legal, what its stream is, time, or sockets.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import msgpack

from tunnel.errors import RemoteProtocolError

VERSION = 1
MAX_U32 = 0xFFFFFFFF
LENGTH = struct.Struct(">I")
"""What stands before a body: how many bytes it has."""

_LONGEST_CODE, _LONGEST_TEXT = 64, 800  # characters, of up to four bytes
_MAX_ITEMS = 1024  # in any array or map of a body: bounds what a nested body can make us allocate

_pack = msgpack.Packer(autoreset=True).pack


@dataclass(slots=True)
class Packet:
    """One control packet. Subclasses list their fields in wire order."""

    type: ClassVar[int]

    def encode(self) -> bytes:
        """The whole frame."""
        kind = type(self)
        body: bytes = _pack((kind.type, *_VALUES[kind](self)))
        return LENGTH.pack(len(body)) + body


def _cut(packet: Packet, **longest: int) -> None:
    """What people are to read is passed on and logged: never more than fits into a frame before the handshake."""
    for name, most in longest.items():
        if len(getattr(packet, name)) > most:
            setattr(packet, name, getattr(packet, name)[:most])


@dataclass(slots=True)
class Hello(Packet):
    """First packet of the side that dialled; ``info`` is described in ``handshake.py``."""

    type = 1
    version: int
    info: dict[str, Any]


@dataclass(slots=True)
class Challenge(Packet):
    """Answer to HELLO of a server that wants a proof; ``info`` holds its ``nonce``."""

    type = 2
    info: dict[str, Any]


@dataclass(slots=True)
class Auth(Packet):
    """A proof: first of the side that dialled, then of the other; see ``handshake.py``."""

    type = 3
    proof: bytes


@dataclass(slots=True)
class Welcome(Packet):
    """The answer to HELLO that makes the link usable."""

    type = 4
    version: int
    info: dict[str, Any]


@dataclass(slots=True)
class DialReq(Packet):
    """Open a stream to a target. ``window``: bytes the opener takes unasked; ``ms``: time left for the dial."""

    type = 5
    stream: int
    host: str
    port: int
    window: int
    ms: int
    options: dict[str, Any]

    @property
    def target(self) -> str:
        """Where to, as people write it; it is not checked."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(slots=True)
class DialRsp(Packet):
    """Answer to DIAL_REQ: ``code`` is ``ok`` or a dial error's; ``window`` as in DIAL_REQ."""

    type = 6
    stream: int
    code: str
    text: str
    window: int

    def __post_init__(self) -> None:
        _cut(self, code=_LONGEST_CODE, text=_LONGEST_TEXT)


@dataclass(slots=True)
class Eof(Packet):
    """No more DATA of this stream in this direction."""

    type = 8
    stream: int


@dataclass(slots=True)
class Close(Packet):
    """Reset of a stream, in both directions at once. Stream 0 is the link itself: goodbye."""

    type = 9
    stream: int
    code: str
    text: str

    def __post_init__(self) -> None:
        _cut(self, code=_LONGEST_CODE, text=_LONGEST_TEXT)


@dataclass(slots=True)
class Credit(Packet):
    """So many bytes more may be sent on the stream."""

    type = 10
    stream: int
    amount: int


@dataclass(slots=True)
class Ping(Packet):
    """Answered at once by a PONG with the same fields; stream 0 is the link itself."""

    type = 11
    stream: int
    token: int


@dataclass(slots=True)
class Pong(Packet):
    """Answer to PING."""

    type = 12
    stream: int
    token: int


@dataclass(slots=True)
class Drain(Packet):
    """The agent is leaving: prefer others. ``ms``: time left; ``open``: streams open now."""

    type = 13
    seq: int
    phase: str
    reason: str
    ms: int
    open: int

    def __post_init__(self) -> None:
        _cut(self, reason=_LONGEST_TEXT)


@dataclass(slots=True)
class DrainAck(Packet):
    """Answer to DRAIN, behind every DIAL_REQ that was chosen before the mark."""

    type = 14
    seq: int
    phase: str


@dataclass(slots=True)
class Undrain(Packet):
    """The agent stays after all."""

    type = 15
    seq: int


@dataclass(slots=True)
class UndrainAck(Packet):
    """Answer to UNDRAIN: dials may come again."""

    type = 16
    seq: int


@dataclass(slots=True)
class DrainCmd(Packet):
    """An operator wants the agent to ``drain`` or ``undrain`` (``action``) on all its servers.

    ``instance``: the process that is meant; ``ms``: the time it gets, 0 for no end; ``leave``: 1 to exit when drained.
    """

    type = 17
    instance: str
    action: str
    text: str
    ms: int
    leave: int

    def __post_init__(self) -> None:
        _cut(self, text=_LONGEST_TEXT)


@dataclass(slots=True)
class DrainStatus(Packet):
    """How far a drain is, as only the agent can see it. ``acked`` of ``servers`` have acknowledged."""

    type = 18
    state: str
    open: int
    pending: int
    oldest_ms: int
    acked: int
    servers: int

    def __post_init__(self) -> None:
        _cut(self, state=_LONGEST_CODE)


@dataclass(slots=True)
class GoAway(Packet):
    """The server is leaving: link elsewhere. ``phase``: ``soft``, or ``final`` when it serves nothing new any more."""

    type = 19
    phase: str
    ms: int


@dataclass(slots=True)
class GoAwayAck(Packet):
    """Answer to GOAWAY."""

    type = 20
    phase: str


_KINDS: tuple[type[Packet], ...] = (
    Hello, Challenge, Auth, Welcome, DialReq, DialRsp, Eof, Close, Credit, Ping, Pong, Drain, DrainAck, Undrain,
    UndrainAck, DrainCmd, DrainStatus, GoAway, GoAwayAck,
)  # fmt: skip
_BY_TYPE = {kind.type: kind for kind in _KINDS}


def is_uint(value: object) -> bool:
    """Whether it is what the wire calls a number: unsigned, of 32 bits."""
    return type(value) is int and 0 <= value <= MAX_U32


class _Shape(NamedTuple):
    """What the fields of a kind of packet are: their names and types, and which of them that is not all of."""

    names: tuple[str, ...]
    types: tuple[type, ...]
    numbers: tuple[int, ...]  # where there are unsigned 32-bit numbers
    maps: tuple[int, ...]  # and where maps, whose keys are text

    @classmethod
    def of(cls, kind: type[Packet]) -> _Shape:
        types = tuple(_TYPES[field.type] for field in fields(kind))
        numbers, maps = (tuple(place for place, each in enumerate(types) if each is one) for one in (int, dict))
        return cls(tuple(field.name for field in fields(kind)), types, numbers, maps)

    def misfit(self, kind: str, body: list[Any]) -> RemoteProtocolError:
        """What is wrong with a body that does not fit."""
        if len(body) < len(self.names):
            return RemoteProtocolError(f"{kind} has {len(body)} fields, not {len(self.names)}")
        wrong = next(place for place, value in enumerate(body) if not self._fits(place, value))
        return RemoteProtocolError(f"{kind}.{self.names[wrong]} is {reprlib.repr(body[wrong]):.60}")

    def _fits(self, place: int, value: Any) -> bool:
        if place in self.numbers:
            return is_uint(value)
        return type(value) is self.types[place] and (place not in self.maps or _has_text_keys(value))


_TYPES: dict[object, type] = {"int": int, "str": str, "bytes": bytes, "dict[str, Any]": dict}


def _has_text_keys(value: Any) -> bool:
    return all(type(key) is str for key in value)


def _getter(kind: type[Packet]) -> Callable[[Packet], tuple[Any, ...]]:
    names = [field.name for field in fields(kind)]
    if len(names) == 1:
        one = attrgetter(names[0])
        return lambda packet: (one(packet),)
    return attrgetter(*names)


_VALUES = {kind: _getter(kind) for kind in _KINDS}
_SHAPES = {kind: _Shape.of(kind) for kind in _KINDS}


def milliseconds(seconds: float) -> int:
    """As the wire has them: whole, and as many as it can say at most."""
    return int(min(seconds * 1000, MAX_U32))


def unpack(body: memoryview) -> list[Any]:
    """The items of a body, the first of which is a type.

    Raises:
        RemoteProtocolError: it is no such array.
    """
    try:
        value = msgpack.unpackb(body, max_array_len=_MAX_ITEMS, max_map_len=_MAX_ITEMS)
    except Exception as error:  # msgpack documents no closed set: stack, format, buffer, unicode, value errors
        raise RemoteProtocolError(f"a frame's body is not one msgpack value: {type(error).__name__}: {error}") from None
    if type(value) is not list or not value or not is_uint(value[0]):
        raise RemoteProtocolError("a frame's body is not an array that starts with a packet type")
    return value


def packet_of(values: list[Any]) -> Packet | None:
    """The packet that a body is; None if its type is not known here.

    Raises:
        RemoteProtocolError: a field is missing, or not of its type.
    """
    kind = _BY_TYPE.get(values[0])
    if kind is None:
        return None
    shape = _SHAPES[kind]
    types = shape.types
    body = values[1 : len(types) + 1]
    fits = tuple(map(type, body)) == types  # which says most of it at once
    if fits:
        for place in shape.numbers:
            fits &= 0 <= body[place] <= MAX_U32
        for place in shape.maps:
            fits &= _has_text_keys(body[place])
    if not fits:
        raise shape.misfit(kind.__name__, body)
    return kind(*body)
