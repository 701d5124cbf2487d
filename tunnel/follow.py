"""Follows a drain from outside until it is certain what became of it.

    told -> draining .. -> drained                  (DRAINED)
                        -> active                   (UNDRAINED: somebody took it back)
                        -> no longer there          (DRAINED if nothing was left when it went, else GONE)

Rules that hold here:

- Only what the process itself said counts. What cannot be seen is ``unknown``, which is neither drained nor gone.
- Followed are the processes that were told; another that comes under the same name is none of them.
- A link may come back: a process counts as gone when it was not there for ``patience``, while one could have seen it.
- Time is handed in.

This file must not know HTTP, or how anything is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

PATIENCE = 2.0  # for an agent whose link was lost, while its server goes on
RELINKING = 20.0  # for one whose server was away itself: longer than agents wait between two attempts
_FAR = ("unknown", "active", "draining", "stopping", "drained")  # how far a drain is, in its order


class Outcome(Enum):
    """What became of a drain; the value is the exit code."""

    DRAINED = 0
    TIMED_OUT = 3
    UNDRAINED = 4
    GONE = 6


@dataclass(frozen=True, slots=True)
class Seen:
    """One process at one moment; ``state`` is ``unknown`` before it has said how far it is."""

    instance: str
    state: str
    open: int = 0
    pending: int = 0
    oldest_s: float = 0.0

    @property
    def left(self) -> int:
        """What was not over."""
        return self.open + self.pending

    @classmethod
    def agent(cls, view: Mapping[str, Any]) -> Seen:
        """An agent as its server sees it."""
        if view["state"] == "active" or view["drain"] is None:
            state = "active" if view["state"] == "active" else "unknown"
            return cls(view["instance"], state, view["streams"])
        return cls.of(view["instance"], view["drain"])

    @classmethod
    def itself(cls, view: Mapping[str, Any]) -> Seen:
        """A program as it sees itself. One that does not drain has no reasons for it."""
        leaves = view["role"] == "server"  # its only drain
        state = "active" if not view["reasons"] else "stopping" if leaves else view["state"]
        return cls.of(view["instance"], view, state)

    @classmethod
    def of(cls, instance: str, drain: Mapping[str, Any], state: str | None = None) -> Seen:
        """From a drain as programs tell it."""
        said = state or drain["state"]
        known = said if said in _FAR else "unknown"
        return cls(instance, known, drain["open"], drain["pending"], drain["oldest_s"])


class Following:
    """The processes that were told to drain, as they were last seen.

    Args:
        told: as they were then.
        leaves: they were also told to exit when they are drained.
        patience: seconds, see the head of this file.
        relinking: the same, once nothing could be seen for a while.
    """

    def __init__(
        self, told: Iterable[Seen], *, leaves: bool, patience: float = PATIENCE, relinking: float = RELINKING
    ) -> None:
        self._last = {seen.instance: seen for seen in told}
        self._missing: dict[str, float] = {}
        self._blind: str | None = None
        self._leaves = leaves
        self._patience = patience
        self._relinking = relinking

    # -- what is seen

    def saw(self, present: Iterable[Seen], now: float) -> None:
        """These are there now, and no others."""
        there = {seen.instance: seen for seen in present if seen.instance in self._last}
        self._last |= there
        self._missing = {name: self._missing.get(name, now) for name in self._last if name not in there}
        self._blind = None

    def saw_nothing(self, cause: str) -> None:
        """Whether they are there could not be seen."""
        self._missing.clear()
        self._patience = self._relinking
        self._blind = cause

    # -- what that means

    def outcome(self, now: float) -> Outcome | None:
        """None while it is not certain."""
        each = [self._became(seen, now) for seen in self._last.values()]
        for bad in (Outcome.GONE, Outcome.UNDRAINED):
            if bad in each:
                return bad
        return None if self._blind or None in each else Outcome.DRAINED

    def _became(self, seen: Seen, now: float) -> Outcome | None:
        if seen.instance not in self._missing:
            return {"drained": Outcome.DRAINED, "active": Outcome.UNDRAINED}.get(seen.state)
        if seen.state == "drained" or (seen.state == "stopping" and not seen.left):
            return Outcome.DRAINED
        if now - self._missing[seen.instance] < self._patience:
            return None
        return Outcome.DRAINED if self._leaves and self._ended_empty(seen) else Outcome.GONE

    def _ended_empty(self, seen: Seen) -> bool:
        return not seen.left and seen.state != "unknown"

    # -- for people

    @property
    def state(self) -> str:
        """That of the one that is least far."""
        if self._blind or self._undecided:
            return "unknown"
        return min((seen.state for seen in self._last.values()), key=_FAR.index, default="unknown")

    @property
    def _undecided(self) -> bool:
        return any(self._last[name].state != "drained" for name in self._missing)

    @property
    def oldest_s(self) -> float:
        """Seconds since what is open longest began."""
        return max((seen.oldest_s for seen in self._last.values()), default=0.0)

    def __str__(self) -> str:
        """How far it is, without what changes by itself."""
        seen = self._last.values()
        left = f"{sum(each.open for each in seen)} open, {sum(each.pending for each in seen)} pending"
        if self._blind:
            return f"unknown: {self._blind}; last seen: {left}"
        if self._undecided:
            return f"unknown: not linked now; last seen: {left}"
        drained = sum(each.state == "drained" for each in seen)
        several = f" ({drained} of {len(seen)} drained)" if len(seen) > 1 else ""
        return f"{self.state}{several}: {left}"

    @property
    def left_behind(self) -> int:
        """What those that are gone did not finish."""
        return sum(self._last[name].left for name in self._missing)

    def as_json(self) -> dict[str, object]:
        """The same, for programs."""
        return {"state": self.state, "instances": [asdict(seen) for seen in self._last.values()]}
