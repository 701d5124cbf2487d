"""The server: what it listens on, whom it links to, what happens when an agent or the server itself goes away."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

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
    open_house,
    receive_all,
    refusal,
    talks,
    tasks,
    through,
)
from trio.testing import wait_all_tasks_blocked

from tunnel import server as server_module
from tunnel.address import ListenAddress, Target
from tunnel.config import Forward, Limits, ServerConfig, Timeouts
from tunnel.errors import HandshakeRefused
from tunnel.frames import Packet, Welcome
from tunnel.handshake import DiallingHandshake, Identity
from tunnel.http_connect import ESTABLISHED
from tunnel.lifecycle import Phase
from tunnel.link import Link
from tunnel.listen import BindError
from tunnel.server import Server
from tunnel.transport import SocketTransport


@pytest.fixture
async def house(caplog: pytest.LogCaptureFixture) -> AsyncIterator[House]:
    async with open_house() as house:
        yield house
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.fixture
async def echoes(house: House) -> Service:
    """A server, and a target that echoes; no agent."""
    await house.serve()
    return await house.service(echo)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def _messages(caplog: pytest.LogCaptureFixture, level: int, logger: str = "tunnel") -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.levelno > level and record.name.startswith(logger)
    ]


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
        before = descriptors()
        with pytest.RaisesGroup(BindError, flatten_subgroups=True):
            await Server(ServerConfig(**config)).run()
        assert descriptors() == before


def test_a_program_that_cannot_start_ends_with_1_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = ListenAddress("127.0.0.1", taken.getsockname()[1])
        assert server_module.run(ServerConfig(address, None)) == 1
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
    await house.server.life.phase.wait_value(Phase.LEAVING)
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
    await house.server.life.phase.wait_value(Phase.LEAVING)
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
    await house.server.life.phase.wait_value(Phase.LEAVING)
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
