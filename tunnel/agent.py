"""The agent: links to servers, and connects the streams they ask for to targets.

Rules that hold here:

- Losing a link costs its streams and nothing else; the sync loop restores it until the agent is told to leave.
- The agent owns its drain state and says it in every HELLO; if it changed before WELCOME, DRAIN is the first packet.
- A dial ends in exactly one answer. If the peer gave it up meanwhile, the target's socket is closed at once.

This file must not know the command line, or servers' insides.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping

import trio

from tunnel import logs
from tunnel.address import Target
from tunnel.config import AgentConfig
from tunnel.connect import Connector
from tunnel.errors import (
    AddressError,
    DialError,
    DialProtocolError,
    DialTimeout,
    Refused,
    RefusedDraining,
    StreamReset,
    first_of,
)
from tunnel.frames import DialReq, Drain, DrainAck, Packet, Welcome
from tunnel.handshake import DiallingHandshake, Identity, new_instance
from tunnel.lifecycle import Lifecycle, live
from tunnel.link import Link
from tunnel.relay import Switchboard
from tunnel.session import State
from tunnel.stream import Dialling, TunnelStream
from tunnel.sync import SyncLoop
from tunnel.transport import SocketTransport

log = logs.get_logger(__name__)

_ACK = 5.0  # seconds that a server has for acknowledging a DRAIN


Service = Callable[[trio.abc.HalfCloseableStream], Awaitable[None]]
"""Serves one connection, as a handler of ``trio.serve_tcp`` does."""


class Agent:
    """One agent.

    Args:
        services: what serves a target in this process, by ``HOST:PORT``. If given, these are all that the agent
            serves: other targets are refused, and it connects nowhere.

    Attributes:
        life: where it is between start and exit.
        sync: what keeps the links; ``sync.links`` are those that are up.
        linked: set while there is a link; replaced by a new event when the last one is lost.
        draining: whether servers were asked to prefer other agents.
        served: how many dials were answered with a stream.

    Raises:
        AddressError: a key of ``services`` is no target.
    """

    def __init__(self, config: AgentConfig, services: Mapping[str, Service] | None = None) -> None:
        self.config = config
        self.life = Lifecycle(self, config.timeouts.shutdown)
        self.linked = trio.Event()
        self.served = 0
        self.draining = False
        self._services = None if services is None else {Target.parse(at): talk for at, talk in services.items()}
        self._instance = new_instance()
        self._board = Switchboard()
        self._connector = Connector()
        self.sync = SyncLoop(config.servers, Connector(), config.timeouts, self._make_link)
        self._drain_seq = 0
        self._drain_reason = ""
        self._unacked: dict[Link, trio.Event] = {}  # by links that owe an ack of the last DRAIN

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
        await life.background.start(self._board.run)
        life.accepting.start_soon(self.sync.run, life.background)

    async def tell(self) -> None:
        """See ``lifecycle.Program``."""
        await self.drain("signal")

    @property
    def unsent(self) -> bool:
        """See ``lifecycle.Program``."""
        return any(link.sending for link in self.sync.links.values())

    async def settle(self) -> None:
        """See ``lifecycle.Program``."""
        while blocked := next((link for link in self.sync.links.values() if link.sending), None):
            await blocked.all_sent()

    async def close(self) -> None:
        """See ``lifecycle.Program``."""
        async with trio.open_nursery() as nursery:
            for link in self.sync.links.values():
                nursery.start_soon(link.close, "leaving", "the agent is leaving")

    async def drain(self, reason: str) -> None:
        """Ask all servers to prefer other agents; return when they have acknowledged, or after five seconds.

        Dials that arrive all the same are served. Links that are lost are restored, still draining, and no others
        are made.
        """
        self.draining = True
        self._drain_reason = reason
        self.sync.drain()
        self._drain_seq += 1
        self._unacked = {link: self._unacked.get(link, trio.Event()) for link in self.sync.links.values()}
        unacked = dict(self._unacked)
        log.info("drain started", reason=reason, open=self.life.open.value, servers=len(unacked))
        for link in unacked:
            self._send_drain(link)
        with trio.move_on_after(_ACK):
            for acked in unacked.values():
                await acked.wait()
            return
        log.warning("drain not acked", servers=sum(not acked.is_set() for acked in unacked.values()))

    def _acked(self, link: Link) -> None:
        acked = self._unacked.pop(link, None)
        if acked is not None:
            acked.set()

    def _send_drain(self, link: Link) -> None:
        ms = int(self.config.timeouts.shutdown * 1000)
        link.session.send_control(Drain(self._drain_seq, "soft", self._drain_reason, ms, self.life.open.value))
        link.flush()

    # -- links

    def _make_link(self, sock: socket.socket, on_linked: Callable[[], None], on_end: Callable[[], None]) -> Link:
        said = self.draining
        me = Identity(
            "agent",
            self.config.name,
            self._instance,
            draining=said,
            body_limit=self.config.limits.body,
            claims=self.config.claims,
            linked=tuple(self.sync.links),
        )

        def linked() -> None:
            on_linked()
            self.linked.set()
            if self.draining and not said:  # it began between HELLO and WELCOME
                self._send_drain(link)

        def ended() -> None:
            on_end()
            self._acked(link)
            if self.linked.is_set() and not self.sync.links:
                self.linked = trio.Event()

        link = Link(
            SocketTransport(sock),
            DiallingHandshake(me),
            limits=self.config.limits,
            timeouts=self.config.timeouts,
            on_dial=self._dialled,
            on_control=lambda packet: self._control(link, packet),
            on_linked=linked,
            on_end=ended,
        )
        return link

    def _control(self, link: Link, packet: Packet) -> None:
        if isinstance(packet, DrainAck):
            if packet.seq == self._drain_seq:
                self._acked(link)
        elif isinstance(packet, Welcome):
            self.sync.told_count(link)

    # -- dials

    def _dialled(self, stream: TunnelStream, request: DialReq) -> None:
        if not self.life.spawn(self._serve, stream, request):
            stream.refuse(RefusedDraining("the agent has left"))

    async def _serve(self, stream: TunnelStream, request: DialReq) -> None:
        """One stream, from its DIAL_REQ to the end of both directions."""
        try:
            target = Target(request.host, request.port)
            if self._services is None:
                await self._serve_there(stream, target, request.ms / 1000)
                return
            service = self._service_at(target, self._services)
        except AddressError as error:
            self._refuse(stream, request, DialProtocolError(str(error)))
        except DialError as error:
            self._refuse(stream, request, error)
        else:
            await self._serve_here(stream, service)

    def _refuse(self, stream: TunnelStream, request: DialReq, error: DialError) -> None:
        if stream.core.state is State.DIALLING:  # still wanted
            log.info("dial failed", target=f"{request.host}:{request.port}", code=error.code, cause=error.text)
            stream.refuse(error)

    async def _serve_there(self, stream: TunnelStream, target: Target, seconds: float) -> None:
        """Connect to the target, and carry the stream."""
        with trio.move_on_after(seconds) as scope:
            stream.core.attach(Dialling(scope))
            sock = await self._connector.connect(target.host, target.port)
        if stream.core.state is not State.DIALLING:  # given up meanwhile
            if not scope.cancelled_caught:
                sock.close()
        elif scope.cancelled_caught:
            raise DialTimeout(f"{target.host} port {target.port}: no answer within {seconds:g} s")
        else:
            stream.core.accept()
            self.served += 1
            await self._carry(stream, sock)

    def _service_at(self, target: Target, services: Mapping[Target, Service]) -> Service:
        service = services.get(target)
        if service is None:
            raise Refused(f"{target}: this agent has no such service")
        return service

    async def _serve_here(self, stream: TunnelStream, service: Service) -> None:
        """Have a service of this process talk on the stream."""
        stream.core.accept()
        stream.outlet.flush()
        self.served += 1
        try:
            await _talk(service, stream)
            await stream.aclose()
        except BaseException:
            stream.reset("reset", "the service failed")
            raise

    async def _carry(self, stream: TunnelStream, sock: socket.socket) -> None:
        try:
            await self._board.join(sock, stream)
        except StreamReset as error:
            log.debug("stream reset", stream=stream.core.id, code=error.code, cause=error.text)


async def _talk(service: Service, stream: TunnelStream) -> None:
    try:
        await service(stream)
    except* trio.BrokenResourceError as group:  # the stream, or what the service carried from elsewhere
        stream.reset("reset", f"service: {first_of(group)}")
        log.debug("stream reset", stream=stream.core.id, cause=first_of(group))


def run(config: AgentConfig) -> int:
    """Run an agent as this process's program, under its signals; the exit code."""
    return trio.run(live, Agent(config).life)
