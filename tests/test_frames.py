"""Frames: what is written is read again however it arrives, and whatever is no frame is refused cheaply."""

from __future__ import annotations

import itertools
import struct
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunnel import frames
from tunnel.errors import RemoteProtocolError
from tunnel.frames import (
    DATA,
    DATA_OVERHEAD,
    MAX_U32,
    READ_SIZE,
    Auth,
    Challenge,
    Close,
    Credit,
    Decoder,
    DialReq,
    DialRsp,
    Drain,
    DrainAck,
    DrainCmd,
    DrainStatus,
    Eof,
    GoAway,
    GoAwayAck,
    Hello,
    Packet,
    Ping,
    Pong,
    Undrain,
    UndrainAck,
    Welcome,
    data_header,
)

LIMIT = 1024 * 1024

EXAMPLES: tuple[Packet, ...] = (
    Hello(1, {"role": "agent"}),
    Challenge({"nonce": bytes(32)}),
    Auth(bytes(range(32))),
    Welcome(1, {"role": "server"}),
    DialReq(1, "db.internal", 5432, 524288, 10000, {}),
    DialRsp(1, "ok", "", 524288),
    Eof(1),
    Close(1, "reset", "gone"),
    Credit(1, 262144),
    Ping(0, 7),
    Pong(0, 7),
    Drain(1, "soft", "signal", 25000, 3),
    DrainAck(1, "soft"),
    Undrain(2),
    UndrainAck(2),
    DrainCmd("00112233445566778899aabbccddeeff", "drain", "disk full", 60000, 1),
    DrainStatus("draining", 12, 1, 90000, 2, 3),
    GoAway("soft", 25000),
    GoAwayAck("soft"),
)
_ids = [type(packet).__name__ for packet in EXAMPLES]

_u32 = st.integers(0, MAX_U32)
_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
_maps = st.dictionaries(st.text(), _values, max_size=6)
_packets: st.SearchStrategy[Packet] = st.one_of(
    st.builds(Hello, _u32, _maps),
    st.builds(Challenge, _maps),
    st.builds(Auth, st.binary()),
    st.builds(Welcome, _u32, _maps),
    st.builds(DialReq, _u32, st.text(), _u32, _u32, _u32, _maps),
    st.builds(DialRsp, _u32, st.text(), st.text(), _u32),
    st.builds(Eof, _u32),
    st.builds(Close, _u32, st.text(), st.text()),
    st.builds(Credit, _u32, _u32),
    st.builds(Ping, _u32, _u32),
    st.builds(Pong, _u32, _u32),
    st.builds(Drain, _u32, st.text(), st.text(), _u32, _u32),
    st.builds(DrainAck, _u32, st.text()),
    st.builds(Undrain, _u32),
    st.builds(UndrainAck, _u32),
    st.builds(DrainCmd, st.text(), st.text(), st.text(), _u32, _u32),
    st.builds(DrainStatus, st.text(), _u32, _u32, _u32, _u32, _u32),
    st.builds(GoAway, st.text(), _u32),
    st.builds(GoAwayAck, st.text()),
)
_payloads = st.binary(min_size=1, max_size=80)
_unknown_types = st.integers(21, MAX_U32)
_frames = st.one_of(
    _packets.map(lambda packet: packet.encode()),
    st.builds(lambda stream, payload: data_header(stream, len(payload)) + payload, _u32, _payloads),
    st.builds(lambda stream, payload: _frame(msgpack.packb([DATA, stream, payload])), _u32, _payloads),
    st.builds(lambda kind, rest: _frame(msgpack.packb([kind, *rest])), _unknown_types, st.lists(_values, max_size=3)),
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


def _memory_used(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# -- what is written is read again


def test_there_is_an_example_of_every_packet() -> None:
    names = {kind.__name__ for kind in Packet.__subclasses__()}  # by name: slots=True leaves every class there twice
    assert {type(packet).__name__ for packet in EXAMPLES} == names


@given(_packets)
def test_every_packet_is_read_as_it_was_written(packet: Packet) -> None:
    assert Reader().read(packet.encode()) == [packet]


@given(_u32, _payloads)
def test_data_is_read_as_it_was_written(stream: int, payload: bytes) -> None:
    assert Reader().read(data_header(stream, len(payload)) + payload) == [(stream, payload)]


def test_the_overhead_of_data_is_its_header() -> None:
    assert len(data_header(MAX_U32, LIMIT)) == len(data_header(1, 1)) == DATA_OVERHEAD


def test_types_are_never_given_twice() -> None:
    types = [packet.type for packet in EXAMPLES] + [DATA]
    assert len(set(types)) == len(types)


def test_a_packet_that_cannot_be_written_leaves_the_next_one_whole() -> None:
    with pytest.raises(UnicodeEncodeError):
        Close(1, "reset", "\ud800").encode()
    assert Reader().read(Ping(0, 1).encode()) == [Ping(0, 1)]


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


@pytest.mark.parametrize("packet", EXAMPLES, ids=_ids)
def test_fields_beyond_the_known_ones_are_ignored(packet: Packet) -> None:
    values = msgpack.unpackb(packet.encode()[4:])
    assert Reader().read(_frame(msgpack.packb([*values, "later", {"a": [1]}]))) == [packet]


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
    assert f"{length} bytes; 1 to 16 are taken" in _refuse(struct.pack(">I", length), limit=16)


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

    assert _memory_used(receive) < 64 * 1024
    assert len(reader.decoder.buffer()) == READ_SIZE


def test_a_length_within_the_limit_is_not_believed_before_its_bytes_arrive() -> None:
    reader = Reader(limit=MAX_U32)
    assert _memory_used(lambda: reader.read(b"\xff\xff\xff\xff\x91")) < 64 * 1024


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
        "c1",  # never used in msgpack
        "93",  # an array that ends before its items
        "92 08",
        "92 08 01 00",  # something behind the value
        "92 08 01 92 08 01",
        "92 0b a1 ff",  # a text that is not UTF-8
        "93 01 01 81 01 02",  # a map with a number as key
        "08",  # not an array
        "81 08 01",
        "a1 08",
        "c0",
        "90",  # an array without a type
        "92 a1 38 01",  # a type that is not a number
        "92 ff 01",
        "92 ca 41000000 01",
        "92 c3 01",
        "92 c0 01",
        "92 cf 0000000100000000 01",
        "92 91 08 01",
    ],
)
def test_what_is_not_one_array_that_begins_with_a_type_is_refused(body: str) -> None:
    assert "body is not" in _refuse(_frame(bytes.fromhex(body)))


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


_WRONG: dict[type, list[Any]] = {
    int: [-1, MAX_U32 + 1, 1.0, True, None, "1", b"1", [1]],
    str: [1, None, b"x", ["x"], True],
    bytes: [1, None, "x", [1], {}, True],
    dict: [None, [], "x", 1, {b"x": 1}],
}


@pytest.mark.parametrize("packet", EXAMPLES, ids=_ids)
def test_a_field_of_another_type_is_refused_by_name(packet: Packet) -> None:
    values = msgpack.unpackb(packet.encode()[4:])
    for index, name in enumerate(type(packet).__slots__, start=1):
        for wrong in _WRONG[type(values[index])]:
            body = msgpack.packb([*values[:index], wrong, *values[index + 1 :]])
            assert f"{type(packet).__name__}.{name} is " in _refuse(_frame(body))


@pytest.mark.parametrize("packet", EXAMPLES, ids=_ids)
def test_a_packet_that_lacks_fields_is_refused_by_name(packet: Packet) -> None:
    values = msgpack.unpackb(packet.encode()[4:])
    for count in range(1, len(values)):
        assert f"{type(packet).__name__} has {count - 1} fields" in _refuse(_frame(msgpack.packb(values[:count])))


def test_a_field_that_is_nested_deep_is_refused_by_name() -> None:
    assert "Eof.stream is [[" in _refuse(_frame(b"\x92\x08" + b"\x91" * 1000 + b"\x90"))


def test_a_refusal_does_not_repeat_a_long_field() -> None:
    assert len(_refuse(_frame(msgpack.packb([5, 1, "host", "x" * 100_000, 1, 1, {}])))) < 200


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\xdd\xff\xff\xff\xff", id="array of 4G"),
        pytest.param(b"\x92\x01\xdd\x00\x10\x00\x00" + bytes(4096), id="array of 1M inside"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="map of 4G"),
        pytest.param(b"\x93\x01\x01\xdf\x00\x10\x00\x00" + bytes(4096), id="map of 1M inside"),
        pytest.param(b"\x92\x01\xdb\xff\xff\xff\xff", id="text of 4G"),
        pytest.param(b"\x93\x07\x01\xc6\xff\xff\xff\xff", id="bin of 4G"),
        pytest.param(b"\x92\x01\xc9\xff\xff\xff\xff\x01", id="extension of 4G"),
        pytest.param(b"\x91" * 4096, id="nested arrays"),
        pytest.param(b"\x81\xa0" * 2048, id="nested maps"),
    ],
)
def test_a_body_that_promises_more_than_it_has_is_refused_cheaply(body: bytes) -> None:
    reader = Reader(limit=4200)
    assert _memory_used(lambda: _refused_by(reader, _frame(body))) < 128 * 1024


@pytest.mark.parametrize("piece", [b"\x91", b"\xdc\x04\x00", b"\xde\x04\x00\xa0"], ids=["small", "arrays", "maps"])
def test_the_deepest_nesting_costs_a_bounded_amount(piece: bytes) -> None:
    body = piece * (LIMIT // len(piece))
    reader = Reader()
    assert _memory_used(lambda: _refused_by(reader, _frame(body))) < 16 * LIMIT


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


def test_the_version_is_1() -> None:
    assert frames.VERSION == 1
