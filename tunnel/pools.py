"""Pools: sets of backends with a fair random choice, whatever is added, removed or marked in between.

    Bucket (one key) -> tiers by priority -> active and draining Pool -> one Bag per agent name -> backends

Rules that hold here:

- Adding, removing, moving and choosing cost the same with ten members and with a hundred thousand.
- An agent's name has one share, however many links are under it. Of two names the one that carries fewer streams in
  all is the better, of two links of a name the one with fewer; ties are random.
- A lower-priority tier is looked at only when no tier above it has a member in the state that is asked for.

This file must not know strategies, targets, or what a backend is beyond its name, instance, priority and streams.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from enum import Enum
from random import random
from typing import Generic, Protocol, TypeVar

_TRIES = 8  # random choices before a scan, where one instance is not wanted


class BackendState(Enum):
    """What a backend is good for. See ``backends.py`` for the transitions."""

    ACTIVE = "active"
    DRAINING = "draining"
    FINAL = "final"
    GONE = "gone"


class Member(Protocol):
    """What a pool needs to know of a backend."""

    @property
    def name(self) -> str:
        """Its agent's name."""

    @property
    def instance(self) -> str:
        """Its agent's process."""

    @property
    def priority(self) -> int:
        """Its tier."""

    @property
    def streams(self) -> int:
        """How many streams it carries, or is asked for."""


M = TypeVar("M", bound=Member)
T = TypeVar("T")


class Bag(Generic[T]):
    """A set with a random choice: an array in which removal swaps in the last, and an index into it."""

    __slots__ = ("_index", "_items")

    def __init__(self) -> None:
        self._items: list[T] = []
        self._index: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def add(self, item: T) -> None:
        """Add what is not there."""
        self._index[item] = len(self._items)
        self._items.append(item)

    def remove(self, item: T) -> None:
        """Remove what is there."""
        place = self._index.pop(item)
        last = self._items.pop()
        if place < len(self._items):  # it was not the last itself; equal items may be different objects
            self._items[place] = last
            self._index[last] = place

    def two(self) -> tuple[T, T]:
        """Two different members at random, in random order; the only one twice."""
        items = self._items
        count = len(items)
        if count == 1:
            return items[0], items[0]
        first = int(random() * count)  # noqa: S311  # balances load, protects nothing
        second = int(random() * (count - 1))  # noqa: S311
        return items[first], items[second if second < first else second + 1]


class Pool(Generic[M]):
    """The backends of one state under one key and priority."""

    __slots__ = ("_bags", "_by_name")

    def __init__(self) -> None:
        self._bags: Bag[Bag[M]] = Bag()  # one for each name
        self._by_name: dict[str, Bag[M]] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[M]:
        for bag in self._by_name.values():
            yield from bag

    def add(self, member: M) -> None:
        """Add a backend that is not there."""
        bag = self._by_name.get(member.name)
        if bag is None:
            bag = self._by_name[member.name] = Bag()
            self._bags.add(bag)
        bag.add(member)

    def remove(self, member: M) -> None:
        """Remove a backend that is there."""
        bag = self._by_name[member.name]
        bag.remove(member)
        if not bag:
            del self._by_name[member.name]
            self._bags.remove(bag)

    def pick(self) -> M:
        """The better of two. The pool must not be empty."""
        one, other = self._bags.two()
        mine = _better(*one.two())
        if one is other:
            return mine
        theirs = _better(*other.two())
        # A name's links carry about as much as each other; what counts is the load of the whole name.
        return mine if mine.streams * len(one) <= theirs.streams * len(other) else theirs

    def pick_besides(self, instance: str) -> M | None:
        """The same, but not of this instance; None if there is no other."""
        for _ in range(_TRIES):
            member = self.pick()
            if member.instance != instance:
                return member
        return next((member for member in self if member.instance != instance), None)


def _better(one: M, other: M) -> M:
    return one if one.streams <= other.streams else other


class Bucket(Generic[M]):
    """All backends under one key."""

    __slots__ = ("_order", "_tiers")

    def __init__(self) -> None:
        self._tiers: dict[int, dict[BackendState, Pool[M]]] = {}
        self._order: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._tiers)

    def add(self, member: M, state: BackendState) -> None:
        """Add a backend that is not there, as ACTIVE or DRAINING."""
        tier = self._tiers.get(member.priority)
        if tier is None:
            tier = self._tiers[member.priority] = {BackendState.ACTIVE: Pool(), BackendState.DRAINING: Pool()}
            insort(self._order, member.priority)
        tier[state].add(member)

    def remove(self, member: M, state: BackendState) -> None:
        """Remove a backend that is there in that state."""
        tier = self._tiers[member.priority]
        tier[state].remove(member)
        if not any(tier.values()):
            del self._tiers[member.priority]
            self._order.remove(member.priority)

    def pick(self, state: BackendState, besides: str | None = None) -> M | None:
        """A backend in that state, of the first tier that has one; not of the instance ``besides``."""
        for priority in self._order:
            pool = self._tiers[priority][state]
            if pool:
                member = pool.pick() if besides is None else pool.pick_besides(besides)
                if member is not None:
                    return member
        return None

    def members(self) -> Iterator[tuple[M, BackendState]]:
        """Every backend and its state, tier by tier, active ones first."""
        for priority in self._order:
            for state, pool in self._tiers[priority].items():
                for member in pool:
                    yield member, state
