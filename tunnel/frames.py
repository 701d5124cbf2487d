"""The wire, without I/O: packets, their bytes, and a decoder that copies no DATA.

A frame is a big-endian ``u32`` length and a body of that many bytes: one msgpack array ``[type, field, ...]``.

Rules that hold here:

- A length over the limit, or zero, is refused from the four bytes alone; nothing is allocated for it.
- DATA is written with a fixed-width header, so that it is built and recognised at fixed offsets. Any other valid
  msgpack spelling of it is understood too.
- The payload of a fixed-width DATA frame is handed on piece by piece as it arrives: no frame is ever assembled.
- All decoders of a thread receive into the same memory, one after the other; each keeps only what is not whole yet.
- Fields beyond the known ones are ignored, so that a later version can add some; missing or wrong ones are refused.

This file must not know streams (what an id means, whether a packet is legal now), time, or sockets.
"""

from __future__ import annotations

import reprlib
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import msgpack

from tunnel.errors import RemoteProtocolError

VERSION = 1
DATA = 7
MAX_U32 = 0xFFFFFFFF
READ_SIZE = 1024 * 1024
DATA_BODY_OVERHEAD = 12
DATA_OVERHEAD = 4 + DATA_BODY_OVERHEAD
"""Bytes that a fixed-width DATA frame adds to its payload: length; array, type, stream, bin length."""

_LENGTH = struct.Struct(">I")
_DATA_HEADER = struct.Struct(">IBBBIBI")
_ARRAY_OF_3, _UINT32, _BIN32 = 0x93, 0xCE, 0xC6
_LONG = 4096  # bytes of a frame that are received before memory for all of it is reserved
_LONGEST_CODE, _LONGEST_TEXT = 64, 800  # characters, of up to four bytes
_MAX_ITEMS = 1024  # in any array or map of a body: bounds what a nested body can make us allocate

_pack = msgpack.Packer(autoreset=True).pack


@dataclass(frozen=True, slots=True)
class Packet:
    """One control packet. Subclasses list their fields in wire order."""

    type: ClassVar[int]

    def encode(self) -> bytes:
        """The whole frame."""
        kind = type(self)
        body: bytes = _pack((kind.type, *_VALUES[kind](self)))
        return _LENGTH.pack(len(body)) + body


def _cut(packet: Packet, **longest: int) -> None:
    """What people are to read is passed on and logged: never more than fits into a frame before the handshake."""
    for name, most in longest.items():
        if len(getattr(packet, name)) > most:
            object.__setattr__(packet, name, getattr(packet, name)[:most])


@dataclass(frozen=True, slots=True)
class Hello(Packet):
    """First packet of the side that dialled; ``info`` is described in ``handshake.py``."""

    type = 1
    version: int
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Challenge(Packet):
    """Answer to HELLO of a server that wants a proof; ``info`` holds its ``nonce``."""

    type = 2
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Auth(Packet):
    """A proof: first of the side that dialled, then of the other; see ``handshake.py``."""

    type = 3
    proof: bytes


@dataclass(frozen=True, slots=True)
class Welcome(Packet):
    """The answer to HELLO that makes the link usable."""

    type = 4
    version: int
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class DialRsp(Packet):
    """Answer to DIAL_REQ: ``code`` is ``ok`` or a dial error's; ``window`` as in DIAL_REQ."""

    type = 6
    stream: int
    code: str
    text: str
    window: int

    def __post_init__(self) -> None:
        _cut(self, code=_LONGEST_CODE, text=_LONGEST_TEXT)


@dataclass(frozen=True, slots=True)
class Eof(Packet):
    """No more DATA of this stream in this direction."""

    type = 8
    stream: int


@dataclass(frozen=True, slots=True)
class Close(Packet):
    """Reset of a stream, in both directions at once. Stream 0 is the link itself: goodbye."""

    type = 9
    stream: int
    code: str
    text: str

    def __post_init__(self) -> None:
        _cut(self, code=_LONGEST_CODE, text=_LONGEST_TEXT)


@dataclass(frozen=True, slots=True)
class Credit(Packet):
    """So many bytes more may be sent on the stream."""

    type = 10
    stream: int
    amount: int


@dataclass(frozen=True, slots=True)
class Ping(Packet):
    """Answered at once by a PONG with the same fields; stream 0 is the link itself."""

    type = 11
    stream: int
    token: int


@dataclass(frozen=True, slots=True)
class Pong(Packet):
    """Answer to PING."""

    type = 12
    stream: int
    token: int


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class DrainAck(Packet):
    """Answer to DRAIN, behind every DIAL_REQ that was chosen before the mark."""

    type = 14
    seq: int
    phase: str


@dataclass(frozen=True, slots=True)
class Undrain(Packet):
    """The agent stays after all."""

    type = 15
    seq: int


@dataclass(frozen=True, slots=True)
class UndrainAck(Packet):
    """Answer to UNDRAIN: dials may come again."""

    type = 16
    seq: int


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class GoAway(Packet):
    """The server is leaving: link elsewhere. ``phase``: ``soft``, or ``final`` when it serves nothing new any more."""

    type = 19
    phase: str
    ms: int


@dataclass(frozen=True, slots=True)
class GoAwayAck(Packet):
    """Answer to GOAWAY."""

    type = 20
    phase: str


_KINDS: tuple[type[Packet], ...] = (
    Hello, Challenge, Auth, Welcome, DialReq, DialRsp, Eof, Close, Credit, Ping, Pong, Drain, DrainAck, Undrain,
    UndrainAck, DrainCmd, DrainStatus, GoAway, GoAwayAck,
)  # fmt: skip
_BY_TYPE = {kind.type: kind for kind in _KINDS}


def _is_uint(value: object) -> bool:
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
            return _is_uint(value)
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


def data_header(stream: int, size: int) -> bytes:
    """What stands before ``size`` bytes of payload in a DATA frame."""
    return _DATA_HEADER.pack(size + DATA_BODY_OVERHEAD, _ARRAY_OF_3, DATA, _UINT32, stream, _BIN32, size)


def _parse(body: memoryview) -> list[Any]:
    try:
        value = msgpack.unpackb(body, max_array_len=_MAX_ITEMS, max_map_len=_MAX_ITEMS)
    except Exception as error:  # msgpack documents no closed set: stack, format, buffer, unicode, value errors
        raise RemoteProtocolError(f"a frame's body is not one msgpack value: {type(error).__name__}: {error}") from None
    if type(value) is not list or not value or not _is_uint(value[0]):
        raise RemoteProtocolError("a frame's body is not an array that starts with a packet type")
    return value


def _packet(kind: type[Packet], values: list[Any]) -> Packet:
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


class _Scratch(threading.local):
    """Memory to receive into, one piece per thread."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(READ_SIZE))


_scratch = _Scratch()


class Decoder:
    """Turns received bytes into calls: ``on_packet(packet)`` and ``on_data(stream, payload)``.

    Either receive into ``buffer()`` and say how much with ``received(n)``, with nothing of other decoders in between,
    or ``feed()`` bytes. Both callables may be replaced at any time, also from within a call. A payload view is valid
    only during its call.

    Attributes:
        limit: the longest body taken, in bytes.
        strict: whether a packet of unknown type is refused, and ``body`` kept; otherwise it is ignored.
        body: the last frame's, as long as it is strict.
        unknown: packets ignored so far because their type is not known.
    """

    def __init__(
        self, limit: int, on_packet: Callable[[Packet], None], on_data: Callable[[int, memoryview], None]
    ) -> None:
        self.limit = limit
        self.on_packet = on_packet
        self.on_data = on_data
        self.strict = False
        self.body = b""
        self.unknown = 0
        self._rest = b""  # the short beginning of a frame
        self._long: memoryview | None = None  # memory for a whole frame of which so much is there that it is believed
        self._filled = 0  # bytes in it
        self._stream = 0  # whose payload is being received
        self._left = 0  # bytes of it that are still to come

    def __repr__(self) -> str:
        held = self._filled if self._long is not None else len(self._rest)
        return f"<Decoder held={held} payload_left={self._left} unknown={self.unknown}>"

    def buffer(self) -> memoryview:
        """Where to put the bytes received next; never empty."""
        if self._long is not None:
            return self._long[self._filled :]
        view, rest = _scratch.view, self._rest
        if not rest:
            return view
        view[: len(rest)] = rest
        return view[len(rest) :]

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Like ``received`` for bytes that are somewhere else.

        Raises:
            RemoteProtocolError: see ``received``.
        """
        rest = memoryview(data)
        while rest:
            room = self.buffer()
            size = min(len(room), len(rest))
            room[:size] = rest[:size]
            self.received(size)
            rest = rest[size:]

    def received(self, count: int) -> None:
        """Take ``count`` bytes that were put into ``buffer()``.

        Raises:
            RemoteProtocolError: they are not a valid frame. The decoder is not usable any more.
        """
        if self._long is None:
            view, end = _scratch.view, len(self._rest) + count
            position = self._consume(view, end)
            if position < end:
                self._keep(view[position:end])
            else:
                self._rest = b""
            return
        self._filled += count
        if self._filled == len(self._long):
            view, self._long = self._long, None
            self._consume(view, self._filled)

    def _keep(self, rest: memoryview) -> None:
        """Keep what is not whole: short beginnings as they are, a long frame where the rest of it is received too."""
        if len(rest) < _LONG:
            self._rest = bytes(rest)
            return
        self._rest = b""
        self._long = memoryview(bytearray(4 + _LENGTH.unpack_from(rest)[0]))
        self._filled = len(rest)
        self._long[: self._filled] = rest

    def _consume(self, view: memoryview, end: int) -> int:
        """Decode what is whole; the position of what is not."""
        position = 0
        while position < end:
            if self._left:
                taken = min(self._left, end - position)
                self._left -= taken
                self.on_data(self._stream, view[position : position + taken])
                position += taken
                continue
            size = end - position
            if size >= DATA_OVERHEAD:
                length, array, kind, uint, stream, binary, payload = _DATA_HEADER.unpack_from(view, position)
                if array == _ARRAY_OF_3 and kind == DATA and uint == _UINT32 and binary == _BIN32:
                    if payload + DATA_BODY_OVERHEAD != length or not DATA_BODY_OVERHEAD < length <= self.limit:
                        raise self._bad_data(length, payload)
                    self._stream, self._left = stream, payload
                    position += DATA_OVERHEAD
                    continue
            elif size >= 4:
                (length,) = _LENGTH.unpack_from(view, position)
            else:
                break
            self._check_length(length)
            if size < 4 + length:
                break
            position += 4
            self._decode(view[position : position + length])
            position += length
        return position

    def _check_length(self, length: int) -> None:
        if not 0 < length <= self.limit:
            text = f"a frame says its body has {length} bytes; 1 to {self.limit} are taken"
            raise RemoteProtocolError(text, bound="body" if length else "")

    def _bad_data(self, length: int, payload: int) -> RemoteProtocolError:
        self._check_length(length)
        room = length - DATA_BODY_OVERHEAD
        return RemoteProtocolError(f"DATA says it has {payload} bytes, in a frame with room for {room}")

    def _decode(self, body: memoryview) -> None:
        values = _parse(body)
        if self.strict:
            self.body = bytes(body)
        kind = _BY_TYPE.get(values[0])
        if kind is not None:
            self.on_packet(_packet(kind, values))
        elif values[0] == DATA:
            self._decode_data(values)
        elif self.strict:
            raise RemoteProtocolError(f"a packet of type {values[0]}, which is not known here")
        else:
            self.unknown += 1

    def _decode_data(self, values: list[Any]) -> None:
        if len(values) < 3 or not _is_uint(values[1]) or type(values[2]) is not bytes or not values[2]:
            raise RemoteProtocolError("DATA is not a stream and at least one byte")
        self.on_data(values[1], memoryview(values[2]))
