"""The server: what it listens on, whom it links to, what happens when an agent or the server itself goes away."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import pytest
import trio
from house import (
    LOOPBACK,
    Held,
    House,
    Service,
    descriptors,
    echo,
    ended,
    expect,
    forward,
    head,
    receive_all,
    receive_exactly,
    refusal,
    talks,
    tasks,
    through,
)
from trio.testing import MockClock, wait_all_tasks_blocked
from trio_util import AsyncValue

from tunnel import programs, turns
from tunnel.address import ListenAddress, Target
from tunnel.backends import Backend
from tunnel.bridge import Bridge
from tunnel.client import open_client
from tunnel.config import Forward, ServerConfig
from tunnel.credentials import Token
from tunnel.desk import ServerDesk
from tunnel.errors import HandshakeRefused, RefusedDraining, StreamReset
from tunnel.handshake import AcceptingHandshake, DiallingHandshake
from tunnel.http_connect import ESTABLISHED
from tunnel.identity import Identity
from tunnel.lifecycle import Phase
from tunnel.limits import Limits, Timeouts
from tunnel.link import Link
from tunnel.listen import BindError
from tunnel.packets import MAX_U32, DrainStatus, GoAway, GoAwayAck, Packet, Welcome
from tunnel.server import Server
from tunnel.transport import SocketTransport
from tunnel.watch import AgentState


@pytest.fixture
async def echoes(house: House) -> Service:
    """A server, and a target that echoes; no agent."""
    await house.serve()
    return await house.service(echo)


def _messages(caplog: pytest.LogCaptureFixture, level: int, logger: str = "tunnel") -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.levelno > level and record.name.startswith(logger)
    ]


async def _until(condition: Callable[[], object]) -> None:
    """Look again and again until it is so."""
    with trio.fail_after(30):
        while not condition():
            await trio.lowlevel.checkpoint()


# -- addresses


async def test_every_address_that_is_bound_is_known_and_logged(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tunnel")
    targets = [Target("db.internal", 5432), Target("web.internal", 80)]
    server = await house.serve(forwards=tuple(map(forward, targets)))
    assert [len(server.addresses[use]) for use in ("links", "connect", "forward")] == [1, 1, 2]
    said = [message for message in _messages(caplog, logging.DEBUG) if message.startswith("listening ")]
    facts = [("links", ""), ("connect", ""), *(("forward", f" target={target}") for target in targets)]
    addresses = [address for use in server.addresses.values() for address in use]
    for message, address, (use, more) in zip(said, addresses, facts, strict=True):
        assert message == f"listening use={use} address={address}{more}"
        (await trio.open_tcp_stream(address.host, address.port)).socket.close()


async def test_the_connect_front_end_can_be_off(house: House) -> None:
    server = await house.serve(connect=None)
    assert server.addresses["connect"] == []


@pytest.mark.parametrize("use", ["listen", "connect", "forwards"])
async def test_a_port_in_use_ends_the_start_and_closes_what_was_opened(use: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = ListenAddress("127.0.0.1", taken.getsockname()[1])
        taken_one = (Forward(address, Target("x", 1)),) if use == "forwards" else address
        config: dict[str, Any] = {"listen": LOOPBACK, "connect": LOOPBACK, use: taken_one}
        turns.of_this_run()  # has a descriptor itself
        before = descriptors()
        with pytest.RaisesGroup(BindError, flatten_subgroups=True):
            await Server(ServerConfig(**config)).run()
        assert descriptors() == before


def test_a_program_that_cannot_start_ends_with_1_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = ListenAddress("127.0.0.1", taken.getsockname()[1])
        assert programs.run_server(ServerConfig(address, None)) == 1
    (message,) = _messages(caplog, logging.WARNING)
    assert str(address) in message
    assert "Address already in use" in message


# -- links


async def _linked(house: House, me: Identity, packets: list[Packet]) -> Link:
    """A link of our own to the server."""
    (address,) = house.server.addresses["links"]
    stream = await trio.open_tcp_stream(address.host, address.port)
    sock = socket.socket(fileno=stream.socket.detach())
    link = Link(
        SocketTransport(sock), DiallingHandshake(me), limits=Limits(), timeouts=Timeouts(), on_control=packets.append
    )
    await house.nursery.start(link.run)
    return link


async def test_a_changed_server_count_is_told_over_the_links_there_are_and_to_those_that_come(house: House) -> None:
    server = await house.serve(server_count=2)
    packets: list[Packet] = []
    link = await _linked(house, Identity("agent", "one"), packets)
    assert link.server_count == 2
    server.set_server_count(3)
    await wait_all_tasks_blocked()
    (packet,) = packets
    assert isinstance(packet, Welcome)
    assert packet.info["servers"] == 3
    assert (await _linked(house, Identity("agent", "two"), [])).server_count == 3


async def test_an_agent_hears_of_a_changed_server_count(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tunnel")
    server = await house.serve()
    await house.agent()
    server.set_server_count(2)
    await wait_all_tasks_blocked()
    assert any("server count" in message for message in _messages(caplog, logging.DEBUG, "tunnel.sync"))


async def test_an_agent_that_is_linked_already_is_refused_as_a_duplicate(house: House) -> None:
    server = await house.serve()
    me = Identity("agent", "one", linked=(server.identity.instance,))
    with pytest.raises(HandshakeRefused) as caught:
        await _linked(house, me, [])
    assert (caught.value.code, caught.value.text) == ("duplicate", server.identity.instance)
    assert len(server.backends) == 0


async def test_a_link_that_does_not_speak_our_protocol_harms_no_other(house: House, echoes: Service) -> None:
    await house.agent()
    stranger = await house.call("links")
    await stranger.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    with suppress(trio.BrokenResourceError):
        await receive_all(stranger)
    assert await talks(await house.connect(echoes.target))


# -- agents that are lost


async def test_a_lost_agent_resets_its_own_streams_and_no_others(house: House, echoes: Service) -> None:
    lost, other = await house.agent("one"), await house.agent("one")
    clients = [await house.connect(echoes.target) for _ in range(20)]
    assert (lost.life.open.value, other.life.open.value) == (10, 10)
    house.kill(lost)
    await house.server.life.open.wait_value(10)
    assert [await talks(client) for client in clients].count(True) == 10
    assert other.life.open.value == 10


async def test_bytes_of_a_hundred_streams_with_equal_ids_on_two_links_never_mix(house: House, echoes: Service) -> None:
    one, two = await house.agent("one"), await house.agent("two")
    clients = [await house.connect(echoes.target) for _ in range(100)]
    assert (one.life.open.value, two.life.open.value) == (50, 50)

    async def talk(client: trio.SocketStream, words: bytes) -> None:
        for _ in range(5):
            assert await talks(client, words)

    async with trio.open_nursery() as nursery:
        for number, client in enumerate(clients):
            nursery.start_soon(talk, client, b"%d " % number * 2000)


async def test_a_dial_whose_agent_is_lost_goes_to_another(house: House, held: Held, echoes: Service) -> None:
    agents = await house.agent("one"), await house.agent("two")
    client = await house.ask(through(echoes.target))
    await held.arrived.wait_value(1)
    house.kill(next(agent for agent in agents if agent.life.open.value))
    await held.arrived.wait_value(2)
    held.open.set()
    await expect(client, ESTABLISHED)
    assert await talks(client)
    assert house.server.backends.redispatched == {"link_lost": 1}


async def test_a_dial_whose_only_agent_is_lost_is_503(house: House, held: Held, echoes: Service) -> None:
    agent = await house.agent()
    client = await house.ask(through(echoes.target))
    await held.arrived.wait_value(1)
    house.kill(agent)
    status, _, text = await refusal(client)
    assert (status, text) == (503, "no_backend: no agent is linked\n")


async def test_a_dial_that_asked_for_the_lost_agent_by_name_is_503(house: House, held: Held, echoes: Service) -> None:
    agent, _ = await house.agent("one"), await house.agent("two")
    client = await house.ask(through(echoes.target), "Tunnel-Agent: one")
    await held.arrived.wait_value(1)
    house.kill(agent)
    status, _, text = await refusal(client)
    assert status == 503
    assert text.startswith("no_backend: ")


async def test_an_agent_that_comes_and_goes_a_hundred_times_leaves_nothing(house: House, echoes: Service) -> None:
    async def come_and_go() -> None:
        agent = await house.agent()
        client = await house.connect(echoes.target)
        assert await talks(client)
        house.kill(agent)
        with pytest.raises(trio.BrokenResourceError):
            await client.receive_some()
        await client.aclose()
        await echoes.open.wait_value(0)
        await house.idle()

    await come_and_go()
    before = tasks(), descriptors()
    for _ in range(100):
        await come_and_go()
    assert (tasks(), descriptors()) == before
    assert len(house.server.backends) == 0


async def test_a_server_that_comes_back_on_its_port_gets_its_agent_back_once(house: House, echoes: Service) -> None:
    agent = await house.agent()
    (address,) = house.server.addresses["links"]
    (link,) = agent.sync.links.values()
    house.server.life.leave()
    await ended(house.server)
    await link.ended.wait()
    await house.serve(listen=address)
    await agent.linked.wait()
    assert await talks(await house.connect(echoes.target))
    await wait_all_tasks_blocked()
    assert len(house.server.backends) == len(agent.sync.links) == 1


# -- leaving


async def test_a_server_without_streams_leaves_with_0(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tunnel")
    await house.serve()
    house.server.life.leave()
    assert await ended(house.server) == 0
    assert not _messages(caplog, logging.INFO)


async def test_leaving_closes_the_front_ends_at_once_and_waits_for_open_streams(house: House) -> None:
    service = await house.service(echo)
    await house.serve(forwards=(forward(service.target),))
    await house.agent()
    clients = [await house.connect(service.target), await house.call("forward")]
    for client in clients:
        assert await talks(client)
    house.server.life.leave()
    await house.server.life.phase.wait_value(Phase.DRAINING)
    for use in ("connect", "forward"):
        with pytest.raises(OSError, match="all attempts to connect"):
            await house.call(use)
    for client in clients:
        assert await talks(client)
        await client.aclose()
    assert await ended(house.server) == 0


async def test_a_dial_that_is_pending_when_the_server_leaves_is_finished(
    house: House, held: Held, echoes: Service
) -> None:
    await house.agent()
    client = await house.ask(through(echoes.target))
    await held.arrived.wait_value(1)
    house.server.life.leave()
    await house.server.life.phase.wait_value(Phase.DRAINING)
    held.open.set()
    await expect(client, ESTABLISHED)
    assert await talks(client)
    await client.aclose()
    assert await ended(house.server) == 0


async def test_streams_that_outlast_the_budget_are_reset_and_the_exit_is_3(house: House) -> None:
    service = await house.service(echo)
    await house.serve(timeouts=Timeouts(shutdown=0.1))
    await house.agent()
    client = await house.connect(service.target)
    house.server.life.leave()
    assert await ended(house.server) == 3
    with pytest.raises(trio.BrokenResourceError):
        await client.receive_some()
    await service.open.wait_value(0)


async def test_a_cut_resets_streams_at_once_and_the_exit_is_4(house: House, echoes: Service) -> None:
    await house.agent()
    client = await house.connect(echoes.target)
    house.server.life.leave()
    await house.server.life.phase.wait_value(Phase.DRAINING)
    house.server.life.cut()
    assert await ended(house.server) == 4
    with pytest.raises(trio.BrokenResourceError):
        await client.receive_some()
    await echoes.open.wait_value(0)


async def test_clients_in_the_accept_queue_when_the_server_leaves_are_served(house: House) -> None:
    service = await house.service(echo)
    await house.serve(forwards=(forward(service.target),))
    await house.agent()
    (connect,), (forwarded,) = house.server.addresses["connect"], house.server.addresses["forward"]
    queued = [
        socket.create_connection((address.host, address.port))
        for address in [connect, forwarded] * 100  # the kernel takes them: more than are accepted in one go
    ]
    house.server.life.leave()
    clients = [trio.SocketStream(trio.socket.from_stdlib_socket(sock)) for sock in queued]
    for number, client in enumerate(clients):
        if number % 2 == 0:
            await client.send_all(head(service.target))
            await expect(client, ESTABLISHED)
        assert await talks(client)
        await client.aclose()
    assert await ended(house.server) == 0


async def test_an_agent_outlives_its_server(house: House, echoes: Service) -> None:
    agent = await house.agent()
    (link,) = agent.sync.links.values()
    house.server.life.leave()
    assert await ended(house.server) == 0
    await link.ended.wait()
    assert agent.life.phase.value is Phase.READY


# -- leaving: the lame duck


@pytest.fixture
def duck(monkeypatch: pytest.MonkeyPatch) -> trio.Event:
    """A lame duck, if there is one, lasts until this is set."""
    over = trio.Event()

    async def sleep_until(deadline: float) -> None:
        await over.wait()

    monkeypatch.setattr(trio, "sleep_until", sleep_until)
    return over


async def _leave(server: Server, phase: Phase) -> None:
    server.life.leave()
    await server.life.phase.wait_value(phase)


async def test_front_ends_accept_until_the_lame_duck_is_over(house: House, duck: trio.Event) -> None:
    service = await house.service(echo)
    server = await house.serve(forwards=(forward(service.target),), lame_duck=10.0)
    await house.agent()
    await _leave(server, Phase.LAME_DUCK)
    clients = [await house.connect(service.target), await house.call("forward")]
    for client in clients:
        assert await talks(client)
    duck.set()
    await server.life.phase.wait_value(Phase.DRAINING)
    for use in ("connect", "forward"):
        with pytest.raises(OSError, match="all attempts to connect"):
            await house.call(use)
    for client in clients:
        assert await talks(client)
        await client.aclose()
    assert await ended(server) == 0


async def test_clients_dials_are_served_until_the_lame_duck_is_over(
    house: House, duck: trio.Event, echoes: Service
) -> None:
    server = await house.serve(lame_duck=10.0)
    await house.agent()
    host, port = echoes.target.host, echoes.target.port
    async with house.client() as client:
        link = await client.connect()
        await _leave(server, Phase.LAME_DUCK)
        stream = await client.dial(host, port)
        duck.set()
        await server.life.phase.wait_value(Phase.DRAINING)
        with pytest.raises(RefusedDraining):
            await link.dial(host, port, seconds=10)
        await stream.send_all(b"hello")
        assert await stream.receive_some() == b"hello"
        await stream.aclose()
    assert await ended(server) == 0


@pytest.mark.parametrize("lame_duck", [0.0, 10.0])
async def test_a_leaving_server_takes_no_new_link_and_warns_about_none(
    house: House, held: Held, duck: trio.Event, echoes: Service, lame_duck: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tunnel")
    server = await house.serve(lame_duck=lame_duck)
    await house.agent()
    await house.ask(through(echoes.target))  # so that it does not end
    await held.arrived.wait_value(1)
    await _leave(server, Phase.LAME_DUCK if lame_duck else Phase.DRAINING)
    for role in ("agent", "client"):
        with pytest.raises(HandshakeRefused) as caught:
            await _linked(house, Identity(role, "late"), [])
        assert caught.value.code == "leaving"
    assert not _messages(caplog, logging.INFO)
    assert not any("link refused" in message for message in _messages(caplog, logging.DEBUG))


async def test_an_agent_that_finds_only_a_leaving_server_keeps_its_link_and_warns_about_nothing(
    house: House, duck: trio.Event, echoes: Service, caplog: pytest.LogCaptureFixture
) -> None:
    server = await house.serve(lame_duck=10.0)
    agent = await house.agent()
    refused: AsyncValue[int] = AsyncValue(0)
    admit = server._admit

    def count(peer: Identity, token: Token | None) -> None:
        refused.value += 1
        admit(peer, token)

    server._admit = count  # type: ignore[method-assign]
    await _leave(server, Phase.LAME_DUCK)
    await refused.wait_value(lambda times: times >= 3)
    assert set(agent.sync.links) == {server.identity.instance}
    assert await talks(await house.connect(echoes.target))
    assert not _messages(caplog, logging.INFO)


class _FakeLink:
    """A link that is there and notes when it was told what; it acknowledges at once, unless it is silent or breaks."""

    def __init__(self, server: Server, answer: str = "acks") -> None:
        self.peer = Identity("agent", "fake")
        self.session = self.outflow = self
        self.sending = False
        self.told: list[tuple[float, Packet]] = []
        self._server = server
        self._answer = answer
        server._links[cast(Link, self)] = AcceptingHandshake(server.identity)

    def send_control(self, packet: Packet) -> None:
        assert isinstance(packet, GoAway)
        self.told.append((trio.current_time(), packet))

    def end_turn(self) -> None:
        pass

    def flush(self) -> None:
        if not self.final:
            return
        if self._answer == "acks":
            self._server.life.background.start_soon(self._acknowledge)
        elif self._answer == "breaks":
            self._server._ended(self._backend)

    async def _acknowledge(self) -> None:
        self._server._control(self._backend, GoAwayAck("final"))

    @property
    def final(self) -> bool:
        """Whether it was told that nothing new is served any more."""
        return any(isinstance(packet, GoAway) and packet.phase == "final" for _, packet in self.told)

    @property
    def _backend(self) -> Backend:
        backend = Backend(self._server.backends)
        backend.link = cast(Link, self)
        return backend

    async def close(self, code: str, text: str, *, seconds: float) -> None:
        del self._server._links[cast(Link, self)]


async def _time_to_leave(server: Server, *links: tuple[str, int]) -> tuple[float, float, list[_FakeLink]]:
    """A whole life with links of these kinds and numbers; when it began to leave, and how long that took."""
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        fakes = [_FakeLink(server, answer) for answer, count in links for _ in range(count)]
        began = trio.current_time()
        server.life.leave()
    return began, trio.current_time() - began, fakes


async def test_every_link_is_told_to_go_elsewhere_within_a_quarter_of_the_lame_duck(autojump_clock: MockClock) -> None:
    server = Server(ServerConfig(LOOPBACK, None, lame_duck=8.0, timeouts=Timeouts(shutdown=25.0)))
    began, took, links = await _time_to_leave(server, ("acks", 4))
    first = [link.told[0] for link in links]
    assert [(when - began, packet) for when, packet in first] == [
        (0.0, GoAway("soft", 25_000)),
        (0.5, GoAway("soft", 24_500)),
        (1.0, GoAway("soft", 24_000)),
        (1.5, GoAway("soft", 23_500)),
    ]
    assert took == 8.0


async def test_without_a_lame_duck_every_link_is_told_at_once(autojump_clock: MockClock) -> None:
    server = Server(ServerConfig(LOOPBACK, None))
    _, took, links = await _time_to_leave(server, ("acks", 4))
    assert [[packet for _, packet in link.told] for link in links] == [
        [GoAway("soft", 25_000), GoAway("final", 25_000)]
    ] * 4
    assert took == 0.0


async def test_each_link_is_told_once_to_go_and_once_that_it_is_over(autojump_clock: MockClock) -> None:
    server = Server(ServerConfig(LOOPBACK, None, lame_duck=8.0))
    _, _, links = await _time_to_leave(server, ("acks", 3))
    assert [[packet.phase for _, packet in link.told if isinstance(packet, GoAway)] for link in links] == [
        ["soft", "final"]
    ] * 3


async def test_more_time_than_the_wire_can_say_is_the_most_it_can(autojump_clock: MockClock) -> None:
    server = Server(ServerConfig(LOOPBACK, None, timeouts=Timeouts(shutdown=100 * 24 * 3600.0)))
    _, _, (link,) = await _time_to_leave(server, ("acks", 1))
    assert [packet for _, packet in link.told] == [GoAway("soft", MAX_U32), GoAway("final", MAX_U32)]


async def test_a_link_that_acknowledges_nothing_delays_the_exit_by_a_second(autojump_clock: MockClock) -> None:
    server = Server(ServerConfig(LOOPBACK, None))
    _, took, _ = await _time_to_leave(server, ("acks", 2), ("silent", 1))
    assert (took, server.life.exit_code) == (1.0, 0)


async def test_a_link_that_breaks_as_it_is_told_the_end_ends_alone(autojump_clock: MockClock) -> None:
    server = Server(ServerConfig(LOOPBACK, None))
    _, took, links = await _time_to_leave(server, ("acks", 1), ("breaks", 1), ("acks", 1))
    assert [link.final for link in links] == [True] * 3
    assert (took, server.life.exit_code) == (0.0, 0)


# -- leaving: everybody moves to another server


async def test_a_client_dials_through_another_server_when_its_own_leaves(house: House, echoes: Service) -> None:
    host, port = echoes.target.host, echoes.target.port
    staying, leaving = house.server, await house.serve()
    doors = [server.addresses["links"][0] for server in (leaving, staying)]
    await house.agent(servers=tuple(Target(door.host, door.port) for door in doors))
    await _until(lambda: leaving.backends.active and staying.backends.active)
    async with open_client(*map(str, doors)) as client:
        old = await client.dial(host, port)
        await _leave(leaving, Phase.DRAINING)
        new = await client.dial(host, port)
        for stream in (old, new):
            await stream.send_all(b"hello")
            assert await stream.receive_some() == b"hello"
        assert (leaving.life.open.value, staying.life.open.value) == (1, 1)
        await old.send_eof()
        assert await old.receive_some() == b""
        assert await ended(leaving) == 0
        await new.send_all(b"still here")
        assert await new.receive_some() == b"still here"


async def test_a_client_links_elsewhere_before_it_has_to(house: House, duck: trio.Event) -> None:
    staying, leaving = await house.serve(), await house.serve(lame_duck=10.0)
    doors = [server.addresses["links"][0] for server in (leaving, staying)]
    async with open_client(*map(str, doors)) as client:
        old = await client.connect()
        await _leave(leaving, Phase.LAME_DUCK)
        await _until(lambda: client.link is not old)
        assert client.link is not None
        assert client.link.peer is not None
        assert client.link.peer.instance == staying.identity.instance
        await old.ended.wait()  # nothing is left on it
        assert leaving.life.phase.value is Phase.LAME_DUCK


async def test_a_client_whose_only_server_leaves_goes_on_there(house: House, duck: trio.Event, echoes: Service) -> None:
    server = await house.serve(lame_duck=10.0)
    await house.agent()
    async with house.client() as client:
        link = await client.connect()
        await _leave(server, Phase.LAME_DUCK)
        await _until(lambda: link.going)
        stream = await client.dial(echoes.target.host, echoes.target.port)
        await stream.send_all(b"hello")
        assert await stream.receive_some() == b"hello"
        assert client.link is link


# -- leaving: the cut


async def test_the_library_is_told_why_a_stream_was_cut(house: House, echoes: Service) -> None:
    server = await house.serve(timeouts=Timeouts(shutdown=0.1))
    await house.agent()
    async with house.client() as client:
        stream = await client.dial(echoes.target.host, echoes.target.port)
        server.life.leave()
        with pytest.raises(trio.BrokenResourceError) as caught:
            await stream.receive_some()
        assert isinstance(caught.value.__cause__, StreamReset)
        assert caught.value.__cause__.code == "drain_deadline"
    assert await ended(server) == 3
    assert server.life.cuts == 1
    await echoes.open.wait_value(0)


async def test_an_agent_says_why_a_stream_was_cut(
    house: House, echoes: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tunnel")
    server = await house.serve(timeouts=Timeouts(shutdown=0.1))
    agent = await house.agent()
    await house.connect(echoes.target)
    server.life.leave()
    await agent.life.open.wait_value(0)
    said = _messages(caplog, logging.DEBUG, "tunnel.dials")  # the server says it, too
    (message,) = [message for message in said if '"stream reset"' in message]
    assert f"target={echoes.target}" in message
    assert "code=drain_deadline" in message


@pytest.mark.parametrize("use", ["connect", "forward"])
async def test_what_had_arrived_is_delivered_before_the_reset_of_a_cut(house: House, use: str) -> None:
    said = bytes(100_000)

    async def say(stream: trio.SocketStream) -> None:
        await stream.send_all(said)
        await trio.sleep_forever()

    service = await house.service(say)
    server = await house.serve(forwards=(forward(service.target),), timeouts=Timeouts(shutdown=0.1))
    await house.agent()
    client = await (house.connect(service.target) if use == "connect" else house.call("forward"))
    assert await receive_exactly(client, 1) == b"\0"
    server.life.leave()
    assert await ended(server) == 3
    assert await receive_exactly(client, len(said) - 1) == said[1:]
    with pytest.raises(trio.BrokenResourceError) as caught:
        await client.receive_some()
    assert isinstance(caught.value.__cause__, ConnectionResetError)


async def test_a_forwarded_connection_that_is_still_dialled_at_the_cut_is_reset(house: House, held: Held) -> None:
    """An end without a byte would look like the target's own."""
    service = await house.service(echo)
    server = await house.serve(forwards=(forward(through(service.target)),))
    await house.agent()
    client = await house.call("forward")
    await held.arrived.wait_value(1)
    server.life.cut()
    assert await ended(server) == 4
    with pytest.raises(trio.BrokenResourceError):
        await client.receive_some()


async def test_a_connect_that_is_still_dialled_at_the_cut_is_never_taken_for_a_success(
    house: House, held: Held, echoes: Service
) -> None:
    await house.agent()
    client = await house.ask(through(echoes.target))
    await held.arrived.wait_value(1)
    house.server.life.cut()
    assert await ended(house.server) == 4
    with suppress(trio.BrokenResourceError):
        assert not (await receive_all(client)).startswith(b"HTTP/1.1 2")


class _FakeSpan:
    """Two bridged streams; says when they were reset."""

    def __init__(self) -> None:
        self.at: float | None = None

    def give_up(self, code: str, text: str) -> None:
        self.at = trio.current_time()


def _bridging(spans: list[_FakeSpan]) -> Bridge:
    bridge = Bridge(1 << 20)
    bridge._spans = cast("dict[Any, None]", dict.fromkeys(spans))
    return bridge


async def test_a_cut_of_clients_streams_is_spread_over_half_the_time(autojump_clock: MockClock) -> None:
    spans = [_FakeSpan() for _ in range(4)]
    began = trio.current_time()
    await _bridging(spans).cut("drain_deadline", "", 4.0)
    assert sorted(span.at - began for span in spans if span.at is not None) == [0.0, 0.5, 1.0, 1.5]
    assert trio.current_time() - began <= 2.0


async def test_a_cut_of_clients_streams_that_is_cancelled_resets_the_rest_at_once(autojump_clock: MockClock) -> None:
    spans = [_FakeSpan() for _ in range(4)]
    began = trio.current_time()
    with trio.move_on_after(0.75):
        await _bridging(spans).cut("drain_deadline", "", 4.0)
    assert sorted(span.at - began for span in spans if span.at is not None) == [0.0, 0.5, 0.75, 0.75]


async def test_a_cut_of_no_streams_is_over_at_once(autojump_clock: MockClock) -> None:
    began = trio.current_time()
    await Bridge(1 << 20).cut("drain_deadline", "", 4.0)
    assert trio.current_time() == began


# -- leaving: what would never end


async def _never_ends(stream: trio.SocketStream) -> None:
    await echo(stream)
    await trio.sleep_forever()


async def test_a_clients_stream_that_is_half_closed_and_does_not_move_is_reset(house: House) -> None:
    service = await house.service(_never_ends)
    server = await house.serve()
    await house.agent()
    async with house.client() as client:
        stream = await client.dial(service.target.host, service.target.port)
        await stream.send_all(b"hello")
        assert await stream.receive_some() == b"hello"
        await stream.send_eof()
        await _until(lambda: any(span.client.ended for span in server._bridge._spans))
        server._bridge.reap()
        await wait_all_tasks_blocked()
        assert server.life.open.value == 1
        server._bridge.reap()
        with pytest.raises(trio.BrokenResourceError) as caught:
            await stream.receive_some()
        assert isinstance(caught.value.__cause__, StreamReset)
        assert caught.value.__cause__.code == "idle"


async def test_a_clients_stream_that_is_open_both_ways_is_spared_however_idle(house: House, echoes: Service) -> None:
    await house.agent()
    async with house.client() as client:
        stream = await client.dial(echoes.target.host, echoes.target.port)
        for _ in range(3):
            house.server._bridge.reap()
        await stream.send_all(b"hello")
        assert await stream.receive_some() == b"hello"


async def test_a_clients_stream_that_moved_meanwhile_is_spared(house: House) -> None:
    ask, answered = trio.open_memory_channel[bytes](0)

    async def answer_slowly(stream: trio.SocketStream) -> None:
        assert await receive_all(stream) == b"question"
        async for words in answered:
            await stream.send_all(words)

    service = await house.service(answer_slowly)
    await house.serve()
    await house.agent()
    async with house.client() as client, ask:
        stream = await client.dial(service.target.host, service.target.port)
        await stream.send_all(b"question")
        await stream.send_eof()
        for _ in range(3):
            await ask.send(b"a word")
            assert await stream.receive_some() == b"a word"
            house.server._bridge.reap()
        ask.close()
        assert await stream.receive_some() == b""


async def test_half_closed_streams_are_looked_at_when_leaving_begins_and_once_a_minute(
    autojump_clock: MockClock,
) -> None:
    server = Server(ServerConfig(LOOPBACK, None, timeouts=Timeouts(shutdown=600.0)))
    looks: list[tuple[str, float]] = []
    server._board.reap = lambda: looks.append(("sockets", trio.current_time()))  # type: ignore[method-assign]
    server._bridge.reap = lambda: looks.append(("clients", trio.current_time()))  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        await trio.sleep(300)
        assert looks == []
        server.life.spawn(trio.sleep, 130.0)
        server.life.leave()
    assert looks == [(kind, 300.0 + minute) for minute in (0, 60, 120) for kind in ("sockets", "clients")]


# -- what operators want


async def test_a_command_at_one_server_drains_an_agent_at_all_of_them(house: House, echoes: Service) -> None:
    one, other = house.server, await house.serve()
    doors = [server.addresses["links"][0] for server in (one, other)]
    agent = await house.agent(servers=tuple(Target(door.host, door.port) for door in doors))
    await _until(lambda: one.backends.active and other.backends.active)
    assert ServerDesk(one).drain_agent("one", "maintenance") == 1
    assert one.backends.active == 0
    await agent.state.wait_value(AgentState.DRAINED)
    assert (one.backends.active, other.backends.active) == (0, 0)
    for server in (one, other):
        (backend,) = server.backends.named("one")
        await _until(lambda backend=backend: backend.status is not None and backend.status.state == "drained")  # type: ignore[misc]
        assert backend.status == DrainStatus("drained", 0, 0, 0, 2, 2)
    assert ServerDesk(other).undrain_agent("one") == 1
    await _until(lambda: one.backends.active and other.backends.active)
    assert agent.state.value is AgentState.READY


async def test_a_command_drains_all_agents_of_a_name_and_no_others(house: House) -> None:
    server = await house.serve()
    agents = [await house.agent("same"), await house.agent("same"), await house.agent("other")]
    assert ServerDesk(server).drain_agent("same", "maintenance") == 2
    await _until(lambda: agents[0].draining.draining and agents[1].draining.draining)
    assert not agents[2].draining.draining
    assert server.backends.active == 1


async def test_a_command_can_have_an_agent_exit_when_it_is_drained(house: House) -> None:
    server = await house.serve()
    agent = await house.agent()
    ServerDesk(server).drain_agent("one", "for good", leave=True)
    assert await ended(agent) == 0


async def test_a_command_can_have_an_agent_exit_at_the_latest_after_some_time(house: House, echoes: Service) -> None:
    server = house.server
    agent = await house.agent()
    client = await house.connect(echoes.target)
    ServerDesk(server).drain_agent("one", "for good", 0.001, leave=True)
    await agent.life.phase.wait_value(Phase.DRAINING)
    assert await talks(client)


async def test_a_command_to_a_name_that_nobody_has_tells_nobody(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tunnel")
    server = await house.serve()
    assert ServerDesk(server).drain_agent("nobody", "maintenance") == 0
    assert "command action=drain agent=nobody text=maintenance backends=0" in _messages(caplog, logging.DEBUG)
