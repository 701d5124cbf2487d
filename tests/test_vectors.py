"""Golden bytes: what is on the wire, written by hand after the msgpack specification, and read by this implementation.

``vectors/`` is for whoever writes a peer in another language; the spaces in its hexadecimal texts stand between items.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunnel import frames
from tunnel.address import Identifier
from tunnel.config import Claims, Limits
from tunnel.errors import HandshakeRefused, RemoteProtocolError
from tunnel.frames import DATA, Close, Decoder, Hello, Packet, data_header
from tunnel.handshake import AcceptingHandshake, DiallingHandshake, Handshake, Identity

_VECTORS = Path(__file__).parent / "vectors"
_NAMES = {
    "HELLO": frames.Hello,
    "WELCOME": frames.Welcome,
    "DIAL_REQ": frames.DialReq,
    "DIAL_RSP": frames.DialRsp,
    "EOF": frames.Eof,
    "CLOSE": frames.Close,
    "CREDIT": frames.Credit,
    "PING": frames.Ping,
    "PONG": frames.Pong,
    "DRAIN": frames.Drain,
    "DRAIN_ACK": frames.DrainAck,
    "UNDRAIN": frames.Undrain,
    "UNDRAIN_ACK": frames.UndrainAck,
    "DRAIN_CMD": frames.DrainCmd,
    "DRAIN_STATUS": frames.DrainStatus,
    "GOAWAY": frames.GoAway,
    "GOAWAY_ACK": frames.GoAwayAck,
}

Vector = dict[str, Any]


def _load(name: str) -> list[Vector]:
    loaded: list[Vector] = json.loads((_VECTORS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def _each(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "vector", [pytest.param(vector, id=vector["name"]) for name in names for vector in _load(name)]
    )


def _bytes(vector: Vector) -> bytes:
    return bytes.fromhex(vector["hex"])


def _decode(data: bytes, limit: int = Limits().body) -> tuple[list[object], int]:
    seen: list[object] = []
    decoder = Decoder(limit, seen.append, lambda stream, payload: seen.append((stream, bytes(payload))))
    decoder.feed(data)
    return seen, decoder.unknown


def _meaning(vector: Vector) -> object:
    fields = vector["fields"]
    if vector["packet"] == "DATA":
        return fields["stream"], bytes.fromhex(fields["payload_hex"])
    return _NAMES[vector["packet"]](**fields)


@_each("packets", "other_spellings")
def test_the_bytes_mean_the_packet(vector: Vector) -> None:
    assert _decode(_bytes(vector)) == ([_meaning(vector)], 0)


@_each("packets")
def test_the_packet_is_written_as_these_bytes(vector: Vector) -> None:
    meaning = _meaning(vector)
    if isinstance(meaning, tuple):
        stream, payload = meaning
        assert data_header(stream, len(payload)) + payload == _bytes(vector)
    else:
        assert isinstance(meaning, Packet)
        assert meaning.encode() == _bytes(vector)


@_each("packets", "other_spellings")
def test_the_type_is_the_packets_number(vector: Vector) -> None:
    number = DATA if vector["packet"] == "DATA" else _NAMES[vector["packet"]].type
    assert vector["type"] == number


def test_every_packet_has_a_vector() -> None:
    assert {vector["packet"] for vector in _load("packets")} == {*_NAMES, "DATA"}


@_each("illegal")
def test_the_bytes_are_refused(vector: Vector) -> None:
    with pytest.raises(RemoteProtocolError):
        _decode(_bytes(vector), vector.get("limit", Limits().body))


@_each("ignored")
def test_the_bytes_are_ignored(vector: Vector) -> None:
    assert _decode(_bytes(vector)) == ([], 1)


def _identity(frame: bytes) -> Identity:
    (packet,), _ = _decode(frame)
    assert isinstance(packet, Hello | frames.Welcome)
    info = packet.info
    claims = Claims(
        tuple(map(Identifier.parse, info.get("identifiers", []))),
        info.get("default_route", False),
        info.get("priority", 0),
    )
    return Identity(
        info["role"],
        info["name"],
        info["instance"],
        tuple(info["features"]),
        info["draining"],
        info["limits"]["body"],
        claims,
        tuple(info.get("linked", [])),
    )


def _linked(vector: Vector) -> tuple[Handshake, Handshake]:
    hello, welcome = (_bytes(step) for step in vector["steps"])
    dialling, accepting = DiallingHandshake(_identity(hello)), AcceptingHandshake(_identity(welcome))
    first = dialling.first()
    assert first.encode() == hello
    answer = accepting.receive(first)
    assert answer is not None
    assert answer.encode() == welcome
    dialling.receive(answer)
    return dialling, accepting


@pytest.mark.parametrize("name", ["an agent is linked", "a client is linked"])
def test_a_handshake_that_succeeds_is_these_bytes(name: str) -> None:
    vector = next(vector for vector in _load("handshakes") if vector["name"] == name)
    dialling, accepting = _linked(vector)
    assert vector["outcome"] == f"linked; the {'server' if accepting.opens else 'client'} opens streams"
    assert dialling.opens is not accepting.opens


def test_a_handshake_that_is_refused_is_these_bytes() -> None:
    vector = next(vector for vector in _load("handshakes") if vector["outcome"] == "refused")
    hello, refusal = (_decode(_bytes(step))[0][0] for step in vector["steps"])
    assert isinstance(hello, Hello)
    assert isinstance(refusal, Close)
    with pytest.raises(RemoteProtocolError) as caught:
        AcceptingHandshake(Identity("server", "server")).receive(hello)
    assert refusal == Close(0, "protocol", str(caught.value))
    with pytest.raises(HandshakeRefused):
        DiallingHandshake(Identity("agent", "edge-1")).receive(refusal)
