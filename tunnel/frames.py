"""The wire, without I/O: bodies in a row, and a decoder that copies no DATA.

A frame is a big-endian ``u32`` length and a body of that many bytes. Bodies but that of DATA: ``packets.py``.

Rules that hold here:

- A length over the limit, or zero, is refused from the four bytes alone; nothing is allocated for it.
- DATA is written with a fixed-width header, so that it is built and recognised at fixed offsets. Any other valid
  msgpack spelling of it is understood too.
- The payload of a fixed-width DATA frame is handed on piece by piece as it arrives: no frame is ever assembled.
- All decoders of a thread receive into the same memory, one after the other; each keeps only what is not whole yet.

This file must not know streams (what an id means, whether a packet is legal now), time, or sockets.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

from tunnel.errors import RemoteProtocolError
from tunnel.packets import LENGTH, Packet, is_uint, packet_of, unpack

DATA = 7
READ_SIZE = 1024 * 1024
DATA_BODY_OVERHEAD = 12
DATA_OVERHEAD = 4 + DATA_BODY_OVERHEAD
"""Bytes that a fixed-width DATA frame adds to its payload: length; array, type, stream, bin length."""

_DATA_HEADER = struct.Struct(">IBBBIBI")
_ARRAY_OF_3, _UINT32, _BIN32 = 0x93, 0xCE, 0xC6
_LONG = 4096  # bytes of a frame that are received before memory for all of it is reserved


def data_header(stream: int, size: int) -> bytes:
    """What stands before ``size`` bytes of payload in a DATA frame."""
    return _DATA_HEADER.pack(size + DATA_BODY_OVERHEAD, _ARRAY_OF_3, DATA, _UINT32, stream, _BIN32, size)


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
        self._long = memoryview(bytearray(4 + LENGTH.unpack_from(rest)[0]))
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
                (length,) = LENGTH.unpack_from(view, position)
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
            text = f"a frame says its body has {length} bytes ({LENGTH.pack(length)!r}); 1 to {self.limit} are taken"
            raise RemoteProtocolError(text, bound="body" if length else "")

    def _bad_data(self, length: int, payload: int) -> RemoteProtocolError:
        self._check_length(length)
        room = length - DATA_BODY_OVERHEAD
        return RemoteProtocolError(f"DATA says it has {payload} bytes, in a frame with room for {room}")

    def _decode(self, body: memoryview) -> None:
        values = unpack(body)
        if self.strict:
            self.body = bytes(body)
        packet = packet_of(values)
        if packet is not None:
            self.on_packet(packet)
        elif values[0] == DATA:
            self._decode_data(values)
        elif self.strict:
            raise RemoteProtocolError(f"a packet of type {values[0]}, which is not known here")
        else:
            self.unknown += 1

    def _decode_data(self, values: list[Any]) -> None:
        if len(values) < 3 or not is_uint(values[1]) or type(values[2]) is not bytes or not values[2]:
            raise RemoteProtocolError("DATA is not a stream and at least one byte")
        self.on_data(values[1], memoryview(values[2]))
