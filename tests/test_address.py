"""Addresses: every spelling of a place has one form, and whatever is not an address is refused by name."""

from __future__ import annotations

import ipaddress

import pytest
from addresses import addresses, identifier_texts, identifiers, names, networks
from hypothesis import given
from hypothesis import strategies as st

from tunnel.address import Identifier, ListenAddress, Target, canonical_host, host_kind
from tunnel.errors import AddressError

_hosts = names | addresses
_targets = st.builds(Target, _hosts, st.integers(1, 65535))
_listens = st.builds(ListenAddress, _hosts, st.integers(0, 65535))
_near_misses = st.text(st.sampled_from("0127.:[]%=xXaà-_ \n\x00\u3002\uff11"), max_size=30)
_texts = st.text() | _near_misses


@pytest.mark.parametrize(
    ("spelling", "host"),
    [
        ("Example.COM", "example.com"),
        ("example.com.", "example.com"),
        ("_sip.Bücher.example", "_sip.xn--bcher-kva.example"),
        ("bücher\u3002example", "xn--bcher-kva.example"),
        ("bu\u0308cher.example", "xn--bcher-kva.example"),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
        ("straße.example", "xn--strae-oqa.example"),
        ("127.0.0.1.", "127.0.0.1"),
        ("\uff11\uff12\uff17.0.0.1", "127.0.0.1"),
        ("2001:DB8:0:0:0:0:0:1", "2001:db8::1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("::FFFF:c000:201", "192.0.2.1"),
        ("127.example", "127.example"),
        ("a" * 63, "a" * 63),
    ],
)
def test_every_spelling_of_a_host_has_one_form(spelling: str, host: str) -> None:
    assert canonical_host(spelling) == host


@pytest.mark.parametrize(
    "host", ["127.1", "0x7f.1", "010.0.0.1", "2130706433", "0x", "1.2.3.4.5", "256.0.0.1", "a.0X1F"]
)
def test_a_number_that_is_not_a_dotted_quad_is_refused(host: str) -> None:
    with pytest.raises(AddressError, match="dotted quad"):
        canonical_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        ".",
        "..",
        "a..b",
        ".a",
        "a b",
        "a\n",
        "a\x00b",
        "[::1]",
        "a/b",
        "a" * 64,
        "a." * 128,
        "é" * 64,
        "\u202e",
        "\ud800",
    ],
)
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(AddressError, match="taken: a name"):
        canonical_host(host)


@pytest.mark.parametrize("host", ["fe80::1%eth0", "::1%", "fe80::1%25eth0"])
def test_a_zone_id_is_refused(host: str) -> None:
    with pytest.raises(AddressError, match="zone id"):
        canonical_host(host)


def test_a_name_may_have_253_characters_and_a_final_dot() -> None:
    name = ".".join(["a" * 49] * 5) + ".bbb"
    assert len(name) == 253
    assert canonical_host(f"{name}.") == name


def test_a_name_of_254_characters_is_refused() -> None:
    with pytest.raises(AddressError, match="taken"):
        canonical_host(".".join(["a" * 49] * 5) + ".bbbb")


@given(_texts)
def test_a_canonical_host_is_its_own_canonical_form(text: str) -> None:
    try:
        host = canonical_host(text)
    except AddressError:
        return
    assert canonical_host(host) == host


@given(_targets)
def test_a_target_reads_its_own_text(target: Target) -> None:
    assert Target.parse(str(target)) == target


@given(_listens)
def test_a_listen_address_reads_its_own_text(address: ListenAddress) -> None:
    assert ListenAddress.parse(str(address)) == address


@pytest.mark.parametrize("kind", [Target, ListenAddress])
@given(text=_texts)
def test_no_text_raises_anything_but_an_address_error(kind: type[Target | ListenAddress], text: str) -> None:
    try:
        kind.parse(text)
    except AddressError as error:
        assert "taken" in str(error)  # noqa: PT017


@given(_hosts, _texts)
def test_no_port_text_raises_anything_but_an_address_error(host: str, port: str) -> None:
    try:
        assert 1 <= Target.parse(f"{host}:{port}").port <= 65535
    except AddressError as error:
        assert "taken" in str(error)  # noqa: PT017


def test_a_target_made_by_hand_is_canonical_too() -> None:
    assert Target("DB.internal.", 5432) == Target.parse("db.internal:5432")


def test_an_ipv6_target_is_written_in_brackets() -> None:
    assert str(Target("2001:db8::1", 80)) == "[2001:db8::1]:80"


@pytest.mark.parametrize("text", ["::1:80", "::1", "2001:db8::1:80"])
def test_a_bare_ipv6_address_is_refused_with_a_hint_to_bracket(text: str) -> None:
    with pytest.raises(AddressError, match="in brackets"):
        Target.parse(text)


@pytest.mark.parametrize(
    "text", ["x:0", "x:65536", "x:-1", "x:+1", "x: 1", "x:1_0", "x:٣", "x:", "x", ":80", "[x]:80", "[::1]80"]
)
def test_what_is_no_target_is_refused_by_name(text: str) -> None:
    with pytest.raises(AddressError) as caught:
        Target.parse(text)
    assert repr(text) in str(caught.value)


def test_a_long_text_is_not_repeated_whole() -> None:
    with pytest.raises(AddressError) as caught:
        Target.parse("x" * 100_000)
    assert len(str(caught.value)) < 200


def test_listening_may_ask_for_any_free_port() -> None:
    assert ListenAddress.parse("[::1]:0") == ListenAddress("::1", 0)


def test_a_bare_port_listens_on_loopback() -> None:
    assert ListenAddress.parse("5432") == ListenAddress("127.0.0.1", 5432)


def test_a_target_needs_its_host() -> None:
    with pytest.raises(AddressError, match="HOST:PORT"):
        Target.parse("5432")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.255.0.3", "::1", "localhost", "LOCALHOST.", "::ffff:127.0.0.1"])
def test_loopback_is_recognised(host: str) -> None:
    assert ListenAddress(host, 1).is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "128.0.0.1", "127.example", "localhost.example", "db"])
def test_what_others_can_reach_is_not_loopback(host: str) -> None:
    assert not ListenAddress(host, 1).is_loopback


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


def test_a_long_text_of_an_identifier_is_not_repeated_whole() -> None:
    with pytest.raises(AddressError) as caught:
        Identifier.parse("cidr=" + "x" * 100_000)
    assert len(str(caught.value)) < 400


@given(identifiers)
def test_an_identifier_reads_its_own_text(identifier: Identifier) -> None:
    assert Identifier.parse(str(identifier)) == identifier


@given(identifier_texts)
def test_no_text_of_an_identifier_raises_anything_but_an_address_error(text: str) -> None:
    try:
        identifier = Identifier.parse(text)
    except AddressError as error:
        assert "taken" in str(error)  # noqa: PT017
    else:
        assert Identifier.parse(str(identifier)) == identifier


@given(networks)
def test_a_cidr_has_its_network(text: str) -> None:
    assert str(Identifier.parse(f"cidr={text}").network) == text


@given(names | addresses)
def test_a_host_is_of_exactly_one_kind(text: str) -> None:
    host = canonical_host(text)
    try:
        kind = f"ipv{ipaddress.ip_address(host).version}"
    except ValueError:
        kind = "host"
    assert host_kind(host) == kind
