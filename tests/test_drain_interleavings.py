"""Whole servers, agents and a client over memory, on a mock clock, while things happen to them in random order.

``play(steps, seed)`` does the steps, waits until all is quiet, has everybody leave, and raises ``AssertionError``, with
the story so far, when something is not as it should be:

- every dial ends once and in time: in a stream, in a ``DialError``, or because its server was killed or had to cut it;
- no dial goes to a draining backend while an active one matches, and none to a final one;
- whoever leaves is gone within its budget and half a second;
- an agent that says DRAINED has nothing open or pending, and all servers have acknowledged; who has, knows;
- the pools of a server are what its backends say;
- when all is quiet, everyone that is alive is linked, and servers know what their agents say of draining;
- nothing is logged as an error, and nobody breaks a rule of the protocol;
- ``gentle``: where programs only drain and leave, with time enough, and one agent stays, every dial gets its stream,
  no agent refuses that was active when it was chosen, and none that was linked goes without an answer.

Only the system is replaced: ``Wire`` stands for connected sockets, ``Net`` for listeners and names. Connections from
clients and to targets are socket pairs. A seed decides delays, the order of tasks, and what is random in the tunnel.
"""

from __future__ import annotations

import logging
import math
import random
import socket
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from tunnel import secure
from tunnel import server as server_module
from tunnel.address import Identifier, ListenAddress, Target
from tunnel.agent import Agent
from tunnel.backends import Backend, Backends, Decision
from tunnel.client import Client
from tunnel.config import AgentConfig, Claims, ClientConfig, Forward, ServerConfig
from tunnel.connect import Address, Connector
from tunnel.desk import ServerDesk
from tunnel.drain import AgentDrain, DrainPhase
from tunnel.errors import DialError, LinkLost, Refused, RefusedDraining, RemoteProtocolError, TunnelError
from tunnel.lifecycle import Lifecycle, Phase
from tunnel.limits import Timeouts
from tunnel.link import Link
from tunnel.listen import Handler, Spawn
from tunnel.pools import BackendState
from tunnel.server import Server
from tunnel.stream import TunnelStream
from tunnel.transport import Buffer, More, Room, Take
from tunnel.watch import AgentState

ACTIVE, DRAINING, FINAL, GONE = BackendState
SERVERS, AGENTS = ("s0", "s1"), ("a0", "a1", "a2")
CLAIMS = {"a1": Claims((Identifier.parse("host=quick.test"),)), "a2": Claims(priority=1)}
DELAYS = {"quick.test": 0.0, "slow.test": 2.0, "refused.test": 0.01, "silent.test": math.inf}  # until they answer
ROUTES = [(host, agent) for host in ("quick.test", "slow.test") for agent in (None, "a0")]  # where they may lead to
ROUTES += [("refused.test", None), ("silent.test", None)]
LINKS, FRONT = 1, 10  # ports of servers: for links, and the first of those that lead to targets
BUDGETS = (0.0, 0.5, 3.0, 9.0)
LATENCIES = (0.0, 0.001, 0.02, 0.1)
DIAL_TIMEOUT = 6.0
QUIET = 27.0  # seconds after which every deadline is over: of dials, of leaving, of silent links and of linking again
KNOWN_AS = {  # what a server that has acknowledged takes an agent for; a command marks before the agent knows of it
    DrainPhase.ACTIVE: (ACTIVE, DRAINING),
    DrainPhase.SOFT: (DRAINING,),
    DrainPhase.FINAL: (FINAL,),
}

Step = tuple[Any, ...]


# -- what stands for the system


class Wire:
    """One end of a connection, as a link's transport. What is sent is at the other end some ``latency`` later."""

    other: Wire
    binding, address = b"", "a wire"

    def __init__(self, latency: float) -> None:
        self.latency = latency
        self.blocked = False  # nothing arrives any more
        self.full = False  # and nothing is taken
        self.closed = self.broken = self.parting = False
        self._arriving: deque[tuple[float, bytes]] = deque()
        self._waiting = trio.CancelScope()  # of who receives, until something is due
        self._room = trio.Event()  # for who sends

    def __repr__(self) -> str:
        return "<Wire>"

    @classmethod
    def pair(cls, latency: float) -> tuple[Wire, Wire]:
        one, other = cls(latency), cls(latency)
        one.other, other.other = other, one
        return one, other

    def getpeername(self) -> tuple[str, int]:
        return "wire", 0

    @property
    def in_use(self) -> bool:
        """Whether who has this end counts on it."""
        return not (self.closed or self.parting or self.broken)

    def block(self, *, full: bool) -> None:
        for end in (self, self.other):
            end.blocked, end.full = True, full

    def cut(self) -> None:
        """The connection breaks, and what was on its way is lost."""
        for end in (self, self.other):
            end.blocked = end.full = False
            end._arriving.clear()
            end._put(b"")
            end._wake_sender()
            end.broken = True

    def _put(self, data: bytes) -> None:
        if not self.broken and not self.closed:
            self._arriving.append((trio.current_time() + self.latency, data))
            self._waiting.deadline = self._due

    def _wake_sender(self) -> None:
        self._room.set()
        self._room = trio.Event()

    @property
    def _due(self) -> float:
        return self._arriving[0][0] if self._arriving and not self.blocked else math.inf

    async def receive(self, room: Room, take: Take) -> bool:
        while count := await self._receive(room):
            if not take(count):
                return True
        return False

    async def _receive(self, room: Room) -> int:
        if self._due <= trio.current_time():
            await trio.lowlevel.checkpoint()
        while self._due > trio.current_time():
            with trio.CancelScope(deadline=self._due) as self._waiting:
                await trio.sleep_forever()
        due, data = self._arriving[0]
        view = room()[: len(data)]
        view[:] = data[: len(view)]
        if data:  # the end stays
            self._arriving.popleft()
        if len(view) < len(data):
            self._arriving.appendleft((due, data[len(view) :]))
        return len(view)

    def send_now(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        if self.closed:
            raise trio.ClosedResourceError
        if self.full:
            return buffers
        self.other._put(b"".join(buffers))
        return ()

    async def send(self, more: More) -> None:
        await trio.lowlevel.checkpoint()
        while buffers := more():
            while self.full and not self.closed:
                await self._room.wait()
            self.send_now(buffers)

    async def linger(self) -> None:
        self.parting = True
        self.other._put(b"")
        scratch = memoryview(bytearray(1 << 16))
        await self.receive(lambda: scratch, lambda count: True)

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        if not self.closed:
            self.other._put(b"")
            self.closed = True
            self._wake_sender()


@dataclass
class Listener:
    """What stands for a listening socket."""

    address: ListenAddress


class Net:
    """Names, listeners, connections.

    Attributes:
        listeners: by host and port, what starts a handler and the handler.
        wires: one end of each connection between programs.
    """

    def __init__(self, nursery: trio.Nursery, pick_latency: Callable[[], float]) -> None:
        self.listeners: dict[tuple[str, int], tuple[Spawn, Handler]] = {}
        self.wires: list[Wire] = []
        self._nursery = nursery
        self._pick_latency = pick_latency

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(secure, "SocketTransport", lambda wire: wire)
        patch.setattr(server_module, "bind", self.bind)
        patch.setattr(server_module, "bound_address", lambda listener: listener.address)
        patch.setattr(server_module, "accept", self.accept)
        patch.setattr(Connector, "resolve", self.resolve)
        patch.setattr(Connector, "connect_to", self.connect_to)
        patch.setattr(Connector, "connect", self.connect)

    async def bind(self, address: ListenAddress) -> list[Listener]:
        await trio.lowlevel.checkpoint()
        return [Listener(address)]

    async def accept(self, listener: Listener, handler: Handler, spawn: Spawn) -> None:
        where = (listener.address.host, listener.address.port)
        self.listeners[where] = mine = (spawn, handler)
        try:
            await trio.sleep_forever()
        finally:
            if self.listeners[where] is mine:
                del self.listeners[where]

    async def resolve(self, host: str, port: int) -> list[Address]:
        await trio.lowlevel.checkpoint()
        return [(int(socket.AF_INET), (host, port))]

    async def connect_to(self, address: Address) -> Wire:
        latency = self._pick_latency()
        await trio.sleep(latency)
        if address[1] not in self.listeners:
            raise Refused("nobody listens")
        spawn, handler = self.listeners[address[1]]
        near, far = Wire.pair(latency)
        self.wires.append(near)
        if not spawn(handler, cast(socket.socket, far)):
            far.close()
        return near

    async def connect(self, host: str, port: int) -> Wire | socket.socket:
        """To a server from a client, or to a target from an agent."""
        if host in SERVERS:
            return await self.connect_to((0, (host, port)))
        await trio.sleep(DELAYS[host])
        if host == "refused.test":
            raise Refused(host)
        near, far = socket.socketpair()
        near.setblocking(False)
        self._nursery.start_soon(until_end, far)
        return near


async def until_end(sock: socket.socket) -> None:
    """What a target does with a connection: nothing, until the other side is done."""
    with suppress(OSError, trio.BrokenResourceError):
        async with trio.SocketStream(trio.socket.from_stdlib_socket(sock)) as stream:
            async for _ in stream:
                pass


# -- what happens

P = TypeVar("P", Server, Agent)


@dataclass(eq=False)
class Life(Generic[P]):
    """A server or an agent, from its start to its end."""

    label: str
    program: P
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    killed: bool = False
    ended: float = math.inf

    def __repr__(self) -> str:
        return self.label

    @property
    def life(self) -> Lifecycle:
        return self.program.life

    @property
    def alive(self) -> bool:
        return math.isinf(self.ended)

    @property
    def late(self) -> bool:
        """Whether it takes, or took, longer to leave than it may."""
        latest = self.life._began + self.program.config.timeouts.shutdown + 0.5
        return self.life.leaving and not self.killed and min(self.ended, trio.current_time()) > latest


@dataclass(eq=False)
class Dial:
    """A dial: who asked, when, and how it ended, as often as it did."""

    label: str
    began: float
    server: Life[Server] | None
    ends: list[str] = field(default_factory=list)


class World:
    """Everything, and what may happen to it: the public methods of the first half are the steps.

    Attributes:
        story: what happened, and when.
        faults: what was not as it should be.
        known: the backends of each server, in any state.
        linked: the agents' ends of links that were up.
    """

    def __init__(
        self, nursery: trio.Nursery, seed: int, *, gentle: bool, budgets: Sequence[float], latencies: Sequence[float]
    ) -> None:
        self.gentle = gentle
        self.story: list[str] = []
        self.faults: list[str] = []
        self.known: defaultdict[Backends, list[Backend]] = defaultdict(list)
        self.linked: set[Wire] = set()
        self.dice = random.Random(seed)
        self.net = Net(nursery, lambda: self.dice.choice(latencies))
        self.all_agents: list[Life[Agent]] = []
        self.all_servers: list[Life[Server]] = []
        self.ways_to_finish: list[Callable[[], object]] = []  # one for each stream that a client may have
        self.dials: list[Dial] = []
        self.clients: list[tuple[Life[Server], socket.socket]] = []
        self.doors = tuple(Target(name, LINKS) for name in SERVERS)
        self.client = Client(ClientConfig(self.doors, "client"))
        self._nursery = nursery
        self._budgets = budgets
        self._rolled = -math.inf

    def tell(self, text: str) -> None:
        self.story.append(f"{trio.current_time():9.3f} {text}")

    def fault(self, text: str) -> None:
        if not self.over:
            self.tell(f"FAULT: {text}")
            self.faults.append(text)

    @property
    def over(self) -> bool:
        return self._nursery.cancel_scope.cancel_called

    @property
    def agents(self) -> list[Life[Agent]]:
        return [life for life in self.all_agents if life.alive]

    @property
    def servers(self) -> list[Life[Server]]:
        return [life for life in self.all_servers if life.alive]

    def _server(self, name: str) -> Life[Server] | None:
        return next((life for life in self.servers if life.label == name), None)

    def _has_anchor(self, server: Life[Server]) -> bool:
        """Whether the first agent is linked to a server."""
        return any(server.program.backends.of_instance(life.program.instance) for life in self.agents[:1])

    # -- who is there

    def start_server(self, name: str) -> None:
        if self._server(name) is None:
            forwards = tuple(
                Forward(ListenAddress(name, FRONT + number), Target(host, 80), agent)
                for number, (host, agent) in enumerate(ROUTES)
            )
            timeouts = self._timeouts()
            config = ServerConfig(
                ListenAddress(name, LINKS),
                None,
                forwards,
                dial_timeout=DIAL_TIMEOUT,
                lame_duck=self.dice.choice((0.0, timeouts.shutdown / 3)),
                timeouts=timeouts,
            )
            self.all_servers.append(Life(name, Server(config)))
            self._nursery.start_soon(self._live, self.all_servers[-1])

    def start_agent(self, name: str) -> None:
        if len(self.agents) < 5:
            config = AgentConfig(self.doors, name, CLAIMS.get(name, Claims()), timeouts=self._timeouts())
            self.all_agents.append(Life(f"{name}#{len(self.all_agents)}", Agent(config)))
            self._nursery.start_soon(self._live, self.all_agents[-1])

    def _timeouts(self) -> Timeouts:
        budget = max(BUDGETS) if self.gentle else self.dice.choice(self._budgets)
        return Timeouts(handshake=4.0, shutdown=budget, backoff_max=2.0)

    async def _live(self, life: Life[Any]) -> None:
        with life.scope:
            code = await life.program.run()
            self.tell(f"{life} exits with {code}")
        life.ended = trio.current_time()

    def leave(self, life: Life[Any]) -> None:
        life.life.leave()

    def hurry(self, life: Life[Any]) -> None:
        life.life.cut()

    def kill(self, life: Life[Any]) -> None:
        life.killed = True
        for link in list(life.program._links if isinstance(life.program, Server) else life.program.sync.links.values()):
            link.drop("killed")
        life.scope.cancel()

    def roll(self, name: str) -> None:
        """A server leaves, if another one will do; some time later a new one is there. No dial meets two of those."""
        life = self._server(name)
        others = [server for server in self.servers if server is not life and not server.life.leaving]
        long_ago = trio.current_time() - self._rolled > DIAL_TIMEOUT
        if life is not None and long_ago and any(map(self._has_anchor, others)):
            self._rolled = trio.current_time()
            life.life.leave()
            self._nursery.start_soon(self._follow, life)

    async def _follow(self, life: Life[Server]) -> None:
        await life.life.phase.wait_value(Phase.EXIT)
        await trio.sleep(DIAL_TIMEOUT)  # a client that goes there at once would find no agent yet
        self.start_server(life.label)

    # -- draining

    def drain(self, agent: Life[Agent], reason: str, seconds: float, leave: bool) -> None:
        stays = self.gentle and agent is self.agents[0]
        agent.program.drain(reason, seconds=seconds, leave=leave and not stays)

    def undrain(self, agent: Life[Agent], reason: str) -> None:
        agent.program.undrain(reason)

    def command(self, server: str, agent: str, seconds: float, leave: bool) -> None:
        if life := self._server(server):
            ServerDesk(life.program).drain_agent(agent, "for the test", seconds, leave=leave)

    def uncommand(self, server: str, agent: str) -> None:
        if life := self._server(server):
            ServerDesk(life.program).undrain_agent(agent)

    # -- links

    def cut_link(self, wire: Wire) -> None:
        wire.cut()

    def block_link(self, wire: Wire, full: bool) -> None:
        wire.block(full=full)

    # -- dials

    def dial(self, server: str, route: int) -> None:
        """A connection to a front-end."""
        life, listener = self._server(server), self.net.listeners.get((server, FRONT + route))
        if life is not None and listener is not None and (self._has_anchor(life) or not self.gentle):
            near, far = socket.socketpair()
            near.setblocking(False)
            far.setblocking(False)
            self.clients.append((life, far))
            self.ways_to_finish.append(far.close)
            spawn, handler = listener
            if not spawn(handler, near):
                near.close()

    def burst(self, server: str, route: int) -> None:
        """Several, soon after each other, whose clients do not stay for long."""
        self._nursery.start_soon(self._burst, server, route)

    async def _burst(self, server: str, route: int) -> None:
        for _ in range(6):
            await trio.sleep(self.dice.choice((0.0, 0.001, 0.05)))
            before = len(self.ways_to_finish)
            self.dial(server, route)
            for way in self.ways_to_finish[before:]:
                self._nursery.start_soon(self._finish_later, way)

    async def _finish_later(self, way: Callable[[], object]) -> None:
        await trio.sleep(self.dice.random() * 2)
        if way in self.ways_to_finish:
            self.finish(way)

    def finish(self, way: Callable[[], object]) -> None:
        self.ways_to_finish.remove(way)
        way()

    def dial_by_client(self, route: int) -> None:
        done = trio.Event()
        self.ways_to_finish.append(done.set)
        self._nursery.start_soon(self._dial_by_client, *ROUTES[route], done)

    async def _dial_by_client(self, host: str, agent: str | None, done: trio.Event) -> None:
        with suppress(DialError):
            dialling = self.client.dial(host, 80, agent=agent, timeout=DIAL_TIMEOUT)
            stream = await self.record(None, f"client to {host} by {agent}", dialling)
            await done.wait()
            await stream.aclose()

    async def wait(self, seconds: float) -> None:
        """Wait, and look whether all is well meanwhile."""
        times = max(1, round(seconds / 5))
        for _ in range(times):
            await trio.sleep(seconds / times)
            await wait_all_tasks_blocked()
            self.check()

    # -- what should hold

    async def record(self, server: Life[Server] | None, label: str, dialling: Awaitable[TunnelStream]) -> TunnelStream:
        """Watch a dial."""
        dial = Dial(f"dial {len(self.dials)}: {label}", trio.current_time(), server)
        self.dials.append(dial)
        try:
            stream = await dialling
        except DialError as error:
            self._ended(dial, error.code)
            raise
        except trio.Cancelled:
            self._ended(dial, "cancelled")
            raise
        self._ended(dial, "stream")
        return stream

    def _ended(self, dial: Dial, how: str) -> None:
        if self.over:
            return
        dial.ends.append(how)
        self.tell(f"{dial.label}: {how}")
        took = trio.current_time() - dial.began
        if len(dial.ends) > 1 or took > DIAL_TIMEOUT + 0.001:
            self.fault(f"{dial.label}: ended in {dial.ends} after {took:g} s")
        if self.gentle and how != "stream":
            self.fault(f"{dial.label}: {how}")
        if how == "cancelled" and dial.server is not None:
            had_to = dial.server.killed or dial.server.life.phase.value in (Phase.CUT, Phase.CLOSING)
            if not had_to:
                self.fault(f"{dial.label}: cancelled by {dial.server.life!r}")

    def check(self) -> None:
        """What holds whenever nobody has anything to do at this moment."""
        lives: list[Life[Any]] = [*self.all_agents, *self.all_servers]
        for life in lives:
            if life.late:
                self.fault(f"{life} leaves late: {life.life!r}")
        for agent in self.agents:
            self._check_agent(agent)
        for manager in self.known:
            self.check_pools(manager)
        assert not self.faults

    def _check_agent(self, life: Life[Agent]) -> None:
        agent = life.program
        left = agent.life.open.value, agent.dials.pending, agent.draining.unacked
        if agent.state.value is AgentState.DRAINED and any(left):
            self.fault(f"{life} is drained with {left} open, pending, unacked")
        if not agent.draining.unacked:
            for backend in self._backends_of(agent):
                if backend.state not in KNOWN_AS[agent.draining.phase] and wire_of(backend).other.in_use:
                    self.fault(f"{life} is acknowledged to be {agent.draining!r}, and is {backend!r}")

    def _backends_of(self, agent: Agent) -> list[Backend]:
        here = (backend for server in self.servers for backend in self.known[server.program.backends])
        return [one for one in here if one.instance == agent.instance and one.state is not GONE]

    def check_pools(self, manager: Backends) -> None:
        """They are what is derived from scratch."""
        here = self.known[manager] = [one for one in self.known[manager] if one.state is not GONE]
        derived: defaultdict[Any, set[Backend]] = defaultdict(set)
        for one in here:
            for key in keys_of(one) if one.state is not FINAL else ():
                derived[key, one.priority, one.state, one.name].add(one)
        found = {
            (key, priority, state, name): set(bag)
            for key, bucket in manager.index.buckets.items()
            for priority, tier in bucket._tiers.items()
            for state, pool in tier.items()
            for name, bag in pool._by_name.items()
        }
        if found != derived or len(manager) != len(here) or set(manager._instances.values()) != set(here):
            self.fault(f"pools are {found}, not {dict(derived)}")

    def check_pick(self, manager: Backends, decision: Decision, agent: str | None, besides: str | None) -> None:
        self.check_pools(manager)
        picked = decision.backend
        others = [one for one in self.known[manager] if one.instance != besides and agent in (None, one.name)]
        spared = picked.state is DRAINING and any(one.state is ACTIVE for one in others)
        if spared or picked.state not in (ACTIVE, DRAINING):
            self.fault(f"{picked!r} was picked, of {others}")

    def check_failed(self, decision: Decision, error: DialError) -> None:
        """What an agent may answer while everybody leaves as they should."""
        lost = isinstance(error, LinkLost) and wire_of(decision.backend).other in self.linked
        unwarned = isinstance(error, RefusedDraining) and not decision.fallback
        if self.gentle and (lost or unwarned):
            self.fault(f"{decision}: {error!r}")

    def check_quiet(self) -> None:
        """What holds when nothing happened for long."""
        for dial in self.dials:
            if len(dial.ends) != 1:
                self.fault(f"{dial.label}: ended in {dial.ends}")
        for server, sock in self.clients:
            if not server.alive and not has_ended(sock):
                self.fault(f"a client of {server} was not told that it is gone")
        servers = {server.program.identity.instance for server in self.servers}
        for life in self.agents:
            drain, links = life.program.draining, life.program.sync.links
            states = {backend.state for backend in self._backends_of(life.program)}
            if drain.unacked or not states <= {DRAINING if drain.draining else ACTIVE}:
                self.fault(f"{life} is {drain!r}, and to servers {states}")
            if not drain.draining and set(links) != servers:
                self.fault(f"{life} is linked to {links}, of {servers}")
        assert not self.faults


def keys_of(backend: Backend) -> Iterator[tuple[str, str, int]]:
    yield "any", "", 0
    yield "agent", backend.name, 0
    for identifier in backend.claims.identifiers:
        yield identifier.kind, identifier.value, 0


def wire_of(backend: Backend) -> Wire:
    return cast(Wire, backend.link._transport)


def has_ended(sock: socket.socket) -> bool:
    """Whether either side has closed it."""
    try:
        return sock.fileno() < 0 or not sock.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def watch(world: World, patch: pytest.MonkeyPatch) -> None:
    """Have the world know of dials, picks, backends and links."""
    add, decide, dial_through, dial = Backends.add, Backends.decide, Backends._dial_through, Server._dial
    linked, end = AgentDrain.linked, Link._end

    def watched_add(manager: Backends, backend: Backend) -> None:
        world.known[manager].append(backend)
        add(manager, backend)

    def watched_decide(
        manager: Backends, target: Target, agent: str | None = None, besides: str | None = None
    ) -> Decision:
        decision = decide(manager, target, agent, besides)
        world.check_pick(manager, decision, agent, besides)
        return decision

    async def watched_dial_through(manager: Backends, decision: Decision, *args: Any) -> TunnelStream:
        try:
            return await dial_through(manager, decision, *args)
        except DialError as error:
            world.check_failed(decision, error)
            raise

    async def watched_dial(server: Server, target: Target, agent: str | None) -> TunnelStream:
        life = next(life for life in world.all_servers if life.program is server)
        return await world.record(life, f"{life} to {target.host} by {agent}", dial(server, target, agent))

    def watched_linked(drain: AgentDrain, link: Link, *args: Any) -> None:
        world.linked.add(cast(Wire, link._transport))
        linked(drain, link, *args)

    def watched_end(link: Link, why: TunnelError) -> None:
        if isinstance(why, RemoteProtocolError):
            world.fault(f"a rule was broken: {why}")
        end(link, why)

    patch.setattr(Backends, "add", watched_add)
    patch.setattr(Backends, "decide", watched_decide)
    patch.setattr(Backends, "_dial_through", watched_dial_through)
    patch.setattr(Server, "_dial", watched_dial)
    patch.setattr(AgentDrain, "linked", watched_linked)
    patch.setattr(Link, "_end", watched_end)


@contextmanager
def errors_in_log(world: World) -> Iterator[None]:
    """Each of them is a fault; all else is not even made into a record."""
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: world.fault(logging.Formatter().format(record))  # type: ignore[method-assign]
    logger = logging.getLogger("tunnel")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# -- playing


async def begin(world: World) -> None:
    for name in SERVERS:
        world.start_server(name)
    await wait_all_tasks_blocked()
    for name in AGENTS[:2]:
        world.start_agent(name)
    await world._nursery.start(world.client.run)
    await trio.sleep(3)
    await world.client.connect()


async def do(world: World, name: str, *args: Any) -> None:
    """One step. A number in the place of something stands for one of those that are there, if there are any."""
    programs: list[Life[Any]] = [*world.agents, *world.servers]
    wires = [wire for wire in world.net.wires if wire.in_use and wire.other.in_use]
    there: dict[str, Sequence[object]] = {
        "drain": world.agents,
        "undrain": world.agents,
        "leave": world.agents[1:] if world.gentle else programs,
        "hurry": [life for life in programs if life.life.leaving],
        "kill": programs,
        "cut_link": wires,
        "block_link": wires,
        "finish": world.ways_to_finish,
    }
    if name in there:
        if not there[name]:
            return
        args = (there[name][args[0] % len(there[name])], *args[1:])
    world.tell(f"{name} {', '.join(map(str, args))}")
    done = getattr(world, name)(*args)
    if done is not None:
        await done


async def end(world: World) -> None:
    await world.wait(QUIET)
    world.check_quiet()
    for those in (world.agents, world.servers):
        for life in those:
            world.tell(f"leave {life}")
            life.life.leave()
        await world.wait(max(BUDGETS) + 1)
        world.check_quiet()
    assert not world.agents
    assert not world.servers


async def play_in_trio(steps: Sequence[Step], seed: int, circumstances: dict[str, Any]) -> None:
    failure: AssertionError | None = None
    async with trio.open_nursery() as nursery:
        world = World(nursery, seed, **circumstances)
        with pytest.MonkeyPatch.context() as patch, errors_in_log(world):
            world.net.patch(patch)
            watch(world, patch)
            try:
                await begin(world)
                for step in steps:
                    await do(world, *step)
                    if world.dice.random() < 0.7:
                        await wait_all_tasks_blocked()
                        world.check()
                await end(world)
            except AssertionError as error:
                failure = error
                failure.add_note("\n".join(world.story))
            nursery.cancel_scope.cancel()
            for _, sock in world.clients:
                sock.close()
    if failure:
        raise failure


def play(
    steps: Sequence[Step],
    seed: int = 0,
    *,
    gentle: bool = False,
    budgets: Sequence[float] = BUDGETS,
    latencies: Sequence[float] = LATENCIES,
) -> None:
    """See the head of this file."""
    random.seed(seed)
    trio._core._run._r.seed(seed)  # the order in which tasks run
    circumstances = {"gentle": gentle, "budgets": budgets, "latencies": latencies}
    trio.run(play_in_trio, steps, seed, circumstances, clock=MockClock(autojump_threshold=0))


def step(name: str, *args: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.tuples(st.just(name), *args)


SERVER, AGENT, WHICH, FLAG = st.sampled_from(SERVERS), st.sampled_from(AGENTS[1:]), st.integers(0, 9), st.booleans()
REASON, TIME = st.sampled_from(("admin", "signal")), st.sampled_from((math.inf, 0.0, 2.0))
GENTLE = [
    *[step("wait", st.sampled_from((0.0, 0.001, 0.02, 0.2, 1.0, 4.0)))] * 4,
    *[step("burst", SERVER, st.integers(0, 3))] * 3,
    step("dial", SERVER, st.integers(0, 3)),
    step("dial_by_client", st.integers(0, 3)),
    step("finish", WHICH),
    *[step("drain", WHICH, REASON, TIME, FLAG)] * 2,
    *[step("undrain", WHICH, REASON)] * 2,
    step("command", SERVER, AGENT, st.sampled_from((0.0, 2.0)), FLAG),
    step("uncommand", SERVER, AGENT),
    step("leave", WHICH),
    step("roll", SERVER),
    *[step("start_agent", AGENT)] * 2,
]
WILD = [
    *GENTLE,
    step("wait", st.just(12.0)),
    step("dial", SERVER, st.integers(0, len(ROUTES) - 1)),
    step("dial_by_client", st.integers(0, len(ROUTES) - 1)),
    step("hurry", WHICH),
    step("kill", WHICH),
    *[step("start_server", SERVER)] * 2,
    step("start_agent", st.just("a0")),
    step("cut_link", WHICH),
    step("block_link", WHICH, FLAG),
]
PARTS = 5  # of each test, so that they can be played side by side; none has the others' seeds
SEED = st.integers(0, 1 << 16)


@pytest.mark.timeout(600)  # finding the shortest example of a fault takes a while
@pytest.mark.parametrize("part", range(PARTS))
@settings(max_examples=150 // PARTS)
@given(steps=st.lists(st.one_of(WILD), min_size=12, max_size=40), seed=SEED)
def test_whatever_happens(part: int, steps: list[Step], seed: int) -> None:
    play(steps, PARTS * seed + part)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
@settings(max_examples=80 // PARTS)
@given(steps=st.lists(st.one_of(GENTLE), min_size=12, max_size=40), seed=SEED)
def test_no_dial_fails_while_programs_drain_and_leave_in_peace(part: int, steps: list[Step], seed: int) -> None:
    play(steps, PARTS * seed + part, gentle=True)


# -- what these have found, reduced


def test_an_agent_is_not_drained_while_a_server_may_have_taken_a_hello_that_said_otherwise() -> None:
    play(
        [("start_agent", "a2"), ("wait", 0.25), ("drain", 2, "admin", math.inf, False), ("wait", 0.0)], latencies=[0.1]
    )


@pytest.mark.parametrize("who", [pytest.param(2, id="agent"), pytest.param(3, id="server")])
def test_leaving_does_not_wait_for_last_words_on_a_link_that_never_was(who: int) -> None:
    """The handshake on a link that takes nothing has just been given up: by both the agent and the server."""
    steps = [("start_agent", "a2"), ("wait", 0.15), ("block_link", 5, True), ("wait", 4.0), ("leave", who)]
    play([*steps, ("wait", 0.6)], budgets=[0.0], latencies=[0.1])
