"""The handshake: two sides get to know each other, and who cannot prove who it is gets nowhere, whatever it says."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from stream_transport import StreamTransport

from tunnel.address import Identifier
from tunnel.config import Claims
from tunnel.credentials import Grant, Token, Tokens
from tunnel.errors import AuthFailed, HandshakeRefused, RemoteProtocolError
from tunnel.frames import Decoder
from tunnel.handshake import AcceptingHandshake, DiallingHandshake, Handshake, welcome
from tunnel.identity import Identity
from tunnel.limits import Limits, Timeouts
from tunnel.link import Link
from tunnel.packets import (
    VERSION,
    Auth,
    Challenge,
    Close,
    Credit,
    DialReq,
    Drain,
    Eof,
    Hello,
    Packet,
    Ping,
    Pong,
    Welcome,
)

CLAIMS = Claims((Identifier.parse("suffix=.db.internal"),))
AGENT = Identity("agent", "edge-1", "0" * 32, ("later",), claims=CLAIMS)
CLIENT = Identity("client", "laptop", "1" * 32)
SERVER = Identity("server", "server", "f" * 32)

EDGE = Token("edge", "agent", b"e" * 32, "server.toml", Grant(agents=("edge-*",), identifiers=CLAIMS.identifiers))
LAPTOP = Token("laptop", "client", b"l" * 32, "server.toml")
TOKENS: Tokens = {token.id: token for token in (EDGE, LAPTOP)}
SAME_REFUSAL = "the token is not known here, or its secret is another one"
NOT_PROVEN = "the server does not prove that it knows the token"

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
    (answer,) = accepting.receive(dialling.first())
    assert dialling.receive(answer) == []
    return dialling, accepting


def _hello(**changes: Any) -> Hello:
    return Hello(VERSION, {**AGENT.to_info(), **changes})


def _welcome(**changes: Any) -> Welcome:
    return Welcome(VERSION, {**SERVER.to_info(), "servers": 1, **changes})


# -- without tokens


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


def test_servers_may_be_left_out() -> None:
    dialling = DiallingHandshake(AGENT)
    dialling.receive(Welcome(VERSION, SERVER.to_info()))
    assert dialling.servers == 1


@pytest.mark.parametrize(("role", "server_opens"), [("agent", True), ("client", False)])
def test_exactly_one_side_opens_streams(role: str, server_opens: bool) -> None:
    dialling, accepting = _meet(Identity(role, "edge-1"))
    assert (dialling.opens, accepting.opens) == (not server_opens, server_opens)


def test_the_server_opens_nothing_before_it_knows_its_peer() -> None:
    assert not AcceptingHandshake(SERVER).opens


@pytest.mark.parametrize("auth", [{"token": "edge", "nonce": bytes(32)}, None, 7, "edge", {}], ids=repr)
def test_a_server_that_wants_no_token_takes_no_notice_of_one(auth: object) -> None:
    accepting = AcceptingHandshake(SERVER)
    assert accepting.receive(_hello(auth=auth)) == [welcome(SERVER, 1)]
    assert (accepting.peer, accepting.token) == (AGENT, None)


# -- refusals without tokens


@pytest.mark.parametrize("version", [0, 2, 4_000_000_000])
def test_a_server_that_cannot_take_a_version_names_both(version: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"version {version}, this side {VERSION}"):
        AcceptingHandshake(SERVER).receive(Hello(version, {}))


def test_an_agent_that_cannot_take_a_version_names_both() -> None:
    with pytest.raises(RemoteProtocolError, match=f"version 2, this side {VERSION}"):
        DiallingHandshake(AGENT).receive(Welcome(2, {}))


@pytest.mark.parametrize("role", ["server", "admin", None])
def test_only_agents_and_clients_say_hello(role: object) -> None:
    accepting = AcceptingHandshake(SERVER)
    with pytest.raises(RemoteProtocolError, match=r"^role is .*, not one of agent, client$"):
        accepting.receive(_hello(role=role))
    assert accepting.peer is None


@pytest.mark.parametrize("role", ["agent", "client", None])
def test_only_servers_say_welcome(role: object) -> None:
    dialling = DiallingHandshake(AGENT)
    with pytest.raises(RemoteProtocolError, match=r"^role is .*, not one of server$"):
        dialling.receive(_welcome(role=role))
    assert dialling.peer is None


@pytest.mark.parametrize("servers", [0, -1, True, "1", None, 1.0, [[[]]]], ids=repr)
def test_a_number_of_servers_that_makes_no_sense_is_refused_by_name(servers: object) -> None:
    dialling = DiallingHandshake(AGENT)
    with pytest.raises(RemoteProtocolError, match=r"^servers is .*, not a positive number$"):
        dialling.receive(_welcome(servers=servers))
    assert dialling.peer is None


def test_a_bad_entry_leaves_the_peer_unknown() -> None:
    accepting, dialling = AcceptingHandshake(SERVER), DiallingHandshake(AGENT)
    with pytest.raises(RemoteProtocolError, match=r"^name"):
        accepting.receive(_hello(name=""))
    with pytest.raises(RemoteProtocolError, match=r"^name"):
        dialling.receive(_welcome(name=""))
    assert (accepting.peer, dialling.peer) == (None, None)


def test_a_refused_agent_learns_what_the_server_said() -> None:
    with pytest.raises(HandshakeRefused) as caught:
        DiallingHandshake(AGENT).receive(Close(0, "protocol", "the peer speaks protocol version 2, this side 1"))
    assert caught.value.code == "protocol"
    assert "version 2, this side 1" in caught.value.text


@pytest.mark.parametrize("tokens", [None, lambda: TOKENS], ids=["no tokens", "tokens"])
def test_whoever_may_not_link_is_told_so_and_stays_unknown(tokens: Callable[[], Tokens] | None) -> None:
    def admit(peer: Identity, _token: Token | None) -> None:
        raise HandshakeRefused("leaving", f"no {peer.role}")

    dialling = DiallingHandshake(AGENT, EDGE if tokens else None)
    accepting = AcceptingHandshake(SERVER, admit=admit, tokens=tokens)
    with pytest.raises(HandshakeRefused, match="no agent"):
        _shake(dialling, accepting)
    assert accepting.peer is None


@pytest.mark.parametrize("kind", [2, 3, 21, 99])
async def test_a_packet_that_is_not_due_is_refused_at_a_link(kind: int) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    link = Link(StreamTransport(theirs), AcceptingHandshake(SERVER), limits=Limits(), timeouts=Timeouts())
    said: list[Packet] = []
    decoder = Decoder(4096, said.append, lambda stream, payload: None)
    await ours.send_all(_frame(msgpack.packb([kind, bytes(32)])) + _hello().encode())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        decoder.feed(await ours.receive_some())
        nursery.cancel_scope.cancel()
    assert [type(packet) for packet in said] == [Close]


# -- two sides with tokens, over a wire on which somebody sits

Wire = Callable[[int, bytes], bytes]
"""What becomes of the frame that is sent as so-and-so-many-th, by either side."""


def _frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def _hand(side: Handshake, frame: bytes) -> list[bytes]:
    """Have a side take a frame, as a link does; the frames that it answers."""
    decoder = Decoder(Limits().body_before_auth, lambda _packet: None, lambda _stream, _data: None)
    decoder.strict = True
    answers: list[Packet] = []
    decoder.on_packet = lambda packet: answers.extend(side.receive(packet, decoder.body))
    decoder.feed(frame)
    return [answer.encode() for answer in answers]


def _shake(
    dialling: DiallingHandshake, accepting: AcceptingHandshake, wire: Wire = lambda _number, frame: frame
) -> list[bytes]:
    """Carry frames between two sides until neither says anything; the frames as they were sent."""
    sent: list[bytes] = []
    waiting: list[tuple[Handshake, bytes]] = [(accepting, dialling.first().encode())]
    while waiting:
        taker, frame = waiting.pop(0)
        sent.append(frame)
        answers = _hand(taker, wire(len(sent) - 1, frame))
        waiting += [(dialling if taker is accepting else accepting, answer) for answer in answers]
    return sent


def _sides(
    me: Identity = AGENT,
    token: Token | None = EDGE,
    tokens: Tokens = TOKENS,
    bindings: tuple[bytes, bytes] = (b"", b""),
) -> tuple[DiallingHandshake, AcceptingHandshake]:
    return DiallingHandshake(me, token, bindings[0]), AcceptingHandshake(
        SERVER, tokens=lambda: tokens, binding=bindings[1]
    )


def _kinds(frames: Iterable[bytes]) -> list[int]:
    return [msgpack.unpackb(frame[4:])[0] for frame in frames]


def _refused(dialling: DiallingHandshake, accepting: AcceptingHandshake, **options: Any) -> AuthFailed:
    with pytest.raises(AuthFailed) as caught:
        _shake(dialling, accepting, **options)
    return caught.value


def _known(*tokens: Token) -> Tokens:
    return {token.id: token for token in tokens}


@pytest.mark.parametrize("binding", [b"", bytes(32)], ids=["plain", "bound"])
@pytest.mark.parametrize(("me", "token"), [(AGENT, EDGE), (CLIENT, LAPTOP)], ids=["agent", "client"])
def test_two_sides_that_share_a_secret_know_each_other_afterwards(me: Identity, token: Token, binding: bytes) -> None:
    dialling, accepting = _sides(me, token, bindings=(binding, binding))
    _shake(dialling, accepting)
    assert (dialling.peer, accepting.peer, accepting.token) == (SERVER, me, token)


def test_what_is_said_is_hello_challenge_auth_auth_welcome() -> None:
    assert _kinds(_shake(*_sides())) == [Hello.type, Challenge.type, Auth.type, Auth.type, Welcome.type]


def test_the_secret_is_never_said() -> None:
    said = b"".join(_shake(*_sides()))
    assert EDGE.secret not in said
    assert EDGE.secret[:8] not in said


def test_no_two_handshakes_have_a_nonce_or_proof_in_common() -> None:
    one, other = _shake(*_sides()), _shake(*_sides())
    assert [one[number] == other[number] for number in range(5)] == [False, False, False, False, True]
    assert not set(one[:4]) & set(other[:4])


def test_neither_side_knows_the_other_before_it_has_a_proof() -> None:
    dialling, accepting = _sides()
    (challenge,) = _hand(accepting, dialling.first().encode())
    (proof,) = _hand(dialling, challenge)
    assert (accepting.peer, accepting.token, accepting.opens) == (None, None, False)
    _hand(accepting, proof)
    assert accepting.peer == AGENT
    assert dialling.peer is None


def test_nobody_is_asked_whether_it_may_link_before_it_has_proved_who_it_is() -> None:
    asked: list[Identity] = []
    dialling = DiallingHandshake(AGENT, EDGE)
    accepting = AcceptingHandshake(SERVER, admit=lambda peer, _token: asked.append(peer), tokens=lambda: TOKENS)
    (challenge,) = _hand(accepting, dialling.first().encode())
    assert asked == []
    _hand(accepting, _hand(dialling, challenge)[0])
    assert asked == [AGENT]


# -- refusals with tokens


def test_a_secret_that_the_server_does_not_have_is_refused() -> None:
    dialling, accepting = _sides(token=replace(EDGE, secret=b"x" * 32))
    refusal = _refused(dialling, accepting)
    assert (refusal.code, refusal.text, refusal.facts) == ("auth", SAME_REFUSAL, EDGE.facts)
    assert accepting.peer is None


def test_a_token_that_the_server_does_not_have_is_refused_like_a_wrong_secret() -> None:
    said: list[bytes] = []

    def wire(_number: int, frame: bytes) -> bytes:
        said.append(frame)
        return frame

    refusal = _refused(*_sides(token=replace(EDGE, id="nobody")), wire=wire)
    assert _kinds(said) == [Hello.type, Challenge.type, Auth.type]
    assert (refusal.code, refusal.text) == ("auth", SAME_REFUSAL)
    assert refusal.facts["token"] == "nobody"


def test_what_a_log_says_of_a_stranger_is_short() -> None:
    _, accepting = _sides()
    _hand(accepting, _hello(auth={"token": "x" * 3000, "nonce": bytes(32)}).encode())
    with pytest.raises(AuthFailed) as caught:
        _hand(accepting, Auth(bytes(32)).encode())
    assert len(str(caught.value.facts)) < 200


def test_the_challenge_to_a_stranger_looks_like_any_other() -> None:
    stranger, known = (_sides(token=replace(EDGE, id=token_id)) for token_id in ("nope", "edge"))
    asked = [_hand(accepting, dialling.first().encode())[0] for dialling, accepting in (stranger, known)]
    assert asked[0][:-32] == asked[1][:-32]


def test_a_server_that_has_no_tokens_at_all_asks_and_refuses_everybody() -> None:
    refusal = _refused(*_sides(tokens={}))
    assert refusal.text == SAME_REFUSAL


@pytest.mark.parametrize(
    ("me", "token", "text"),
    [
        (CLIENT, EDGE, "the token is for the role agent, not client"),
        (AGENT, LAPTOP, "the token is for the role client, not agent"),
        (AGENT, Token("ops", "admin", b"o" * 32, "server.toml"), "the token is for the role admin, not agent"),
        (CLIENT, Token("ops", "admin", b"o" * 32, "server.toml"), "the token is for the role admin, not client"),
    ],
)
def test_a_token_of_another_role_is_refused(me: Identity, token: Token, text: str) -> None:
    dialling, accepting = _sides(me, token, _known(token))
    refusal = _refused(dialling, accepting)
    assert (refusal.text, refusal.facts) == (text, token.facts)
    assert (accepting.peer, accepting.token) == (None, None)


@pytest.mark.parametrize(
    ("me", "text"),
    [
        (
            replace(AGENT, name="core-1"),
            "the token edge: it may not be used by an agent called core-1; allowed: edge-*",
        ),
        (
            replace(AGENT, claims=Claims((Identifier.parse("host=db.example"),))),
            "the token edge: it may not claim host=db.example; allowed: suffix=.db.internal",
        ),
        (
            replace(AGENT, claims=Claims(default_route=True)),
            "the token edge: it may not claim the default route; allowed: suffix=.db.internal",
        ),
    ],
    ids=["name", "identifier", "default route"],
)
def test_what_a_token_does_not_allow_is_refused_by_name(me: Identity, text: str) -> None:
    dialling, accepting = _sides(me)
    assert _refused(dialling, accepting).text == text
    assert accepting.peer is None


def test_what_a_token_would_not_allow_is_said_to_nobody_who_does_not_have_it() -> None:
    refusal = _refused(*_sides(replace(AGENT, name="core-1"), replace(EDGE, secret=b"x" * 32)))
    assert refusal.text == SAME_REFUSAL


@pytest.mark.parametrize("me", [AGENT, replace(AGENT, name="core-1")], ids=["claims", "name"])
def test_a_refusal_fits_into_what_a_stranger_may_send(me: Identity) -> None:
    many = tuple(Identifier("host", f"node-{number}.internal") for number in range(500))
    long = replace(EDGE, grant=Grant(agents=tuple(f"edge-{number}" for number in range(2, 900)), identifiers=many))
    if me is AGENT:
        long = replace(long, grant=replace(long.grant, agents=("*",)))
    refusal = _refused(*_sides(me, tokens=_known(long)))
    assert len(Close(0, refusal.code, refusal.text).encode()) - 4 <= Limits().body_before_auth


def test_who_names_no_token_is_refused_where_one_is_wanted() -> None:
    dialling, accepting = _sides(token=None)
    refusal = _refused(dialling, accepting)
    assert (refusal.text, refusal.facts) == ("a token is wanted here, and none was named", {})
    assert accepting.peer is None


@pytest.mark.parametrize(
    ("auth", "text"),
    [
        (7, "auth is not a map with a token and a nonce"),
        ("edge", "auth is not a map with a token and a nonce"),
        ([], "auth is not a map with a token and a nonce"),
        ({}, "auth is not a map with a token and a nonce"),
        ({"token": 7, "nonce": bytes(32)}, "auth is not a map with a token and a nonce"),
        ({"token": ["edge"], "nonce": bytes(32)}, "auth is not a map with a token and a nonce"),
        ({"token": b"edge", "nonce": bytes(32)}, "auth is not a map with a token and a nonce"),
        ({"token": "edge"}, "nonce is not 32 bytes"),
        ({"token": "edge", "nonce": "0" * 32}, "nonce is not 32 bytes"),
        ({"token": "edge", "nonce": bytes(31)}, "nonce is not 32 bytes"),
        ({"token": "edge", "nonce": bytes(33)}, "nonce is not 32 bytes"),
    ],
    ids=repr,
)
def test_a_hello_with_a_bad_entry_for_its_token_is_refused(auth: object, text: str) -> None:
    _, accepting = _sides()
    with pytest.raises(RemoteProtocolError, match=f"^{text}$"):
        _hand(accepting, _hello(auth=auth).encode())
    assert accepting.peer is None


@pytest.mark.parametrize("info", [{}, {"nonce": None}, {"nonce": bytes(31)}, {"nonce": "0" * 32}], ids=repr)
def test_a_challenge_without_a_nonce_is_refused(info: dict[str, Any]) -> None:
    dialling, _ = _sides()
    dialling.first()
    with pytest.raises(RemoteProtocolError, match=r"^nonce is not 32 bytes$"):
        _hand(dialling, Challenge(info).encode())


def test_who_has_a_token_takes_no_server_that_wants_none() -> None:
    dialling, accepting = DiallingHandshake(AGENT, EDGE), AcceptingHandshake(SERVER)
    refusal = _refused(dialling, accepting)
    assert (refusal.text, refusal.facts) == (NOT_PROVEN, EDGE.facts)
    assert dialling.peer is None


def test_who_has_a_token_takes_no_server_that_welcomes_it_without_a_proof() -> None:
    dialling, accepting = _sides()
    (challenge,) = _hand(accepting, dialling.first().encode())
    _hand(dialling, challenge)
    with pytest.raises(AuthFailed, match=NOT_PROVEN):
        _hand(dialling, welcome(SERVER, 1).encode())
    assert dialling.peer is None


@pytest.mark.parametrize("proof", [b"", bytes(32), bytes(31), bytes(4000)], ids=len)
def test_who_has_a_token_takes_no_server_with_another_proof(proof: bytes) -> None:
    dialling, accepting = _sides()
    (challenge,) = _hand(accepting, dialling.first().encode())
    _hand(dialling, challenge)
    with pytest.raises(AuthFailed) as caught:
        _hand(dialling, Auth(proof).encode())
    assert (caught.value.text, caught.value.facts) == (NOT_PROVEN, EDGE.facts)
    assert dialling.peer is None


def test_who_has_no_token_cannot_answer_a_challenge() -> None:
    dialling = DiallingHandshake(AGENT)
    with pytest.raises(AuthFailed, match="the server wants a token, and there is none"):
        _hand(dialling, Challenge({"nonce": bytes(32)}).encode())


@pytest.mark.parametrize("proof", [b"", bytes(32), bytes(31), bytes(4000)], ids=len)
def test_a_proof_that_is_none_is_refused(proof: bytes) -> None:
    dialling, accepting = _sides()
    _hand(accepting, dialling.first().encode())
    with pytest.raises(AuthFailed, match=SAME_REFUSAL):
        _hand(accepting, Auth(proof).encode())
    assert accepting.peer is None


def test_a_refused_agent_learns_why_and_has_its_own_facts_for_its_log() -> None:
    with pytest.raises(AuthFailed) as caught:
        _hand(DiallingHandshake(AGENT, EDGE), Close(0, "auth", SAME_REFUSAL).encode())
    assert (caught.value.text, caught.value.facts) == (f"the server says: {SAME_REFUSAL}", EDGE.facts)


# -- somebody on the wire


def _recorded() -> list[bytes]:
    """What an attacker has seen of a handshake that went well."""
    return _shake(*_sides())


def test_a_recorded_handshake_proves_nothing_to_a_server() -> None:
    hello, _, proof, *_ = _recorded()
    _, accepting = _sides()
    assert _kinds(_hand(accepting, hello)) == [Challenge.type]
    with pytest.raises(AuthFailed, match=SAME_REFUSAL):
        _hand(accepting, proof)
    assert accepting.peer is None


def test_a_recorded_handshake_proves_nothing_to_who_dials() -> None:
    _, challenge, _, proof, _ = _recorded()
    dialling, _ = _sides()
    dialling.first()
    _hand(dialling, challenge)
    with pytest.raises(AuthFailed, match=NOT_PROVEN):
        _hand(dialling, proof)
    assert dialling.peer is None


def test_the_proof_of_who_dials_proves_nothing_to_it() -> None:
    dialling, accepting = _sides()
    (challenge,) = _hand(accepting, dialling.first().encode())
    (proof,) = _hand(dialling, challenge)
    with pytest.raises(AuthFailed, match=NOT_PROVEN):
        _hand(dialling, proof)
    assert dialling.peer is None


def test_nonces_that_are_sent_back_prove_nothing_to_who_dials() -> None:
    dialling, _ = _sides()
    nonce = dialling.first().encode()[-32:]
    (proof,) = _hand(dialling, Challenge({"nonce": nonce}).encode())
    with pytest.raises(AuthFailed, match=NOT_PROVEN):
        _hand(dialling, proof)
    assert dialling.peer is None


def test_the_proof_of_one_server_proves_nothing_to_another() -> None:
    """A dials a false server, which says to a true one what A says, but with a nonce of its own choice."""
    dialling, accepting = _sides()
    hello = dialling.first().encode()
    (challenge,) = _hand(accepting, hello)
    (proof,) = _hand(dialling, Challenge({"nonce": bytes(32)}).encode())
    assert proof != challenge
    with pytest.raises(AuthFailed, match=SAME_REFUSAL):
        _hand(accepting, proof)
    assert accepting.peer is None


def test_the_proof_of_a_server_proves_nothing_to_a_server() -> None:
    recorded = _recorded()
    _, accepting = _sides()
    _hand(accepting, recorded[0])
    with pytest.raises(AuthFailed, match=SAME_REFUSAL):
        _hand(accepting, recorded[3])
    assert accepting.peer is None


def _flips(frame: bytes) -> Iterable[bytes]:
    """The frame with each byte of its body changed, one at a time, in its lowest and in its highest bit."""
    for position, bit in itertools.product(range(4, len(frame)), (1, 128)):
        yield frame[:position] + bytes([frame[position] ^ bit]) + frame[position + 1 :]


@pytest.mark.parametrize("number", range(4), ids=["HELLO", "CHALLENGE", "AUTH of who dials", "AUTH of the server"])
def test_whatever_is_changed_on_the_way_is_refused(number: int) -> None:
    for index in range(2 * (len(_shake(*_sides())[number]) - 4)):
        dialling, accepting = _sides()

        def wire(sent: int, frame: bytes, index: int = index) -> bytes:
            return next(itertools.islice(_flips(frame), index, None)) if sent == number else frame

        with pytest.raises((AuthFailed, RemoteProtocolError)):
            _shake(dialling, accepting, wire)
        assert dialling.peer is None
        assert accepting.peer is None or number == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "edge-2"},
        {"instance": "2" * 32},
        {"identifiers": []},
        {"default_route": True},
        {"priority": 1},
        {"draining": True},
        {"linked": ["f" * 32]},
        {"later": 1},
        {"auth": {"token": "edge", "nonce": bytes(32)}},
    ],
    ids=str,
)
def test_a_hello_that_was_changed_on_the_way_is_refused(changes: dict[str, Any]) -> None:
    def wire(number: int, frame: bytes) -> bytes:
        _, version, info = msgpack.unpackb(frame[4:]) if number == 0 else (0, 0, {})
        return frame if number else Hello(version, info | changes).encode()

    dialling, accepting = _sides(tokens=_known(replace(EDGE, grant=Grant(agents=("*",), anything=True))))
    assert _refused(dialling, accepting, wire=wire).text == SAME_REFUSAL
    assert (dialling.peer, accepting.peer) == (None, None)


@pytest.mark.parametrize("number", range(4), ids=["HELLO", "CHALLENGE", "AUTH of who dials", "AUTH of the server"])
def test_a_frame_that_means_the_same_in_other_bytes_is_noticed(number: int) -> None:
    def wire(sent: int, frame: bytes) -> bytes:
        return _frame(b"\xdc\x00" + bytes([frame[4] & 0x0F]) + frame[5:]) if sent == number else frame

    dialling, accepting = _sides()
    if number == 3:  # nothing is proved after it
        _shake(dialling, accepting, wire)
        assert dialling.peer == SERVER
    else:
        _refused(dialling, accepting, wire=wire)
        assert dialling.peer is None


@pytest.mark.parametrize("number", range(3), ids=["HELLO", "CHALLENGE", "AUTH"])
def test_a_field_that_was_added_on_the_way_is_noticed(number: int) -> None:
    def wire(sent: int, frame: bytes) -> bytes:
        return _frame(msgpack.packb([*msgpack.unpackb(frame[4:]), "later"])) if sent == number else frame

    dialling, accepting = _sides()
    _refused(dialling, accepting, wire=wire)
    assert dialling.peer is None


def test_what_a_later_version_adds_is_no_hindrance() -> None:
    """The peer is written by hand: it adds an entry or a field to all that it says."""
    _, accepting = _sides()
    hello = _frame(msgpack.packb([1, 1, AGENT.to_info() | {"auth": {"token": "edge", "nonce": bytes(32), "x": 1}}, 2]))
    (challenge,) = _hand(accepting, hello)
    digest = hashlib.sha256(bytes(4) + hello + challenge).digest()
    proof = _frame(msgpack.packb([3, EDGE.proof("dialling", digest), "later"]))
    own, _ = _hand(accepting, proof)
    assert own == Auth(EDGE.proof("accepting", hashlib.sha256(bytes(4) + hello + challenge + proof).digest())).encode()
    assert accepting.peer == AGENT


@pytest.mark.parametrize(
    "bindings",
    [(b"", bytes(32)), (bytes(32), b""), (bytes(32), bytes(31) + b"\1"), (b"", bytes(4)), (bytes(4), bytes(8))],
    ids=str,
)
def test_sides_whose_channels_are_bound_otherwise_do_not_meet(bindings: tuple[bytes, bytes]) -> None:
    dialling, accepting = _sides(bindings=bindings)
    assert _refused(dialling, accepting).text == SAME_REFUSAL
    assert (dialling.peer, accepting.peer) == (None, None)


def test_a_binding_is_not_confused_with_what_is_said() -> None:
    dialling, _ = _sides()
    hello = dialling.first().encode()
    _, accepting = _sides(bindings=(b"", hello))
    (challenge,) = _hand(accepting, hello)
    (proof,) = _hand(dialling, challenge)
    with pytest.raises(AuthFailed, match=SAME_REFUSAL):
        _hand(accepting, proof)


# -- tokens that change


@pytest.mark.parametrize(
    "tokens",
    [
        {},
        _known(LAPTOP),
        _known(replace(EDGE, secret=b"n" * 32)),
        _known(replace(EDGE, role="client")),
        _known(replace(EDGE, grant=Grant())),
    ],
    ids=["none", "another", "secret", "role", "grant"],
)
def test_a_token_that_changes_before_the_proof_arrives_is_refused(tokens: Tokens) -> None:
    now = TOKENS
    dialling, accepting = DiallingHandshake(AGENT, EDGE), AcceptingHandshake(SERVER, tokens=lambda: now)
    (challenge,) = _hand(accepting, dialling.first().encode())
    (proof,) = _hand(dialling, challenge)
    now = tokens
    with pytest.raises(AuthFailed, match=SAME_REFUSAL):
        _hand(accepting, proof)
    assert (accepting.peer, accepting.token) == (None, None)


def test_a_token_that_appears_after_hello_does_not_count_yet() -> None:
    now: Tokens = {}
    dialling, accepting = DiallingHandshake(AGENT, EDGE), AcceptingHandshake(SERVER, tokens=lambda: now)
    (challenge,) = _hand(accepting, dialling.first().encode())
    (proof,) = _hand(dialling, challenge)
    now = TOKENS
    with pytest.raises(AuthFailed, match=SAME_REFUSAL):
        _hand(accepting, proof)


def _linked(me: Identity = AGENT, token: Token = EDGE) -> AcceptingHandshake:
    dialling, accepting = _sides(me, token)
    _shake(dialling, accepting)
    return accepting


WIDER = replace(EDGE, grant=Grant(agents=("*",), anything=True))


@pytest.mark.parametrize("now", [EDGE, WIDER, replace(EDGE, source="elsewhere.toml")], ids=["the same", "more", "file"])
def test_a_token_that_still_allows_the_link_keeps_it(now: Token) -> None:
    accepting = _linked()
    assert accepting.still_valid(_known(now))
    assert accepting.token == now


@pytest.mark.parametrize(
    "tokens",
    [
        {},
        _known(LAPTOP),
        _known(replace(EDGE, secret=b"n" * 32)),
        _known(replace(EDGE, role="client")),
        _known(replace(EDGE, grant=Grant(agents=("core-*",), anything=True))),
        _known(replace(EDGE, grant=Grant(agents=("edge-*",)))),
    ],
    ids=["none", "another", "secret", "role", "name", "claims"],
)
def test_a_token_that_does_not_allow_the_link_any_more_ends_it(tokens: Tokens) -> None:
    assert not _linked().still_valid(tokens)


def test_a_client_keeps_its_link_and_has_the_new_targets() -> None:
    accepting = _linked(CLIENT, LAPTOP)
    fewer = replace(LAPTOP, grant=Grant())
    assert accepting.still_valid(_known(fewer))
    assert accepting.token == fewer


def test_a_link_without_a_token_does_not_depend_on_any() -> None:
    _, accepting = _meet(AGENT)
    assert accepting.still_valid({})


def test_a_handshake_that_is_not_done_does_not_depend_on_tokens_yet() -> None:
    dialling, accepting = _sides()
    _hand(accepting, dialling.first().encode())
    assert accepting.still_valid({})


# -- whatever comes, in whatever order

ANY: tuple[Packet, ...] = (
    *OTHERS,
    Close(0, "leaving", "goodbye"),
    Close(0, "auth", "no"),
    _hello(),
    _hello(auth={"token": "edge", "nonce": bytes(32)}),
    _hello(auth={"token": "nobody", "nonce": bytes(32)}),
    Hello(2, {}),
    Challenge({"nonce": bytes(32)}),
    Challenge({}),
    Auth(bytes(32)),
    Auth(b""),
    _welcome(),
    Welcome(2, {}),
)
_REFUSALS = (RemoteProtocolError, HandshakeRefused)


def _try(side: Handshake, packet: Packet) -> list[Packet] | None:
    """What a side answers, or None if it refuses."""
    try:
        return side.receive(packet, packet.encode()[4:])
    except _REFUSALS:
        return None


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_order_of_packets_makes_a_server_believe_who_proves_nothing(depth: int) -> None:
    for packets in itertools.product(ANY, repeat=depth):
        _, accepting = _sides()
        for packet in packets:
            _try(accepting, packet)
        assert (accepting.peer, accepting.token, accepting.opens) == (None, None, False)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_order_of_packets_makes_who_has_a_token_believe_a_server_that_proves_nothing(depth: int) -> None:
    for packets in itertools.product(ANY, repeat=depth):
        dialling, _ = _sides()
        dialling.first()
        for packet in packets:
            _try(dialling, packet)
        assert dialling.peer is None


def _states() -> dict[str, Callable[[], tuple[Handshake, type[Packet]]]]:
    """For each state of a side with tokens, one that is in it, and the only kind of packet that is due."""

    def until(count: int) -> tuple[DiallingHandshake, AcceptingHandshake, list[bytes]]:
        dialling, accepting = _sides()
        waiting = [dialling.first().encode()]
        for number in range(count):
            waiting += _hand(accepting if number in (0, 2) else dialling, waiting.pop(0))
        return dialling, accepting, waiting

    return {
        "START": lambda: (until(0)[1], Hello),
        "CHALLENGED": lambda: (until(1)[1], Auth),
        "HELLO SENT": lambda: (until(0)[0], Challenge),
        "PROVED": lambda: (until(2)[0], Auth),
        "KNOWN": lambda: (until(4)[0], Welcome),
    }


@pytest.mark.parametrize("packet", ANY, ids=repr)
def test_what_is_not_due_is_refused(packet: Packet) -> None:
    for make in _states().values():
        side, due = make()
        if not isinstance(packet, due):
            with pytest.raises(_REFUSALS):
                _hand(side, packet.encode())
            assert side.peer is None


@pytest.mark.parametrize("packet", [*OTHERS, Challenge({}), Auth(b""), _welcome(), Close(0, "leaving", "")], ids=repr)
@pytest.mark.parametrize("tokens", [None, lambda: TOKENS], ids=["no tokens", "tokens"])
def test_nothing_but_hello_is_legal_at_first(packet: Packet, tokens: Callable[[], Tokens] | None) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{type(packet).__name__} before HELLO"):
        AcceptingHandshake(SERVER, tokens=tokens).receive(packet)


@pytest.mark.parametrize("packet", [*OTHERS, _hello(), Challenge({}), _welcome(), Close(0, "leaving", "")], ids=repr)
def test_nothing_but_a_proof_answers_a_challenge(packet: Packet) -> None:
    dialling, accepting = _sides()
    _hand(accepting, dialling.first().encode())
    with pytest.raises(RemoteProtocolError, match=f"{type(packet).__name__} before AUTH"):
        _hand(accepting, packet.encode())


@pytest.mark.parametrize("packet", [*OTHERS, Hello(1, AGENT.to_info()), Auth(b"")], ids=repr)
def test_nothing_but_welcome_or_a_refusal_answers_hello(packet: Packet) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{type(packet).__name__} before WELCOME"):
        DiallingHandshake(AGENT).receive(packet)


@pytest.mark.parametrize("token", [None, EDGE], ids=["no token", "token"])
def test_nothing_is_taken_once_both_sides_know_each_other(token: Token | None) -> None:
    for packet in ANY:
        dialling = DiallingHandshake(AGENT, token)
        accepting = AcceptingHandshake(SERVER, tokens=(lambda: TOKENS) if token else None)
        frames = _shake(dialling, accepting)
        for side in (dialling, accepting):
            with pytest.raises(_REFUSALS):
                side.receive(packet, packet.encode()[4:])
        for frame in frames:
            with pytest.raises(_REFUSALS):
                _hand(accepting, frame)
            with pytest.raises(_REFUSALS):
                _hand(dialling, frame)


def test_a_refused_proof_cannot_be_mended() -> None:
    dialling, accepting = _sides()
    (challenge,) = _hand(accepting, dialling.first().encode())
    (proof,) = _hand(dialling, challenge)
    with pytest.raises(AuthFailed):
        _hand(accepting, Auth(bytes(32)).encode())
    with pytest.raises(_REFUSALS):
        _hand(accepting, proof)
    assert accepting.peer is None


_anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.binary() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
_auths = st.fixed_dictionaries(
    {}, optional={"token": st.sampled_from(["edge", "laptop", "x"]) | _anything, "nonce": st.binary() | _anything}
)
_infos = st.fixed_dictionaries(
    {}, optional=dict.fromkeys([*AGENT.to_info(), "servers", "nonce"], _anything) | {"auth": _auths | _anything}
)
_packets: st.SearchStrategy[Packet] = st.one_of(
    st.sampled_from(ANY),
    st.builds(Hello, st.just(VERSION) | st.integers(0, 3), _infos),
    st.builds(lambda info: _hello(**info), _infos),
    st.builds(Challenge, _infos | st.fixed_dictionaries({"nonce": st.binary(min_size=32, max_size=32)})),
    st.builds(Auth, st.binary(max_size=40)),
    st.builds(Welcome, st.just(VERSION) | st.integers(0, 3), _infos),
    st.builds(lambda info: _welcome(**info), _infos),
)


@given(st.lists(_packets, max_size=6), st.sampled_from([None, EDGE]))
def test_no_packets_raise_anything_but_a_refusal(packets: list[Packet], token: Token | None) -> None:
    dialling = DiallingHandshake(AGENT, token)
    accepting = AcceptingHandshake(SERVER, tokens=(lambda: TOKENS) if token else None)
    dialling.first()
    for packet in packets:
        _try(dialling, packet)
        _try(accepting, packet)
    if token:
        assert (dialling.peer, accepting.peer) == (None, None)


# -- sizes


def test_a_hello_fits_the_limit_for_strangers() -> None:
    long = Identity("agent", "\U0001f600" * 128)
    token = replace(EDGE, id="x" * 64)
    assert len(DiallingHandshake(long, token).first().encode()) - 4 <= Limits().body_before_auth
