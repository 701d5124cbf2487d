"""The backend manager: who is there, who should serve a dial and why, and what a dial comes to."""

from __future__ import annotations

import ipaddress
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import trio
from backends import NOTHING, TARGET, Serve, claims, crowd, joined, link_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stream_transport import StreamTransport
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from tunnel.address import Target
from tunnel.backends import Backend, Backends
from tunnel.config import STRATEGIES, Claims
from tunnel.errors import DialError, DialTimeout, LinkLost, NoBackend, Refused, RefusedDraining, TooMany
from tunnel.explain import Explanation, explain
from tunnel.handshake import AcceptingHandshake, DiallingHandshake
from tunnel.identity import Identity
from tunnel.limits import Limits, Timeouts
from tunnel.link import Link
from tunnel.packets import MAX_U32, DialReq, Drain, DrainAck, DrainCmd, DrainStatus, Packet, Undrain, UndrainAck
from tunnel.pools import BackendState, Bag
from tunnel.stream import TunnelStream

ACTIVE, DRAINING, FINAL, GONE = BackendState
CRITICAL = {2: 13.82, 9: 27.88}  # chi-square by degrees of freedom, 1 in 1,000


def picks(backends: Backends, target: Target = TARGET, count: int = 10_000, agent: str | None = None) -> Counter[str]:
    return Counter(backends.decide(target, agent).backend.name for _ in range(count))


def is_uniform(counts: Iterable[int]) -> bool:
    counts = list(counts)
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 for count in counts) / expected < CRITICAL[len(counts) - 1]


# -- against a model


HOSTS = [
    "db.internal",
    "a.db.internal",
    "x.a.db.internal",
    "internal",
    "xdb.internal",
    "other.example",
    "10.1.2.3",
    "10.1.255.1",
    "10.200.0.1",
    "192.0.2.1",
    "2001:db8::1",
    "2001:db8:1::7",
    "::1",
]
IDENTIFIERS = [
    "host=db.internal",
    "host=A.DB.internal.",
    "host=other.example",
    "suffix=.internal",
    "suffix=*.db.internal",
    "suffix=a.db.internal",
    "ipv4=10.1.2.3",
    "host=::ffff:10.200.0.1",
    "ipv6=2001:DB8:0::1",
    "cidr=0.0.0.0/0",
    "cidr=10.0.0.0/8",
    "cidr=10.1.0.0/16",
    "cidr=10.1.2.3/32",
    "cidr=::/0",
    "cidr=2001:db8::/32",
    "cidr=2001:db8::1/128",
]
INSTANCES = [f"{number:032x}" for number in range(8)]


def plain(host: str) -> str:
    """A host as the model spells it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().rstrip(".")
    return str(getattr(address, "ipv4_mapped", None) or address)


def specificity(identifier: str, host: str) -> tuple[int, int] | None:
    """How well an identifier matches, least first; None if it does not."""
    kind, _, value = identifier.partition("=")
    if kind == "suffix":
        suffix = "." + value.lstrip("*.")
        return (1, -len(suffix)) if host.endswith(suffix) else None
    if kind == "cidr":
        network = ipaddress.ip_network(value)
        try:
            inside = ipaddress.ip_address(host) in network
        except ValueError:
            return None
        return (1, -network.prefixlen) if inside else None
    return (0, 0) if plain(value) == host else None


@dataclass(eq=False)
class Known:
    """What the model knows of a backend."""

    backend: Backend
    name: str
    instance: str
    identifiers: list[str]
    default_route: bool
    priority: int
    state: BackendState
    keys: set[tuple[str, str | int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.keys = {("any", "", 0), ("agent", self.name, 0)}
        if self.default_route:
            self.keys.add(("default-route", "", 0))
        self.keys |= {self._key(*identifier.split("=")) for identifier in self.identifiers}

    @staticmethod
    def _key(kind: str, value: str) -> tuple[str, str | int, int]:
        if kind == "suffix":
            return kind, "." + value.lstrip("*."), 0
        if kind == "cidr":
            network = ipaddress.ip_network(value)
            shifted = int(network.network_address) >> (network.max_prefixlen - network.prefixlen)
            return f"cidr{network.version}", shifted, network.prefixlen
        host = plain(value)
        return "ipv6" if ":" in host else "ipv4" if host[-1].isdigit() else "host", host, 0

    def rank(self, strategies: tuple[str, ...], host: str, agent: str | None) -> tuple[Any, ...] | None:
        """How much it is preferred for a dial, least first; None if it does not match."""
        if agent is not None:
            return ("agent", self.priority) if self.name == agent else None
        for place, strategy in enumerate(strategies):
            if strategy == "destHost":
                found = [rank for one in self.identifiers if (rank := specificity(one, host)) is not None]
                if found:
                    return place, min(found), self.priority
            elif strategy == "default" or self.default_route:
                return place, (0, 0), self.priority
        return None


class Model(RuleBasedStateMachine):
    """A manager beside a list of what happened to each backend, from which everything is derived from scratch."""

    def __init__(self) -> None:
        super().__init__()
        self.backends = Backends()
        self.known: list[Known] = []

    @initialize(strategies=st.permutations(STRATEGIES), count=st.integers(1, 3))
    def choose_strategies(self, strategies: list[str], count: int) -> None:
        self.backends = Backends(tuple(strategies[:count]))

    @property
    def here(self) -> list[Known]:
        return [one for one in self.known if one.state is not GONE]

    @rule(
        name=st.sampled_from(["edge-1", "edge-2", "edge-3"]),
        instance=st.sampled_from(INSTANCES),
        identifiers=st.lists(st.sampled_from(IDENTIFIERS), max_size=4),
        default_route=st.booleans(),
        priority=st.integers(0, 2),
        draining=st.sampled_from([False, False, True]),
    )
    def add(
        self,
        name: str,
        instance: str,
        identifiers: list[str],
        default_route: bool,
        priority: int,
        draining: bool,
    ) -> None:
        said = claims(*identifiers, default_route=default_route, priority=priority)
        backend = joined(self.backends, name, said, instance=instance, draining=draining)
        for stale in self.here:
            if stale.instance == instance:
                stale.state = GONE
        state = DRAINING if draining else ACTIVE
        self.known.append(Known(backend, name, instance, identifiers, default_route, priority, state))

    def some(self, data: st.DataObject) -> Known:
        return self.known[data.draw(st.integers(0, len(self.known) - 1))]

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        one = self.some(data)
        link_of(one.backend).drop("gone")
        one.state = GONE

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        one = self.some(data)
        self.backends.mark(one.backend)
        if one.state is ACTIVE:
            one.state = DRAINING

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def mark_final(self, data: st.DataObject) -> None:
        one = self.some(data)
        self.backends.mark(one.backend, final=True)
        if one.state in (ACTIVE, DRAINING):
            one.state = FINAL

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def unmark(self, data: st.DataObject) -> None:
        one = self.some(data)
        self.backends.unmark(one.backend)
        if one.state is DRAINING:
            one.state = ACTIVE

    @precondition(lambda self: self.known)
    @rule(data=st.data(), streams=st.integers(0, 5))
    def load(self, data: st.DataObject, streams: int) -> None:
        link_of(self.some(data).backend).session.streams = streams

    @rule(
        host=st.sampled_from(HOSTS),
        agent=st.none() | st.none() | st.sampled_from(["edge-1", "edge-2", "nobody"]),
        besides=st.none() | st.none() | st.sampled_from(INSTANCES),
    )
    def pick(self, host: str, agent: str | None, besides: str | None) -> None:
        state, strategy, allowed = self.expected(host, agent, besides)
        if not allowed:
            with pytest.raises(NoBackend):
                self.backends.decide(Target(host, 1), agent, besides)
            return
        decision = self.backends.decide(Target(host, 1), agent, besides)
        assert decision.backend in allowed
        assert (decision.strategy, decision.fallback) == (strategy, state is DRAINING)
        others = [other for other in allowed if other is not decision.backend]
        if others and besides is None:
            picked, names = decision.backend, Counter(backend.name for backend in allowed)
            load = picked.streams * names[picked.name]  # what a name carries in all, about
            assert any(
                picked.streams <= one.streams if one.name == picked.name else load <= one.streams * names[one.name]
                for one in others
            )

    @rule(host=st.sampled_from(HOSTS), agent=st.none() | st.sampled_from(["edge-1", "nobody"]))
    def explain(self, host: str, agent: str | None) -> None:
        state, strategy, allowed = self.expected(host, agent, None)
        explanation = explain(self.backends, Target(host, 1), agent)
        if not allowed:
            assert explanation == Explanation(Target(host, 1), None, ())
            return
        decision = explanation.decision
        assert decision is not None
        assert decision.backend in allowed
        assert (decision.strategy, decision.fallback) == (strategy, state is DRAINING)
        (chosen,) = [one for one in explanation.considered if one.verdict.startswith("used")]
        assert (chosen.strategy, chosen.key) == (decision.strategy, decision.key)
        assert [one.instance for one in chosen.candidates if one.verdict == "picked"] == [decision.backend.instance]

    def expected(self, host: str, agent: str | None, besides: str | None) -> tuple[BackendState, str, list[Backend]]:
        """The pass, the strategy, and who may be picked."""
        strategies = self.backends.index.strategies
        for state in (ACTIVE, DRAINING):
            ranks = {
                one: rank
                for one in self.known
                if one.state is state
                and one.instance != besides
                and (rank := one.rank(strategies, plain(host), agent)) is not None
            }
            if ranks:
                best = min(ranks.values())
                strategy = best[0] if agent is not None else strategies[best[0]]
                return state, strategy, [one.backend for one, rank in ranks.items() if rank == best]
        return GONE, "", []

    @invariant()
    def states_are_as_told(self) -> None:
        assert [one.backend.state for one in self.known] == [one.state for one in self.known]
        assert len(self.backends) == len(self.here)
        assert self.backends.active == sum(one.state is ACTIVE for one in self.known)
        assert self.backends._instances == {one.instance: one.backend for one in self.here}

    @invariant()
    def pools_equal_what_is_derived_from_scratch(self) -> None:
        pools: dict[Any, dict[int, dict[BackendState, dict[str, set[Backend]]]]] = {}
        for one in self.known:
            for key in one.keys if one.state in (ACTIVE, DRAINING) else ():
                tiers = pools.setdefault(key, {})
                tier = tiers.setdefault(one.priority, {ACTIVE: defaultdict(set), DRAINING: defaultdict(set)})
                tier[one.state][one.name].add(one.backend)
        assert pools == {
            key: {
                priority: {
                    state: {name: contents(bag) for name, bag in pool._by_name.items()} for state, pool in tier.items()
                }
                for priority, tier in bucket._tiers.items()
            }
            for key, bucket in self.backends.index.buckets.items()
        }
        for bucket in self.backends.index.buckets.values():
            assert bucket._order == sorted(bucket._tiers)
            for tier in bucket._tiers.values():
                for pool in tier.values():
                    assert contents(pool._bags) == set(pool._by_name.values())

    @invariant()
    def what_is_worth_looking_for_is_counted_exactly(self) -> None:
        keys = set().union(*(one.keys for one in self.known if one.state in (ACTIVE, DRAINING)))
        assert self.backends.index._suffixes == sum(kind == "suffix" for kind, _, _ in keys)
        for family in ("cidr4", "cidr6"):
            lengths = Counter(bits for kind, _, bits in keys if kind == family)
            assert dict(self.backends.index._prefixes[family]) == dict(lengths)


def contents(bag: Bag[Any]) -> set[Any]:
    """What a bag holds, having looked that its index is right."""
    items = list(bag)
    assert bag._index == {item: place for place, item in enumerate(items)}
    return set(items)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60)


# -- active ones first


KINDS = {
    "destHost": claims("host=db.internal"),
    "defaultRoute": claims(default_route=True),
    "default": claims(),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
class TestPreference:
    def test_draining_ones_are_picked_only_if_there_is_nothing_else(self, strategy: str) -> None:
        random.seed(1)
        backends = Backends((strategy,))
        members = crowd(backends, 6, KINDS[strategy])
        for member in members[:5]:
            backends.mark(member)
        assert picks(backends) == {"edge-5": 10_000}
        backends.mark(members[5])
        assert set(picks(backends)) == {member.name for member in members}
        backends.unmark(members[0])
        assert picks(backends) == {"edge-0": 10_000}

    def test_the_active_ones_share_what_contiguous_draining_ones_leave(self, strategy: str) -> None:
        random.seed(2)
        backends = Backends((strategy,))
        for member in crowd(backends, 10, KINDS[strategy])[2:9]:
            backends.mark(member)
        picked = picks(backends)
        assert set(picked) == {"edge-0", "edge-1", "edge-9"}
        assert is_uniform(picked.values())

    def test_all_share_when_all_are_draining(self, strategy: str) -> None:
        random.seed(3)
        backends = Backends((strategy,))
        for member in crowd(backends, 10, KINDS[strategy]):
            backends.mark(member)
        picked = picks(backends)
        assert len(picked) == 10
        assert is_uniform(picked.values())

    @pytest.mark.parametrize("draining", [False, True])
    def test_an_agent_with_two_links_has_one_share(self, strategy: str, draining: bool) -> None:
        random.seed(4)
        backends = Backends((strategy,))
        crowd(backends, 10, KINDS[strategy])
        joined(backends, "edge-0", KINDS[strategy])
        for backend in list(backends._instances.values()) if draining else ():
            backends.mark(backend)
        assert is_uniform(picks(backends).values())

    def test_one_that_is_final_or_gone_is_never_picked(self, strategy: str) -> None:
        backends = Backends((strategy,))
        final, gone, left = crowd(backends, 3, KINDS[strategy])
        backends.mark(final, final=True)
        backends.remove(gone)
        backends.mark(left)
        assert picks(backends, count=1000) == {left.name: 1000}
        backends.remove(left)
        with pytest.raises(NoBackend, match=r"no agent matches db\.internal:5432"):
            backends.decide(TARGET)


def test_other_keys_are_not_affected_by_a_drain() -> None:
    random.seed(5)
    backends = Backends(("destHost",))
    for member in crowd(backends, 3, claims("host=db.internal")):
        backends.mark(member)
    crowd(backends, 3, claims("host=web.internal"), "web")
    joined(backends, "wide", claims("suffix=.internal"))
    picked = picks(backends, Target("web.internal", 80))
    assert set(picked) == {"web-0", "web-1", "web-2"}
    assert is_uniform(picked.values())
    assert set(picks(backends, count=1000)) == {"wide"}


@pytest.mark.parametrize(
    ("strategies", "earlier", "later"),
    [
        (STRATEGIES, claims("host=db.internal"), claims(default_route=True)),
        (STRATEGIES, claims("host=db.internal"), claims()),
        (STRATEGIES, claims(default_route=True), claims()),
        (STRATEGIES, claims("host=db.internal"), claims("suffix=.internal")),
        (("default", "destHost"), claims("host=db.internal"), claims("host=db.internal", priority=1)),
    ],
)
def test_an_active_one_of_a_later_match_goes_before_draining_ones_of_an_earlier(
    strategies: tuple[str, ...], earlier: Claims, later: Claims
) -> None:
    backends = Backends(strategies)
    for member in crowd(backends, 3, earlier, "leaving"):
        backends.mark(member)
    active = joined(backends, "active", later)
    assert picks(backends, count=1000) == {"active": 1000}
    backends.mark(active)
    assert "active" not in picks(backends, count=1000)


def test_strategies_count_in_their_order() -> None:
    backends = Backends(("default", "destHost"))
    joined(backends, "exact", claims("host=db.internal"))
    joined(backends, "any")
    assert {backends.decide(TARGET).strategy for _ in range(100)} == {"default"}


def test_only_the_strategies_asked_for_count() -> None:
    backends = Backends(("destHost",))
    joined(backends, "any", claims(default_route=True))
    with pytest.raises(NoBackend, match=r"no agent matches db\.internal:5432"):
        backends.decide(TARGET)


def test_several_claim_a_host_and_one_that_goes_leaves_the_others() -> None:
    random.seed(6)
    backends = Backends(("destHost",))
    members = crowd(backends, 4, claims("host=db.internal"))
    backends.remove(members[1])
    picked = picks(backends)
    assert set(picked) == {"edge-0", "edge-2", "edge-3"}
    assert is_uniform(picked.values())


def test_one_that_claims_nothing_serves_by_default_only() -> None:
    backends = Backends(("destHost", "defaultRoute"))
    joined(backends)
    with pytest.raises(NoBackend):
        backends.decide(TARGET)


def test_claiming_a_host_twice_is_claiming_it_once() -> None:
    backends = Backends(("destHost",))
    backend = joined(
        backends, "edge", claims("host=db.internal", "host=DB.internal.", "ipv4=10.0.0.7", "host=10.0.0.7")
    )
    assert backends.decide(TARGET).backend is backend
    backends.remove(backend)
    assert not backends.index.buckets


def test_no_agent_at_all_is_said_so() -> None:
    with pytest.raises(NoBackend, match="no agent is linked"):
        Backends().decide(TARGET)


# -- the most specific match


SPECIFIC = {
    "exact name": "host=a.db.internal",
    "long suffix": "suffix=.db.internal",
    "short suffix": "suffix=.internal",
    "exact v4": "ipv4=10.1.2.3",
    "v4 /32": "cidr=10.1.2.4/32",
    "v4 /16": "cidr=10.1.0.0/16",
    "v4 /8": "cidr=10.0.0.0/8",
    "v4 /0": "cidr=0.0.0.0/0",
    "exact v6": "ipv6=2001:db8::1",
    "v6 /64": "cidr=2001:db8::/64",
    "v6 /0": "cidr=::/0",
}


@pytest.mark.parametrize(
    ("host", "who"),
    [
        ("a.db.internal", "exact name"),
        ("A.DB.Internal.", "exact name"),
        ("b.db.internal", "long suffix"),
        ("x.a.db.internal", "long suffix"),
        ("db.internal", "short suffix"),
        ("DB.INTERNAL.", "short suffix"),
        ("xdb.internal", "short suffix"),
        ("10.1.2.3", "exact v4"),
        ("::ffff:10.1.2.3", "exact v4"),
        ("::FFFF:0a01:0203", "exact v4"),
        ("10.1.2.4", "v4 /32"),
        ("10.1.255.255", "v4 /16"),
        ("10.2.0.0", "v4 /8"),
        ("11.0.0.0", "v4 /0"),
        ("255.255.255.255", "v4 /0"),
        ("0.0.0.0", "v4 /0"),
        ("::ffff:192.0.2.1", "v4 /0"),
        ("2001:db8::1", "exact v6"),
        ("2001:DB8:0:0:0:0:0:1", "exact v6"),
        ("2001:db8::ffff:1", "v6 /64"),
        ("2001:db8:0:1::", "v6 /0"),
        ("::", "v6 /0"),
        ("::1", "v6 /0"),
    ],
)
def test_the_most_specific_match_serves(host: str, who: str) -> None:
    backends = Backends(("destHost",))
    for name, identifier in SPECIFIC.items():
        joined(backends, name, claims(identifier))
    assert picks(backends, Target(host, 1), 50) == {who: 50}


@pytest.mark.parametrize("host", ["internal", "a.internal.example", "internal.a"])
def test_a_suffix_matches_names_below_it_only(host: str) -> None:
    backends = Backends(("destHost",))
    joined(backends, "edge", claims("suffix=.internal"))
    with pytest.raises(NoBackend):
        backends.decide(Target(host, 1))


def test_a_network_is_never_asked_about_a_name() -> None:
    backends = Backends(("destHost",))
    joined(backends, "edge", claims("cidr=0.0.0.0/0", "cidr=::/0"))
    with pytest.raises(NoBackend):
        backends.decide(TARGET)


def test_a_more_specific_match_goes_before_a_higher_tier() -> None:
    backends = Backends()
    joined(backends, "first", claims("suffix=.internal", priority=0))
    joined(backends, "exact", claims("host=db.internal", priority=9))
    assert picks(backends, count=100) == {"exact": 100}


def test_a_tier_serves_only_when_none_above_it_is_active() -> None:
    backends = Backends()
    first = joined(backends, "first", claims("host=db.internal"))
    joined(backends, "second", claims("host=db.internal", priority=1))
    assert picks(backends, count=100) == {"first": 100}
    backends.mark(first)
    assert picks(backends, count=100) == {"second": 100}


# -- asked for by name


def test_an_agent_asked_for_by_name_serves_whatever_it_claims() -> None:
    backends = Backends(("destHost",))
    joined(backends, "exact", claims("host=db.internal"))
    joined(backends, "named", claims("host=other"))
    decision = backends.decide(TARGET, "named")
    assert (decision.backend.name, decision.strategy, decision.key) == ("named", "agent", "agent=named")


def test_an_agent_asked_for_by_name_may_be_draining_if_none_of_its_links_is_active() -> None:
    backends = Backends()
    old, new = joined(backends, "named"), joined(backends, "named")
    joined(backends, "other")
    backends.mark(old)
    assert {backends.decide(TARGET, "named").backend for _ in range(50)} == {new}
    backends.remove(new)
    decision = backends.decide(TARGET, "named")
    assert (decision.backend, decision.fallback) == (old, True)


def test_no_other_agent_serves_for_one_asked_for_by_name() -> None:
    backends = Backends()
    joined(backends, "other")
    with pytest.raises(NoBackend, match="no agent named nobody"):
        backends.decide(TARGET, "nobody")


# -- marks


def drain(seq: int, phase: str = "soft") -> Drain:
    return Drain(seq, phase, "signal", 25_000, 0)


def acks(backend: Backend) -> list[Packet]:
    return link_of(backend).session.sent


def test_one_that_says_it_is_draining_is_never_active() -> None:
    backends = Backends()
    states: list[BackendState] = []
    enter = backends._enter

    def watched(backend: Backend, state: BackendState) -> None:
        enter(backend, state)
        states.append(state)

    backends._enter = watched  # type: ignore[method-assign]
    backend = joined(backends, "leaving", draining=True)
    joined(backends, "staying")
    assert states == [DRAINING, ACTIVE]
    assert backend.draining
    assert picks(backends, count=1000) == {"staying": 1000}


def test_drain_marks_and_acks_in_one_step() -> None:
    backends = Backends()
    backend = joined(backends)
    backend.on_control(drain(1))
    assert backend.state is DRAINING
    assert acks(backend) == [DrainAck(1, "soft")]


def test_a_repeated_drain_is_acked_again_and_does_nothing() -> None:
    backends = Backends()
    backend = joined(backends)
    backend.on_control(drain(1))
    backends.unmark(backend)
    backend.on_control(drain(1))
    assert backend.state is ACTIVE
    assert acks(backend) == [DrainAck(1, "soft")] * 2


def test_a_stale_drain_is_acked_as_what_it_is_and_does_nothing() -> None:
    backends = Backends()
    backend = joined(backends)
    backend.on_control(drain(5))
    backend.on_control(drain(4, "final"))
    assert backend.state is DRAINING
    assert acks(backend) == [DrainAck(5, "soft"), DrainAck(4, "final")]


@pytest.mark.parametrize("before", [[], [drain(1)]])
def test_after_a_final_drain_it_is_never_picked_and_there_is_no_way_back(before: list[Drain]) -> None:
    backends = Backends()
    backend = joined(backends)
    for packet in [*before, drain(2, "final")]:
        backend.on_control(packet)
    backends.unmark(backend)
    backend.on_control(drain(3))
    assert backend.state is FINAL
    assert acks(backend)[-2:] == [DrainAck(2, "final"), DrainAck(3, "soft")]
    with pytest.raises(NoBackend):
        backends.decide(TARGET)
    backends.remove(backend)
    assert (backend.state, len(backends)) == (GONE, 0)


@pytest.mark.parametrize("change", ["mark", "unmark", "remove"])
def test_one_that_is_gone_stays_gone(change: str) -> None:
    backends = Backends()
    backend = joined(backends)
    backends.remove(backend)
    getattr(backends, change)(backend)
    assert (backend.state, len(backends), backends.index.buckets) == (GONE, 0, {})


def test_a_drain_after_the_end_is_acked_and_does_nothing() -> None:
    backends = Backends()
    backend = joined(backends)
    backends.remove(backend)
    backend.on_control(drain(1))
    assert (backend.state, len(backends)) == (GONE, 0)


def test_the_last_active_one_that_drains_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backends = Backends()
    one, other = crowd(backends, 2)
    backends.mark(one)
    backends.mark(other)
    backends.mark(other)
    backends.mark(other, final=True)
    events = [record.getMessage() for record in caplog.records]
    assert sum("no active backend left" in event for event in events) == 1
    assert sum("backend draining" in event for event in events) == 2


def status(state: str = "draining", open_: int = 3) -> DrainStatus:
    return DrainStatus(state, open_, 0, 1000, 1, 1)


def test_undrain_unmarks_and_acks_in_one_step() -> None:
    backends = Backends()
    backend = joined(backends)
    backend.on_control(drain(1))
    backend.on_control(Undrain(2))
    assert backend.state is ACTIVE
    assert acks(backend)[1:] == [UndrainAck(2)]
    assert picks(backends, count=10) == {"edge": 10}


def test_an_undrain_of_one_that_is_active_is_acked_and_does_nothing() -> None:
    backends = Backends()
    backend = joined(backends)
    backend.on_control(Undrain(1))
    assert (backend.state, acks(backend)) == (ACTIVE, [UndrainAck(1)])


@pytest.mark.parametrize("seq", [4, 5])
def test_a_stale_undrain_is_acked_and_does_nothing(seq: int) -> None:
    backends = Backends()
    backend = joined(backends)
    backend.on_control(drain(5))
    backend.on_control(Undrain(seq))
    assert backend.state is DRAINING
    assert acks(backend)[1:] == [UndrainAck(seq)]


def test_a_drain_that_an_undrain_overtook_does_nothing() -> None:
    backends = Backends()
    backend = joined(backends)
    backend.on_control(Undrain(2))
    backend.on_control(drain(1))
    assert backend.state is ACTIVE
    assert acks(backend) == [UndrainAck(2), DrainAck(1, "soft")]


def test_an_undrain_after_final_is_acked_and_does_nothing() -> None:
    backends = Backends()
    backend = joined(backends)
    backend.on_control(drain(1, "final"))
    backend.on_control(Undrain(2))
    assert (backend.state, acks(backend)[1:]) == (FINAL, [UndrainAck(2)])


def test_an_undrain_of_one_that_linked_draining_makes_it_active() -> None:
    backends = Backends()
    backend = joined(backends, draining=True)
    backend.on_control(Undrain(1))
    assert (backend.state, backends.active) == (ACTIVE, 1)


def test_the_last_status_is_kept_until_the_drain_is_undone() -> None:
    backend = joined(Backends())
    assert backend.status is None
    backend.on_control(drain(1))
    for told in (status(), status("drained", 0)):
        backend.on_control(told)
        assert backend.status == told
    backend.on_control(Undrain(2))
    assert backend.status is None


def test_a_status_changes_no_state_and_is_not_answered() -> None:
    backend = joined(Backends())
    backend.on_control(status("drained", 0))
    assert (backend.state, acks(backend)) == (ACTIVE, [])


# -- commands


def test_a_command_to_drain_marks_at_once_and_is_sent_to_the_process_that_is_meant() -> None:
    backends = Backends()
    backend = joined(backends, instance=INSTANCES[3])
    backend.command("drain", "disk full", 60.0, leave=True)
    assert backend.state is DRAINING
    assert link_of(backend).session.sent == [DrainCmd(INSTANCES[3], "drain", "disk full", 60_000, 1)]
    assert link_of(backend).flushes == 1


def test_a_command_has_no_end_and_wants_no_exit_unless_it_says_so() -> None:
    backend = joined(Backends(), instance=INSTANCES[3])
    backend.command("drain", "")
    assert link_of(backend).session.sent == [DrainCmd(INSTANCES[3], "drain", "", 0, 0)]


def test_a_command_with_more_time_than_the_wire_can_say_has_the_most_it_can() -> None:
    backend = joined(Backends())
    backend.command("drain", "", 1e9)
    (sent,) = link_of(backend).session.sent
    assert isinstance(sent, DrainCmd)
    assert sent.ms == MAX_U32


def test_a_command_to_undrain_is_left_to_the_agent() -> None:
    backends = Backends()
    backend = joined(backends, instance=INSTANCES[3])
    backends.mark(backend)
    backend.command("undrain", "all well")
    assert backend.state is DRAINING
    assert link_of(backend).session.sent == [DrainCmd(INSTANCES[3], "undrain", "all well", 0, 0)]


def test_those_of_one_name_are_found_unless_they_are_final() -> None:
    backends = Backends()
    active, draining, final = (joined(backends, "edge") for _ in range(3))
    joined(backends, "other")
    backends.mark(draining)
    backends.mark(final, final=True)
    assert set(backends.named("edge")) == {active, draining}
    assert backends.named("nobody") == []


# -- draining ones that may not serve


def test_without_fallback_a_draining_one_is_never_picked() -> None:
    backends = Backends(fallback=False)
    one, other = joined(backends, "one"), joined(backends, "other")
    backends.mark(one)
    assert picks(backends, count=100) == {"other": 100}
    backends.mark(other)
    with pytest.raises(NoBackend):
        backends.decide(TARGET)
    backends.unmark(one)
    assert picks(backends, count=100) == {"one": 100}


@pytest.mark.parametrize(
    ("agent", "text"),
    [
        (None, "no agent that is not draining matches db.internal:5432"),
        ("edge", "no agent that is not draining named edge can take it now"),
    ],
)
def test_without_fallback_the_error_says_that_draining_ones_do_not_count(agent: str | None, text: str) -> None:
    backends = Backends(fallback=False)
    backends.mark(joined(backends, "edge"))
    with pytest.raises(NoBackend) as caught:
        backends.decide(TARGET, agent)
    assert caught.value.text == text


def test_with_fallback_the_error_says_nothing_of_draining_ones() -> None:
    backends = Backends()
    backends.mark(joined(backends, "edge"))
    with pytest.raises(NoBackend, match="no agent named nobody can take it now"):
        backends.decide(TARGET, "nobody")


@pytest.mark.parametrize(("fallback", "serving"), [(True, 2), (False, 1)])
def test_those_that_may_be_picked_are_counted(fallback: bool, serving: int) -> None:
    backends = Backends(fallback=fallback)
    _, draining, final = (joined(backends) for _ in range(3))
    backends.mark(draining)
    backends.mark(final, final=True)
    assert (backends.serving, backends.active, len(backends)) == (serving, 1, 3)


# -- identity


def test_a_new_instance_under_an_old_name_starts_active() -> None:
    backends = Backends()
    old = joined(backends, "edge")
    backends.mark(old)
    new = joined(backends, "edge")
    assert (old.state, new.state) == (DRAINING, ACTIVE)
    assert {backends.decide(TARGET).backend for _ in range(100)} == {new}


def test_two_instances_under_a_name_are_both_kept() -> None:
    backends = Backends()
    replicas = [joined(backends, "edge"), joined(backends, "edge")]
    assert {backends.decide(TARGET).backend for _ in range(100)} == set(replicas)
    assert all(link_of(replica).why is None for replica in replicas)


def test_an_instance_that_links_anew_drops_its_stale_link() -> None:
    backends = Backends()
    old = joined(backends, "edge", instance=INSTANCES[0])
    new = joined(backends, "edge", instance=INSTANCES[0])
    assert str(link_of(old).why) == "the agent linked anew"
    assert (old.state, new.state, len(backends)) == (GONE, ACTIVE, 1)
    assert backends._instances == {INSTANCES[0]: new}


def test_a_stale_link_that_ends_late_does_not_take_the_new_one_along() -> None:
    backends = Backends()
    old = joined(backends, "edge", instance=INSTANCES[0])
    new = joined(backends, "edge", instance=INSTANCES[0])
    old.on_end()
    assert backends.decide(TARGET).backend is new


def test_a_link_that_never_came_up_ends_without_a_trace() -> None:
    backends = Backends()
    Backend(backends).on_end()
    assert len(backends) == 0


# -- dialling, with links that do as they are told


def failing(error: Exception) -> Serve:
    async def serve(host: str, port: int) -> str:
        await trio.lowlevel.checkpoint()
        raise error

    return serve


def sleeping(seconds: float, error: Exception | None = None) -> Serve:
    async def serve(host: str, port: int) -> str:
        await trio.sleep(seconds)
        if error:
            raise error
        return "late"

    return serve


async def dialled(backends: Backends, seconds: float = 10, agent: str | None = None) -> str:
    return cast(str, await backends.dial(TARGET, seconds, agent))


async def test_a_dial_goes_through_the_backend_that_was_picked() -> None:
    backends = Backends()
    backend = joined(backends, "edge")
    assert await dialled(backends) == "stream through edge"
    assert link_of(backend).dials == [10]
    assert (backends.fallbacks, backends.redispatched.total()) == (0, 0)


@pytest.mark.parametrize("error", [LinkLost("cut"), RefusedDraining("leaving"), TooMany("too many streams are open")])
async def test_a_dial_that_cannot_be_served_goes_once_to_another_instance(
    autojump_clock: MockClock, error: DialError
) -> None:
    backends = Backends()
    bad = joined(backends, "bad", claims("host=db.internal"))
    link_of(bad).serve = sleeping(3, error)
    good = joined(backends, "good")
    assert await dialled(backends) == "stream through good"
    assert (link_of(bad).dials, link_of(good).dials) == ([10], [7])
    assert backends.redispatched == {error.code: 1}
    assert trio.current_time() == pytest.approx(3)


async def test_another_instance_of_the_same_name_may_serve() -> None:
    backends = Backends()
    bad = joined(backends, "edge", claims("host=db.internal"))
    link_of(bad).serve = failing(LinkLost("cut"))
    good = joined(backends, "edge")
    assert await dialled(backends, agent="edge") == "stream through edge"
    assert len(link_of(good).dials) == 1


@pytest.mark.parametrize("error", [LinkLost("cut"), RefusedDraining("leaving")])
async def test_with_no_other_there_is_an_answer_at_once(autojump_clock: MockClock, error: Exception) -> None:
    backends = Backends()
    link_of(joined(backends, "only")).serve = failing(error)
    began = trio.current_time()
    with pytest.raises(NoBackend, match=r"no other agent matches db\.internal:5432"):
        await dialled(backends)
    assert trio.current_time() == began
    assert backends.redispatched.total() == 0


async def test_with_no_other_than_one_that_has_too_many_that_is_the_answer() -> None:
    backends = Backends()
    link_of(joined(backends, "only")).serve = failing(TooMany("too many streams are open"))
    with pytest.raises(TooMany, match="too many streams are open") as caught:
        await dialled(backends)
    assert caught.value.agent == "only"
    assert backends.dials == {("too_many", "active"): 1}
    assert backends.redispatched.total() == 0


async def test_another_link_of_the_same_instance_is_no_other() -> None:
    backends = Backends()
    old = joined(backends, "edge", instance=INSTANCES[0])

    async def relink(host: str, port: int) -> str:
        joined(backends, "edge", instance=INSTANCES[0])
        raise LinkLost("the agent linked anew")

    link_of(old).serve = relink
    with pytest.raises(NoBackend):
        await dialled(backends)


async def test_a_dial_is_not_sent_on_twice() -> None:
    backends = Backends()
    for member in crowd(backends, 5):
        link_of(member).serve = failing(LinkLost("cut"))
    with pytest.raises(LinkLost):
        await dialled(backends)
    assert sum(len(link_of(member).dials) for member in backends._instances.values()) == 2


async def test_what_the_target_answers_is_final() -> None:
    backends = Backends()
    for member in crowd(backends, 5):
        link_of(member).serve = failing(Refused("nobody listens"))
    with pytest.raises(Refused):
        await dialled(backends)
    assert sum(len(link_of(member).dials) for member in backends._instances.values()) == 1


async def test_the_time_is_for_both_tries_together(autojump_clock: MockClock) -> None:
    backends = Backends()
    first = joined(backends, "first", claims("host=db.internal"))
    link_of(first).serve = sleeping(6, LinkLost("cut"))
    link_of(joined(backends, "second")).serve = sleeping(6)
    with pytest.raises(DialTimeout, match=r"db\.internal:5432: no answer within 10 s"):
        await dialled(backends)
    assert trio.current_time() == pytest.approx(10)
    assert all(member.streams == 0 for member in backends._instances.values())


@pytest.mark.parametrize("tries", [1, 2])
async def test_a_cancelled_dial_leaves_nothing(autojump_clock: MockClock, tries: int) -> None:
    backends = Backends()
    first = joined(backends, "first", claims("host=db.internal"))
    link_of(first).serve = sleeping(1, LinkLost("cut")) if tries == 2 else sleeping(100)
    link_of(joined(backends, "second")).serve = sleeping(100)
    with trio.move_on_after(5) as scope:
        await dialled(backends)
    assert scope.cancelled_caught
    assert all(member.streams == 0 for member in backends._instances.values())


async def test_no_time_at_all_is_a_timeout() -> None:
    backends = Backends()
    link_of(joined(backends)).serve = sleeping(0)
    with pytest.raises(DialTimeout):
        await dialled(backends, seconds=0)


async def test_dials_spread_over_those_with_fewer_streams() -> None:
    backends = Backends()
    members = crowd(backends, 2)
    for _ in range(100):
        await dialled(backends)
    assert [member.streams for member in members] == [50, 50]


async def test_a_dial_that_waits_counts_as_a_stream() -> None:
    backends = Backends()
    members = crowd(backends, 2)
    for member in members:
        link_of(member).serve = sleeping(float("inf"))
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(dialled, backends, 1000)
        await wait_all_tasks_blocked()
        assert [member.streams for member in members] == [10, 10]
        nursery.cancel_scope.cancel()


async def test_fallbacks_are_counted_each() -> None:
    backends = Backends()
    leaving = joined(backends, "leaving")
    backends.mark(leaving)
    for _ in range(3):
        assert await dialled(backends) == "stream through leaving"
    backends.unmark(leaving)
    await dialled(backends)
    assert backends.fallbacks == 3


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [message for message in caplog.messages if event in message]


async def test_a_fallback_is_said_once_for_each_agent_and_drain(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tunnel.backends")
    backends = Backends()
    leaving = joined(backends, "leaving", instance=INSTANCES[0])
    for expected in (1, 2):
        backends.mark(leaving)
        for _ in range(3):
            await dialled(backends)
        assert len(said(caplog, "fallback")) == expected
        backends.unmark(leaving)
    assert backends.fallbacks == 6
    assert said(caplog, "fallback")[0] == (
        f'"fallback to a draining agent" agent=leaving instance={INSTANCES[0]} target=db.internal:5432'
    )
    assert {record.levelname for record in caplog.records if "fallback" in record.getMessage()} == {"INFO"}


async def test_a_fallback_is_said_of_each_agent_that_serves_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tunnel.backends")
    backends = Backends()
    for member in crowd(backends, 2):
        backends.mark(member)
    for _ in range(50):
        await dialled(backends)
    assert len(said(caplog, "fallback")) == 2
    assert backends.fallbacks == 50


# -- dialling, with links


@dataclass
class Pair:
    """A real link between a server's backend and an agent."""

    backend: Backend
    agent: Link
    requests: list[TunnelStream]


async def linked_pair(
    nursery: trio.Nursery,
    backends: Backends,
    name: str,
    said: Claims = NOTHING,
    answer: Callable[[TunnelStream], None] = lambda stream: stream.core.accept(),
) -> Pair:
    near, far = memory_stream_pair()
    requests: list[TunnelStream] = []

    def on_dial(stream: TunnelStream, request: DialReq) -> None:
        requests.append(stream)
        answer(stream)

    backend = Backend(backends)
    backend.link = Link(
        StreamTransport(near),
        AcceptingHandshake(Identity("server", "server")),
        limits=Limits(),
        timeouts=Timeouts(),
        on_control=backend.on_control,
        on_linked=backend.on_linked,
        on_end=backend.on_end,
    )
    handshake = DiallingHandshake(Identity("agent", name, claims=said))
    agent = Link(StreamTransport(far), handshake, limits=Limits(), timeouts=Timeouts(), on_dial=on_dial)
    nursery.start_soon(backend.link.run)
    await nursery.start(agent.run)
    return Pair(backend, agent, requests)


async def test_a_dial_on_a_link_that_is_cut_is_served_by_another(nursery: trio.Nursery) -> None:
    backends = Backends()
    bad = await linked_pair(nursery, backends, "bad", claims("host=db.internal"), lambda stream: None)
    good = await linked_pair(nursery, backends, "good")
    got: list[TunnelStream] = []

    async def dial() -> None:
        got.append(await backends.dial(TARGET, 10))

    nursery.start_soon(dial)
    await wait_all_tasks_blocked()
    assert (len(bad.requests), bad.backend.streams) == (1, 1)
    bad.agent.drop("pulled the plug")
    await wait_all_tasks_blocked()
    await got[0].send_all(b"hello")
    assert await good.requests[0].receive_some() == b"hello"
    assert (bad.backend.state, len(backends)) == (GONE, 1)
    assert backends.redispatched == {"link_lost": 1}


async def test_a_dial_refused_by_a_draining_agent_is_served_by_another(nursery: trio.Nursery) -> None:
    backends = Backends()
    bad = await linked_pair(
        nursery,
        backends,
        "bad",
        claims("host=db.internal"),
        lambda stream: stream.core.refuse(RefusedDraining("leaving")),
    )
    good = await linked_pair(nursery, backends, "good")
    await backends.dial(TARGET, 10)
    assert (bad.backend.streams, good.backend.streams) == (0, 1)
    assert backends.redispatched == {"refused_draining": 1}


async def test_a_drain_off_the_wire_marks_before_its_ack_is_seen(nursery: trio.Nursery) -> None:
    backends = Backends()
    pair = await linked_pair(nursery, backends, "edge")
    states: list[BackendState] = []
    pair.agent._on_control = lambda packet: states.append(pair.backend.state)
    for packet in (drain(1), drain(2, "final")):
        pair.agent.session.send_control(packet)
        pair.agent.flush()
        await wait_all_tasks_blocked()
    assert states == [DRAINING, FINAL]
    with pytest.raises(NoBackend):
        await backends.dial(TARGET, 10)


async def test_a_cancelled_dial_is_told_to_the_agent(nursery: trio.Nursery) -> None:
    backends = Backends()
    pair = await linked_pair(nursery, backends, "edge", answer=lambda stream: None)
    with trio.CancelScope() as scope:
        nursery.start_soon(_cancel_when_idle, scope)
        await backends.dial(TARGET, 10)
    await pair.agent.open_streams.wait_value(0)
    assert scope.cancelled_caught
    assert (len(pair.requests), pair.backend.streams) == (1, 0)


async def _cancel_when_idle(scope: trio.CancelScope) -> None:
    await wait_all_tasks_blocked()
    scope.cancel()


async def test_an_agent_that_links_anew_takes_the_place_of_its_stale_link(nursery: trio.Nursery) -> None:
    backends = Backends()
    old = await linked_pair(nursery, backends, "edge")
    me = old.agent._handshake.me
    near, far = memory_stream_pair()
    backend = Backend(backends)
    backend.link = Link(
        StreamTransport(near),
        AcceptingHandshake(Identity("server", "server")),
        limits=Limits(),
        timeouts=Timeouts(),
        on_linked=backend.on_linked,
        on_end=backend.on_end,
    )
    nursery.start_soon(backend.link.run)
    agent = Link(StreamTransport(far), DiallingHandshake(me), limits=Limits(), timeouts=Timeouts())
    await nursery.start(agent.run)
    await old.agent.ended.wait()
    assert (old.backend.state, backend.state, len(backends)) == (GONE, ACTIVE, 1)
