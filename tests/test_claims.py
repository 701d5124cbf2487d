"""What agents claim and what dials ask for by name: identifiers, claims, strategies, ``@AGENT``, ``Tunnel-Agent``."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunnel.address import Identifier, ListenAddress, Target, canonical_host, host_kind
from tunnel.config import LOWEST_PRIORITY, STRATEGIES, Claims, Forward, parse_strategies
from tunnel.credentials import Token
from tunnel.errors import AddressError, ConfigError, RemoteProtocolError
from tunnel.frames import VERSION, Decoder, Hello, Packet
from tunnel.handshake import AcceptingHandshake, DiallingHandshake
from tunnel.http_connect import BadRequest, ConnectRequest, Head
from tunnel.identity import Identity, read_identity

AGENT = Identity("agent", "edge-1", "0" * 32)
SERVER = Identity("server", "server", "f" * 32)

_labels = st.from_regex(r"[a-z_][a-z0-9_-]{0,20}", fullmatch=True)
_names = st.lists(_labels, min_size=1, max_size=4).map(".".join)
_addresses = st.ip_addresses().map(str).filter(lambda text: "%" not in text)
_v4_networks = st.tuples(st.ip_addresses(v=4), st.integers(0, 32))
_plain_v6 = st.ip_addresses(v=6).filter(lambda ip: ip.scope_id is None and ip.ipv4_mapped is None)
_v6_networks = st.tuples(_plain_v6, st.integers(0, 128))
_networks = (_v4_networks | _v6_networks).map(lambda pair: str(ipaddress.ip_network(pair, strict=False)))
_identifiers = st.one_of(
    st.builds("host={}".format, _names | _addresses),
    st.builds("suffix=.{}".format, _names),
    st.builds("cidr={}".format, _networks),
).map(Identifier.parse)
_near_misses = st.text(st.sampled_from("0129.:=/%*xsufhoctidrpv46-_ \x00à"), max_size=30)
_kinds = st.sampled_from(["host=", "ipv4=", "ipv6=", "suffix=", "cidr=", ""])
_texts = st.tuples(_kinds, st.text() | _near_misses).map("".join)


# -- identifiers


@pytest.mark.parametrize(
    ("spelling", "identifier"),
    [
        ("host=db.internal", "host=db.internal"),
        ("host=DB.Internal.", "host=db.internal"),
        ("host=bücher.example", "host=xn--bcher-kva.example"),
        ("host=10.0.0.7", "ipv4=10.0.0.7"),
        ("host=::ffff:10.0.0.7", "ipv4=10.0.0.7"),
        ("host=2001:DB8:0::1", "ipv6=2001:db8::1"),
        ("ipv4=10.0.0.7", "ipv4=10.0.0.7"),
        ("ipv4=::ffff:a00:7", "ipv4=10.0.0.7"),
        ("ipv6=2001:db8:0:0::1", "ipv6=2001:db8::1"),
        ("suffix=.svc.local", "suffix=.svc.local"),
        ("suffix=svc.local", "suffix=.svc.local"),
        ("suffix=*.SVC.local.", "suffix=.svc.local"),
        ("cidr=10.1.0.0/16", "cidr=10.1.0.0/16"),
        ("cidr=10.1.0.0/255.255.0.0", "cidr=10.1.0.0/16"),
        ("cidr=10.0.0.7/32", "cidr=10.0.0.7/32"),
        ("cidr=0.0.0.0/0", "cidr=0.0.0.0/0"),
        ("cidr=2001:DB8:0::/32", "cidr=2001:db8::/32"),
        ("cidr=::/0", "cidr=::/0"),
    ],
)
def test_every_spelling_of_an_identifier_has_one_form(spelling: str, identifier: str) -> None:
    assert str(Identifier.parse(spelling)) == identifier


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "''"),
        ("db.internal", "'db.internal'"),
        ("HOST=db", "'HOST=db'"),
        ("name=db", "'name=db'"),
        ("=db", "'=db'"),
        ("host=", "''"),
        ("host=a b", "'a b'"),
        ("host=*.internal", "'*.internal'"),
        ("host=10.1", "'10.1'"),
        ("host=fe80::1%eth0", "zone id"),
        ("ipv4=db.internal", "'ipv4=db.internal' holds no ipv4"),
        ("ipv4=2001:db8::1", "'ipv4=2001:db8::1' holds no ipv4"),
        ("ipv6=10.0.0.7", "'ipv6=10.0.0.7' holds no ipv6"),
        ("ipv6=::ffff:10.0.0.7", "holds no ipv6"),
        ("suffix=", "''"),
        ("suffix=*", "'*'"),
        ("suffix=..local", "'.local'"),
        ("suffix=10.0.0.7", "is not a domain"),
        ("cidr=", "is not a network"),
        ("cidr=10.1.2.3/16", "host bits set"),
        ("cidr=10.0.0.0/33", "'cidr=10.0.0.0/33' is not a network"),
        ("cidr=db.internal/8", "is not a network"),
        ("cidr=010.0.0.0/8", "is not a network"),
    ],
)
def test_what_is_no_identifier_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(AddressError) as caught:
        Identifier.parse(text)
    assert named in str(caught.value)
    assert "; taken: " in str(caught.value)


def test_a_suffix_with_half_a_wildcard_is_refused() -> None:
    with pytest.raises(AddressError):
        Identifier.parse("suffix=*db.internal")


def test_a_network_with_a_zone_id_is_refused() -> None:
    with pytest.raises(AddressError):
        Identifier.parse("cidr=fe80::%eth0/64")


def test_a_network_of_wrapped_ipv4_addresses_is_an_ipv4_network() -> None:
    assert Identifier.parse("cidr=::ffff:10.1.0.0/112") == Identifier.parse("cidr=10.1.0.0/16")


def test_a_long_text_is_not_repeated_whole() -> None:
    with pytest.raises(AddressError) as caught:
        Identifier.parse("cidr=" + "x" * 100_000)
    assert len(str(caught.value)) < 400


@given(_identifiers)
def test_an_identifier_reads_its_own_text(identifier: Identifier) -> None:
    assert Identifier.parse(str(identifier)) == identifier


@given(_texts)
def test_no_text_raises_anything_but_an_address_error(text: str) -> None:
    try:
        identifier = Identifier.parse(text)
    except AddressError as error:
        assert "taken" in str(error)  # noqa: PT017
    else:
        assert Identifier.parse(str(identifier)) == identifier


@given(_networks)
def test_a_cidr_has_its_network(text: str) -> None:
    assert str(Identifier.parse(f"cidr={text}").network) == text


@given(_names | _addresses)
def test_a_host_is_of_exactly_one_kind(text: str) -> None:
    host = canonical_host(text)
    try:
        kind = f"ipv{ipaddress.ip_address(host).version}"
    except ValueError:
        kind = "host"
    assert host_kind(host) == kind


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
        st.lists(_identifiers, max_size=10).map(tuple),
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
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | _texts | st.binary(max_size=20),
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


@given(st.lists(_texts, max_size=4))
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
    st.builds(ListenAddress, _names | _addresses, st.integers(0, 65535)),
    st.builds(Target, _names | _addresses, st.integers(1, 65535)),
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
