"""An agent's drain as its operator sees it: how far it is, when nothing is left, and what would never end by itself.

    STARTING --> READY --drain--> DRAINING --all acked, none open or pending--> DRAINED
    DRAINED --a dial came all the same--> DRAINING             DRAINING, DRAINED --undrain--> READY
    READY, DRAINING, DRAINED --the agent leaves--> STOPPING

Rules that hold here:

- The agent owns its drain state. It is DRAINED only while nothing is left, not for one turn longer.
- Servers are told how far it is, at most once a second; an agent that is to leave when drained does so when they were.
- A half-closed stream on which nothing moves for a minute is reset: nobody may ever end it.

This file must not know how servers are told, how links are kept, or who moves bytes.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from enum import Enum

import trio
from trio_util import AsyncValue

from tunnel import logs
from tunnel.drain import AgentDrain
from tunnel.lifecycle import Lifecycle
from tunnel.packets import DrainStatus, milliseconds
from tunnel.sync import SyncLoop
from tunnel.tally import Histogram

log = logs.get_logger(__name__)

_STATUS = 1.0  # seconds between two DRAIN_STATUS at least
_REAP = 60.0  # seconds without a byte after which a half-closed stream does not hold a drain up


class AgentState(Enum):
    """See the head of this file."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DRAINED = "drained"
    STOPPING = "stopping"


class DrainWatch:
    """The drain of one agent.

    Args:
        pending: how many dials are not answered yet.
        reap: resets the half-closed streams on which nothing moved since it was called last.

    Attributes:
        state: see the head of this file; can be waited for.
        exchange: what servers were told, and what they acknowledged.
        drains: how long operators' drains took, by how they ended: ``drained`` or ``undone``.
    """

    def __init__(self, life: Lifecycle, sync: SyncLoop, pending: Callable[[], int], reap: Callable[[], None]) -> None:
        self.state: AsyncValue[AgentState] = AsyncValue(AgentState.STARTING)
        self.exchange = AgentDrain(sync.links.values, self._left)
        self.drains = {outcome: Histogram(1, 5, 15, 60, 300, 900, 3600) for outcome in ("drained", "undone")}
        self._life = life
        self._sync = sync
        self._pending = pending
        self._reap = reap
        self._changed = trio.Event()  # something about the drain, or its links
        self._began: float | None = None  # when the drain began that is under way
        self._until = math.inf  # when an operator's drain is over at the latest
        self._leave_when_drained = False

    def __repr__(self) -> str:
        return f"<DrainWatch {self.state.value.name} {self.exchange!r}>"

    # -- how far it is

    @property
    def remaining(self) -> float:
        """Seconds until the exit at the latest, if the agent leaves; else until an operator's drain should be over."""
        if self._life.leaving or math.isinf(self._until):
            return self._life.remaining
        return max(0.0, self._until - trio.current_time())

    def _left(self) -> tuple[float, int]:
        """What servers are told of a drain: seconds that are left, 0 for no end, and what is open."""
        return self.remaining if self.limited else 0.0, self._life.open.value

    @property
    def limited(self) -> bool:
        """Whether a drain that is under way has an end."""
        return self._life.leaving or math.isfinite(self._until)

    @property
    def status(self) -> DrainStatus:
        """How far a drain is."""
        servers = len(self._sync.links)
        return DrainStatus(
            self.state.value.value,
            self._life.open.value - self._pending(),
            self._pending(),
            milliseconds(self._life.oldest),
            self.exchange.informed,
            servers,
        )

    # -- changes

    def drain(self, reason: str, seconds: float, *, leave: bool) -> None:
        """See ``Agent.drain``."""
        self._until = min(self._until, trio.current_time() + seconds)
        self._leave_when_drained |= leave
        if not self._life.leaving:
            self.begin(reason)
            self._enter_drain_state()

    def undrain(self, reason: str) -> bool:
        """See ``Agent.undrain``."""
        was_draining = self.exchange.draining
        if self._life.leaving or not self.exchange.undrain(reason):
            return False
        if not was_draining:
            return True
        self._until, self._leave_when_drained = math.inf, False
        self._drain_ended("undone")
        self._sync.undrain()
        self.state.value = AgentState.READY
        log.info("drain undone", reason=reason, servers=len(self._sync.links))
        return True

    def begin(self, reason: str) -> None:
        """Have servers told, and no more links made than there are."""
        self._sync.drain()
        if not self.exchange.draining:
            self._began = trio.current_time()
        if reason not in self.exchange.reasons:
            log.info("drain started", reason=reason, open=self._life.open.value, servers=len(self._sync.links))
        self.exchange.drain(reason)
        self.tell_change()

    def dial_came(self) -> None:
        """It is being served: DRAINED -> DRAINING."""
        if self.state.value is AgentState.DRAINED:
            self.state.value = AgentState.DRAINING

    def tell_change(self) -> None:
        """A link is up that was not: what was said may not be so any more."""
        self._changed.set()
        self._changed = trio.Event()

    def _enter_drain_state(self) -> None:
        left = self._life.open.value or self.exchange.unacked
        self.state.value = AgentState.DRAINING if left else AgentState.DRAINED
        if not left:
            self._drain_ended("drained")

    def _drain_ended(self, outcome: str) -> None:
        began, self._began = self._began, None
        if began is not None:
            self.drains[outcome].observe(trio.current_time() - began)

    async def run(self) -> None:
        """While draining: know when nothing is left, tell servers how far it is, and end what will never end."""
        said: DrainStatus | None = None
        when = reaped = -math.inf
        while True:
            while not self.exchange.draining:
                said, reaped = None, trio.current_time()
                await self._changed.wait()
            if not self._life.leaving:
                self._enter_drain_state()
                self._leave_if_drained(said)
            now = trio.current_time()
            if self.status != said and now - when >= _STATUS:
                said, when = self.status, now
                self._tell(said)
            if now - reaped >= _REAP:
                reaped = now
                self._reap()
            with trio.move_on_after(_STATUS):
                await self._something_new()

    async def _something_new(self) -> None:
        """Return at the moments that matter: the last stream ended, or the first one came back; all have acked."""
        empty, acked = not self._life.open.value, not self.exchange.unacked
        async with trio.open_nursery() as nursery:

            async def then_stop(wait: Callable[[], Awaitable[object]]) -> None:
                await wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(then_stop, lambda: self._life.open.wait_value(lambda n: (not n) is not empty))
            nursery.start_soon(then_stop, self._changed.wait)
            if not acked:
                nursery.start_soon(then_stop, self.exchange.wait_acked)

    def _leave_if_drained(self, said: DrainStatus | None) -> None:
        """Only when servers have been told: whoever waits for it there is to see it."""
        drained = self.state.value is AgentState.DRAINED and said is not None and said.state == "drained"
        if self._leave_when_drained and (drained or trio.current_time() >= self._until):
            self._life.leave()

    def _tell(self, status: DrainStatus) -> None:
        for link in list(self._sync.links.values()):  # sending may find one broken
            link.session.send_control(status)
            link.flush()
