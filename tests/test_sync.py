"""The sync loop: one link to each server, wherever the servers are found, and no more dialling than that takes."""

from __future__ import annotations

import logging
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle, pairwise
from typing import cast

import pytest
import trio
from stream_transport import StreamTransport
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from tunnel import sync
from tunnel.address import ListenAddress, Target
from tunnel.agent import Agent
from tunnel.backends import Backend, Backends
from tunnel.config import AgentConfig, ServerConfig
from tunnel.connect import Address, Connector
from tunnel.credentials import Token
from tunnel.errors import DnsError, HandshakeRefused, LinkClosed, Refused
from tunnel.handshake import AcceptingHandshake, DiallingHandshake, welcome
from tunnel.identity import Identity, new_instance
from tunnel.limits import Limits, Timeouts
from tunnel.link import Link
from tunnel.packets import GoAway, Packet, Welcome
from tunnel.server import Server
from tunnel.sync import Backoff, SyncLoop, SyncState
from tunnel.transport import Transport

TIMEOUTS = Timeouts(keepalive=1e6)  # so that hours of mock time cost nothing
HOUR = 3600.0


async def over_pipe(sock: socket.socket, host: str) -> Transport:
    """What ``World`` connects is no socket."""
    return StreamTransport(cast(trio.abc.Stream, sock))


class Pipe(trio.abc.Stream):
    """What stands for a connected socket; the world knows whether it was closed."""

    def __init__(
        self,
        stream: trio.StapledStream[trio.testing.MemorySendStream, trio.testing.MemoryReceiveStream],
        world: World,
    ) -> None:
        self._stream = stream
        self._world = world
        world.open.add(self)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        self._world.open.discard(self)
        await self._stream.aclose()

    def close(self) -> None:
        self._world.open.discard(self)
        self._stream.send_stream.close()
        self._stream.receive_stream.close()


class FakeServer:
    """A server: its links are real ones, and so is its backend manager.

    Attributes:
        hellos: what came, duplicates included.
        refusal: said to whoever comes.
        answers: whether it takes any notice of a connection.
    """

    def __init__(self, count: int = 1) -> None:
        self.identity = Identity("server", "server")
        self.count = count
        self.backends = Backends()
        self.hellos: list[Identity] = []
        self.refusal: HandshakeRefused | None = None
        self.answers = True
        self.up = True

    @property
    def id(self) -> str:
        return self.identity.instance

    async def serve(self, stream: trio.abc.Stream) -> None:
        if not self.answers:
            await trio.sleep_forever()
        backend = Backend(self.backends)
        backend.link = Link(
            StreamTransport(stream),
            AcceptingHandshake(self.identity, self.count, self.admit),
            limits=Limits(),
            timeouts=TIMEOUTS,
            on_control=backend.on_control,
            on_linked=backend.on_linked,
            on_end=backend.on_end,
        )
        with suppress(HandshakeRefused, LinkClosed):
            await backend.link.run()

    def admit(self, peer: Identity, _token: object) -> None:
        self.hellos.append(peer)
        if self.refusal:
            raise self.refusal
        if self.id in peer.linked:
            raise HandshakeRefused("duplicate", self.id)

    def drop_links(self) -> None:
        for backend in list(self.backends._instances.values()):
            backend.link.drop("cut")

    def stop(self) -> None:
        self.up = False
        self.drop_links()

    def leave(self) -> None:
        """Say so over all links, and take no new ones."""
        self.refusal = HandshakeRefused("leaving", "the server is leaving")
        for backend in self.backends._instances.values():
            backend.link.session.send_control(GoAway("soft", 25_000))
            backend.link.flush()

    def tell(self, count: int) -> None:
        self.count = count
        for backend in self.backends._instances.values():
            backend.link.session.send_control(welcome(self.identity, count))
            backend.link.flush()


class World:
    """Names, addresses and the servers behind them; a ``Connector`` to the loop.

    Attributes:
        names: the addresses of each name; a name without any does not resolve.
        behind: the servers behind each address, one of which takes a connection.
        attempts: when which address was dialled.
        lookups: when a name was resolved.
        open: connections that were made and not closed.
        latency: seconds that a connection takes; those to ``blackholes`` take for ever.
    """

    def __init__(self, nursery: trio.Nursery, seed: int = 0) -> None:
        self.names: dict[str, list[Address]] = {}
        self.behind: dict[Address, list[FakeServer]] = {}
        self.attempts: list[tuple[float, Address]] = []
        self.lookups: list[float] = []
        self.open: set[Pipe] = set()
        self.latency = 0.001
        self.blackholes: set[Address] = set()
        self._nursery = nursery
        self._random = random.Random(seed)

    def add(self, name: str, *addresses: list[FakeServer]) -> list[Address]:
        """A name, and for each of its addresses the servers behind it."""
        for servers in addresses:
            address = (int(socket.AF_INET), (f"10.0.0.{len(self.behind) + 1}", 7400))
            self.behind[address] = servers
            self.names.setdefault(name, []).append(address)
        return self.names[name]

    async def resolve(self, host: str, port: int) -> list[Address]:
        await trio.lowlevel.checkpoint()
        self.lookups.append(trio.current_time())
        if not self.names.get(host):
            raise DnsError(f"{host}: no such name")
        return list(self.names[host])

    async def connect_to(self, address: Address) -> socket.socket:
        self.attempts.append((trio.current_time(), address))
        await trio.sleep(float("inf") if address in self.blackholes else self.latency)
        servers = [server for server in self.behind[address] if server.up]
        if not servers:
            raise Refused(f"{address}: nobody listens")
        near, far = memory_stream_pair()
        self._nursery.start_soon(self._random.choice(servers).serve, far)
        return cast(socket.socket, Pipe(near, self))


class Site:
    """What has links to servers: the loop, and what makes its links."""

    def __init__(self, world: World, *names: str) -> None:
        self.instance = new_instance()
        servers = [Target(name, 7400) for name in names]
        self.loop = SyncLoop(servers, cast(Connector, world), TIMEOUTS, self.make_link, secure=over_pipe)

    def make_link(self, transport: Transport, on_linked: Callable[[], None], on_end: Callable[[], None]) -> Link:
        def control(packet: Packet) -> None:
            if isinstance(packet, GoAway):
                self.loop.going(link)
            else:
                assert isinstance(packet, Welcome)
                self.loop.told_count(link)

        draining = self.loop.state is SyncState.DRAINING
        me = Identity("agent", "edge", self.instance, draining=draining, linked=tuple(self.loop.links))
        link = Link(
            transport,
            DiallingHandshake(me),
            limits=Limits(),
            timeouts=TIMEOUTS,
            on_control=control,
            on_linked=on_linked,
            on_end=on_end,
        )
        return link

    def linked_to(self, *servers: FakeServer) -> bool:
        """Exactly those, and each of them knows it."""
        return set(self.loop.links) == {server.id for server in servers} and all(
            len(server.backends) == 1 for server in servers
        )


@pytest.fixture
def world(nursery: trio.Nursery) -> World:
    random.seed(0)
    return World(nursery)


async def started(nursery: trio.Nursery, world: World, *names: str) -> Site:
    site = Site(world, *names)
    nursery.start_soon(site.loop.run, nursery)
    return site


async def until(condition: Callable[[], bool], seconds: float) -> float:
    """Wait for a condition; how long that took, by the clock of the test."""
    began = trio.current_time()
    while not condition():
        assert trio.current_time() - began < seconds, "waited in vain"
        await trio.sleep(seconds / 1000)
    return trio.current_time() - began


@contextmanager
def no_attempts(world: World) -> Iterator[None]:
    """Nothing is dialled inside."""
    before = len(world.attempts)
    yield
    assert world.attempts[before:] == []


async def an_hour_without_attempts(world: World) -> None:
    with no_attempts(world):
        await trio.sleep(HOUR)


# -- back-off


def test_a_delay_is_random_up_to_a_bound_that_grows_to_its_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float]] = []
    monkeypatch.setattr(sync.random, "uniform", lambda low, high: asked.append((low, high)) or high / 2)
    backoff = Backoff(0.2, 1.5)
    assert [backoff.next() for _ in range(5)] == [0.1, 0.2, 0.4, 0.75, 0.75]
    assert asked == [(0, 0.2), (0, 0.4), (0, 0.8), (0, 1.5), (0, 1.5)]
    assert backoff.attempt == 5
    backoff.reset()
    assert (backoff.attempt, backoff.next()) == (0, 0.1)


def test_delays_are_spread_evenly() -> None:
    random.seed(1)
    delays = [Backoff(1.0, 1.0).next() for _ in range(10_000)]
    counts = Counter(int(delay * 10) for delay in delays)
    assert sum((counts[tenth] - 1000) ** 2 for tenth in range(10)) / 1000 < 27.88  # 9 degrees of freedom, 1 in 1,000


# -- finding all servers


async def test_one_server_has_one_link(nursery: trio.Nursery, autojump_clock: MockClock, world: World) -> None:
    server = FakeServer()
    world.add("one", [server])
    site = await started(nursery, world, "one")
    await until(lambda: site.linked_to(server), 1)
    await an_hour_without_attempts(world)
    assert len(world.open) == 1


async def test_a_server_behind_several_addresses_has_one_link(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    server = FakeServer()
    world.add("one", [server], [server], [server])
    site = await started(nursery, world, "one")
    await trio.sleep(60)
    assert site.linked_to(server)
    assert len(world.open) == 1
    await an_hour_without_attempts(world)


async def test_a_lost_link_to_a_server_behind_several_addresses_is_restored_once(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    server = FakeServer()
    world.add("one", [server], [server])
    site = await started(nursery, world, "one")
    await trio.sleep(60)
    server.drop_links()
    await trio.sleep(60)
    assert site.linked_to(server)
    assert len(world.open) == 1


async def test_every_address_of_a_name_is_linked(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    servers = [FakeServer() for _ in range(3)]
    world.add("three", *([server] for server in servers))
    site = await started(nursery, world, "three")
    await until(lambda: site.linked_to(*servers), 1)
    await an_hour_without_attempts(world)


async def test_every_name_is_linked(nursery: trio.Nursery, autojump_clock: MockClock, world: World) -> None:
    servers = [FakeServer() for _ in range(3)]
    for number, server in enumerate(servers):
        world.add(f"server-{number}", [server])
    site = await started(nursery, world, "server-0", "server-1", "server-2")
    await until(lambda: site.linked_to(*servers), 1)
    await an_hour_without_attempts(world)


async def test_two_names_of_one_server_are_one_link(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    server = FakeServer()
    world.add("one", [server])
    world.add("other", [server])
    site = await started(nursery, world, "one", "other")
    await trio.sleep(60)
    assert site.linked_to(server)
    assert len(world.open) == 1
    await an_hour_without_attempts(world)


async def test_an_address_that_leads_nowhere_does_not_hold_up_the_others(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    good = FakeServer()
    dead, blackhole, _ = world.add("three", [], [], [good])
    world.blackholes.add(blackhole)
    site = await started(nursery, world, "three")
    await until(lambda: site.linked_to(good), 0.1)
    await trio.sleep(HOUR)
    tries = Counter(address for _, address in world.attempts)
    assert tries[dead] > 100
    assert tries[blackhole] > 100
    assert len(world.open) == 1


async def test_a_server_that_says_nothing_is_given_up_and_tried_again(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    server = FakeServer()
    server.answers = False
    world.add("one", [server])
    site = await started(nursery, world, "one")
    await trio.sleep(9.9)
    assert len(world.open) == 1
    await until(lambda: not world.open, 2)
    server.answers = True
    await until(lambda: site.linked_to(server), 30)


# -- behind a load balancer


def balanced(world: World, count: int) -> list[FakeServer]:
    servers = [FakeServer(count) for _ in range(count)]
    world.add("all", servers)
    return servers


@pytest.mark.parametrize("seed", range(10))
async def test_all_servers_behind_a_balancer_are_linked(
    nursery: trio.Nursery, autojump_clock: MockClock, seed: int
) -> None:
    random.seed(seed)
    world = World(nursery, seed)
    servers = balanced(world, 5)
    site = await started(nursery, world, "all")
    await until(lambda: site.linked_to(*servers), 5)
    assert len(world.open) == 5
    await an_hour_without_attempts(world)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("replaced", [False, True])
async def test_all_are_linked_again_within_a_second_of_a_loss(
    nursery: trio.Nursery, autojump_clock: MockClock, seed: int, replaced: bool
) -> None:
    random.seed(seed)
    world = World(nursery, seed)
    servers = balanced(world, 5)
    site = await started(nursery, world, "all")
    await until(lambda: site.linked_to(*servers), 5)
    await trio.sleep(100)
    if replaced:
        servers.pop().stop()
        servers.append(FakeServer(5))
        (address,) = world.names["all"]
        world.behind[address] = servers
    else:
        servers[0].drop_links()
    await wait_all_tasks_blocked()
    assert len(site.loop.links) == 4
    await until(lambda: site.linked_to(*servers), 1)


async def test_a_duplicate_is_refused_and_never_takes_the_place_of_the_link(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    servers = balanced(world, 5)
    site = await started(nursery, world, "all")
    await until(lambda: len(site.loop.links) == 5, 5)
    refused = [hello for server in servers for hello in server.hellos if server.id in hello.linked]
    assert len(world.attempts) == 5 + len(refused)
    assert all(len(server.hellos) - len([h for h in server.hellos if server.id in h.linked]) == 1 for server in servers)


async def test_a_server_that_is_never_there_is_looked_for_ever_more_slowly(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    servers = [FakeServer(4) for _ in range(3)]
    world.add("all", servers)
    site = await started(nursery, world, "all")
    await until(lambda: site.linked_to(*servers), 10)
    began = trio.current_time()
    await trio.sleep(HOUR)
    minutes = Counter(int((when - began) // 60) for when, _ in world.attempts if when >= began)
    assert minutes.total() < 700
    assert all(count < 16 for minute, count in minutes.items() if minute > 5)
    late = FakeServer(4)
    servers.append(late)
    await until(lambda: site.linked_to(*servers), 600)


async def test_a_long_search_does_not_slow_down_the_next(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    servers = [FakeServer(3) for _ in range(2)]
    world.add("all", servers)
    site = await started(nursery, world, "all")
    await trio.sleep(HOUR)
    servers.append(FakeServer(3))
    await until(lambda: site.linked_to(*servers), 600)
    for _ in range(10):
        servers[0].drop_links()
        await until(lambda: site.linked_to(*servers), 5)
        await trio.sleep(10)


async def test_a_count_told_live_raises_what_is_wanted(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    servers = [FakeServer(1), FakeServer(1)]
    world.add("all", servers)
    site = await started(nursery, world, "all")
    await trio.sleep(10)
    assert len(site.loop.links) == 1
    for server in servers:
        server.tell(2)
    await until(lambda: site.linked_to(*servers), 1)


async def test_a_count_told_live_lowers_what_is_wanted(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    servers = balanced(world, 3)
    site = await started(nursery, world, "all")
    await until(lambda: site.linked_to(*servers), 5)
    leaving, *staying = servers
    for server in staying:
        server.tell(2)
    await wait_all_tasks_blocked()
    assert len(site.loop.links) == 3
    leaving.stop()
    await trio.sleep(60)
    assert site.linked_to(*staying)
    await an_hour_without_attempts(world)


# -- names


async def test_a_new_address_of_a_name_is_found(nursery: trio.Nursery, autojump_clock: MockClock, world: World) -> None:
    first, second = FakeServer(), FakeServer()
    world.add("name", [first])
    site = await started(nursery, world, "name")
    await trio.sleep(100)
    world.add("name", [second])
    await until(lambda: site.linked_to(first, second), 31)


async def test_an_address_that_is_gone_from_the_name_is_let_go(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    old, new = FakeServer(), FakeServer()
    gone, _ = world.add("name", [old], [new])
    site = await started(nursery, world, "name")
    await until(lambda: site.linked_to(old, new), 1)
    world.names["name"].remove(gone)
    await trio.sleep(100)
    assert site.linked_to(old, new)
    old.drop_links()
    await an_hour_without_attempts(world)
    assert site.linked_to(new)


async def test_a_lost_link_is_sought_where_the_name_leads_now(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    old, new = FakeServer(), FakeServer()
    world.add("name", [old])
    site = await started(nursery, world, "name")
    await until(lambda: site.linked_to(old), 1)
    world.names["name"].clear()
    world.add("name", [new])
    old.stop()
    await until(lambda: site.linked_to(new), 1)


async def test_a_name_that_does_not_resolve_is_asked_for_ever_more_slowly(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    site = await started(nursery, world, "late")
    await trio.sleep(HOUR)
    assert 240 < len(world.lookups) < 960
    assert caplog.messages[0].startswith('"link failed" server=late:7400 attempt=1 delay=')
    server = FakeServer()
    world.add("late", [server])
    await until(lambda: site.linked_to(server), 15)


async def test_a_resolver_that_fails_costs_no_link(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    server = FakeServer()
    addresses = world.add("name", [server])
    site = await started(nursery, world, "name")
    await until(lambda: site.linked_to(server), 1)
    world.names["name"] = []
    await trio.sleep(HOUR)
    assert site.linked_to(server)
    world.names["name"] = addresses
    server.drop_links()
    await until(lambda: site.linked_to(server), 16)


# -- losing and failing


@pytest.fixture
def longest_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every delay is as long as it may be."""
    monkeypatch.setattr(sync.random, "uniform", lambda _low, high: high)


def gaps(world: World) -> list[float]:
    return [round(after - before - world.latency, 2) for (before, _), (after, _) in pairwise(world.attempts)]


@pytest.mark.usefixtures("longest_delays")
async def test_failures_back_off_to_a_cap(nursery: trio.Nursery, autojump_clock: MockClock, world: World) -> None:
    world.add("dead", [])
    await started(nursery, world, "dead")
    await trio.sleep(80)
    assert gaps(world) == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 15.0, 15.0, 15.0]


@pytest.mark.usefixtures("longest_delays")
async def test_a_refusal_backs_off_like_a_failure(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    server = FakeServer()
    server.refusal = HandshakeRefused("denied", "not today")
    world.add("one", [server])
    await started(nursery, world, "one")
    await trio.sleep(1)
    assert gaps(world) == [0.2, 0.4]
    assert caplog.messages[1] == '"link failed" server=one:7400 attempt=2 delay=0.40s cause="not today (denied)"'
    assert not world.open


@pytest.mark.usefixtures("longest_delays")
@pytest.mark.parametrize(("life", "delays"), [(0.5, [0.2, 0.4, 0.8, 1.6]), (2.0, [0.2, 0.2, 0.2, 0.2])])
async def test_the_back_off_begins_anew_only_after_a_stable_link(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World, life: float, delays: list[float]
) -> None:
    server = FakeServer()
    world.add("one", [server])
    site = await started(nursery, world, "one")
    waited = []
    for _ in delays:
        await until(lambda: bool(site.loop.links), 10)
        await trio.sleep(life)
        server.drop_links()
        lost = trio.current_time()
        before = len(world.attempts)
        await until(lambda before=before: len(world.attempts) > before, 10)
        waited.append(round(world.attempts[-1][0] - lost, 2))
    assert waited == delays


@pytest.mark.usefixtures("longest_delays")
async def test_failures_before_a_short_link_are_not_forgotten(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    server = FakeServer()
    server.up = False
    world.add("one", [server])
    site = await started(nursery, world, "one")
    await trio.sleep(1)
    server.up = True
    await until(lambda: site.linked_to(server), 2)
    server.drop_links()
    before = len(world.attempts)
    await trio.sleep(1.5)
    assert len(world.attempts) == before
    await until(lambda: site.linked_to(server), 0.2)


async def test_a_server_that_restarts_is_linked_again(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    (address,) = world.add("one", [FakeServer()])
    site = await started(nursery, world, "one")
    for _ in range(20):
        await until(lambda: site.linked_to(*world.behind[address]), 2)
        await trio.sleep(5)
        world.behind[address][0].stop()
        world.behind[address] = [FakeServer()]
    assert len(world.open) <= 1


async def test_many_agents_at_a_refusing_server_make_no_waves(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    world.add("one", [])
    for _ in range(100):
        await started(nursery, world, "one")
    await trio.sleep(120)
    windows = Counter(int(when * 10) for when, _ in world.attempts if when > 5)
    assert max(windows.values()) <= 12
    assert 100 * 10 < windows.total() < 100 * 30


async def test_many_agents_that_lose_a_server_do_not_come_back_at_once(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    server = FakeServer()
    world.add("one", [server])
    for _ in range(100):
        await started(nursery, world, "one")
    await until(lambda: len(server.backends) == 100, 1)
    await trio.sleep(10)
    before = len(world.attempts)
    server.drop_links()
    await until(lambda: len(server.backends) == 100, 1)
    windows = Counter(int(when * 50) for when, _ in world.attempts[before:])
    assert max(windows.values()) <= 25


# -- draining


async def test_while_draining_a_lost_link_comes_back_draining(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    servers = [FakeServer() for _ in range(3)]
    world.add("all", *([server] for server in servers))
    site = await started(nursery, world, "all")
    await until(lambda: site.linked_to(*servers), 1)
    site.loop.drain()
    servers[0].drop_links()
    await until(lambda: site.linked_to(*servers), 1)
    assert [hello.draining for hello in servers[0].hellos] == [False, True]
    assert servers[0].backends.active == 0


async def test_while_draining_a_restarted_server_is_linked_again(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    servers = balanced(world, 3)
    site = await started(nursery, world, "all")
    await until(lambda: site.linked_to(*servers), 5)
    site.loop.drain()
    servers.pop().stop()
    servers.append(FakeServer(3))
    (address,) = world.names["all"]
    world.behind[address] = servers
    await until(lambda: site.linked_to(*servers), 5)
    assert [hello.draining for hello in servers[-1].hellos if servers[-1].id not in hello.linked] == [True]


async def test_while_draining_no_new_link_is_made(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    servers = [FakeServer(2), FakeServer(2)]
    servers[1].up = False
    world.add("all", [servers[0]], [servers[1]])
    site = await started(nursery, world, "all")
    await trio.sleep(10)
    site.loop.drain()
    servers[1].up = True
    await trio.sleep(20)
    assert site.linked_to(servers[0])
    await an_hour_without_attempts(world)


async def test_a_drain_during_a_connect_makes_no_new_link(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    servers = [FakeServer(2), FakeServer(2)]
    world.add("all", [servers[0]], [servers[1]])
    slow = world.names["all"][1]
    world.blackholes.add(slow)
    site = await started(nursery, world, "all")
    await until(lambda: site.linked_to(servers[0]), 1)
    await trio.sleep(100)
    world.blackholes.clear()
    world.latency = 1.0
    before = len(world.attempts)
    await until(lambda: slow in [address for _, address in world.attempts[before:]], 60)
    site.loop.drain()
    await trio.sleep(60)
    assert site.linked_to(servers[0])
    assert len(world.open) == 1


async def test_while_draining_there_are_never_more_links_than_there_were(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [FakeServer(), FakeServer()]
    servers[1].up = False
    world.add("all", [servers[0]], [servers[1]])
    site = await started(nursery, world, "all")
    await trio.sleep(100)
    site.loop.drain()
    servers[1].up = True
    parts = cycle([0.3, 0.9])  # so that one address is tried clearly before the other
    monkeypatch.setattr(sync.random, "uniform", lambda _low, high: high * next(parts))
    for _ in range(20):
        for server in servers:
            server.drop_links()
        await trio.sleep(30)
        assert len(site.loop.links) == 1
        assert len(world.open) == 1


async def test_a_link_that_was_lost_before_the_drain_is_restored_too(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    server = FakeServer()
    world.add("one", [server])
    site = await started(nursery, world, "one")
    await until(lambda: site.linked_to(server), 1)
    server.stop()
    await trio.sleep(20)
    site.loop.drain()
    await trio.sleep(20)
    server.up = True
    await until(lambda: site.linked_to(server), 20)
    assert server.hellos[-1].draining


async def test_after_an_undrain_all_servers_are_linked(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    servers = [FakeServer(), FakeServer()]
    servers[1].up = False
    world.add("all", [servers[0]], [servers[1]])
    site = await started(nursery, world, "all")
    await trio.sleep(10)
    site.loop.drain()
    await trio.sleep(100)
    servers[1].up = True
    site.loop.undrain()
    await until(lambda: site.linked_to(*servers), 0.1)
    assert [hello.draining for hello in servers[1].hellos] == [False]


# -- servers that leave


@pytest.mark.parametrize("balanced_too", [False, True], ids=["another address", "the same address"])
async def test_another_server_is_linked_to_before_the_one_that_leaves_is_gone(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World, balanced_too: bool
) -> None:
    leaving, staying = FakeServer(), FakeServer()
    addresses = world.add("all", [leaving])
    site = await started(nursery, world, "all")
    await until(lambda: site.linked_to(leaving), 1)
    if balanced_too:
        world.behind[addresses[0]].append(staying)
    else:
        world.add("all", [staying])
    leaving.leave()
    await until(lambda: site.linked_to(leaving, staying), 60)
    leaving.stop()
    await until(lambda: site.linked_to(staying), 1)
    world.behind[addresses[0]].remove(leaving)
    await trio.sleep(HOUR)
    assert site.linked_to(staying)


async def test_a_server_that_leaves_keeps_its_link_while_there_is_no_other(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    server = FakeServer()
    (address,) = world.add("one", [server])
    site = await started(nursery, world, "one")
    await until(lambda: site.linked_to(server), 1)
    server.leave()
    await trio.sleep(60)
    assert site.linked_to(server)
    tries = [when for when, _ in world.attempts]
    assert 3 < len(tries) < 60
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []
    world.behind[address] = [FakeServer()]
    await until(lambda: site.linked_to(server, *world.behind[address]), 20)


async def test_a_server_that_leaves_is_said_once_and_its_end_is_no_warning(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tunnel.sync")
    leaving, staying = FakeServer(), FakeServer()
    world.add("all", [leaving], [staying])
    site = await started(nursery, world, "all")
    await until(lambda: site.linked_to(leaving, staying), 1)
    caplog.clear()
    leaving.leave()
    leaving.leave()
    await wait_all_tasks_blocked()
    leaving.drop_links()
    await wait_all_tasks_blocked()
    assert [(record.levelname, record.getMessage().replace(leaving.id, "ID")) for record in caplog.records[:2]] == [
        ("INFO", '"server leaving" server_id=ID links=2'),
        ("INFO", '"link lost" server=all:7400 server_id=ID cause="the peer closed the connection"'),
    ]


async def test_while_draining_a_server_that_leaves_is_replaced_when_its_link_has_ended(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    leaving, staying = FakeServer(), FakeServer()
    (address,) = world.add("one", [leaving])
    site = await started(nursery, world, "one")
    await until(lambda: site.linked_to(leaving), 1)
    site.loop.drain()
    world.behind[address] = [staying]
    leaving.leave()
    await trio.sleep(60)
    assert site.linked_to(leaving)  # no more links than there were
    leaving.drop_links()
    await until(lambda: site.linked_to(staying), 20)
    assert staying.hellos[-1].draining


async def test_a_server_that_left_and_was_replaced_is_not_missing(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    leaving, staying, other = FakeServer(), FakeServer(), FakeServer()
    other.up = False
    first, _ = world.add("all", [leaving], [other])
    site = await started(nursery, world, "all")
    await until(lambda: site.linked_to(leaving), 1)
    world.behind[first] = [staying]
    leaving.leave()
    await until(lambda: site.linked_to(leaving, staying), 20)
    leaving.stop()
    await until(lambda: site.linked_to(staying), 1)
    site.loop.drain()
    other.up = True
    await trio.sleep(HOUR)
    assert site.linked_to(staying)  # while draining, no more links than there were


# -- stopping


async def test_after_stopping_nothing_is_dialled_and_links_stay(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    server = FakeServer()
    world.add("all", [server], [])
    site = Site(world, "all")
    with trio.CancelScope() as scope:
        nursery.start_soon(_cancel_after, 10, scope)
        await site.loop.run(nursery)
    assert site.loop.state is SyncState.STOPPED
    with no_attempts(world):
        await trio.sleep(HOUR)
        assert site.linked_to(server)
        server.drop_links()
        await trio.sleep(HOUR)
    assert site.loop.links == {}


async def _cancel_after(seconds: float, scope: trio.CancelScope) -> None:
    await trio.sleep(seconds)
    scope.cancel()


@pytest.mark.parametrize("moment", [0.0, 0.0005, 0.001, 0.0015, 5.0])
async def test_an_attempt_that_is_stopped_leaves_no_connection(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World, moment: float
) -> None:
    server = FakeServer()
    server.answers = False
    world.add("all", [server])
    site = Site(world, "all")
    with trio.move_on_after(moment):
        await site.loop.run(nursery)
    await wait_all_tasks_blocked()
    assert world.open == set()
    await an_hour_without_attempts(world)


async def test_a_stop_in_a_back_off_ends_it(nursery: trio.Nursery, autojump_clock: MockClock, world: World) -> None:
    world.add("all", [])
    site = Site(world, "all", "nowhere")
    with trio.move_on_after(100):
        await site.loop.run(nursery)
    await an_hour_without_attempts(world)


async def test_a_stopped_loop_neither_drains_nor_undrains(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    world.add("all", [FakeServer()])
    site = Site(world, "all")
    with trio.move_on_after(1):
        await site.loop.run(nursery)
    site.loop.drain()
    site.loop.undrain()
    assert site.loop.state is SyncState.STOPPED


# -- what is logged


async def test_there_is_one_line_for_each_transition(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tunnel.sync")
    server = FakeServer()
    world.add("all", [server])
    site = Site(world, "all")
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as inner:
            inner.start_soon(site.loop.run, nursery)
            await until(lambda: site.linked_to(server), 1)
            server.tell(2)
            server.tell(2)
            await wait_all_tasks_blocked()
            for _ in range(2):
                site.loop.drain()
            for _ in range(2):
                site.loop.undrain()
            server.tell(1)
            await wait_all_tasks_blocked()
            server.drop_links()
            await until(lambda: site.linked_to(server), 1)
            scope.cancel()
    ours = [record for record in caplog.records if record.name == "tunnel.sync"]
    assert [(record.levelname, record.getMessage().replace(server.id, "ID")) for record in ours] == [
        ("INFO", "linked server=all:7400 server_id=ID links=1"),
        ("INFO", '"server count" server=all:7400 count=2'),
        ("INFO", '"sync draining" links=1'),
        ("INFO", '"sync running" links=1'),
        ("INFO", '"server count" server=all:7400 count=1'),
        ("WARNING", '"link lost" server=all:7400 server_id=ID cause="the peer closed the connection"'),
        ("INFO", "linked server=all:7400 server_id=ID links=1"),
        ("INFO", '"sync stopped" links=1'),
    ]


# -- agents and servers over sockets


async def real_server(nursery: trio.Nursery, port: int = 0) -> tuple[Server, Target]:
    server = Server(ServerConfig(ListenAddress("127.0.0.1", port), None))
    await nursery.start(server.run)
    address = server.addresses["links"][0]
    return server, Target(address.host, address.port)


async def backend_of(server: Server) -> Backend:
    """The only backend, when it is there."""
    await until(lambda: len(server.backends) == 1, 10)
    (backend,) = server.backends._instances.values()
    return backend


async def test_an_agent_that_drains_comes_back_draining_and_never_active(nursery: trio.Nursery) -> None:
    server, where = await real_server(nursery)
    agent = Agent(AgentConfig((where,), "edge"))
    await nursery.start(agent.run)
    await agent.linked.wait()
    backend = await backend_of(server)
    agent.drain()
    await agent.draining.wait_acked()
    assert (backend.state.value, server.backends.active) == ("draining", 0)
    actives: list[int] = []
    enter = server.backends._enter
    server.backends._enter = lambda *args: (enter(*args), actives.append(server.backends.active))  # type: ignore
    backend.link.drop("cut")
    again = await backend_of(server)
    assert (again.state.value, again.draining) == ("draining", True)
    assert set(actives) == {0}


async def test_a_drain_between_hello_and_welcome_is_the_first_thing_said(nursery: trio.Nursery) -> None:
    server, where = await real_server(nursery)
    agent = Agent(AgentConfig((where,), "edge"))
    admit = server._admit

    def drain_now(peer: Identity, token: Token | None) -> None:
        if not agent.draining.draining:
            agent.drain()
        admit(peer, token)

    server._admit = drain_now  # type: ignore[method-assign]
    await nursery.start(agent.run)
    backend = await backend_of(server)
    await until(lambda: not server.backends.active, 10)
    assert backend.state.value == "draining"


async def test_an_agent_is_linked_to_each_of_its_servers(nursery: trio.Nursery) -> None:
    (one, at_one), (other, at_other) = await real_server(nursery), await real_server(nursery)
    agent = Agent(AgentConfig((at_one, at_other, at_one), "edge"))
    await nursery.start(agent.run)
    await backend_of(one)
    await backend_of(other)
    await until(lambda: len(agent.sync.links) == 2, 10)
    assert set(agent.sync.links) == {one.identity.instance, other.identity.instance}


async def test_two_names_of_one_server_make_one_link(nursery: trio.Nursery, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tunnel")
    server, where = await real_server(nursery)
    agent = Agent(AgentConfig((where, Target("localhost", where.port), where), "edge"))
    await nursery.start(agent.run)
    await until(lambda: all(door.leads_to for door in agent.sync._doors), 10)
    assert len(server.backends) == len(agent.sync.links) == 1
    assert [record.getMessage() for record in caplog.records if '"agent gone"' in record.getMessage()] == []


async def test_a_lost_link_does_not_wait_for_a_server_that_is_missing(
    nursery: trio.Nursery, autojump_clock: MockClock, world: World
) -> None:
    server = FakeServer(2)  # says that there is another one, which never comes
    world.add("all", [server])
    site = await started(nursery, world, "all")
    await trio.sleep(HOUR)
    server.drop_links()
    await until(lambda: site.linked_to(server), 1)
