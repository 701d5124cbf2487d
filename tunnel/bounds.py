"""Bounds on what others can make this process hold and do: how many, how often; and when they bite.

Rules that hold here:

- A bound is called what its limit is called (see ``limits.py``), in metrics, logs and documents. A few have no
  limit that can be set: ``answers``, ``credit``, ``handshake_time`` and ``head_time``.
- Each time that a bound bites is counted; in the log each says so once a minute at most.
- Who is turned away costs a look at two numbers.

This file must not know sockets, links or streams: whoever comes from somewhere has a *source*, which is anything that
can be a key. It is handed the time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Self

from tunnel import logs
from tunnel.errors import TooMany
from tunnel.limits import Limits

log = logs.get_logger(__name__)

_BURST = 2.0  # seconds' worth that may come at once

Clock = Callable[[], float]


class Bounds:
    """The bounds of a program.

    Args:
        now: seconds, from whenever on.

    Attributes:
        limits: what they are.
        hits: how often each has bitten.
        handshakes: connections that are not linked yet, by address.
        heads: CONNECT connections whose request is not whole yet, by address.
        streams: those that are open or being dialled, by link.
        dials: those that are being dialled, by link.
    """

    def __init__(self, limits: Limits, now: Clock) -> None:
        self.limits = limits
        self.hits: Counter[str] = Counter()
        self.now = now
        self.handshakes = Crowd(self, "unauthenticated", "unauthenticated_per_source")
        self.heads = Crowd(self, "heads", "heads_per_source")
        self.streams = Crowd(self, "streams", "streams_per_link")
        self.dials = Crowd(self, "pending_dials", "pending_per_link")
        self._seldom = logs.Seldom(now)

    def __repr__(self) -> str:
        return f"<Bounds {dict(self.hits)}>"

    def hit(self, bound: str, **facts: object) -> None:
        """It has bitten. The facts are for the log."""
        self.hits[bound] += 1
        if times := self._seldom.times(bound):
            log.warning("bound", bound=bound, times=times, **facts)

    def admit(self, link: Hashable | None, *, shared: bool = False) -> Place:
        """Room for one more stream that ``link`` asks for; None for a stream that comes from no link.

        ``shared``: many ask through it, each bounded there; what waits for its answer counts among all only.

        Raises:
            TooMany: there is none.
        """
        open_ = self.streams.enter(link)
        if open_ is None:
            raise TooMany("too many streams are open")
        dialling = self.dials.enter(None if shared else link)
        if dialling is None:
            open_.leave()
            raise TooMany("too many dials wait for their answers")
        return Place(open_, dialling)


class Crowd:
    """How many are in at a time: in all, and of each source."""

    def __init__(self, bounds: Bounds, total: str, each: str) -> None:
        self.inside = 0
        self._bounds = bounds
        self._by_source: Counter[Hashable] = Counter()
        self._total: tuple[str, int] = total, getattr(bounds.limits, total)
        self._each: tuple[str, int] = each, getattr(bounds.limits, each)

    def enter(self, source: Hashable | None) -> Seat | None:
        """Come in, unless there are too many: then it is None. Those whose source is None count in all only."""
        name, most = self._total
        if self.inside < most:
            name, most = self._each
            if source is None or self._by_source[source] < most:
                self.inside += 1
                self._by_source[source] += 1
                return Seat(self, source)
        facts = {"source": source} if isinstance(source, str) else {}
        self._bounds.hit(name, limit=most, **facts)
        return None

    def leave(self, source: Hashable | None) -> None:
        """For a seat."""
        self.inside -= 1
        self._by_source[source] -= 1
        if not self._by_source[source]:
            del self._by_source[source]


class Seat:
    """One of a crowd, until it leaves; twice is allowed. A context manager that leaves at its end.

    Attributes:
        source: where it comes from.
    """

    __slots__ = ("_crowd", "source")

    def __init__(self, crowd: Crowd, source: Hashable | None) -> None:
        self._crowd: Crowd | None = crowd
        self.source = source

    def leave(self) -> None:
        """Make room for another one."""
        crowd, self._crowd = self._crowd, None
        if crowd is not None:
            crowd.leave(self.source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class Place:
    """One stream's room, from before its dial to its end. A context manager that gives it back."""

    __slots__ = ("_dialling", "_open")

    def __init__(self, open_: Seat, dialling: Seat) -> None:
        self._open = open_
        self._dialling = dialling

    def answered(self) -> None:
        """It is not being dialled any more."""
        self._dialling.leave()

    def leave(self) -> None:
        """There is no such stream any more."""
        self._dialling.leave()
        self._open.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class Pace:
    """How fast the peer of one link may ask for what has to be answered."""

    def __init__(self, bounds: Bounds) -> None:
        self._pings, self._dials = Rate(bounds, "ping_rate"), Rate(bounds, "dial_rate")
        self._free = bounds.limits.ping_rate
        self._frames = 0

    def asked(self, pings: int, dials: int, frames: int, **facts: object) -> float:
        """So many PINGs and dials have come since: for how many seconds nothing more should be read.

        ``frames`` of streams were sent so far: a PING with each is free. The facts are for the log.
        """
        new, self._frames = frames - self._frames, frames
        paid = max(0, pings - min(new, self._free))
        return max(self._pings.spend(paid, **facts), self._dials.spend(dials, **facts))


class Rate:
    """How often something may be done in a second, or somewhat more at once."""

    def __init__(self, bounds: Bounds, name: str) -> None:
        self._bounds = bounds
        self._name = name
        self._rate: int = getattr(bounds.limits, name)
        self._left: float = self._rate * _BURST
        self._when = -math.inf

    def spend(self, times: int, **facts: object) -> float:
        """It was done so many times since: for how many seconds it must not be done now. The facts are for the log."""
        now = self._bounds.now()
        self._left = min(self._rate * _BURST, self._left + (now - self._when) * self._rate) - times
        self._when = now
        if self._left >= 0:
            return 0.0
        self._bounds.hit(self._name, limit=self._rate, **facts)
        return -self._left / self._rate
