"""Patterns and rules: which targets are meant, whatever their spelling, and that nothing leads round a denial."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tunnel.address import Target
from tunnel.errors import AddressError, Denied
from tunnel.patterns import Pattern, Rules

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _network(address: Address, bits: int) -> Network:
    return ipaddress.ip_network(f"{address}/{min(bits, address.max_prefixlen)}", strict=False)


@st.composite
def _networks_and_members(draw: st.DrawFn) -> tuple[Network, Address]:
    network = draw(_networks)
    member = network[draw(st.integers(0, network.num_addresses - 1))]
    assume(member.version == 4 or member.ipv4_mapped is None)  # that one is an IPv4 address
    return network, member


_labels = st.from_regex(r"[a-z_][a-z0-9_-]{0,20}", fullmatch=True)
_names = st.lists(_labels, min_size=1, max_size=4).map(".".join)
_addresses = st.ip_addresses().map(str)
_networks = st.builds(_network, st.ip_addresses(), st.integers(0, 128))
_hosts = st.just("*") | _names | _names.map("*.{}".format) | _addresses | _networks.map(str)
_ports = st.integers(1, 65535)
_spans = st.just([1, 65535]) | _ports.map(lambda port: [port, port]) | st.tuples(_ports, _ports).map(sorted)
_patterns = st.builds(lambda host, span: Pattern(host, *span), _hosts, _spans)
_allowed = st.lists(_patterns, max_size=3).map(tuple)
_targets = st.builds(Target, _names | _addresses, _ports)
_near_misses = st.text(st.sampled_from("0126f.:/[]*-%xaà_ \n\x00\u3002\uff0a"), max_size=30)
_texts = st.text() | _near_misses


def _rules(*deny: str, allow: tuple[str, ...] = ()) -> Rules:
    return Rules(tuple(map(Pattern.parse, allow)), tuple(map(Pattern.parse, deny)))


def _left(rules: Rules, target: Target, *addresses: str) -> list[str]:
    """Of a target's addresses those that are permitted; none if it is denied."""
    try:
        return rules.permitted(target, addresses)
    except Denied:
        return []


# -- patterns


@pytest.mark.parametrize(
    ("spelling", "text"),
    [
        ("*", "*"),
        ("*:*", "*"),
        ("*:1-65535", "*"),
        ("*:443", "*:443"),
        ("DB.Internal.", "db.internal"),
        ("db.internal:*", "db.internal"),
        ("db.internal:05432", "db.internal:5432"),
        ("db.internal:8000-8000", "db.internal:8000"),
        ("*.Bücher.example.:8000-8999", "*.xn--bcher-kva.example:8000-8999"),
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("10.0.0.0/8:443", "10.0.0.0/8:443"),
        ("10.0.0.1/32", "10.0.0.1"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("[::1]", "[::1]"),
        ("[0:0::1]:443", "[::1]:443"),
        ("FD00::/8", "[fd00::/8]"),
        ("[fd00:0::/8]", "[fd00::/8]"),
        ("[fd00::/8]:1-1023", "[fd00::/8]:1-1023"),
        ("::1/128", "[::1]"),
        ("[::ffff:192.0.2.1]:80", "192.0.2.1:80"),
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ("[::ffff:0:0/96]:80", "0.0.0.0/0:80"),
    ],
)
def test_every_spelling_of_a_pattern_has_one_form(spelling: str, text: str) -> None:
    assert str(Pattern.parse(spelling)) == text
    assert Pattern.parse(spelling) == Pattern.parse(text)


@given(_patterns)
def test_a_pattern_reads_its_own_text(pattern: Pattern) -> None:
    assert Pattern.parse(str(pattern)) == pattern


@given(_texts)
def test_no_text_raises_anything_but_an_address_error(text: str) -> None:
    try:
        pattern = Pattern.parse(text)
    except AddressError as error:
        assert "taken" in str(error)  # noqa: PT017
    else:
        assert Pattern.parse(str(pattern)) == pattern


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a pattern"),
        ("db:", "not a pattern"),
        (":443", "not a pattern"),
        ("db:https", "not a pattern"),
        ("db:1-", "not a pattern"),
        ("db:-1", "not a pattern"),
        ("db:443,444", "not a pattern"),
        ("[db]:443", "not a pattern"),
        ("[10.0.0.0/8]", "not a pattern"),
        ("[fd00::/8", "not a pattern"),
        ("db:0", "out of range"),
        ("db:65536", "out of range"),
        ("db:9-8", "out of range or order"),
        ("10.0.0.1/8", "host bits"),
        ("fd00::1/8", "host bits"),
        ("10.0.0.0/33", "not a network"),
        ("::ffff:0:0/95", "host bits|not a network"),
        ("10.0.0.0/255.0.0.0", "not a network"),
        ("db/8", "not a network"),
        ("10/8", "not a network"),
        ("10.0.0.0/8/8", "not a network"),
        ("db*", r"a \* where none"),
        ("**", r"a \* where none"),
        ("a.*.b", r"a \* where none"),
        ("*.*.b", r"a \* where none"),
        ("*.", "no domain"),
        ("*..b", "no domain"),
        ("*.10.0.0.1", "address where a domain"),
        (".b", "not a host"),
        ("a b", "not a host"),
        ("127.1", "dotted quad"),
    ],
)
def test_what_is_no_pattern_is_refused_by_name_with_what_is_taken(text: str, why: str) -> None:
    with pytest.raises(AddressError, match=why) as caught:
        Pattern.parse(text)
    assert repr(text) in str(caught.value)
    assert "taken" in str(caught.value)


@pytest.mark.parametrize("text", ["::1", "::1:443", "fd00::/8:443", "fe80::1%1"])
def test_ipv6_that_could_end_in_a_port_is_refused_with_a_hint_to_bracket(text: str) -> None:
    with pytest.raises(AddressError, match=r"ambiguous.*IPv6 in brackets"):
        Pattern.parse(text)


def test_a_zone_id_is_refused() -> None:
    with pytest.raises(AddressError, match="zone id"):
        Pattern.parse("[fe80::1%eth0]")


def test_a_long_text_is_not_repeated_whole() -> None:
    with pytest.raises(AddressError) as caught:
        Pattern.parse("x/" * 50_000)
    assert len(str(caught.value)) < 400


def test_a_pattern_made_by_hand_is_canonical_too() -> None:
    assert Pattern("DB.internal.", 5432, 5432) == Pattern.parse("db.internal:5432")


# -- what they match


@pytest.mark.parametrize(
    ("pattern", "target"),
    [
        ("*", "db.internal:1"),
        ("*", "10.0.0.1:65535"),
        ("*:443", "[::1]:443"),
        ("db.internal", "DB.Internal.:5432"),
        ("db.internal:8000-8999", "db.internal:8000"),
        ("db.internal:8000-8999", "db.internal:8999"),
        ("*.internal", "db.internal:1"),
        ("*.internal", "a.b.internal:1"),
        ("10.0.0.0/8", "10.255.255.255:1"),
        ("10.0.0.0/8", "[::ffff:10.0.0.1]:1"),
        ("::ffff:10.0.0.0/104", "10.0.0.1:1"),
        ("[::ffff:10.0.0.1]", "10.0.0.1:1"),
        ("fd00::/8", "[fdff::1]:1"),
        ("0.0.0.0/0", "1.2.3.4:1"),
        ("127.0.0.0/8", "0.0.0.0:1"),
        ("127.0.0.1", "[::ffff:0.0.0.0]:1"),
        ("0.0.0.0", "0.0.0.0:1"),
        ("[::1]", "[::]:1"),
        ("[::]", "[::]:1"),
    ],
)
def test_what_is_meant_matches(pattern: str, target: str) -> None:
    meant = Target.parse(target)
    assert Pattern.parse(pattern).matches(meant.host, meant.port)


@pytest.mark.parametrize(
    ("pattern", "target"),
    [
        ("*:443", "db.internal:444"),
        ("db.internal:8000-8999", "db.internal:7999"),
        ("db.internal:8000-8999", "db.internal:9000"),
        ("db.internal", "a.db.internal:1"),
        ("internal", "db.internal:1"),
        ("*.internal", "internal:1"),
        ("*.internal", "notinternal:1"),
        ("*.internal", "db.internal.example:1"),
        ("10.0.0.0/8", "11.0.0.0:1"),
        ("10.0.0.0/8", "10.0.0.0.example:1"),
        ("::/0", "10.0.0.1:1"),
        ("0.0.0.0/0", "[fd00::1]:1"),
        ("0.0.0.0/0", "localhost:1"),
        ("::/0", "localhost:1"),
        ("localhost", "127.0.0.1:1"),
        ("127.0.0.2", "0.0.0.0:1"),
        ("0.0.0.0", "127.0.0.1:1"),
        ("127.0.0.1", "[::]:1"),
    ],
)
def test_what_is_not_meant_does_not_match(pattern: str, target: str) -> None:
    other = Target.parse(target)
    assert not Pattern.parse(pattern).matches(other.host, other.port)


@given(_networks_and_members(), _ports)
def test_a_network_matches_every_address_in_it(both: tuple[Network, Address], port: int) -> None:
    network, member = both
    assert Pattern(str(network)).matches(str(member), port)


@given(_networks, _names, _ports)
def test_a_network_matches_no_name(network: Network, name: str, port: int) -> None:
    assert not Pattern(str(network)).matches(name, port)


# -- rules

DB = Target("db.internal", 5432)


def test_without_rules_every_address_is_permitted() -> None:
    assert not Rules()
    assert Rules().permitted(DB, ["10.0.0.1", "fd00::1"]) == ["10.0.0.1", "fd00::1"]


def test_a_denied_name_is_denied_before_it_is_looked_up() -> None:
    with pytest.raises(Denied, match=r"db\.internal:5432: denied by \*\.internal"):
        _rules("*.internal").check_name(DB)


def test_a_denied_literal_is_denied_before_it_is_connected_to() -> None:
    with pytest.raises(Denied, match=r"10\.1\.2\.3:80: denied by 10\.0\.0\.0/8"):
        _rules("10.0.0.0/8").check_name(Target("10.1.2.3", 80))


def test_what_is_not_denied_passes_before_its_lookup() -> None:
    _rules("*.example", "10.0.0.0/8", "db.internal:80").check_name(DB)


def test_a_name_that_no_rule_could_allow_is_denied_before_it_is_looked_up() -> None:
    with pytest.raises(Denied, match=r"db\.internal:5432: no rule allows it"):
        _rules(allow=("web.internal", "10.0.0.0/8:443")).check_name(DB)


@pytest.mark.parametrize("allow", ["*", "*:5432", "*.internal", "db.internal", "10.0.0.0/8", "10.0.0.1:5432"])
def test_a_name_that_may_be_allowed_passes_before_its_lookup(allow: str) -> None:
    _rules(allow=("web.internal", allow)).check_name(DB)


def test_a_name_does_not_lead_to_a_denied_address() -> None:
    with pytest.raises(Denied, match=r"db\.internal:5432: it is 10\.0\.0\.1, which is denied by 10\.0\.0\.0/8"):
        _rules("10.0.0.0/8").permitted(DB, ["10.0.0.1"])


def test_an_allowed_name_does_not_lead_to_a_denied_address() -> None:
    assert _left(_rules("10.0.0.0/8", allow=("db.internal",)), DB, "10.0.0.1") == []


def test_of_several_addresses_those_that_are_not_denied_are_left_in_their_order() -> None:
    rules = _rules("10.0.0.0/8", "fd00::/8")
    assert _left(rules, DB, "192.0.2.2", "10.0.0.1", "fd00::1", "192.0.2.1") == ["192.0.2.2", "192.0.2.1"]


def test_an_allowed_name_leads_to_any_address() -> None:
    assert _left(_rules(allow=("db.internal:5432",)), DB, "10.0.0.1", "fd00::1") == ["10.0.0.1", "fd00::1"]


def test_another_name_leads_to_allowed_addresses_only() -> None:
    assert _left(_rules(allow=("web.internal", "10.0.0.0/8")), DB, "192.0.2.1", "10.0.0.1") == ["10.0.0.1"]


def test_another_name_without_an_allowed_address_is_denied() -> None:
    with pytest.raises(Denied, match=r"db\.internal:5432: no rule allows it"):
        _rules(allow=("10.0.0.0/8",)).permitted(DB, ["192.0.2.1"])


def test_an_allowed_port_allows_no_other() -> None:
    assert _left(_rules(allow=("10.0.0.0/8:443",)), DB, "10.0.0.1") == []


@pytest.mark.parametrize(
    ("deny", "address"),
    [
        ("10.0.0.0/8", "::ffff:10.0.0.1"),
        ("10.0.0.0/8", "::FFFF:a00:1"),
        ("127.0.0.0/8", "0.0.0.0"),
        ("127.0.0.0/8", "::ffff:0.0.0.0"),
        ("[::1]", "::"),
        ("[::1]", "0:0:0:0:0:0:0:1"),
    ],
)
def test_no_spelling_of_an_address_leads_round_its_denial(deny: str, address: str) -> None:
    assert _left(_rules(deny), DB, address) == []


def test_an_address_is_the_same_on_every_link() -> None:
    assert _left(_rules("[fe80::1]"), DB, "fe80::1%eth0", "fe80::2%eth0") == ["fe80::2%eth0"]


@pytest.mark.parametrize("rules", [_rules("10.0.0.0/8"), _rules(allow=("db.internal",))], ids=["deny", "allow"])
def test_an_address_that_cannot_be_read_is_not_permitted(rules: Rules) -> None:
    assert _left(rules, DB, "?") == []


def test_a_target_that_is_not_looked_up_is_judged_by_its_own_host() -> None:
    rules = _rules(allow=("db.internal", "10.0.0.0/8"))
    assert _left(rules, DB, DB.host) == [DB.host]
    assert _left(rules, Target("web.internal", 80), "web.internal") == []


@given(_targets, _allowed, _patterns)
def test_a_denied_target_is_denied_whatever_is_allowed(
    target: Target, allow: tuple[Pattern, ...], other: Pattern
) -> None:
    rules = Rules((Pattern(target.host), *allow), (other, Pattern(target.host, target.port, target.port)))
    with pytest.raises(Denied):
        rules.check_name(target)
    with pytest.raises(Denied):
        rules.permitted(target, ["192.0.2.1", "2001:db8::1"])


@given(_networks_and_members(), _targets, _allowed, st.lists(_addresses, max_size=3), st.booleans())
def test_no_address_in_a_denied_network_is_permitted_whatever_led_there(
    denied: tuple[Network, Address], target: Target, allow: tuple[Pattern, ...], others: list[str], wrap: bool
) -> None:
    network, member = denied
    found = f"::ffff:{member}" if wrap and member.version == 4 else str(member)
    rules = Rules((*allow, Pattern(target.host)) if allow else (), (Pattern(str(network)),))
    left = _left(rules, target, *others, found, *others)
    assert found not in left
    assert not any(ipaddress.ip_address(Target(address, 1).host) in network for address in left)


@given(_targets, st.lists(_addresses, min_size=1, max_size=3, unique=True), _allowed, _allowed)
def test_what_is_permitted_is_not_denied_and_is_allowed_by_name_or_address(
    target: Target, addresses: list[str], allow: tuple[Pattern, ...], deny: tuple[Pattern, ...]
) -> None:
    for address in _left(Rules(allow, deny), target, *addresses):
        reached = (target.host, Target(address, target.port).host)
        assert not any(pattern.matches(host, target.port) for pattern in deny for host in reached)
        assert not allow or any(pattern.matches(host, target.port) for pattern in allow for host in reached)
