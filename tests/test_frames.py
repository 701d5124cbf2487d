"""Frames: what is written is read again however it arrives, and whatever is no frame is refused cheaply."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import memory_used
from packet_examples import packets, u32, values

from tunnel.errors import RemoteProtocolError
from tunnel.frames import DATA, DATA_OVERHEAD, READ_SIZE, Decoder, data_header
from tunnel.packets import (
    MAX_U32,
    Auth,
    Challenge,
    Close,
    DialReq,
    Packet,
    Ping,
)

LIMIT = 1024 * 1024

_payloads = st.binary(min_size=1, max_size=80)
_unknown_types = st.integers(21, MAX_U32)
_frames = st.one_of(
    packets.map(lambda packet: packet.encode()),
    st.builds(lambda stream, payload: data_header(stream, len(payload)) + payload, u32, _payloads),
    st.builds(lambda stream, payload: _frame(msgpack.packb([DATA, stream, payload])), u32, _payloads),
    st.builds(
        lambda kind, rest: _frame(msgpack.packb([kind, *rest])),
        _unknown_types,
        st.lists(values, max_size=3),
    ),
)


def _frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


class Reader:
    """A decoder that remembers what came out; payload pieces in a row are one entry."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.seen: list[Packet | tuple[int, bytes]] = []
        self.decoder = Decoder(limit, self.seen.append, self._on_data)

    def _on_data(self, stream: int, payload: memoryview) -> None:
        assert payload
        last = self.seen[-1] if self.seen else None
        if isinstance(last, tuple) and last[0] == stream:
            self.seen[-1] = (stream, last[1] + bytes(payload))
        else:
            self.seen.append((stream, bytes(payload)))

    def read(self, *pieces: bytes | memoryview) -> list[Packet | tuple[int, bytes]]:
        for piece in pieces:
            self.decoder.feed(piece)
        return self.seen


def _cut(data: bytes, points: Iterable[int]) -> list[memoryview]:
    view, edges = memoryview(data), [0, *sorted({point % (len(data) + 1) for point in points}), len(data)]
    return [view[start:end] for start, end in itertools.pairwise(edges)]


def _refuse(data: bytes, limit: int = LIMIT) -> str:
    return _refused_by(Reader(limit), data)


def _refused_by(reader: Reader, data: bytes) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        reader.read(data)
    assert not reader.seen
    return str(caught.value)


# -- what is written is read again


@given(packets)
def test_every_packet_is_read_as_it_was_written(packet: Packet) -> None:
    assert Reader().read(packet.encode()) == [packet]


@given(u32, _payloads)
def test_data_is_read_as_it_was_written(stream: int, payload: bytes) -> None:
    assert Reader().read(data_header(stream, len(payload)) + payload) == [(stream, payload)]


def test_the_overhead_of_data_is_its_header() -> None:
    assert len(data_header(MAX_U32, LIMIT)) == len(data_header(1, 1)) == DATA_OVERHEAD


# -- however it arrives


@given(st.lists(_frames, min_size=1, max_size=8), st.lists(st.integers(0, 10_000), max_size=12))
def test_frames_mean_the_same_however_they_are_split(parts: list[bytes], points: list[int]) -> None:
    data = b"".join(parts)
    whole, split = Reader(), Reader()
    assert split.read(*_cut(data, points)) == whole.read(data)
    assert split.decoder.unknown == whole.decoder.unknown


@given(st.lists(_frames, min_size=1, max_size=4))
def test_frames_mean_the_same_byte_by_byte(parts: list[bytes]) -> None:
    data = b"".join(parts)
    assert Reader().read(*_cut(data, range(len(data)))) == Reader().read(data)


_BIG = st.sampled_from([READ_SIZE - 17, READ_SIZE - 16, READ_SIZE - 15, READ_SIZE, READ_SIZE + 1, 3 * READ_SIZE + 5])


@settings(max_examples=25, deadline=None)
@given(_BIG, _BIG, st.booleans(), st.lists(st.integers(0, 8 * READ_SIZE), max_size=6))
def test_frames_longer_than_the_buffer_mean_the_same_however_they_are_split(
    payload: int, text: int, text_first: bool, points: list[int]
) -> None:
    data = data_header(5, payload) + bytes(payload)
    close = Close(6, "reset", "x" * text).encode()
    parts = [close, data] if text_first else [data, close]
    seen = Reader(MAX_U32).read(*_cut(b"".join([*parts, Ping(0, 1).encode()]), points))
    expected: list[Packet | tuple[int, bytes]] = [(5, bytes(payload)), Close(6, "reset", "x" * text)]
    assert seen == [*(reversed(expected) if text_first else expected), Ping(0, 1)]


@given(st.lists(_frames, min_size=1, max_size=6), st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_reading_into_the_buffer_is_the_same_as_feeding(parts: list[bytes], sizes: list[int]) -> None:
    data = b"".join(parts)
    reader, position, turn = Reader(), 0, 0
    while position < len(data):
        room = reader.decoder.buffer()
        size = min(len(room), sizes[turn % len(sizes)], len(data) - position)
        room[:size] = data[position : position + size]
        reader.decoder.received(size)
        position, turn = position + size, turn + 1
    assert reader.seen == Reader().read(data)


def test_the_payload_of_data_is_handed_on_as_it_arrives() -> None:
    pieces: list[bytes] = []
    decoder = Decoder(LIMIT, lambda packet: None, lambda stream, payload: pieces.append(bytes(payload)))
    decoder.feed(data_header(1, 6) + b"ab")
    decoder.feed(b"c")
    decoder.feed(b"def" + Ping(0, 1).encode())
    assert pieces == [b"ab", b"c", b"def"]


def test_a_payload_begins_as_soon_as_its_header_is_whole() -> None:
    reader = Reader()
    reader.read(data_header(1, 2))
    assert reader.read(b"x") == [(1, b"x")]


def test_the_callables_may_be_replaced_from_within_a_call() -> None:
    seen: list[str] = []

    def first(packet: Packet) -> None:
        seen.append("first")
        decoder.on_packet = lambda packet: seen.append("second")

    decoder = Decoder(LIMIT, first, lambda stream, payload: None)
    decoder.feed(Ping(0, 1).encode() + Ping(0, 2).encode())
    assert seen == ["first", "second"]


def test_the_limit_may_be_raised_from_within_a_call() -> None:
    reader = Reader(limit=16)
    seen = reader.seen

    def first(packet: Packet) -> None:
        seen.append(packet)
        reader.decoder.limit = LIMIT
        reader.decoder.on_packet = seen.append

    reader.decoder.on_packet = first
    long = Close(1, "reset", "x" * 100)
    assert reader.read(Ping(0, 1).encode() + long.encode()) == [Ping(0, 1), long]


# -- other spellings of the same


_ARRAYS = {"fixarray": "93", "array16": "dc0003", "array32": "dd00000003"}
_TYPES = {"fixint": "07", "uint8": "cc07", "uint64": "cf0000000000000007", "int8": "d007"}
_STREAMS = {
    "fixint": "05",
    "uint8": "cc05",
    "uint16": "cd0005",
    "uint32": "ce00000005",
    "uint64": "cf0000000000000005",
    "int32": "d200000005",
}
_BINS = {"bin8": "c402", "bin16": "c50002", "bin32": "c600000002"}


@pytest.mark.parametrize("array", _ARRAYS)
@pytest.mark.parametrize("kind", _TYPES)
@pytest.mark.parametrize("stream", _STREAMS)
@pytest.mark.parametrize("binary", _BINS)
def test_every_valid_spelling_of_data_is_taken(array: str, kind: str, stream: str, binary: str) -> None:
    body = bytes.fromhex(_ARRAYS[array] + _TYPES[kind] + _STREAMS[stream] + _BINS[binary]) + b"hi"
    assert Reader().read(_frame(body)) == [(5, b"hi")]


def test_fields_of_data_beyond_the_known_ones_are_ignored() -> None:
    assert Reader().read(_frame(msgpack.packb([DATA, 1, b"x", "later"]))) == [(1, b"x")]


@pytest.mark.parametrize("kind", [0, 21, 128, MAX_U32])
def test_a_packet_of_unknown_type_is_counted_and_ignored(kind: int) -> None:
    reader = Reader()
    assert reader.read(_frame(msgpack.packb([kind, "whatever", {}])), Ping(0, 1).encode()) == [Ping(0, 1)]
    assert reader.decoder.unknown == 1


# -- the body, as it came


def _strict() -> Reader:
    reader = Reader()
    reader.decoder.strict = True
    return reader


def test_the_body_is_kept_as_it_was_spelled() -> None:
    body = bytes.fromhex(
        "dc0003 cd0003 c50001 61 a5 6c61746572"
    )  # AUTH in longer formats, with a field of a later version
    for reader in (_strict(), _strict()):
        assert reader.read(_frame(body)) == [Auth(b"a")]
        assert reader.decoder.body == body


def test_the_body_is_kept_however_it_arrives() -> None:
    frame = Challenge({"nonce": bytes(32)}).encode()
    reader = _strict()
    reader.read(*_cut(frame, range(len(frame))))
    assert reader.decoder.body == frame[4:]


def test_the_body_is_there_when_its_packet_is() -> None:
    bodies: list[bytes] = []
    decoder = Decoder(LIMIT, lambda packet: bodies.append(decoder.body), lambda stream, payload: None)
    decoder.strict = True
    decoder.feed(Ping(0, 1).encode() + Ping(0, 2).encode())
    assert bodies == [Ping(0, 1).encode()[4:], Ping(0, 2).encode()[4:]]


def test_no_body_is_kept_unless_strict() -> None:
    reader = Reader()
    reader.read(Ping(0, 1).encode())
    assert reader.decoder.body == b""


# -- lengths


def test_an_empty_frame_is_refused() -> None:
    assert "0 bytes" in _refuse(bytes(4))


@pytest.mark.parametrize("length", [17, 0xFFFFFFFF, 0x80000000, 0x47455420])
def test_a_length_over_the_limit_is_refused_from_its_four_bytes(length: int) -> None:
    refused = _refuse(struct.pack(">I", length), limit=16)
    assert f"{length} bytes ({struct.pack('>I', length)!r}); 1 to 16 are taken" in refused


def test_a_frame_as_long_as_the_limit_is_taken() -> None:
    frame = Close(1, "reset", "x" * 100).encode()
    assert len(Reader(len(frame) - 4).read(frame)) == 1


def test_data_longer_than_the_limit_is_refused_before_any_of_it_is_handed_on() -> None:
    frame = data_header(1, 5) + b"hello"
    assert Reader(limit=17).read(frame) == [(1, b"hello")]
    _refuse(frame, limit=16)


def test_nothing_is_allocated_for_a_length_over_the_limit() -> None:
    reader = Reader()

    def receive() -> None:
        reader.decoder.buffer()[:4] = b"\xff\xff\xff\xff"
        with pytest.raises(RemoteProtocolError):
            reader.decoder.received(4)

    assert memory_used(receive) < 64 * 1024
    assert len(reader.decoder.buffer()) == READ_SIZE


def test_a_length_within_the_limit_is_not_believed_before_its_bytes_arrive() -> None:
    reader = Reader(limit=MAX_U32)
    assert memory_used(lambda: reader.read(b"\xff\xff\xff\xff\x91")) < 64 * 1024


def test_the_buffer_grows_for_a_long_frame_and_shrinks_afterwards() -> None:
    reader = Reader(MAX_U32)
    long = DialReq(1, "x" * (3 * READ_SIZE), 1, 1, 1, {})
    frame = long.encode()
    reader.read(frame[:READ_SIZE])
    assert len(reader.decoder.buffer()) == len(frame) - READ_SIZE
    assert reader.read(frame[READ_SIZE:], Ping(0, 1).encode()) == [long, Ping(0, 1)]
    assert len(reader.decoder.buffer()) == READ_SIZE


def test_the_buffer_never_grows_for_data() -> None:
    reader = Reader(MAX_U32)
    size = 3 * READ_SIZE
    reader.read(data_header(1, size) + bytes(size - 1))
    assert len(reader.decoder.buffer()) == READ_SIZE


# -- bodies


@pytest.mark.parametrize(
    "body",
    [
        "92 07 01",  # no payload
        "93 07 01 c4 00",  # an empty one
        "93 07 01 a2 6869",  # a text
        "93 07 01 c0",
        "93 07 ff c4 01 78",  # not a stream
        "93 07 cf 0000000100000000 c4 01 78",
        "93 07 a1 31 c4 01 78",
        "93 07 ce 00000001 c6 00000000",  # the fixed header, with an empty payload
        "93 07 ce 00000001 c6 00000001 7878",  # one that does not fill its frame
        "93 07 ce 00000001 c6 00000003 7878",  # one that does not fit
        "93 07 ce 00000001 c6 ffffffff 7878",
        "93 07 ce 00000001 c6",
    ],
)
def test_data_without_a_stream_and_a_payload_is_refused(body: str) -> None:
    assert _refuse(_frame(bytes.fromhex(body)) + bytes(16))


# -- anything else


def _read_anything(data: bytes, limit: int) -> None:
    try:
        Reader(limit).read(data)
    except RemoteProtocolError as error:
        assert str(error)  # noqa: PT017


@settings(max_examples=300)
@given(st.binary(max_size=200), st.sampled_from([4096, LIMIT, MAX_U32]))
def test_random_bytes_raise_nothing_but_a_protocol_error(data: bytes, limit: int) -> None:
    _read_anything(data, limit)


@settings(max_examples=300)
@given(st.binary(min_size=1, max_size=200))
def test_random_bodies_raise_nothing_but_a_protocol_error(body: bytes) -> None:
    _read_anything(_frame(body), LIMIT)


_mutations = st.lists(
    st.tuples(st.sampled_from(["set", "delete", "insert"]), st.integers(0, 10_000), st.integers(0, 255)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=300)
@given(st.lists(_frames, min_size=1, max_size=4), _mutations)
def test_mutated_frames_raise_nothing_but_a_protocol_error(
    parts: list[bytes], mutations: list[tuple[str, int, int]]
) -> None:
    data = bytearray(b"".join(parts))
    for how, where, byte in mutations:
        place = where % (len(data) + 1)
        if how == "insert":
            data.insert(place, byte)
        elif place < len(data):
            data[place : place + 1] = bytes([byte]) if how == "set" else b""
    _read_anything(bytes(data), LIMIT)


def test_a_decoder_says_what_it_holds() -> None:
    reader = Reader()
    reader.read(b"\x00\x00")
    assert repr(reader.decoder) == "<Decoder held=2 payload_left=0 unknown=0>"
