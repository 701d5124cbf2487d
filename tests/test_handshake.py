"""The handshake: two sides get to know each other, and whatever cannot be believed is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from tunnel.config import Limits, Timeouts
from tunnel.errors import HandshakeRefused, RemoteProtocolError
from tunnel.frames import VERSION, Close, Credit, Decoder, DialReq, Drain, Eof, Hello, Packet, Ping, Pong, Welcome
from tunnel.handshake import AcceptingHandshake, DiallingHandshake, Identity, new_instance
from tunnel.link import Link
from tunnel.transport import StreamTransport

AGENT = Identity("agent", "edge-1", "0" * 32, ("later",))
SERVER = Identity("server", "server", "f" * 32)

OTHERS: tuple[Packet, ...] = (
    DialReq(1, "x", 1, 1, 1, {}),
    Eof(1),
    Close(1, "reset", "a stream's"),
    Credit(1, 1),
    Ping(0, 1),
    Pong(0, 1),
    Drain(1, "soft", "signal", 1, 0),
)


def _meet(me: Identity, *, servers: int = 1) -> tuple[DiallingHandshake, AcceptingHandshake]:
    dialling, accepting = DiallingHandshake(me), AcceptingHandshake(SERVER, servers)
    answer = accepting.receive(dialling.first())
    assert answer is not None
    assert dialling.receive(answer) is None
    return dialling, accepting


def _hello(**changes: Any) -> Hello:
    return Hello(VERSION, {**AGENT.to_info(), **changes})


def _welcome(**changes: Any) -> Welcome:
    return Welcome(VERSION, {**SERVER.to_info(), "servers": 1, **changes})


def _without(packet: Hello | Welcome, entry: str) -> Hello | Welcome:
    return type(packet)(packet.version, {key: value for key, value in packet.info.items() if key != entry})


# -- both sides meet


def test_both_sides_know_each_other_afterwards() -> None:
    dialling, accepting = _meet(AGENT)
    assert (dialling.peer, accepting.peer) == (SERVER, AGENT)


def test_the_dialling_side_speaks_first() -> None:
    assert DiallingHandshake(AGENT).first() == Hello(VERSION, AGENT.to_info())
    assert AcceptingHandshake(SERVER).first() is None


def test_nobody_is_known_before() -> None:
    assert DiallingHandshake(AGENT).peer is None
    assert AcceptingHandshake(SERVER).peer is None


@pytest.mark.parametrize("draining", [False, True])
def test_a_peer_says_whether_it_is_draining(draining: bool) -> None:
    _, accepting = _meet(Identity("agent", "edge-1", draining=draining))
    assert accepting.peer is not None
    assert accepting.peer.draining is draining


def test_a_server_says_how_many_servers_there_are() -> None:
    dialling, _ = _meet(AGENT, servers=3)
    assert dialling.servers == 3


@pytest.mark.parametrize(("role", "server_opens"), [("agent", True), ("client", False)])
def test_exactly_one_side_opens_streams(role: str, server_opens: bool) -> None:
    dialling, accepting = _meet(Identity(role, "edge-1"))
    assert (dialling.opens, accepting.opens) == (not server_opens, server_opens)


def test_the_server_opens_nothing_before_it_knows_its_peer() -> None:
    assert not AcceptingHandshake(SERVER).opens


def test_an_instance_is_128_bits_that_differ_each_time() -> None:
    one, other = new_instance(), new_instance()
    assert one != other
    assert len(bytes.fromhex(one)) == 16


def test_features_and_draining_may_be_left_out() -> None:
    accepting = AcceptingHandshake(SERVER)
    accepting.receive(_without(_without(_hello(), "features"), "draining"))
    assert accepting.peer == Identity("agent", "edge-1", "0" * 32)


def test_servers_may_be_left_out() -> None:
    dialling = DiallingHandshake(AGENT)
    dialling.receive(_without(_welcome(), "servers"))
    assert dialling.servers == 1


def test_unknown_entries_are_ignored() -> None:
    accepting, dialling = AcceptingHandshake(SERVER), DiallingHandshake(AGENT)
    accepting.receive(_hello(later={"a": [1]}))
    dialling.receive(_welcome(later=None))
    assert (dialling.peer, accepting.peer) == (SERVER, AGENT)


# -- refusals


@pytest.mark.parametrize("version", [0, 2, 4_000_000_000])
def test_a_server_that_cannot_take_a_version_names_both(version: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"version {version}, this side {VERSION}"):
        AcceptingHandshake(SERVER).receive(Hello(version, {}))


def test_an_agent_that_cannot_take_a_version_names_both() -> None:
    with pytest.raises(RemoteProtocolError, match=f"version 2, this side {VERSION}"):
        DiallingHandshake(AGENT).receive(Welcome(2, {}))


_BAD_IN_BOTH: list[tuple[str, Any]] = [
    *[("role", role) for role in (None, "", "king", b"agent", 1, ["agent"], {})],
    *[("name", name) for name in (None, "", "two words", "a\nb", "\x1b[31m", "x" * 129, b"edge", 7)],
    *[("instance", text) for text in (None, "", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "0" * 32 + "\n", bytes(16))],
    *[("features", words) for words in (None, "later", {}, [1], ["a", None], 3)],
    *[("draining", value) for value in (None, 0, 1, "true", [])],
]


@pytest.mark.parametrize(("entry", "value"), [*_BAD_IN_BOTH, ("role", "server")])
def test_a_bad_entry_of_a_hello_is_refused_by_name(entry: str, value: Any) -> None:
    accepting = AcceptingHandshake(SERVER)
    with pytest.raises(RemoteProtocolError, match=f"^{entry}\\b"):
        accepting.receive(_hello(**{entry: value}))
    assert accepting.peer is None


_BAD_SERVERS = [("servers", value) for value in (0, -1, True, "1", None, 1.0)]


@pytest.mark.parametrize(("entry", "value"), [*_BAD_IN_BOTH, *_BAD_SERVERS, ("role", "agent"), ("role", "client")])
def test_a_bad_entry_of_a_welcome_is_refused_by_name(entry: str, value: Any) -> None:
    dialling = DiallingHandshake(AGENT)
    with pytest.raises(RemoteProtocolError, match=f"^{entry}\\b"):
        dialling.receive(_welcome(**{entry: value}))
    assert dialling.peer is None


@pytest.mark.parametrize("entry", [*AGENT.to_info(), "servers"])
def test_an_entry_that_is_nested_deep_is_refused_by_name(entry: str) -> None:
    nested: list[Any] = []
    for _ in range(1000):
        nested = [nested]
    with pytest.raises(RemoteProtocolError, match=f"^{entry} is "):
        DiallingHandshake(AGENT).receive(_welcome(**{entry: nested}))


@pytest.mark.parametrize("entry", ["role", "name", "instance"])
def test_a_missing_entry_is_refused_by_name(entry: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"^{entry} is None"):
        AcceptingHandshake(SERVER).receive(_without(_hello(), entry))
    with pytest.raises(RemoteProtocolError, match=f"^{entry} is None"):
        DiallingHandshake(AGENT).receive(_without(_welcome(), entry))


@pytest.mark.parametrize("entry", ["role", "name", "instance", "features", "draining"])
def test_a_refusal_does_not_repeat_a_long_entry(entry: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        AcceptingHandshake(SERVER).receive(_hello(**{entry: "x" * 4000}))
    assert len(str(caught.value)) < 300


def test_a_refused_agent_learns_what_the_server_said() -> None:
    with pytest.raises(HandshakeRefused) as caught:
        DiallingHandshake(AGENT).receive(Close(0, "protocol", "the peer speaks protocol version 2, this side 1"))
    assert caught.value.code == "protocol"
    assert "version 2, this side 1" in caught.value.text


@pytest.mark.parametrize("packet", [*OTHERS, Welcome(1, SERVER.to_info()), Close(0, "leaving", "")], ids=repr)
def test_nothing_but_hello_is_legal_at_first(packet: Packet) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{type(packet).__name__} before HELLO"):
        AcceptingHandshake(SERVER).receive(packet)


@pytest.mark.parametrize("packet", [*OTHERS, Hello(1, AGENT.to_info())], ids=repr)
def test_nothing_but_welcome_or_a_refusal_answers_hello(packet: Packet) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{type(packet).__name__} before WELCOME"):
        DiallingHandshake(AGENT).receive(packet)


@pytest.mark.parametrize("kind", [2, 3, 99], ids=["CHALLENGE", "AUTH", "unknown"])
async def test_a_packet_of_unknown_type_is_refused_during_the_handshake(kind: int) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    link = Link(StreamTransport(theirs), AcceptingHandshake(SERVER), limits=Limits(), timeouts=Timeouts())
    said: list[Packet] = []
    decoder = Decoder(4096, said.append, lambda stream, payload: None)
    await ours.send_all(bytes([0, 0, 0, 2, 0x91, kind]) + _hello().encode())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        decoder.feed(await ours.receive_some())
        nursery.cancel_scope.cancel()
    assert [type(packet) for packet in said] == [Close]


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys([*AGENT.to_info(), "servers"], _anything)))
def test_no_info_raises_anything_but_a_protocol_error(info: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError):
        AcceptingHandshake(SERVER).receive(Hello(VERSION, info))
    with pytest.raises(RemoteProtocolError):
        DiallingHandshake(AGENT).receive(Welcome(VERSION, info))


@pytest.mark.parametrize("limits", [1, [], {"body": 4095}, {"body": "8192"}, {"body": True}], ids=repr)
def test_limits_that_make_no_sense_are_refused_by_name(limits: object) -> None:
    with pytest.raises(RemoteProtocolError, match="limits is "):
        AcceptingHandshake(SERVER).receive(Hello(VERSION, AGENT.to_info() | {"limits": limits}))


@pytest.mark.parametrize(("limits", "body"), [({}, 1 << 20), ({"later": 1}, 1 << 20), ({"body": 4096}, 4096)], ids=repr)
def test_the_peer_says_how_long_a_body_it_takes(limits: object, body: int) -> None:
    accepting = AcceptingHandshake(SERVER)
    accepting.receive(Hello(VERSION, AGENT.to_info() | {"limits": limits}))
    assert accepting.peer is not None
    assert accepting.peer.body_limit == body


def test_a_hello_fits_the_limit_for_strangers() -> None:
    long = Identity("agent", "\U0001f600" * 128)
    assert len(DiallingHandshake(long).first().encode()) - 4 <= Limits().body_before_auth
