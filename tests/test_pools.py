"""Pools: whatever is added, removed or moved, they hold what they should, and choose fairly."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tunnel.pools import BackendState, Bag, Bucket, Pool

ACTIVE, DRAINING = BackendState.ACTIVE, BackendState.DRAINING
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 8: 26.12, 9: 27.88}  # chi-square by degrees of freedom, 1 in 1,000


@dataclass(eq=False)
class One:
    name: str
    instance: str = ""
    priority: int = 0
    streams: int = 0


def fresh(name: str) -> str:
    """An equal text that is another object, as two links bring it off the wire."""
    return name.encode().decode()


def pool_of(members: Iterable[One]) -> Pool[One]:
    pool: Pool[One] = Pool()
    for member in members:
        pool.add(member)
    return pool


def is_uniform(counts: Iterable[int]) -> bool:
    """Whether a chi-square test lets it pass."""
    counts = list(counts)
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 for count in counts) / expected < CRITICAL[len(counts) - 1]


# -- bags


@given(st.lists(st.sampled_from(["aa", "bb", "cc", "dd"])))
def test_a_bag_holds_what_was_toggled_an_odd_number_of_times(toggles: list[str]) -> None:
    bag: Bag[str] = Bag()
    held: set[str] = set()
    for word in toggles:
        if word in held:
            bag.remove(fresh(word))
            held.discard(word)
        else:
            bag.add(fresh(word))
            held.add(word)
        assert len(bag) == len(held)
        assert set(bag) == held
        assert all(bag._items[place] == item for item, place in bag._index.items())


def test_the_last_item_is_removed_by_any_object_that_equals_it() -> None:
    bag: Bag[str] = Bag()
    bag.add("edge-1")
    bag.remove(fresh("edge-1"))
    assert len(bag) == 0


@given(st.integers(2, 20))
def test_two_of_a_bag_are_different(count: int) -> None:
    bag: Bag[int] = Bag()
    for item in range(count):
        bag.add(item)
    for _ in range(50):
        one, other = bag.two()
        assert one != other


def test_two_of_a_bag_of_one_are_the_same() -> None:
    bag: Bag[int] = Bag()
    bag.add(7)
    assert bag.two() == (7, 7)


def test_every_ordered_pair_comes_equally_often() -> None:
    random.seed(1)
    bag: Bag[int] = Bag()
    for item in range(3):
        bag.add(item)
    pairs = Counter(bag.two() for _ in range(6000))
    assert len(pairs) == 6
    expected = 1000
    assert sum((count - expected) ** 2 for count in pairs.values()) / expected < 20.52  # 5 degrees of freedom


# -- pools


def test_ties_are_random() -> None:
    random.seed(2)
    pool = pool_of(One(f"agent-{number}") for number in range(10))
    picked = Counter(pool.pick().name for _ in range(10_000))
    assert len(picked) == 10
    assert is_uniform(picked.values())


def test_an_agent_with_two_links_has_one_share() -> None:
    random.seed(3)
    members = [One(f"agent-{number}") for number in range(4)] + [One(fresh("agent-0"))]
    pool = pool_of(members)
    picks = [pool.pick() for _ in range(10_000)]
    assert is_uniform(Counter(member.name for member in picks).values())
    assert is_uniform(sum(pick is member for pick in picks) for member in (members[0], members[4]))


def test_of_two_agents_the_one_with_fewer_streams_is_picked() -> None:
    pool = pool_of([One("busy", streams=2), One("idle", streams=1)])
    assert {pool.pick().name for _ in range(100)} == {"idle"}


def test_of_two_links_of_an_agent_the_one_with_fewer_streams_is_picked() -> None:
    idle = One("edge", streams=1)
    pool = pool_of([One(fresh("edge"), streams=2), idle])
    assert all(pool.pick() is idle for _ in range(100))


def test_a_name_with_two_links_has_one_share_under_load() -> None:
    random.seed(7)
    links = [One("pair"), One("pair"), *(One(f"agent-{number}") for number in range(4))]
    pool = pool_of(links)
    for _ in range(5000):
        pool.pick().streams += 1
    carried = Counter[str]()
    for link in links:
        carried[link.name] += link.streams
    assert max(carried.values()) - min(carried.values()) < 50


def test_the_busiest_of_many_is_never_picked() -> None:
    pool = pool_of([One("busiest", streams=5), *(One(f"agent-{number}", streams=number) for number in range(4))])
    assert "busiest" not in {pool.pick().name for _ in range(1000)}


def test_load_evens_out() -> None:
    random.seed(4)
    members = [One(f"agent-{number}") for number in range(100)]
    pool = pool_of(members)
    for _ in range(10_000):
        pool.pick().streams += 1
    assert max(member.streams for member in members) - min(member.streams for member in members) <= 8


def test_an_instance_is_avoided_although_it_looks_best() -> None:
    pool = pool_of([One("idle", "x"), *(One(f"busy-{number}", str(number), streams=9) for number in range(2))])
    assert "x" not in {member.instance for _ in range(100) if (member := pool.pick_besides("x"))}


def test_nobody_is_picked_besides_the_only_instance() -> None:
    assert pool_of([One("edge", "x")]).pick_besides("x") is None


def test_another_instance_of_the_same_name_may_be_picked() -> None:
    other = One(fresh("edge"), "y", streams=9)
    pool = pool_of([One("edge", "x"), other])
    assert {pool.pick_besides("x") for _ in range(100)} == {other}


def test_a_pool_forgets_a_name_with_its_last_link() -> None:
    one, other = One("edge"), One(fresh("edge"))
    pool = pool_of([one, other])
    pool.remove(one)
    assert list(pool) == [other]
    pool.remove(other)
    assert (len(pool), list(pool)) == (0, [])


# -- buckets


def bucket_of(*members: tuple[One, BackendState]) -> Bucket[One]:
    bucket: Bucket[One] = Bucket()
    for member, state in members:
        bucket.add(member, state)
    return bucket


def test_a_lower_tier_serves_only_when_no_tier_above_has_one_in_that_state() -> None:
    first, second = One("first", priority=0), One("second", priority=1)
    bucket = bucket_of((second, ACTIVE), (first, ACTIVE))
    assert {bucket.pick(ACTIVE) for _ in range(100)} == {first}
    bucket.remove(first, ACTIVE)
    bucket.add(first, DRAINING)
    assert bucket.pick(ACTIVE) is second
    assert bucket.pick(DRAINING) is first


def test_who_is_to_be_avoided_alone_in_its_tier_opens_the_next() -> None:
    second = One("second", "y", priority=7)
    bucket = bucket_of((One("first", "x"), ACTIVE), (second, ACTIVE))
    assert bucket.pick(ACTIVE, "x") is second


def test_members_are_listed_tier_by_tier_and_active_ones_first() -> None:
    wanted = [
        (One("a"), ACTIVE),
        (One("b"), DRAINING),
        (One("c", priority=3), ACTIVE),
        (One("d", priority=9), DRAINING),
    ]
    assert list(bucket_of(*reversed(wanted)).members()) == wanted


class Buckets(RuleBasedStateMachine):
    """A bucket beside the plain list of what was put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket: Bucket[One] = Bucket()
        self.held: list[tuple[One, BackendState]] = []

    @rule(
        name=st.sampled_from(["edge-1", "edge-2", "edge-3"]),
        instance=st.sampled_from("xyz"),
        priority=st.integers(0, 2),
        streams=st.integers(0, 3),
        state=st.sampled_from([ACTIVE, DRAINING]),
    )
    def add(self, name: str, instance: str, priority: int, streams: int, state: BackendState) -> None:
        one = One(fresh(name), instance, priority, streams)
        self.bucket.add(one, state)
        self.held.append((one, state))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        one, state = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.bucket.remove(one, state)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.held) - 1))
        one, state = self.held[place]
        other = DRAINING if state is ACTIVE else ACTIVE
        self.bucket.remove(one, state)
        self.bucket.add(one, other)
        self.held[place] = (one, other)

    @rule(state=st.sampled_from([ACTIVE, DRAINING]), besides=st.none() | st.sampled_from("xyz"))
    def pick(self, state: BackendState, besides: str | None) -> None:
        fit = [one for one, its_state in self.held if its_state is state and one.instance != besides]
        first = min((one.priority for one in fit), default=0)
        allowed = [one for one in fit if one.priority == first]
        picked = self.bucket.pick(state, besides)
        assert picked in allowed if allowed else picked is None
        if picked and besides is None and len(allowed) > 1:
            names = Counter(one.name for one in allowed)
            load = picked.streams * names[picked.name]  # what a name carries in all, about
            assert any(
                picked.streams <= one.streams if one.name == picked.name else load <= one.streams * names[one.name]
                for one in allowed
                if one is not picked
            )

    @invariant()
    def holds_what_was_put_in(self) -> None:
        def order(pair: tuple[One, BackendState]) -> tuple[int, bool, int]:
            return pair[0].priority, pair[1] is DRAINING, id(pair[0])

        members = list(self.bucket.members())
        assert sorted(members, key=order) == sorted(self.held, key=order)
        assert [pair[:2] for pair in map(order, members)] == sorted(pair[:2] for pair in map(order, members))
        assert bool(self.bucket) is bool(self.held)
        assert self.bucket._order == sorted({one.priority for one, _ in self.held})


TestBuckets = Buckets.TestCase


@pytest.mark.parametrize("leaving", range(10))
def test_the_neighbour_of_those_who_left_gets_no_more_than_its_share(leaving: int) -> None:
    random.seed(leaving)
    members = [One(f"agent-{number}") for number in range(10)]
    pool = pool_of(members)
    for member in (members * 2)[leaving : leaving + 7]:
        pool.remove(member)
    picked = Counter(pool.pick().name for _ in range(10_000))
    assert len(picked) == 3
    assert is_uniform(picked.values())
