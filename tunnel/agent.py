"""The agent: links to servers, and connects the streams they ask for to targets.

    STARTING --start()--> READY --drain, undrain: see watch.py--> READY --life.leave()--> STOPPING

Rules that hold here:

- Losing a link costs its streams and nothing else; the sync loop restores it until the agent is told to leave.
- Leaving is a drain, too: what is said of it is ``drain.py``'s, and how an operator's one ends ``watch.py``'s.
- A dial ends in exactly one answer. If the peer gave it up meanwhile, the target's socket is closed at once.

This file must not know the command line, or servers' insides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import trio

from tunnel import logs
from tunnel.address import Target
from tunnel.bounds import Bounds
from tunnel.config import AgentConfig
from tunnel.connect import Connector
from tunnel.dials import Dials, Service
from tunnel.drain import FINAL_ACK, SOFT_ACK, DrainPhase
from tunnel.errors import CUT, HandshakeRefused, RefusedDraining, TooMany, TunnelError
from tunnel.handshake import DiallingHandshake
from tunnel.identity import Identity, new_instance
from tunnel.lifecycle import EXIT_NEVER_LINKED, Lifecycle, Slices
from tunnel.link import Link
from tunnel.outflow import Outflow, all_sent, all_taken
from tunnel.packets import (
    DialReq,
    DrainAck,
    DrainCmd,
    GoAway,
    GoAwayAck,
    Packet,
    UndrainAck,
    Welcome,
)
from tunnel.relay import Switchboard
from tunnel.secure import Dialling
from tunnel.stream import TunnelStream
from tunnel.sync import SyncLoop
from tunnel.tally import Traffic
from tunnel.transport import Transport
from tunnel.watch import AgentState, DrainWatch

log = logs.get_logger(__name__)


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
        watch: its drain, as operators see it.
        state: ready, draining and so on; can be waited for. See ``watch.py``.
        draining: what servers were told about leaving, and what they acknowledged.
        dials: what serves dials, with their counts.
        late: how many dials arrived while it drained, and were served.
        carried: what links have carried that are not there any more.

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
        self.late = 0
        self.carried = Traffic()
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
        self.watch = DrainWatch(self.life, self.sync, lambda: self.dials.pending, self._board.reap)
        self.state = self.watch.state
        self.draining = self.watch.exchange

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
        life.background.start_soon(self.watch.run)
        life.accepting.start_soon(self.sync.run, life.background)
        self.state.value = AgentState.READY

    def announce(self) -> None:
        """See ``lifecycle.Program``."""
        self.state.value = AgentState.STOPPING

    async def soft(self) -> None:
        """See ``lifecycle.Program``."""
        self.watch.begin("signal")
        await self.draining.acknowledged(SOFT_ACK)

    @property
    def unsent(self) -> bool:
        """See ``lifecycle.Program``."""
        return not all_taken(self._ways())

    async def settle(self) -> None:
        """See ``lifecycle.Program``."""
        await all_sent(self._ways)

    def _ways(self) -> Iterator[Outflow]:
        return (link.outflow for link in self.sync.links.values())

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

    def drain(self, reason: str = "admin", *, seconds: float = math.inf, leave: bool = False) -> None:
        """Ask all servers to prefer other agents; ``state`` says when nothing is left.

        Dials that arrive all the same are served. Links that are lost are restored, still draining, and no others are
        made. With ``leave`` the agent leaves when it is drained, or after so many seconds. No effect once it leaves.
        """
        self.watch.drain(reason, seconds, leave=leave)

    def undrain(self, reason: str = "admin") -> bool:
        """Take that reason to drain back. False if it is too late, or another reason remains."""
        return self.watch.undrain(reason)

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
            self.watch.tell_change()

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
            self.watch.dial_came()
