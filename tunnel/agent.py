"""The agent: links to servers, and connects the streams they ask for to targets.

    STARTING --start--> READY --drain--> DRAINING --all acked, none open or pending--> DRAINED
    DRAINED --a dial came all the same--> DRAINING             DRAINING, DRAINED --undrain--> READY
    READY, DRAINING, DRAINED --life.leave()--> STOPPING

Rules that hold here:

- Losing a link costs its streams and nothing else; the sync loop restores it until the agent is told to leave.
- The agent owns its drain state; what it says of it, and when, is ``drain.py``'s. Leaving is a drain, too.
- A dial ends in exactly one answer. If the peer gave it up meanwhile, the target's socket is closed at once.

This file must not know the command line, or servers' insides.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from functools import partial

import trio
from trio_util import AsyncValue

from tunnel import logs
from tunnel.address import Target
from tunnel.bounds import Bounds
from tunnel.config import AgentConfig
from tunnel.connect import Connector
from tunnel.dials import Dials, Service
from tunnel.drain import FINAL_ACK, SOFT_ACK, AgentDrain, DrainPhase
from tunnel.errors import CUT, HandshakeRefused, RefusedDraining, TooMany, TunnelError
from tunnel.handshake import DiallingHandshake
from tunnel.identity import Identity, new_instance
from tunnel.lifecycle import EXIT_NEVER_LINKED, Lifecycle, Slices
from tunnel.link import Link
from tunnel.packets import (
    DialReq,
    DrainAck,
    DrainCmd,
    DrainStatus,
    GoAway,
    GoAwayAck,
    Packet,
    UndrainAck,
    Welcome,
    milliseconds,
)
from tunnel.relay import Switchboard
from tunnel.secure import Dialling
from tunnel.stream import TunnelStream
from tunnel.sync import SyncLoop
from tunnel.tally import Histogram, Traffic
from tunnel.transport import Transport

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


class Agent:
    """One agent.

    Args:
        services: what serves a target in this process, by ``HOST:PORT``. If given, these are all that the agent
            serves: other targets are refused, and it connects nowhere.

    Attributes:
        life: where it is between start and exit.
        bounds: what others can make it hold, and how often that was too much.
        secure: what it shows to servers, and what it takes them for.
        sync: what keeps the links; ``sync.links`` are those that are up.
        linked: set while there is a link; replaced by a new event when the last one is lost.
        state: see the head of this file; can be waited for.
        draining: what servers were told about leaving, and what they acknowledged.
        dials: what serves dials, with their counts.
        late: how many dials arrived while it drained, and were served.
        carried: what links have carried that are not there any more.
        drains: how long operators' drains took, by how they ended: ``drained`` or ``undone``.

    Raises:
        AddressError: a key of ``services`` is no target.
        ConfigError: a file of tokens or certificates is not taken.
    """

    slices = Slices(final=FINAL_ACK, cut=1.0, close=1.0)
    lame_duck = 0.0

    def __init__(self, config: AgentConfig, services: Mapping[str, Service] | None = None) -> None:
        self.config = config
        self.life = Lifecycle(self, config.timeouts.shutdown)
        self.linked = trio.Event()
        self.state: AsyncValue[AgentState] = AsyncValue(AgentState.STARTING)
        self.late = 0
        self.carried = Traffic()
        self.drains = {outcome: Histogram(1, 5, 15, 60, 300, 900, 3600) for outcome in ("drained", "undone")}
        self.instance = new_instance()
        self.bounds = Bounds(config.limits, trio.current_time)
        self._board = Switchboard()
        served_here = None if services is None else {Target.parse(at): talk for at, talk in services.items()}
        self.dials = Dials(self._board, served_here, config.rules)
        self.secure = Dialling("agent", config.token_file, config.tls, self._files_changed)
        self.sync = SyncLoop(
            config.servers,
            Connector(),
            config.timeouts,
            self._make_link,
            self._link_failed,
            self.secure.transport,
        )
        self.draining = AgentDrain(self.sync.links.values, self._left)
        self._changed = trio.Event()  # a drain began or ended
        self._began: float | None = None  # when the drain began that is under way
        self._until = math.inf  # when an operator's drain is over at the latest
        self._leave_when_drained = False

    def __repr__(self) -> str:
        return f"<Agent {self.config.name} {self.life!r} {self.sync!r}>"

    async def run(self, *, task_status: trio.TaskStatus[Agent] = trio.TASK_STATUS_IGNORED) -> int:
        """Serve until ``life.leave()`` is called; the exit code. Cancelling ends everything at once.

        ``task_status.started(self)`` is called at once; wait for ``linked`` to know that it serves.
        """
        async with trio.open_nursery() as nursery:
            await nursery.start(self.life.run)
            task_status.started(self)
        return self.life.exit_code

    # -- the steps of its life

    async def start(self, life: Lifecycle) -> None:
        """See ``lifecycle.Program``."""
        life.background.start_soon(self.secure.run)
        life.background.start_soon(self._watch_drain)
        life.accepting.start_soon(self.sync.run, life.background)
        self.state.value = AgentState.READY

    def announce(self) -> None:
        """See ``lifecycle.Program``."""
        self.state.value = AgentState.STOPPING

    async def soft(self) -> None:
        """See ``lifecycle.Program``."""
        self._begin_drain("signal")
        await self.draining.acknowledged(SOFT_ACK)

    @property
    def unsent(self) -> bool:
        """See ``lifecycle.Program``."""
        return not all(link.send_now() for link in list(self.sync.links.values()))  # sending may find one broken

    async def settle(self) -> None:
        """See ``lifecycle.Program``."""
        while blocked := next((link for link in self.sync.links.values() if link.sending), None):
            await blocked.all_sent()

    async def final(self) -> None:
        """See ``lifecycle.Program``."""
        self.draining.final()
        await self.draining.acknowledged(FINAL_ACK)

    async def cut(self, seconds: float) -> None:
        """See ``lifecycle.Program``."""
        text = "the agent is leaving, and the time is over"
        try:
            await self._board.cut(CUT, text, seconds)
        finally:
            self.dials.cut(CUT, text)

    async def close(self, seconds: float) -> None:
        """See ``lifecycle.Program``."""
        async with trio.open_nursery() as nursery:
            for link in self.sync.links.values():
                nursery.start_soon(partial(link.close, "leaving", "the agent is leaving", seconds=seconds))

    def tally(self) -> dict[str, int]:
        """See ``lifecycle.Program``."""
        return {"late": self.late, "refused": self.dials.failed[RefusedDraining.code]}

    # -- draining

    @property
    def remaining(self) -> float:
        """Seconds until the exit at the latest, if the agent leaves; else until an operator's drain should be over."""
        if self.life.leaving or math.isinf(self._until):
            return self.life.remaining
        return max(0.0, self._until - trio.current_time())

    def _left(self) -> tuple[float, int]:
        """What servers are told of a drain: seconds that are left, 0 for no end, and what is open."""
        return self.remaining if self.limited else 0.0, self.life.open.value

    @property
    def limited(self) -> bool:
        """Whether a drain that is under way has an end."""
        return self.life.leaving or math.isfinite(self._until)

    @property
    def status(self) -> DrainStatus:
        """How far a drain is."""
        servers = len(self.sync.links)
        return DrainStatus(
            self.state.value.value,
            self.life.open.value - self.dials.pending,
            self.dials.pending,
            milliseconds(self.life.oldest),
            self.draining.informed,
            servers,
        )

    def drain(self, reason: str = "admin", *, seconds: float = math.inf, leave: bool = False) -> None:
        """Ask all servers to prefer other agents; ``state`` says when nothing is left.

        Dials that arrive all the same are served. Links that are lost are restored, still draining, and no others are
        made. With ``leave`` the agent leaves when it is drained, or after so many seconds. No effect once it leaves.
        """
        self._until = min(self._until, trio.current_time() + seconds)
        self._leave_when_drained |= leave
        if not self.life.leaving:
            self._begin_drain(reason)
            self._enter_drain_state()

    def undrain(self, reason: str = "admin") -> bool:
        """Take that reason to drain back. False if it is too late, or another reason remains."""
        was_draining = self.draining.draining
        if self.life.leaving or not self.draining.undrain(reason):
            return False
        if not was_draining:
            return True
        self._until, self._leave_when_drained = math.inf, False
        self._drain_ended("undone")
        self.sync.undrain()
        self.state.value = AgentState.READY
        log.info("drain undone", reason=reason, servers=len(self.sync.links))
        return True

    def _begin_drain(self, reason: str) -> None:
        self.sync.drain()
        if not self.draining.draining:
            self._began = trio.current_time()
        if reason not in self.draining.reasons:
            log.info("drain started", reason=reason, open=self.life.open.value, servers=len(self.sync.links))
        self.draining.drain(reason)
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _enter_drain_state(self) -> None:
        left = self.life.open.value or self.draining.unacked
        self.state.value = AgentState.DRAINING if left else AgentState.DRAINED
        if not left:
            self._drain_ended("drained")

    def _drain_ended(self, outcome: str) -> None:
        began, self._began = self._began, None
        if began is not None:
            self.drains[outcome].observe(trio.current_time() - began)

    async def _watch_drain(self) -> None:
        """While draining: know when nothing is left, tell servers how far it is, and end what will never end."""
        said: DrainStatus | None = None
        when = reaped = -math.inf
        while True:
            while not self.draining.draining:
                said, reaped = None, trio.current_time()
                await self._changed.wait()
            if not self.life.leaving:
                self._enter_drain_state()
                self._leave_if_drained(said)
            now = trio.current_time()
            if self.status != said and now - when >= _STATUS:
                said, when = self.status, now
                self._send_all(said)
            if now - reaped >= _REAP:
                reaped = now
                self._board.reap()
            with trio.move_on_after(_STATUS):
                await self._something_new()

    async def _something_new(self) -> None:
        """Return at the moments that matter: the last stream ended, or the first one came back; all have acked."""
        empty, acked = not self.life.open.value, not self.draining.unacked
        async with trio.open_nursery() as nursery:

            async def then_stop(wait: Callable[[], Awaitable[object]]) -> None:
                await wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(then_stop, lambda: self.life.open.wait_value(lambda n: (not n) is not empty))
            nursery.start_soon(then_stop, self._changed.wait)
            if not acked:
                nursery.start_soon(then_stop, self.draining.wait_acked)

    def _leave_if_drained(self, said: DrainStatus | None) -> None:
        """Only when servers have been told: whoever waits for it there is to see it."""
        drained = self.state.value is AgentState.DRAINED and said is not None and said.state == "drained"
        if self._leave_when_drained and (drained or trio.current_time() >= self._until):
            self.life.leave()

    def _send_all(self, packet: Packet) -> None:
        for link in list(self.sync.links.values()):  # sending may find one broken
            link.session.send_control(packet)
            link.flush()

    def _obey(self, link: Link, command: DrainCmd) -> None:
        """An operator said so at a server."""
        if command.instance != self.instance:
            log.warning("command for another process", action=command.action, instance=command.instance)
            return
        log.info("command", action=command.action, text=command.text, server_id=link.peer and link.peer.instance)
        if command.action == "undrain":
            self.undrain()
        else:
            self.drain(seconds=command.ms / 1000 if command.ms else math.inf, leave=bool(command.leave))

    # -- links

    def _files_changed(self) -> None:
        """What servers refused they may take now."""
        self.sync.hurry()

    def _make_link(self, transport: Transport, on_linked: Callable[[], None], on_end: Callable[[], None]) -> Link:
        said = self.draining.draining
        me = Identity(
            "agent",
            self.config.name,
            self.instance,
            draining=said,
            body_limit=self.config.limits.body,
            claims=self.config.claims,
            linked=tuple(self.sync.links),
        )

        def linked() -> None:
            on_linked()
            self.linked.set()
            self.draining.linked(link, said)
            self._note_change()

        def ended() -> None:
            on_end()
            self.carried.add(link.session)
            self.draining.gone(link)
            if self.linked.is_set() and not self.sync.links:
                self.linked = trio.Event()

        link = Link(
            transport,
            DiallingHandshake(me, self.secure.token, transport.binding),
            limits=self.config.limits,
            timeouts=self.config.timeouts,
            on_dial=self._dialled,
            on_control=lambda packet: self._control(link, packet),
            on_linked=linked,
            on_end=ended,
            bounds=self.bounds,
        )
        self.draining.linking(link, said)
        return link

    def _control(self, link: Link, packet: Packet) -> None:
        match packet:
            case DrainAck() | UndrainAck():
                self.draining.acked(link, packet)
            case Welcome():
                self.sync.told_count(link)
            case DrainCmd():
                self._obey(link, packet)
            case GoAway():
                link.session.send_control(GoAwayAck(packet.phase))
                self.sync.going(link)

    def _link_failed(self, error: TunnelError, all_failed: bool) -> None:
        """With ``exit_on_failure``: a refusal that is for good, or no server at all, ends the agent."""
        for_good = isinstance(error, HandshakeRefused)
        if self.config.exit_on_failure and (for_good or (all_failed and not self.sync.ever_linked)):
            log.error("cannot link", cause=error)
            self.life.leave(EXIT_NEVER_LINKED)

    # -- dials

    def _dialled(self, stream: TunnelStream, request: DialReq) -> None:
        try:
            place = self.bounds.admit(stream.core.session, shared=True)
        except TooMany as error:
            self.dials.refuse(stream, error)
            return
        if self.draining.phase is DrainPhase.FINAL or not self.life.spawn(self.dials.serve, stream, request, place):
            place.leave()
            self.dials.refuse(stream, RefusedDraining("the agent has left"))
        else:
            self.late += self.draining.draining
            if self.state.value is AgentState.DRAINED:  # not any more, not for one turn
                self.state.value = AgentState.DRAINING
