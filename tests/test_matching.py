"""Matching: the keys of claims, and which of them a target is looked for under, in order."""

from __future__ import annotations

import pytest

from tunnel.address import Identifier, Target
from tunnel.config import STRATEGIES, Claims
from tunnel.matching import Index, Key, keys_of, spelled
from tunnel.pools import BackendState

ACTIVE = BackendState.ACTIVE


class Agent:
    """All that an index needs of one."""

    priority = 0
    streams = 0

    def __init__(self, name: str, *identifiers: str, default_route: bool = False) -> None:
        self.name = self.instance = name
        said = Claims(tuple(map(Identifier.parse, identifiers)), default_route=default_route)
        self.keys = keys_of(name, said)


def index_of(*agents: Agent, strategies: tuple[str, ...] = STRATEGIES) -> Index[Agent]:
    index: Index[Agent] = Index(strategies)
    for agent in agents:
        index.add(agent, agent.keys, ACTIVE)
    return index


def matches(index: Index[Agent], host: str, agent: str | None = None) -> list[tuple[str, str]]:
    return [(strategy, spelled(key)) for strategy, key in index.matches(Target(host, 1), agent)]


def test_the_host_then_suffixes_then_the_default_route_then_anybody() -> None:
    claims = ("host=a.b.test", "suffix=.test", "suffix=.b.test")
    index = index_of(Agent("one", *claims, default_route=True))
    assert matches(index, "a.b.test") == [
        ("destHost", "host=a.b.test"),
        ("destHost", "suffix=.b.test"),
        ("destHost", "suffix=.test"),
        ("defaultRoute", "default-route"),
        ("default", "any"),
    ]


@pytest.mark.parametrize(("claims", "host", "found"), [
    (["cidr=10.0.0.0/8", "cidr=10.1.0.0/16", "ipv4=10.1.2.3"], "10.1.2.3",
     ["ipv4=10.1.2.3", "cidr=10.1.0.0/16", "cidr=10.0.0.0/8"]),
    (["cidr=2001:db8::/32", "cidr=::/0"], "2001:db8::1", ["cidr=2001:db8::/32", "cidr=::/0"]),
    (["cidr=10.0.0.0/8"], "192.0.2.1", []),
    (["cidr=::/0"], "192.0.2.1", []),
    (["suffix=.test"], "test", []),
])  # fmt: skip
def test_networks_and_suffixes_match_what_is_in_them_longest_first(
    claims: list[str], host: str, found: list[str]
) -> None:
    index = index_of(Agent("one", *claims), strategies=("destHost",))
    assert [key for _, key in matches(index, host)] == found


def test_strategies_are_tried_in_the_order_they_are_given_in() -> None:
    index = index_of(Agent("one", "host=a", default_route=True), strategies=("default", "destHost"))
    assert [strategy for strategy, _ in matches(index, "a")] == ["default", "destHost"]


def test_an_agent_that_is_asked_for_by_name_is_looked_for_by_that_alone() -> None:
    index = index_of(Agent("one", "host=a"), Agent("two"))
    assert matches(index, "a", "two") == [("agent", "agent=two")]
    assert matches(index, "a", "three") == []


def test_those_of_one_name_are_found() -> None:
    one, other, third = Agent("one"), Agent("one"), Agent("three")
    other.instance = "other"
    index = index_of(one, other, third)
    assert set(index.named("one")) == {one, other}
    assert index.named("nobody") == []


def test_what_was_removed_leaves_nothing() -> None:
    agent = Agent("one", "host=a", "suffix=.b", "cidr=10.0.0.0/8", default_route=True)
    index = index_of(agent)
    index.remove(agent, agent.keys, ACTIVE)
    assert index.buckets == {}
    assert (index._suffixes, index._prefixes["cidr4"]) == (0, {})


@pytest.mark.parametrize("identifier", ["host=a.test", "suffix=.test", "ipv4=192.0.2.1", "ipv6=2001:db8::1",
                                        "cidr=10.0.0.0/8", "cidr=2001:db8::/32", "cidr=0.0.0.0/0"])  # fmt: skip
def test_a_key_is_spelled_as_it_was_claimed(identifier: str) -> None:
    keys: tuple[Key, ...] = keys_of("one", Claims((Identifier.parse(identifier),)))
    assert [spelled(key) for key in keys] == ["any", "agent=one", identifier]


def test_what_was_found_before_is_not_found_when_it_has_gone() -> None:
    stays, goes = Agent("one"), Agent("two", "host=a")
    index = index_of(stays, goes)
    assert matches(index, "a") == [("destHost", "host=a"), ("default", "any")]
    index.remove(goes, goes.keys, ACTIVE)
    assert matches(index, "a") == [("default", "any")]


def test_whoever_comes_is_found_by_targets_that_were_asked_for_before() -> None:
    index = index_of(Agent("one"))
    assert matches(index, "a") == [("default", "any")]
    comes = Agent("two", "suffix=.test", "host=a", default_route=True)
    index.add(comes, comes.keys, ACTIVE)
    assert matches(index, "a") == [("destHost", "host=a"), ("defaultRoute", "default-route"), ("default", "any")]


def test_any_number_of_hosts_may_be_asked_for() -> None:
    index = index_of(Agent("one", "host=host-5"))
    for number in range(3000):
        expected = ["destHost", "default"] if number == 5 else ["default"]
        assert [strategy for strategy, _ in matches(index, f"host-{number}")] == expected
    assert len(index._found) <= 1024
