"""Packets: what is written is read again, and a body that is none is refused by name, and cheaply."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import memory_used
from packet_examples import EXAMPLES, IDS, packets

from tunnel import packets as module
from tunnel.errors import RemoteProtocolError
from tunnel.frames import DATA
from tunnel.packets import MAX_U32, Close, DialRsp, Drain, DrainCmd, DrainStatus, Packet, Ping, packet_of, unpack

LIMIT = 1024 * 1024


def _read(body: bytes) -> Packet | None:
    return packet_of(unpack(memoryview(body)))


def _refuse(body: bytes) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        _read(body)
    return str(caught.value)


# -- what is written is read again


def test_there_is_an_example_of_every_packet() -> None:
    names = {kind.__name__ for kind in Packet.__subclasses__()}  # by name: slots=True leaves every class there twice
    assert {type(packet).__name__ for packet in EXAMPLES} == names


@given(packets)
def test_every_packet_is_read_as_it_was_written(packet: Packet) -> None:
    frame = packet.encode()
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert _read(frame[4:]) == packet


def test_types_are_never_given_twice() -> None:
    types = [packet.type for packet in EXAMPLES] + [DATA]
    assert len(set(types)) == len(types)


def test_a_packet_that_cannot_be_written_leaves_the_next_one_whole() -> None:
    with pytest.raises(UnicodeEncodeError):
        Close(1, "reset", "\ud800").encode()
    assert _read(Ping(0, 1).encode()[4:]) == Ping(0, 1)


@pytest.mark.parametrize("packet", EXAMPLES, ids=IDS)
def test_fields_beyond_the_known_ones_are_ignored(packet: Packet) -> None:
    values = msgpack.unpackb(packet.encode()[4:])
    assert _read(msgpack.packb([*values, "later", {"a": [1]}])) == packet


@pytest.mark.parametrize("kind", [0, 21, 128, MAX_U32])
def test_a_type_that_is_not_known_is_no_packet(kind: int) -> None:
    assert _read(msgpack.packb([kind, "whatever", {}])) is None


@pytest.mark.parametrize(
    ("packet", "field", "longest"),
    [
        (DialRsp(1, "x" * 9000, "", 0), "code", 64),
        (DialRsp(1, "ok", "x" * 9000, 0), "text", 800),
        (Close(1, "x" * 9000, ""), "code", 64),
        (Close(1, "reset", "x" * 9000), "text", 800),
        (Drain(1, "soft", "x" * 9000, 0, 0), "reason", 800),
        (DrainCmd("", "drain", "x" * 9000, 0, 0), "text", 800),
        (DrainStatus("x" * 9000, 0, 0, 0, 0, 0), "state", 64),
    ],
)
def test_what_people_are_to_read_is_cut(packet: Packet, field: str, longest: int) -> None:
    assert getattr(packet, field) == "x" * longest


# -- what is no packet


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
    assert "body is not" in _refuse(bytes.fromhex(body))


_WRONG: dict[type, list[Any]] = {
    int: [-1, MAX_U32 + 1, 1.0, True, None, "1", b"1", [1]],
    str: [1, None, b"x", ["x"], True],
    bytes: [1, None, "x", [1], {}, True],
    dict: [None, [], "x", 1, {b"x": 1}],
}


@pytest.mark.parametrize("packet", EXAMPLES, ids=IDS)
def test_a_field_of_another_type_is_refused_by_name(packet: Packet) -> None:
    values = msgpack.unpackb(packet.encode()[4:])
    for index, name in enumerate(type(packet).__slots__, start=1):
        for wrong in _WRONG[type(values[index])]:
            body = msgpack.packb([*values[:index], wrong, *values[index + 1 :]])
            assert f"{type(packet).__name__}.{name} is " in _refuse(body)


@pytest.mark.parametrize("packet", EXAMPLES, ids=IDS)
def test_a_packet_that_lacks_fields_is_refused_by_name(packet: Packet) -> None:
    values = msgpack.unpackb(packet.encode()[4:])
    for count in range(1, len(values)):
        assert f"{type(packet).__name__} has {count - 1} fields" in _refuse(msgpack.packb(values[:count]))


def test_a_field_that_is_nested_deep_is_refused_by_name() -> None:
    assert "Eof.stream is [[" in _refuse(b"\x92\x08" + b"\x91" * 1000 + b"\x90")


def test_a_refusal_does_not_repeat_a_long_field() -> None:
    assert len(_refuse(msgpack.packb([5, 1, "host", "x" * 100_000, 1, 1, {}]))) < 200


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
    assert memory_used(lambda: _refuse(body)) < 128 * 1024


@pytest.mark.parametrize("piece", [b"\x91", b"\xdc\x04\x00", b"\xde\x04\x00\xa0"], ids=["small", "arrays", "maps"])
def test_the_deepest_nesting_costs_a_bounded_amount(piece: bytes) -> None:
    body = piece * (LIMIT // len(piece))
    assert memory_used(lambda: _refuse(body)) < 16 * LIMIT


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_random_bodies_raise_nothing_but_a_protocol_error(body: bytes) -> None:
    try:
        _read(body)
    except RemoteProtocolError as error:
        assert str(error)  # noqa: PT017


def test_the_version_is_1() -> None:
    assert module.VERSION == 1
