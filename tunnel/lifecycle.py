"""How a server or an agent lives and leaves: three nested nurseries, ordered phases, one budget.

    STARTING --start() returned--> READY --leave()--> LAME_DUCK, if it has one --its time is over--> DRAINING
    DRAINING --none open and all links know--> CLOSING --links said goodbye--> EXIT
    DRAINING --its time is over--> CUT --> CLOSING        any before CUT --cut()--> CUT, or CLOSING if nothing is open

``background > connections > accepting``: what is inside ends first. On leaving, the program announces it; after the
lame duck, if it has one, ``accepting`` is cancelled (nothing new arrives by itself); links are told (``soft``); open
connections get the time; links are told that nothing more is served (``final``); what is left is cut; links are closed;
``background`` (links) is cancelled last.

Rules that hold here:

- One absolute deadline, ``leave()`` plus the budget. Each step ends as soon as it can; ``Plan`` has their latest ends.
- The cut is a deadline on the scope of ``connections``, never a loop over tasks. Before it, the program may end streams
  in its own, gentler way (``cut``).
- A connection that has ended may have left bytes on a link: leaving waits for those too.
- Connections are counted by ``spawn``; between the last look at the count and ``final`` there is no checkpoint, so none
  can slip in and be lost.

This file must not know links, sockets, streams or signals: the programs give it their steps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Protocol

import trio
from trio_util import AsyncValue

from tunnel import logs

log = logs.get_logger(__name__)

EXIT_DONE, EXIT_CUT_BY_DEADLINE, EXIT_CUT_BY_SIGNAL, EXIT_NEVER_LINKED = 0, 3, 4, 5
_LEAST_CLOSE = 0.4  # seconds that goodbyes get even when the budget is spent
_REPORT = 5.0  # seconds between two log lines about what is still open


class Phase(Enum):
    """See the head of this file."""

    STARTING = "starting"
    READY = "ready"
    LAME_DUCK = "lame duck"
    DRAINING = "draining"
    CUT = "cut"
    CLOSING = "closing"
    EXIT = "exit"


@dataclass(frozen=True, slots=True)
class Slices:
    """What the last steps get at most, in seconds. A budget that is less than twice their sum shrinks them alike."""

    final: float
    cut: float
    close: float


@dataclass(frozen=True, slots=True)
class Plan:
    """When each step ends at the latest, in seconds from ``leave()``. They follow each other in this order."""

    lame_duck: float
    serve: float
    final: float
    cut: float
    close: float

    @classmethod
    def of(cls, budget: float, slices: Slices, lame_duck: float = 0.0) -> Plan:
        """The arithmetic."""
        rest = budget - lame_duck
        fixed = slices.final + slices.cut + slices.close
        scale = min(1.0, rest / (2 * fixed))
        close = budget
        cut = close - slices.close * scale
        final = cut - slices.cut * scale
        return cls(lame_duck, final - slices.final * scale, final, cut, close)


class Program(Protocol):
    """The steps of a server or an agent."""

    slices: Slices
    lame_duck: float
    """Seconds for which it goes on as before once leaving was announced."""

    async def start(self, life: Lifecycle) -> None:
        """Start everything in ``life``'s nurseries; return when ready to serve."""

    def announce(self) -> None:
        """Leaving has begun: say so to whoever asks, and begin to say it to links."""

    async def soft(self) -> None:
        """Nothing new arrives by itself: say so to links; return when they know."""

    @property
    def unsent(self) -> bool:
        """Whether links have something to send that did not go yet."""

    async def settle(self) -> None:
        """Wait until that is not so."""

    async def final(self) -> None:
        """Serve nothing new from this call on; tell links, and return when they know."""

    async def cut(self, seconds: float) -> None:
        """End what is open, within so many seconds."""

    async def close(self, seconds: float) -> None:
        """End the links, within so many seconds."""

    def tally(self) -> dict[str, int]:
        """What happened meanwhile, for the log."""


class Lifecycle:
    """One life of a program.

    Args:
        program: the steps.
        budget: seconds from ``leave`` to the exit.

    Attributes:
        phase: where it is; can be waited for.
        open: how many connections are open; can be waited for.
        exit_code: what the process should end with, once in EXIT.
        cuts: how many connections were cut.
        background, accepting: nurseries for the program's own tasks, from ``start`` on.
    """

    background: trio.Nursery
    accepting: trio.Nursery

    def __init__(self, program: Program, budget: float) -> None:
        self.phase: AsyncValue[Phase] = AsyncValue(Phase.STARTING)
        self.open: AsyncValue[int] = AsyncValue(0)
        self.exit_code = EXIT_DONE
        self.cuts = 0
        self._program = program
        self._budget = budget
        self._began = 0.0
        self._leaving = trio.Event()
        self._hurry = False
        self._patience = trio.CancelScope()  # for everything that ends by itself; a cut ends it
        self._since: dict[object, float] = {}  # when each open connection began, oldest first
        self._swept = trio.Event()
        self._emptied = trio.Event()
        self._closing = trio.Event()
        self._connections: trio.Nursery

    def __repr__(self) -> str:
        return f"<Lifecycle {self.phase.value.name} open={self.open.value}>"

    @property
    def plan(self) -> Plan:
        """When each step of leaving ends at the latest."""
        return Plan.of(self._budget, self._program.slices, self._program.lame_duck)

    @property
    def leaving(self) -> bool:
        """Whether ``leave`` was called."""
        return self._leaving.is_set()

    @property
    def remaining(self) -> float:
        """Seconds that are left of the budget."""
        return max(0.0, self._began + self._budget - trio.current_time()) if self.leaving else self._budget

    @property
    def oldest(self) -> float:
        """For how many seconds the oldest open connection is there; 0 if none is."""
        return trio.current_time() - next(iter(self._since.values())) if self._since else 0.0

    def leave(self, exit_code: int = EXIT_DONE) -> None:
        """Begin to leave. No effect when that has begun."""
        if not self.leaving:
            self.exit_code = exit_code
            self._began = trio.current_time()
            self._leaving.set()

    def cut(self) -> None:
        """Leave, and give open connections no more time."""
        self.leave()
        self._hurry = True
        self._patience.cancel()

    def spawn(self, handler: Callable[..., Awaitable[None]], *args: Any) -> bool:
        """Start ``handler(*args)`` as a connection. False, and nothing started, if it is too late for that."""
        if self.phase.value in (Phase.CUT, Phase.CLOSING, Phase.EXIT):
            return False
        self.open.value += 1
        self._connections.start_soon(self._connection, handler, args)
        return True

    async def _connection(self, handler: Callable[..., Awaitable[None]], args: tuple[Any, ...]) -> None:
        key = object()
        self._since[key] = trio.current_time()
        try:
            await handler(*args)
        except* Exception:
            log.exception("fault in a connection")
        finally:
            del self._since[key]
            self.open.value -= 1

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> int:
        """Live until ``leave`` was called and everything has ended; the exit code.

        ``task_status.started()`` is called when READY. Cancelling ends everything at once.
        """
        async with trio.open_nursery() as self.background:
            async with trio.open_nursery() as self._connections:
                async with trio.open_nursery() as self.accepting:
                    await self._program.start(self)
                    self.phase.value = Phase.READY
                    log.info("ready", **{step: f"{seconds:g}s" for step, seconds in asdict(self.plan).items()})
                    task_status.started()
                    self.background.start_soon(self._leave)
                    await trio.sleep_forever()
                self._swept.set()
                await self._closing.wait()
            self._emptied.set()
        self.phase.value = Phase.EXIT
        log.info("exit", code=self.exit_code)
        return self.exit_code

    # -- leaving

    async def _leave(self) -> None:
        await self._leaving.wait()
        with self._patience:
            await self._wind_down()
        self.accepting.cancel_scope.cancel()
        await self._swept.wait()
        if self.open.value or self._program.unsent:
            await self._cut()
        self.phase.value = Phase.CLOSING
        self._closing.set()
        await self._emptied.wait()
        took = trio.current_time() - self._began
        log.info("drained", took=f"{took:.1f}s", cut=self.cuts, **self._program.tally())
        await self._program.close(min(self._program.slices.close, max(_LEAST_CLOSE, self.remaining)))
        self.background.cancel_scope.cancel()

    def _at(self, seconds: float) -> float:
        return self._began + seconds

    async def _wind_down(self) -> None:
        """Everything that ends by itself, or when its time is over."""
        plan = self.plan
        hint = {"hint": "a second signal cuts them"} if self.open.value else {}
        log.info("leaving", open=self.open.value, seconds=f"{self._budget:g}", **hint)
        self._program.announce()
        if plan.lame_duck:
            self.phase.value = Phase.LAME_DUCK
            await trio.sleep_until(self._at(plan.lame_duck))
        self.accepting.cancel_scope.cancel()
        await self._swept.wait()
        self.phase.value = Phase.DRAINING
        with trio.CancelScope(deadline=self._at(plan.serve)):
            await self._program.soft()
            await self._until_none_open()
        with trio.CancelScope(deadline=self._at(plan.final)):
            await self._program.final()

    async def _until_none_open(self) -> None:
        while True:
            await self._program.settle()
            if not self.open.value:
                return
            with trio.move_on_after(_REPORT):
                await self.open.wait_value(0)
                continue
            log.info("draining", open=self.open.value, oldest=f"{self.oldest:.0f}s", remaining=f"{self.remaining:.0f}s")

    async def _cut(self) -> None:
        self.phase.value = Phase.CUT
        self.cuts = self.open.value
        self.exit_code = EXIT_CUT_BY_SIGNAL if self._hurry else EXIT_CUT_BY_DEADLINE
        event = "second signal, cutting" if self._hurry else "drain deadline, cutting"
        log.warning(event, streams=self.cuts)
        seconds = 0.0 if self._hurry else max(0.0, self._at(self.plan.cut) - trio.current_time())
        if seconds:
            self._connections.cancel_scope.deadline = trio.current_time() + seconds
        with trio.move_on_after(seconds):
            await self._program.cut(seconds)
            await self.open.wait_value(0)
        self._connections.cancel_scope.cancel()
