"""What agents claim and what dials ask for by name: identifiers, claims, strategies, ``@AGENT``, ``Tunnel-Agent``."""

from __future__ import annotations

from typing import Any

import pytest
from addresses import addresses, identifier_texts, identifiers, names
from hypothesis import given
from hypothesis import strategies as st

from tunnel.address import Identifier, ListenAddress, Target
from tunnel.config import LOWEST_PRIORITY, STRATEGIES, Claims, Forward, parse_strategies
from tunnel.credentials import Token
from tunnel.errors import ConfigError, RemoteProtocolError
from tunnel.frames import Decoder
from tunnel.handshake import AcceptingHandshake, DiallingHandshake
from tunnel.http_connect import BadRequest, ConnectRequest, Head
from tunnel.identity import Identity, read_identity
from tunnel.packets import VERSION, Hello, Packet

AGENT = Identity("agent", "edge-1", "0" * 32)
SERVER = Identity("server", "server", "f" * 32)


# -- claims


def test_nothing_is_claimed_unless_said() -> None:
    assert Claims() == Claims((), default_route=False, priority=0)


def test_duplicates_count_once_in_their_first_order() -> None:
    texts = ("host=b", "host=a", "host=B.", "ipv4=10.0.0.7", "host=10.0.0.7")
    claims = Claims(tuple(map(Identifier.parse, texts)))
    assert [str(identifier) for identifier in claims.identifiers] == ["host=b", "host=a", "ipv4=10.0.0.7"]


@pytest.mark.parametrize("priority", [-1, LOWEST_PRIORITY + 1])
def test_a_priority_out_of_range_is_refused(priority: int) -> None:
    with pytest.raises(ConfigError, match=rf"{priority} is not a priority; taken: 0 \(first\) to 99"):
        Claims(priority=priority)


def test_identifiers_that_are_too_long_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="300 identifiers are longer than 2048 bytes together"):
        Claims(tuple(Identifier("host", f"node-{number}") for number in range(300)))


def test_the_largest_claims_fit_into_a_hello_with_the_longest_name_and_token() -> None:
    claims = Claims(tuple(Identifier("host", f"n{number:03}.a") for number in range(157)))
    token = Token("x" * 64, "agent", b"0" * 32, "tokens.toml")
    hello = DiallingHandshake(Identity("agent", "\U0001f680" * 128, claims=claims), token).first()
    assert len(hello.encode()) < 4096


# -- as HELLO says them


def _read(**info: Any) -> Identity:
    return read_identity({**AGENT.to_info(), **info}, "agent")


def _claims_of(**info: Any) -> Claims:
    return _read(**info).claims


def _over_the_wire(packet: Packet) -> Packet:
    packets: list[Packet] = []
    Decoder(4096, packets.append, lambda _number, _data: None).feed(packet.encode())
    return packets[0]


@given(
    st.builds(
        Claims,
        st.lists(identifiers, max_size=10).map(tuple),
        default_route=st.booleans(),
        priority=st.integers(0, LOWEST_PRIORITY),
    )
)
def test_claims_cross_the_wire_unchanged(claims: Claims) -> None:
    accepting = AcceptingHandshake(SERVER)
    accepting.receive(_over_the_wire(DiallingHandshake(Identity("agent", "edge-1", claims=claims)).first()))
    assert accepting.peer is not None
    assert accepting.peer.claims == claims


def test_an_agent_that_says_nothing_claims_nothing() -> None:
    peer = read_identity({"role": "agent", "name": "edge-1", "instance": "0" * 32}, "agent")
    assert (peer.claims, peer.linked) == (Claims(), ())


def test_the_server_does_not_rely_on_the_agents_spelling() -> None:
    claims = _claims_of(identifiers=["host=DB.Internal.", "host=db.internal", "ipv4=::ffff:10.0.0.7"])
    assert claims.identifiers == (Identifier("host", "db.internal"), Identifier("ipv4", "10.0.0.7"))


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"identifiers": "host=db"}, ["identifiers", "'host=db'"]),
        ({"identifiers": None}, ["identifiers", "None"]),
        ({"identifiers": {"host": "db"}}, ["identifiers"]),
        ({"identifiers": [1]}, ["identifiers", "[1]"]),
        ({"identifiers": [b"host=db"]}, ["identifiers"]),
        ({"identifiers": [["host", "db"]]}, ["identifiers"]),
        ({"identifiers": [""]}, ["claims", "''"]),
        ({"identifiers": ["db"]}, ["claims", "'db'", "host=..."]),
        ({"identifiers": ["host=ok", "cidr=10.0.0.1/8"]}, ["claims", "'cidr=10.0.0.1/8'", "host bits"]),
        ({"identifiers": ["host=\x1b[2J"]}, ["claims", "'\\x1b[2J'"]),
        ({"identifiers": [f"host=node-{number}" for number in range(200)]}, ["claims", "200 identifiers"]),
        ({"priority": "0"}, ["priority", "'0'", "not a number"]),
        ({"priority": 1.0}, ["priority", "1.0"]),
        ({"priority": True}, ["priority", "True"]),
        ({"priority": None}, ["priority", "None"]),
        ({"priority": -1}, ["claims", "-1 is not a priority"]),
        ({"priority": 1 << 62}, ["claims", "is not a priority"]),
        ({"default_route": 1}, ["default_route", "1", "true or false"]),
        ({"default_route": "yes"}, ["default_route", "'yes'"]),
        ({"linked": "f" * 32}, ["linked"]),
        ({"linked": [7]}, ["linked", "[7]"]),
    ],
)
def test_bad_claims_are_refused_by_name_and_the_peer_stays_unknown(info: dict[str, Any], words: list[str]) -> None:
    accepting = AcceptingHandshake(SERVER)
    with pytest.raises(RemoteProtocolError) as caught:
        accepting.receive(_over_the_wire(Hello(VERSION, {**AGENT.to_info(), **info})))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert accepting.peer is None


_junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | identifier_texts
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["identifiers", "default_route", "priority", "linked"]), _junk))
def test_no_claims_raise_anything_but_a_protocol_error(info: dict[str, Any]) -> None:
    try:
        claims = _claims_of(**info)
    except RemoteProtocolError as error:
        assert str(error)  # noqa: PT017
    else:
        assert Claims(claims.identifiers, claims.default_route, claims.priority) == claims


@given(st.lists(identifier_texts, max_size=4))
def test_no_identifiers_raise_anything_but_a_protocol_error(texts: list[str]) -> None:
    try:
        identifiers = _claims_of(identifiers=texts).identifiers
    except RemoteProtocolError as error:
        assert str(error).startswith("claims: ")  # noqa: PT017
    else:
        assert set(identifiers) == set(map(Identifier.parse, texts))


# -- strategies


@pytest.mark.parametrize("words", [STRATEGIES, STRATEGIES[::-1], ("default",), ("defaultRoute", "destHost")])
def test_strategies_keep_their_order(words: tuple[str, ...]) -> None:
    assert parse_strategies(",".join(words)) == words


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "desthost",
        "destHost,",
        ",default",
        "destHost, default",
        "default,default",
        "destHost;default",
        "x" * 500,
    ],
)
def test_what_is_no_list_of_strategies_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a list of strategies; taken: destHost,defaultRoute,default, each"):
        parse_strategies(text)


# -- forwards


_agent_names = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=20)
_forwards = st.builds(
    Forward,
    st.builds(ListenAddress, names | addresses, st.integers(0, 65535)),
    st.builds(Target, names | addresses, st.integers(1, 65535)),
    st.none() | _agent_names,
)


@given(_forwards)
def test_a_forward_reads_its_own_text(forward: Forward) -> None:
    assert Forward.parse(str(forward)) == forward


def test_a_forward_may_begin_with_a_bare_port() -> None:
    assert str(Forward.parse("5432=DB.internal:5432")) == "127.0.0.1:5432=db.internal:5432"


def test_a_forward_may_name_its_agent() -> None:
    assert Forward.parse("[::1]:1=[2001:db8::1]:2@edge-7") == Forward(
        ListenAddress("::1", 1), Target("2001:db8::1", 2), "edge-7"
    )


def test_the_name_of_an_agent_may_hold_what_separates_the_parts() -> None:
    assert Forward.parse("1=a:1@b=c@d").agent == "b=c@d"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("127.0.0.1:5432", "LISTEN=TARGET"),
        ("", "LISTEN=TARGET"),
        ("1=a", "'a' is not an address"),
        ("1=@edge", "'' is not an address"),
        ("x=a:1", "'x' is not an address"),
        ("1=a:1@", "'' is not an agent name"),
        ("1=a:1@a b", "'a b' is not an agent name"),
        ("1=a:1@" + "x" * 129, "is not an agent name"),
    ],
)
def test_what_is_no_forward_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Forward.parse(text)
    assert named in str(caught.value)


@given(st.text() | st.text(st.sampled_from("01.:[]=@ax "), max_size=20))
def test_no_text_raises_anything_but_a_config_error(text: str) -> None:
    try:
        assert Forward.parse(str(Forward.parse(text))) == Forward.parse(text)
    except ConfigError as error:
        assert "taken" in str(error)  # noqa: PT017


# -- the header of a CONNECT


def _request(*headers: bytes) -> ConnectRequest:
    head = Head(16 * 1024)
    request = head.feed(b"".join((b"CONNECT db:1 HTTP/1.1\r\nHost: db:1\r\n", *headers, b"\r\n")))
    assert request is not None
    return request


def test_no_agent_is_asked_for_unless_named() -> None:
    assert _request().agent is None


@pytest.mark.parametrize(
    "header",
    [b"Tunnel-Agent: edge-7\r\n", b"tunnel-agent:edge-7\r\n", b"TUNNEL-AGENT: \t edge-7 \r\n"],
)
def test_a_header_names_the_agent(header: bytes) -> None:
    assert _request(header).agent == "edge-7"


def test_the_name_in_the_header_is_utf8() -> None:
    assert _request("Tunnel-Agent: Zürich\r\n".encode()).agent == "Zürich"


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ([b"Tunnel-Agent:\r\n"], "''"),
        ([b"Tunnel-Agent: a b\r\n"], "'a b'"),
        ([b"Tunnel-Agent: a, b\r\n"], "'a, b'"),
        ([b"Tunnel-Agent: " + b"x" * 129 + b"\r\n"], "1 to 128"),
        ([b"Tunnel-Agent: \xff\r\n"], "utf-8"),
        ([b"Tunnel-Agent: a\r\n", b"Tunnel-Agent: a\r\n"], "Tunnel-Agent is there more than once"),
    ],
)
def test_a_bad_name_in_the_header_is_answered_with_400(headers: list[bytes], named: str) -> None:
    with pytest.raises(BadRequest) as caught:
        _request(*headers)
    assert caught.value.status == 400
    assert named in str(caught.value)
