"""Whole servers, agents and a client over memory, on a mock clock, while things happen to them in random order.

``play(steps, seed)`` does the steps, waits until everything is quiet, has everybody leave, and raises
``AssertionError``, with the story so far, when something is not as it should be:

- every dial ends in exactly one way, and in time: a stream, a ``DialError``, or its server was killed or cut it;
- no dial goes to a draining backend while an active one matches, and none to a final one;
- whoever leaves is gone within its budget, and half a second;
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from tunnel import agent as agent_module
from tunnel import client as client_module
from tunnel import server as server_module
from tunnel.address import Identifier, ListenAddress, Target
from tunnel.agent import Agent, AgentState
from tunnel.backends import Backend, Backends, Decision
from tunnel.client import Client
from tunnel.config import AgentConfig, Claims, ClientConfig, Forward, ServerConfig, Timeouts
from tunnel.connect import Address, Connector
from tunnel.drain import AgentDrain, DrainPhase
from tunnel.errors import DialError, LinkLost, Refused, RefusedDraining, RemoteProtocolError, TunnelError
from tunnel.lifecycle import Lifecycle, Phase
from tunnel.link import Link
from tunnel.listen import Handler, Spawn
from tunnel.pools import BackendState
from tunnel.server import Server
from tunnel.stream import TunnelStream
from tunnel.transport import Buffer, Room

ACTIVE, DRAINING, FINAL, GONE = BackendState
SERVERS = ("s0", "s1")
LINKS, FRONT = 1, 10  # ports of servers: for links, and the first of those that lead to targets
AGENTS = ("a0", "a1", "a2")
CLAIMS = {"a1": Claims((Identifier.parse("host=quick.test"),)), "a2": Claims(priority=1)}
KNOWN_AS = {  # what a server that has acknowledged takes an agent for; a command marks before the agent knows of it
    DrainPhase.ACTIVE: (ACTIVE, DRAINING),
    DrainPhase.SOFT: (DRAINING,),
    DrainPhase.FINAL: (FINAL,),
}
TARGETS = ("quick.test", "slow.test", "silent.test", "refused.test")
FORWARDS = [
    *[(target, agent) for target in TARGETS[:2] for agent in (None, "a0")],
    *((target, None) for target in TARGETS[2:]),
]
BUDGETS = (0.0, 0.5, 3.0, 9.0)
LATENCIES = (0.0, 0.001, 0.02, 0.1)
DIAL_TIMEOUT = 6.0
QUIET = 27.0  # seconds after which every deadline is over: of dials, of leaving, of silent links and of linking again

Step = tuple[Any, ...]


# -- what stands for the system


class Wire:
    """One end of a connection, as a link's transport. What is sent is at the other end some ``latency`` later.

    Attributes:
        blocked: nothing arrives at either end any more; if ``full``, nothing is taken any more, too.
    """

    other: Wire

    def __init__(self, latency: float) -> None:
        self.latency = latency
        self.blocked = self.full = self.closed = self.broken = self.parting = False
        self._arriving: deque[tuple[float, bytes]] = deque()
        self._changed = trio.Event()

    def __repr__(self) -> str:
        return "<Wire>"

    @property
    def in_use(self) -> bool:
        """Whether who has this end counts on it."""
        return not (self.closed or self.parting or self.broken)

    @classmethod
    def pair(cls, latency: float) -> tuple[Wire, Wire]:
        one, other = cls(latency), cls(latency)
        one.other, other.other = other, one
        return one, other

    def block(self, *, full: bool) -> None:
        for end in (self, self.other):
            end.blocked, end.full = True, full

    def cut(self) -> None:
        """The connection breaks, and what was on its way is lost."""
        for end in (self, self.other):
            end.blocked = end.full = False
            end._arriving.clear()
            end._put(b"")
            end.broken = True

    def _put(self, data: bytes) -> None:
        if not self.broken and not self.closed:
            self._arriving.append((trio.current_time() + self.latency, data))
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def receive_into(self, room: Room) -> int:
        await trio.lowlevel.checkpoint()
        while self.blocked or not self._arriving or self._arriving[0][0] > trio.current_time():
            due = math.inf if self.blocked or not self._arriving else self._arriving[0][0]
            with trio.move_on_at(due):
                await self._changed.wait()
        data = self._arriving[0][1]
        view = room()[: len(data)]
        view[:] = data[: len(view)]
        if len(view) < len(data):
            self._arriving[0] = (0.0, data[len(view) :])
        elif data:  # the end stays
            self._arriving.popleft()
        return len(view)

    def send_now(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        if self.closed:
            raise trio.ClosedResourceError
        if self.full:
            return buffers
        self.other._put(b"".join(buffers))
        return ()

    async def send(self, buffers: Sequence[Buffer]) -> None:
        await trio.lowlevel.checkpoint()
        while self.full and not self.closed:
            await self._changed.wait()
        self.send_now(buffers)

    async def linger(self) -> None:
        self.parting = True
        self.other._put(b"")
        scratch = memoryview(bytearray(1 << 16))
        while await self.receive_into(lambda: scratch):
            pass

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        if not self.closed:
            self.other._put(b"")
            self.closed = True
            self._wake()


@dataclass
class Door:
    """What stands for a listening socket."""

    address: ListenAddress


class Net:
    """Names, listeners, connections.

    Attributes:
        doors: who listens where: what starts a handler, and the handler.
        wires: one end of each connection that was made between processes.
    """

    def __init__(self, nursery: trio.Nursery, dice: random.Random) -> None:
        self.doors: dict[tuple[str, int], tuple[Spawn, Handler]] = {}
        self.wires: list[Wire] = []
        self._nursery = nursery
        self._dice = dice

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        for module in (server_module, agent_module, client_module):
            patch.setattr(module, "SocketTransport", lambda wire: wire)
        patch.setattr(server_module, "bind", self.bind)
        patch.setattr(server_module, "bound_address", lambda door: door.address)
        patch.setattr(server_module, "accept", self.accept)
        patch.setattr(Connector, "resolve", self.resolve)
        patch.setattr(Connector, "connect_to", self.connect_to)
        patch.setattr(Connector, "connect", self.connect)

    async def bind(self, address: ListenAddress) -> list[Door]:
        await trio.lowlevel.checkpoint()
        return [Door(address)]

    async def accept(self, door: Door, handler: Handler, spawn: Spawn) -> None:
        where = (door.address.host, door.address.port)
        self.doors[where] = mine = (spawn, handler)
        try:
            await trio.sleep_forever()
        finally:
            if self.doors[where] is mine:
                del self.doors[where]

    async def resolve(self, host: str, port: int) -> list[Address]:
        await trio.lowlevel.checkpoint()
        return [(int(socket.AF_INET), (host, port))]

    async def connect_to(self, address: Address) -> Wire:
        host, port = address[1]
        latency = self._dice.choice(LATENCIES)
        await trio.sleep(latency)
        if (host, port) not in self.doors:
            raise Refused(f"{host}: nobody listens")
        spawn, handler = self.doors[host, port]
        near, far = Wire.pair(latency)
        self.wires.append(near)
        if not spawn(handler, far):  # type: ignore[arg-type]
            far.close()
        return near

    async def connect(self, host: str, port: int) -> Wire | socket.socket:
        """To a server from a client, or to a target from an agent."""
        if host in SERVERS:
            return await self.connect_to((0, (host, port)))
        await trio.sleep({"quick.test": 0, "slow.test": 2, "silent.test": math.inf, "refused.test": 0.01}[host])
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


@dataclass(eq=False)
class Life:
    """A server or an agent, from its start to its end."""

    label: str
    program: Server | Agent
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    killed: bool = False
    ended: float = math.inf

    @property
    def life(self) -> Lifecycle:
        return self.program.life

    @property
    def alive(self) -> bool:
        return math.isinf(self.ended)

    @property
    def late(self) -> bool:
        """Whether it takes, or took, longer to leave than it may."""
        if not self.life.leaving or self.killed:
            return False
        budget = self.program.config.timeouts.shutdown
        return min(self.ended, trio.current_time()) > self.life._began + budget + 0.5


@dataclass(eq=False)
class Dial:
    """A dial: who asked, when, and how it ended, as often as it did."""

    label: str
    began: float
    server: Life | None = None
    ends: list[str] = field(default_factory=list)


class World:
    """Everything, and what may happen to it: the public methods are the steps.

    Attributes:
        told: what happened, and when.
        faults: what was not as it should be.
    """

    def __init__(self, nursery: trio.Nursery, net: Net, dice: random.Random, gentle: bool) -> None:
        self.gentle = gentle
        self.told: list[str] = []
        self.faults: list[str] = []
        self.lives: list[Life] = []
        self.dials: list[Dial] = []
        self.backends: defaultdict[Backends, list[Backend]] = defaultdict(list)
        self.net = net
        self._nursery = nursery
        self._dice = dice
        self._rolled = -math.inf
        self.linked: set[Wire] = set()  # the agents' ends of links that were up
        self._open: list[Callable[[], object]] = []  # what ends each stream that a client may have
        self._sockets: list[tuple[Life, socket.socket]] = []
        self.doors = tuple(Target(name, LINKS) for name in SERVERS)
        self.client = Client(ClientConfig(self.doors, "client"))

    def tell(self, text: str) -> None:
        self.told.append(f"{trio.current_time():9.3f} {text}")

    def fault(self, text: str) -> None:
        if not self._nursery.cancel_scope.cancel_called:
            self.tell(f"FAULT: {text}")
            self.faults.append(text)

    @property
    def agents(self) -> list[Life]:
        return [life for life in self.lives if life.alive and isinstance(life.program, Agent)]

    @property
    def servers(self) -> list[Life]:
        return [life for life in self.lives if life.alive and isinstance(life.program, Server)]

    def _server(self, name: str) -> Life | None:
        return next((life for life in self.servers if life.label == name), None)

    # -- who is there

    def start_server(self, name: str) -> None:
        if self._server(name) is None:
            timeouts = self._timeouts()
            forwards = tuple(
                Forward(ListenAddress(name, FRONT + number), Target(target, 80), agent)
                for number, (target, agent) in enumerate(FORWARDS)
            )
            config = ServerConfig(
                ListenAddress(name, LINKS),
                None,
                forwards,
                dial_timeout=DIAL_TIMEOUT,
                lame_duck=self._dice.choice((0.0, timeouts.shutdown / 3)),
                timeouts=timeouts,
            )
            self._start(Life(name, Server(config)))

    def start_agent(self, name: str) -> None:
        if len(self.agents) < 5:
            claims = CLAIMS.get(name, Claims())
            config = AgentConfig(self.doors, name, claims=claims, timeouts=self._timeouts())
            self._start(Life(f"{name}.{len(self.lives)}", Agent(config)))

    def _timeouts(self) -> Timeouts:
        return Timeouts(
            handshake=4.0, shutdown=BUDGETS[-1] if self.gentle else self._dice.choice(BUDGETS), backoff_max=2.0
        )

    def _start(self, life: Life) -> None:
        self.lives.append(life)
        self._nursery.start_soon(self._live, life)

    async def _live(self, life: Life) -> None:
        with life.scope:
            code = await life.program.run()
            self.tell(f"{life.label} exits with {code}")
        life.ended = trio.current_time()

    def leave(self, life: Life) -> None:
        life.life.leave()

    def roll(self, name: str) -> None:
        """A server leaves, if another one will do; some time later a new one is there. No dial meets two of those."""
        life = self._server(name)
        others = [server for server in self.servers if server is not life and not server.life.leaving]
        long_ago = trio.current_time() - self._rolled > DIAL_TIMEOUT
        if life is not None and long_ago and any(map(self._has_anchor, others)):
            self._rolled = trio.current_time()
            life.life.leave()
            self._nursery.start_soon(self._follow, life)

    def _has_anchor(self, server: Life) -> bool:
        """Whether the first agent is linked to a server."""
        return any(server.program.backends.of_instance(life.program._instance) for life in self.agents[:1])

    async def _follow(self, life: Life) -> None:
        await life.life.phase.wait_value(Phase.EXIT)
        await trio.sleep(DIAL_TIMEOUT)  # a client that goes there at once would find no agent yet
        self.start_server(life.label)

    def hurry(self, life: Life) -> None:
        life.life.cut()

    def kill(self, life: Life) -> None:
        life.killed = True
        program = life.program
        for link in list(program._links if isinstance(program, Server) else program.sync.links.values()):
            link.drop("killed")
        life.scope.cancel()

    # -- draining

    def drain(self, agent: Life, reason: str, seconds: float, leave: bool) -> None:
        if self.gentle and agent is self.agents[0]:
            leave = False
        agent.program.drain(reason, seconds=seconds, leave=leave)

    def undrain(self, agent: Life, reason: str) -> None:
        agent.program.undrain(reason)

    def command(self, server: str, agent: str, seconds: float, leave: bool) -> None:
        if life := self._server(server):
            life.program.drain_agent(agent, "for the test", seconds, leave=leave)

    def uncommand(self, server: str, agent: str) -> None:
        if life := self._server(server):
            life.program.undrain_agent(agent, "for the test")

    # -- links

    def cut_link(self, wire: Wire) -> None:
        wire.cut()

    def block_link(self, wire: Wire, full: bool) -> None:
        wire.block(full=full)

    # -- dials

    def dial(self, server: str, number: int) -> None:
        """A connection to a front-end."""
        life, door = self._server(server), self.net.doors.get((server, FRONT + number))
        if life is not None and door is not None and (self._has_anchor(life) or not self.gentle):
            near, far = socket.socketpair()
            near.setblocking(False)
            far.setblocking(False)
            self._sockets.append((life, far))
            self._open.append(far.close)
            spawn, handler = door
            if not spawn(handler, near):
                near.close()

    def burst(self, server: str, number: int) -> None:
        """Many, soon after each other, whose clients do not stay for long."""
        self._nursery.start_soon(self._burst, server, number)

    async def _burst(self, server: str, number: int) -> None:
        for _ in range(6):
            await trio.sleep(self._dice.choice((0.0, 0.001, 0.05)))
            before = len(self._open)
            self.dial(server, number)
            for end in self._open[before:]:
                self._nursery.start_soon(self._finish_later, end)

    async def _finish_later(self, end: Callable[[], object]) -> None:
        await trio.sleep(self._dice.random() * 2)
        if end in self._open:
            self.finish(end)

    def dial_by_client(self, number: int) -> None:
        done = trio.Event()
        self._open.append(done.set)
        self._nursery.start_soon(self._dial_by_client, *FORWARDS[number], done)

    async def _dial_by_client(self, target: str, agent: str | None, done: trio.Event) -> None:
        stream = await self._record(
            None, f"client to {target} by {agent}", self.client.dial(target, 80, agent=agent, timeout=DIAL_TIMEOUT)
        )
        if stream is not None:
            await done.wait()
            await stream.aclose()

    async def _record(self, server: Life | None, label: str, dialling: Any) -> TunnelStream | None:
        dial = Dial(f"dial {len(self.dials)}: {label}", trio.current_time(), server)
        self.dials.append(dial)
        ended = partial(self._ended, dial)
        try:
            stream: TunnelStream = await dialling
        except DialError as error:
            ended(error.code)
            if server is None:
                return None
            raise
        except trio.Cancelled:
            ended("cancelled")
            raise
        ended("stream")
        return stream

    def _ended(self, dial: Dial, how: str) -> None:
        if self._nursery.cancel_scope.cancel_called:
            return
        dial.ends.append(how)
        self.tell(f"{dial.label}: {how}")
        took = trio.current_time() - dial.began
        if len(dial.ends) > 1 or took > DIAL_TIMEOUT + 0.001:
            self.fault(f"{dial.label}: ended in {dial.ends} after {took:g} s")
        if self.gentle and how != "stream":
            self.fault(f"{dial.label}: {how}")
        if how == "cancelled" and dial.server is not None:
            cut = dial.server.life.phase.value in (Phase.CUT, Phase.CLOSING)
            if not cut and not dial.server.killed:
                self.fault(f"{dial.label}: cancelled by {dial.server.life!r}")

    def finish(self, end: Callable[[], object]) -> None:
        self._open.remove(end)
        end()

    async def wait(self, seconds: float) -> None:
        """Wait, and look whether all is well meanwhile."""
        for _ in range(math.ceil(seconds / 5) or 1):
            await trio.sleep(seconds / (math.ceil(seconds / 5) or 1))
            await wait_all_tasks_blocked()
            self.check()

    # -- what should hold

    def check(self) -> None:
        """What holds whenever nobody has anything to do at this moment."""
        for life in self.lives:
            if life.late:
                self.fault(f"{life.label} leaves late: {life.life!r}")
        for agent in self.agents:
            self._check_agent(agent)
        for manager in self.backends:
            self.check_pools(manager)
        assert not self.faults

    def _check_agent(self, life: Life) -> None:
        agent = life.program
        left = agent.life.open.value, agent.dials.pending, agent.draining.unacked
        if agent.state.value is AgentState.DRAINED and any(left):
            self.fault(f"{life.label} is drained with {left} open, pending, unacked")
        if not agent.draining.unacked:
            for backend in self._backends_of(agent):
                if backend.state not in KNOWN_AS[agent.draining.phase] and wire_of(backend).other.in_use:
                    self.fault(f"{life.label} is acknowledged to be {agent.draining!r}, and is {backend!r}")

    def _backends_of(self, agent: Agent) -> list[Backend]:
        here = (backend for server in self.servers for backend in self.backends[server.program.backends])
        return [one for one in here if one.instance == agent._instance and one.state is not GONE]

    def check_pools(self, manager: Backends) -> None:
        """The pools, derived from scratch."""
        here = self.backends[manager] = [one for one in self.backends[manager] if one.state is not GONE]
        pools: defaultdict[Any, set[Backend]] = defaultdict(set)
        for one in here:
            for key in keys_of(one) if one.state is not FINAL else ():
                pools[key, one.priority, one.state, one.name].add(one)
        found = {
            (key, priority, state, name): set(bag)
            for key, bucket in manager._buckets.items()
            for priority, tier in bucket._tiers.items()
            for state, pool in tier.items()
            for name, bag in pool._by_name.items()
        }
        if found != pools or len(manager) != len(here) or set(manager._instances.values()) != set(here):
            self.fault(f"pools are {found}, not {dict(pools)}")

    def check_pick(self, manager: Backends, decision: Decision, agent: str | None, besides: str | None) -> None:
        self.check_pools(manager)
        backend = decision.backend
        others = [one for one in self.backends[manager] if one.instance != besides and agent in (None, one.name)]
        if backend.state is DRAINING and any(one.state is ACTIVE for one in others):
            self.fault(f"{backend!r} was picked, of {others}")
        elif backend.state not in (ACTIVE, DRAINING):
            self.fault(f"{backend!r} was picked")

    def check_failed(self, decision: Decision, error: DialError) -> None:
        was_linked = wire_of(decision.backend).other in self.linked
        lost = isinstance(error, LinkLost) and was_linked
        if self.gentle and (lost or (isinstance(error, RefusedDraining) and not decision.fallback)):
            self.fault(f"{decision}: {error!r}")

    def check_quiet(self) -> None:
        """What holds when nothing happened for long."""
        for dial in self.dials:
            if len(dial.ends) != 1 and not (dial.server and dial.server.killed):
                self.fault(f"{dial.label}: ended in {dial.ends}")
        for life, far in self._sockets:
            if not life.alive and not has_ended(far):
                self.fault(f"a client of {life.label} was not told that it is gone")
        known = {server.program.identity.instance: server.program.backends for server in self.servers}
        for life in self.agents:
            agent = life.program
            if not agent.life.leaving:
                states = {backend.state for backend in self._backends_of(agent)}
                wanted = {ACTIVE if agent.draining.phase is DrainPhase.ACTIVE else DRAINING} if states else set()
                if states != wanted or agent.draining.unacked:
                    self.fault(f"{life.label} is {agent.draining!r}, and to servers {states}")
                if not agent.draining.draining and set(agent.sync.links) != set(known):
                    self.fault(f"{life.label} is linked to {agent.sync.links}, of {list(known)}")
        assert not self.faults

    async def close(self) -> None:
        """Everything at once, and without a word."""
        for _, far in self._sockets:
            far.close()
        self._nursery.cancel_scope.cancel()


def keys_of(backend: Backend) -> Iterator[tuple[str, str, int]]:
    yield "any", "", 0
    yield "agent", backend.name, 0
    for identifier in CLAIMS.get(backend.name, Claims()).identifiers:
        yield identifier.kind, identifier.value, 0


def wire_of(backend: Backend) -> Wire:
    return cast(Wire, backend.link._transport)


def has_ended(sock: socket.socket) -> bool:
    """Whether the other side has closed it."""
    try:
        return sock.fileno() < 0 or not sock.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


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
    there: dict[str, Sequence[Any]] = {
        "drain": world.agents,
        "undrain": world.agents,
        "leave": world.agents[1:] if world.gentle else [*world.agents, *world.servers],
        "hurry": [life for life in (*world.agents, *world.servers) if life.life.leaving],
        "kill": [*world.agents, *world.servers],
        "cut_link": (wires := [wire for wire in world.net.wires if wire.in_use and wire.other.in_use]),
        "block_link": wires,
        "finish": world._open,
    }
    if name in there:
        if not there[name]:
            return
        args = (there[name][args[0] % len(there[name])], *args[1:])
    said = [arg.label if isinstance(arg, Life) else arg for arg in args]
    world.tell(f"{name} {said}")
    done = getattr(world, name)(*args)
    if done is not None:
        await done


async def end(world: World) -> None:
    await world.wait(QUIET)
    world.check_quiet()
    for those in (world.agents, world.servers):
        for life in those:
            world.tell(f"leave [{life.label!r}]")
            life.life.leave()
        await world.wait(max(BUDGETS) + 1)
        for life in those:
            if life.alive:
                world.fault(f"{life.label} has not left: {life.life!r}")
        world.check_quiet()


async def play_in_trio(steps: Sequence[Step], seed: int, gentle: bool) -> None:
    failure: AssertionError | None = None
    dice = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch, errors_in_log() as errors:
        async with trio.open_nursery() as nursery:
            net = Net(nursery, dice)
            world = World(nursery, net, dice, gentle)
            net.patch(patch)
            watch(world, patch)
            try:
                await begin(world)
                for step in steps:
                    await do(world, *step)
                    if dice.random() < 0.7:
                        await wait_all_tasks_blocked()
                        world.check()
                await end(world)
                assert not errors
            except AssertionError as error:
                failure = error
            await world.close()
    if failure:
        failure.add_note("\n".join([*world.told, *errors]))
        raise failure


def watch(world: World, patch: pytest.MonkeyPatch) -> None:
    """Have the world know of dials, picks and backends."""
    add, decide, dial, end = Backends.add, Backends.decide, Server._dial, Link._end
    dial_through, linked = Backends._dial_through, AgentDrain.linked

    def watched_add(manager: Backends, backend: Backend) -> None:
        world.backends[manager].append(backend)
        add(manager, backend)

    def watched_decide(
        manager: Backends, target: Target, agent: str | None = None, besides: str | None = None
    ) -> Decision:
        decision = decide(manager, target, agent, besides)
        world.check_pick(manager, decision, agent, besides)
        return decision

    async def watched_dial(server: Server, target: Target, agent: str | None) -> TunnelStream:
        life = next(life for life in world.lives if life.program is server)
        stream = await world._record(life, f"{life.label} to {target.host} by {agent}", dial(server, target, agent))
        assert stream is not None
        return stream

    async def watched_dial_through(manager: Backends, decision: Decision, *args: Any) -> TunnelStream:
        try:
            return await dial_through(manager, decision, *args)
        except DialError as error:
            world.check_failed(decision, error)
            raise

    def watched_linked(drain: AgentDrain, link: Link, *args: Any) -> None:
        world.linked.add(cast(Wire, link._transport))
        linked(drain, link, *args)

    def watched_end(link: Link, why: TunnelError) -> None:
        if isinstance(why, RemoteProtocolError):
            world.fault(f"a rule was broken: {why}")
        end(link, why)

    patch.setattr(Link, "_end", watched_end)
    patch.setattr(AgentDrain, "linked", watched_linked)
    patch.setattr(Backends, "_dial_through", watched_dial_through)
    patch.setattr(Backends, "add", watched_add)
    patch.setattr(Backends, "decide", watched_decide)
    patch.setattr(Server, "_dial", watched_dial)


@contextmanager
def errors_in_log() -> Iterator[list[str]]:
    errors: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(logging.Formatter().format(record))  # type: ignore[method-assign]
    logger = logging.getLogger("tunnel")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    try:
        yield errors
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def play(steps: Sequence[Step], seed: int = 0, *, gentle: bool = False) -> None:
    """See the head of this file."""
    random.seed(seed)
    trio._core._run._r.seed(seed)  # the order in which tasks run
    trio.run(play_in_trio, steps, seed, gentle, clock=MockClock(autojump_threshold=0))


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
    step("dial", SERVER, st.integers(0, len(FORWARDS) - 1)),
    step("dial_by_client", st.integers(0, len(FORWARDS) - 1)),
    step("hurry", WHICH),
    step("kill", WHICH),
    *[step("start_server", SERVER)] * 2,
    step("start_agent", st.just("a0")),
    step("cut_link", WHICH),
    step("block_link", WHICH, FLAG),
]
SEED = st.integers(0, 1 << 16)


@settings(max_examples=100)
@given(st.lists(st.one_of(WILD), min_size=12, max_size=40), SEED)
def test_whatever_happens(steps: list[Step], seed: int) -> None:
    play(steps, seed)


@settings(max_examples=50)
@given(st.lists(st.one_of(GENTLE), min_size=12, max_size=40), SEED)
def test_no_dial_fails_while_programs_drain_and_leave_in_peace(steps: list[Step], seed: int) -> None:
    play(steps, seed, gentle=True)
