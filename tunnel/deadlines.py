"""Calls that are made at a given time, unless they are taken back: mostly they are.

A dial has ten seconds and takes a millisecond. A cancel scope for that costs more than a task does, so there is one
task for all deadlines, which sleeps until the first of them.

Rules that hold here:

- A call is made once and not before its time; those of the same time in the order in which they were asked for.
- What is taken back keeps nothing alive, and is forgotten before it is more than a thousand, or what still waits.
- A fault in one call costs the others nothing.

This file must not know what is too late then, or for whom.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count

import trio

from tunnel import logs

log = logs.get_logger(__name__)

_CROWD = 1024  # so many wait, and those that were taken back are looked for


class Deadline:
    """A call that is going to be made; see ``Deadlines.at``."""

    __slots__ = ("call", "when")

    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when = when
        self.call: Callable[[], None] | None = call

    def __repr__(self) -> str:
        return f"<Deadline {self.when:.3f}{'' if self.call else ' taken back'}>"

    def take_back(self) -> None:
        """Have it not made. No effect once it was."""
        self.call = None


class Deadlines:
    """The deadlines of one run of trio; see ``of_this_run``."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Deadline]] = []  # a heap
        self._crowd = _CROWD
        self._numbers = count()
        self._scope = trio.CancelScope()  # in which the task sleeps
        self._wakes = math.inf  # when it ends

    def __repr__(self) -> str:
        return f"<Deadlines waiting={len(self._waiting)}>"

    def at(self, when: float, call: Callable[[], None]) -> Deadline:
        """Have ``call`` called at that time of trio's clock, or as soon as possible if it is past."""
        self._forget()
        if len(self._waiting) >= self._crowd:
            self._forget_all()
        deadline = Deadline(when, call)
        heapq.heappush(self._waiting, (when, next(self._numbers), deadline))
        if when < self._wakes:
            self._scope.deadline = self._wakes = when
        return deadline

    def _forget(self) -> None:
        """Whatever was taken back, and is the first."""
        while self._waiting and self._waiting[0][2].call is None:
            heapq.heappop(self._waiting)

    def _forget_all(self) -> None:
        self._waiting = [each for each in self._waiting if each[2].call is not None]
        heapq.heapify(self._waiting)
        self._crowd = max(_CROWD, 2 * len(self._waiting))

    async def run(self) -> None:
        """Make the calls."""
        while True:
            self._forget()
            self._wakes = self._waiting[0][0] if self._waiting else math.inf
            with trio.CancelScope(deadline=self._wakes) as self._scope:
                await trio.sleep_forever()
            self._wakes = -math.inf  # what is asked for meanwhile is looked at before it sleeps again
            self._make()

    def _make(self) -> None:
        now = trio.current_time()
        while self._waiting and self._waiting[0][0] <= now:
            deadline = heapq.heappop(self._waiting)[2]
            call, deadline.call = deadline.call, None
            if call is not None:
                try:
                    call()
                except Exception:  # a fault of ours
                    log.exception("fault at a deadline")


_deadlines: trio.lowlevel.RunVar[Deadlines] = trio.lowlevel.RunVar("tunnel.deadlines")


def of_this_run() -> Deadlines:
    """The deadlines of the run of trio that this is called in."""
    try:
        return _deadlines.get()
    except LookupError:
        deadlines = Deadlines()
        _deadlines.set(deadlines)
        trio.lowlevel.spawn_system_task(deadlines.run)
        return deadlines
