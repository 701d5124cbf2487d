"""Golden bytes: what is on the wire, written by hand after the msgpack specification, and read by this implementation.

``vectors/`` is for whoever writes a peer in another language; the spaces in its hexadecimal texts stand between items.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import pytest

from tunnel import packets
from tunnel.address import Identifier
from tunnel.config import Claims
from tunnel.credentials import Grant, Token
from tunnel.errors import AuthFailed, HandshakeRefused, RemoteProtocolError
from tunnel.frames import DATA, Decoder, data_header
from tunnel.handshake import AcceptingHandshake, DiallingHandshake, Handshake
from tunnel.identity import Identity
from tunnel.limits import Limits
from tunnel.packets import Close, Hello, Packet

_VECTORS = Path(__file__).parent / "vectors"
_NAMES = {
    "HELLO": packets.Hello,
    "CHALLENGE": packets.Challenge,
    "AUTH": packets.Auth,
    "WELCOME": packets.Welcome,
    "DIAL_REQ": packets.DialReq,
    "DIAL_RSP": packets.DialRsp,
    "EOF": packets.Eof,
    "CLOSE": packets.Close,
    "CREDIT": packets.Credit,
    "PING": packets.Ping,
    "PONG": packets.Pong,
    "DRAIN": packets.Drain,
    "DRAIN_ACK": packets.DrainAck,
    "UNDRAIN": packets.Undrain,
    "UNDRAIN_ACK": packets.UndrainAck,
    "DRAIN_CMD": packets.DrainCmd,
    "DRAIN_STATUS": packets.DrainStatus,
    "GOAWAY": packets.GoAway,
    "GOAWAY_ACK": packets.GoAwayAck,
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


def _with_bytes(fields: Vector) -> Vector:
    """With an entry ``x`` of bytes for each ``x_hex``."""
    return {
        key.removesuffix("_hex"): _with_bytes(value)
        if isinstance(value, dict)
        else (bytes.fromhex(value) if key.endswith("_hex") else value)
        for key, value in fields.items()
    }


def _meaning(vector: Vector) -> object:
    fields = _with_bytes(vector["fields"])
    if vector["packet"] == "DATA":
        return fields["stream"], fields["payload"]
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
    assert isinstance(packet, Hello | packets.Welcome)
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
    (answer,) = accepting.receive(first)
    assert answer.encode() == welcome
    assert dialling.receive(answer) == []
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


# -- with tokens

_SERVER = Identity("server", "server", "ffeeddccbbaa99887766554433221100")


def _chosen(monkeypatch: pytest.MonkeyPatch, nonce: bytes) -> None:
    monkeypatch.setattr("secrets.token_bytes", lambda _size: nonce)


def _accepting(vector: Vector) -> AcceptingHandshake:
    secret = vector.get("secret_of_server", vector["secret"]).encode()
    role = _identity(_bytes(vector["steps"][0])).role
    token = Token(vector["token"], role, secret, "tokens.toml", Grant(agents=("*",), anything=True))
    return AcceptingHandshake(_SERVER, tokens=lambda: {token.id: token}, binding=bytes.fromhex(vector["binding_hex"]))


def _dialling(vector: Vector) -> DiallingHandshake:
    me = _identity(_bytes(vector["steps"][0]))
    token = Token(vector["token"], me.role, vector["secret"].encode(), "token.toml")
    return DiallingHandshake(me, token, bytes.fromhex(vector["binding_hex"]))


def _take(side: Handshake, frame: bytes) -> list[bytes]:
    (packet,), _ = _decode(frame)
    assert isinstance(packet, Packet)
    return [answer.encode() for answer in side.receive(packet, frame[4:])]


@_each("authenticated")
def test_a_proof_is_the_hmac_of_what_was_said(vector: Vector) -> None:
    binding = bytes.fromhex(vector["binding_hex"])
    said = len(binding).to_bytes(4, "big") + binding
    labels = {"server": b"trio-tunnel accepting\0"}
    for step in vector["steps"]:
        if "digest_hex" in step:
            (auth,), _ = _decode(_bytes(step))
            digest = hashlib.sha256(said).digest()
            label = labels.get(step["from"], b"trio-tunnel dialling\0")
            assert digest == bytes.fromhex(step["digest_hex"])
            assert auth == packets.Auth(hmac.digest(vector["secret"].encode(), label + digest, "sha256"))
        said += _bytes(step)


def _with_outcome(*, refused: bool, spelled_here: bool = False) -> pytest.MarkDecorator:
    vectors = [vector for vector in _load("authenticated") if refused is (vector["outcome"] == "refused")]
    if spelled_here:
        vectors = [vector for vector in vectors if "spelled otherwise" not in vector["name"]]
    return pytest.mark.parametrize("vector", [pytest.param(vector, id=vector["name"]) for vector in vectors])


def _challenged(monkeypatch: pytest.MonkeyPatch, vector: Vector) -> tuple[AcceptingHandshake, bytes, list[bytes]]:
    """The accepting side, the proof that it hears, and what it answers."""
    hello, challenge, proof, *rest = map(_bytes, vector["steps"])
    accepting = _accepting(vector)
    _chosen(monkeypatch, challenge[-32:])
    assert _take(accepting, hello) == [challenge]
    return accepting, proof, rest


@_with_outcome(refused=False)
def test_a_server_takes_a_proof_and_gives_its_own_as_these_bytes(
    monkeypatch: pytest.MonkeyPatch, vector: Vector
) -> None:
    accepting, proof, answers = _challenged(monkeypatch, vector)
    assert _take(accepting, proof) == answers
    assert accepting.peer == _identity(_bytes(vector["steps"][0]))


@_with_outcome(refused=True)
def test_a_server_refuses_a_proof_with_these_bytes(monkeypatch: pytest.MonkeyPatch, vector: Vector) -> None:
    accepting, proof, answers = _challenged(monkeypatch, vector)
    with pytest.raises(AuthFailed) as caught:
        _take(accepting, proof)
    assert [Close(0, caught.value.code, caught.value.text).encode()] == answers
    assert accepting.peer is None


def _proved(monkeypatch: pytest.MonkeyPatch, vector: Vector) -> tuple[DiallingHandshake, list[bytes]]:
    """The dialling side, and what it is answered."""
    hello, challenge, proof, *rest = map(_bytes, vector["steps"])
    dialling = _dialling(vector)
    _chosen(monkeypatch, hello[-32:])
    assert dialling.first().encode() == hello
    assert _take(dialling, challenge) == [proof]
    return dialling, rest


@_with_outcome(refused=False, spelled_here=True)
def test_who_dials_gives_a_proof_and_takes_the_servers_as_these_bytes(
    monkeypatch: pytest.MonkeyPatch, vector: Vector
) -> None:
    dialling, (proof, welcome) = _proved(monkeypatch, vector)
    assert _take(dialling, proof) == []
    assert _take(dialling, welcome) == []
    assert dialling.peer == _SERVER
    assert vector["outcome"] == f"linked; the {'client' if dialling.opens else 'server'} opens streams"


@_with_outcome(refused=True, spelled_here=True)
def test_who_dials_understands_a_refusal_that_is_these_bytes(monkeypatch: pytest.MonkeyPatch, vector: Vector) -> None:
    dialling, (refusal,) = _proved(monkeypatch, vector)
    with pytest.raises(AuthFailed):
        _take(dialling, refusal)
    assert dialling.peer is None
