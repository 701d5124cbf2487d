"""Explanations: the decision that a dial would get, every match in order, and a verdict for each candidate."""

from __future__ import annotations

from collections import Counter

import pytest
from backends import TARGET, claims, crowd, joined, link_of

from tunnel.address import Target
from tunnel.backends import Backends
from tunnel.config import Claims
from tunnel.explain import Explanation, explain
from tunnel.pools import BackendState

ACTIVE, DRAINING, FINAL, GONE = BackendState


def table(explanation: Explanation) -> list[tuple[str, str, str, list[tuple[str, str]]]]:
    return [
        (
            one.strategy,
            one.key,
            one.verdict.partition(":")[0],
            sorted((candidate.agent, candidate.verdict.partition(":")[0]) for candidate in one.candidates),
        )
        for one in explanation.considered
    ]


def test_an_explanation_lists_every_match_in_the_order_of_preference() -> None:
    backends = Backends()
    joined(backends, "exact", claims("host=a.db.internal"))
    joined(backends, "long", claims("suffix=.db.internal"))
    joined(backends, "short", claims("suffix=.internal", default_route=True))
    explanation = explain(backends, Target("a.db.internal", 1))
    assert explanation.decision is not None
    assert (explanation.decision.strategy, explanation.decision.key) == ("destHost", "host=a.db.internal")
    assert explanation.decision.backend.name == "exact"
    assert [(one.strategy, one.key) for one in explanation.considered] == [
        ("destHost", "host=a.db.internal"),
        ("destHost", "suffix=.db.internal"),
        ("destHost", "suffix=.internal"),
        ("defaultRoute", "default-route"),
        ("default", "any"),
    ]


EXPLAINED: dict[str, tuple[list[tuple[str, Claims, bool]], list[tuple[str, str, str, list[tuple[str, str]]]]]] = {
    "active before draining": (
        [("a", claims("host=db.internal"), True), ("b", claims("host=db.internal"), False)],
        [
            ("destHost", "host=db.internal", "used", [("a", "passed over"), ("b", "picked")]),
            ("default", "any", "not used", [("a", "not used"), ("b", "not used")]),
        ],
    ),
    "a later match with an active one": (
        [("a", claims("host=db.internal"), True), ("b", claims(), False)],
        [
            ("destHost", "host=db.internal", "not used", [("a", "not used")]),
            ("default", "any", "used", [("a", "passed over"), ("b", "picked")]),
        ],
    ),
    "all draining": (
        [("a", claims("host=db.internal"), True), ("b", claims(), True)],
        [
            ("destHost", "host=db.internal", "used", [("a", "picked")]),
            ("default", "any", "not used", [("a", "not used"), ("b", "not used")]),
        ],
    ),
    "tiers": (
        [("a", claims(priority=0), True), ("b", claims(priority=1), False), ("c", claims(priority=2), False)],
        [("default", "any", "used", [("a", "passed over"), ("b", "picked"), ("c", "passed over")])],
    ),
    "tiers, all draining": (
        [("a", claims(priority=0), True), ("b", claims(priority=1), True)],
        [("default", "any", "used", [("a", "picked"), ("b", "passed over")])],
    ),
    "nobody": ([], []),
}


@pytest.mark.parametrize(("members", "wanted"), EXPLAINED.values(), ids=EXPLAINED)
def test_an_explanation_says_what_became_of_each(
    members: list[tuple[str, Claims, bool]], wanted: list[tuple[str, str, str, list[tuple[str, str]]]]
) -> None:
    backends = Backends()
    for name, said, draining in members:
        joined(backends, name, said, draining=draining)
    explanation = explain(backends, TARGET)
    assert table(explanation) == wanted
    assert (explanation.decision is None) == (not wanted)


def test_verdicts_say_why() -> None:
    backends = Backends()
    joined(backends, "a", claims(priority=1), draining=True)
    joined(backends, "b", claims(priority=1))
    joined(backends, "c", claims(priority=2))
    (considered,) = explain(backends, TARGET).considered
    assert considered.verdict == "used: the first that has an active agent"
    assert {one.agent: one.verdict for one in considered.candidates} == {
        "a": "passed over: draining, and another is active",
        "b": "picked",
        "c": "passed over: priority 2, and one of priority 1 serves",
    }


def test_equals_are_called_so() -> None:
    backends = Backends()
    crowd(backends, 2)
    (considered,) = explain(backends, TARGET).considered
    assert sorted(one.verdict for one in considered.candidates) == [
        "equal: each dial takes the better of two random ones",
        "picked",
    ]


def test_a_candidate_is_described() -> None:
    backends = Backends()
    backend = joined(backends, "edge", claims(priority=3), instance="a" * 32, draining=True)
    link_of(backend).session.streams = 7
    ((candidate,),) = (one.candidates for one in explain(backends, TARGET).considered)
    assert (candidate.agent, candidate.instance, candidate.state) == ("edge", "a" * 32, "draining")
    assert (candidate.priority, candidate.streams) == (3, 7)


def test_matches_after_the_one_that_serves_in_a_fallback_are_said_to_come_later() -> None:
    backends = Backends()
    joined(backends, "edge", claims("host=db.internal"), draining=True)
    first, second = explain(backends, TARGET).considered
    assert first.verdict == "used: the first, and no match has an active agent"
    assert second.verdict == "not used: an earlier match serves"


def test_an_active_one_behind_a_hundred_draining_ones_is_seen() -> None:
    backends = Backends()
    for member in crowd(backends, 150):
        backends.mark(member)
    joined(backends, "spare", claims(priority=1))
    (considered,) = explain(backends, TARGET).considered
    assert considered.verdict == "used: the first that has an active agent"
    assert len(considered.candidates) == 100


def test_an_explanation_may_be_about_one_agent() -> None:
    backends = Backends()
    joined(backends, "a", claims("host=db.internal"))
    joined(backends, "b")
    assert table(explain(backends, TARGET, "b")) == [("agent", "agent=b", "used", [("b", "picked")])]
    assert explain(backends, TARGET, "nobody") == Explanation(TARGET, None, ())


def test_explaining_changes_nothing() -> None:
    backends = Backends()
    members = [*crowd(backends, 3), joined(backends, "leaving", claims("host=db.internal"), draining=True)]
    before = [(member.state, member.streams) for member in members]
    backends.mark(members[0])
    explain(backends, TARGET)
    backends.unmark(members[0])
    assert [(member.state, member.streams) for member in members] == before
    assert (backends.fallbacks, backends.redispatched) == (0, Counter())
    assert not any(link_of(member).dials for member in members)


def test_networks_are_spelled_as_they_were_claimed() -> None:
    backends = Backends(("destHost",))
    joined(backends, "edge", claims("cidr=10.1.0.0/16", "cidr=0.0.0.0/0", "cidr=2001:db8::/32", "cidr=::/0"))
    for host, keys in {
        "10.1.2.3": ["cidr=10.1.0.0/16", "cidr=0.0.0.0/0"],
        "2001:db8::1": ["cidr=2001:db8::/32", "cidr=::/0"],
    }.items():
        assert [one.key for one in explain(backends, Target(host, 1)).considered] == keys
