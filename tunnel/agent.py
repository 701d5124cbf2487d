"""The agent: keeps a link to its server, and connects streams to targets.

    connecting --linked--> linked --link ended--> waiting (full jitter, capped) --> connecting

Rules that hold here:

- Losing the link costs its streams and nothing else; the agent reconnects until it is told to leave.
- The back-off grows with every failure, and falls back only after a link was stable for a while.
- A dial ends in exactly one answer. If the peer gave it up meanwhile, the target's socket is closed at once.

This file must not know the command line, or servers' insides.
"""

from __future__ import annotations

import random
import socket

import trio

from tunnel import logs
from tunnel.address import Target
from tunnel.config import AgentConfig, Timeouts
from tunnel.connect import Connector
from tunnel.errors import (
    AddressError,
    DialError,
    DialProtocolError,
    DialTimeout,
    HandshakeRefused,
    LinkClosed,
    RefusedDraining,
    StreamReset,
)
from tunnel.frames import DialReq, Drain, DrainAck, Packet
from tunnel.handshake import DiallingHandshake, Identity, new_instance
from tunnel.lifecycle import Lifecycle, live
from tunnel.link import Link
from tunnel.relay import Switchboard
from tunnel.session import State
from tunnel.stream import TunnelStream
from tunnel.transport import SocketTransport

log = logs.get_logger(__name__)

_ACK = 5.0  # seconds that a server has for acknowledging a DRAIN


class Backoff:
    """Full jitter: each delay is random between nothing and a bound that doubles up to a cap.

    Attributes:
        attempt: failures since the last reset.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self.attempt = 0
        self._timeouts = timeouts

    def next(self) -> float:
        """Seconds to wait after one more failure."""
        bound = min(self._timeouts.backoff_max, self._timeouts.backoff_first * 2 ** min(self.attempt, 30))
        self.attempt += 1
        return random.uniform(0, bound)  # noqa: S311  # spreads load, protects nothing

    def lived(self, seconds: float) -> None:
        """A link ended after so long."""
        if seconds >= self._timeouts.stable:
            self.attempt = 0


class _Dialling:
    """The sink of a stream whose target is being connected: only a reset can come."""

    __slots__ = ("_scope",)

    def __init__(self, scope: trio.CancelScope) -> None:
        self._scope = scope

    def on_reset(self, code: str, text: str) -> None:
        self._scope.cancel()

    def on_data(self, data: memoryview) -> None: ...
    def on_eof(self) -> None: ...
    def on_credit(self) -> None: ...


class Agent:
    """One agent.

    Attributes:
        life: where it is between start and exit.
        linked: set while there is a link; replaced by a new event when it is lost.
        served: how many dials were answered with a stream.
    """

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.life = Lifecycle(self, config.timeouts.shutdown)
        self.linked = trio.Event()
        self.served = 0
        self._instance = new_instance()
        self._board = Switchboard()
        self._connector = Connector()
        self._backoff = Backoff(config.timeouts)
        self._link: Link | None = None
        self._draining = False
        self._drain_seq = 0
        self._acked = trio.Event()

    def __repr__(self) -> str:
        return f"<Agent {self.config.name} {self.life!r} {self._link!r}>"

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
        await life.background.start(self._board.run)
        life.accepting.start_soon(self._keep_linked)

    async def tell(self) -> None:
        """See ``lifecycle.Program``."""
        await self.drain("signal")

    async def close(self) -> None:
        """See ``lifecycle.Program``."""
        if self._link is not None:
            await self._link.close("leaving", "the agent is leaving")

    async def drain(self, reason: str) -> None:
        """Ask the server to prefer other agents; return when it has acknowledged, or after five seconds.

        Dials that arrive all the same are served.
        """
        self._draining = True
        link = self._link
        if link is None:
            return
        self._drain_seq += 1
        self._acked = trio.Event()
        log.info("drain started", reason=reason, open=self.life.open.value)
        ms = int(self.config.timeouts.shutdown * 1000)
        link.session.send_control(Drain(self._drain_seq, "soft", reason, ms, self.life.open.value))
        link.flush()
        with trio.move_on_after(_ACK):
            await self._acked.wait()
            return
        log.warning("drain not acked", server=self.config.server)

    # -- the link

    async def _keep_linked(self) -> None:
        while True:
            try:
                await self._link_once()
            except (DialError, HandshakeRefused, LinkClosed) as error:
                delay = self._backoff.next()
                log.warning(
                    "link failed",
                    server=self.config.server,
                    attempt=self._backoff.attempt,
                    delay=f"{delay:.2f}s",
                    cause=error,
                )
                await trio.sleep(delay)

    async def _link_once(self) -> None:
        """Connect, be linked, and raise what ended it."""
        server = self.config.server
        with trio.move_on_after(self.config.timeouts.handshake) as scope:
            sock = await self._connector.connect(server.host, server.port)
        if scope.cancelled_caught:
            raise DialTimeout(f"{server}: no connection within {self.config.timeouts.handshake:g} s")
        handshake = DiallingHandshake(Identity("agent", self.config.name, self._instance, draining=self._draining))
        link = Link(
            SocketTransport(sock),
            handshake,
            limits=self.config.limits,
            timeouts=self.config.timeouts,
            on_dial=self._dialled,
            on_control=self._control,
        )
        await self.life.background.start(link.run)
        await self._while_linked(link)

    async def _while_linked(self, link: Link) -> None:
        began = trio.current_time()
        self._link = link
        self.linked.set()
        log.info("linked", server=self.config.server, server_id=link.peer.instance if link.peer else "")
        await link.ended.wait()
        self._link = None
        self.linked = trio.Event()
        self._backoff.lived(trio.current_time() - began)
        raise LinkClosed(str(link.why))

    def _control(self, packet: Packet) -> None:
        if isinstance(packet, DrainAck) and packet.seq == self._drain_seq:
            self._acked.set()

    # -- dials

    def _dialled(self, stream: TunnelStream, request: DialReq) -> None:
        if not self.life.spawn(self._serve, stream, request):
            stream.core.refuse(RefusedDraining("the agent has left"))

    async def _serve(self, stream: TunnelStream, request: DialReq) -> None:
        """One stream, from its DIAL_REQ to the end of both directions."""
        seconds = min(request.ms / 1000, self.config.dial_timeout)
        with trio.move_on_after(seconds) as scope:
            stream.core.attach(_Dialling(scope))
            try:
                target = Target(request.host, request.port)
                sock = await self._connector.connect(target.host, target.port)
            except (DialError, AddressError) as error:
                self._refuse(stream, error if isinstance(error, DialError) else DialProtocolError(str(error)))
                return
        if scope.cancelled_caught:
            self._refuse(stream, DialTimeout(f"{request.host} port {request.port}: no answer within {seconds:g} s"))
        elif stream.core.state is not State.DIALLING:
            sock.close()
        else:
            stream.core.accept()
            self.served += 1
            await self._carry(stream, sock)

    def _refuse(self, stream: TunnelStream, error: DialError) -> None:
        if stream.core.state is State.DIALLING:
            log.info("dial failed", code=error.code, cause=error.text)
            stream.core.refuse(error)
            stream.outlet.flush()

    async def _carry(self, stream: TunnelStream, sock: socket.socket) -> None:
        try:
            await self._board.join(sock, stream)
        except StreamReset as error:
            log.debug("stream reset", stream=stream.core.id, code=error.code, cause=error.text)


def run(config: AgentConfig) -> int:
    """Run an agent as this process's program, under its signals; the exit code."""
    return trio.run(live, Agent(config).life)
