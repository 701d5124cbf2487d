"""A forwarder: what it listens on, how it dials, what happens without a server, and how it leaves."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable

import pytest
import trio
from house import PROMPT, House, Service, descriptors, echo, ended, forward, receive_all, talks
from trio.testing import wait_all_tasks_blocked

from tunnel import programs, turns
from tunnel.address import ListenAddress, Target
from tunnel.config import ClientConfig, Forward
from tunnel.forwarder import Forwarder
from tunnel.lifecycle import Phase
from tunnel.listen import BindError

Start = Callable[..., Awaitable[Forwarder]]


@pytest.fixture(autouse=True)
def _whole_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tunnel")


@pytest.fixture
async def echoes(house: House) -> Service:
    """A server, an agent, and a target that echoes."""
    await house.serve()
    await house.agent()
    return await house.service(echo)


@pytest.fixture
def start(house: House) -> Start:
    """Starts a forwarder over the house's server, unless another one is given."""

    async def start(*forwards: Forward, server: Target | None = None) -> Forwarder:
        if server is None:
            links = house.server.addresses["links"][0]
            server = Target(links.host, links.port)
        forwarder = Forwarder(ClientConfig((server,), timeouts=PROMPT), forwards)
        await house.nursery.start(forwarder.life.run)
        return forwarder

    return start


async def call(forwarder: Forwarder, nth: int = 0) -> trio.SocketStream:
    address = forwarder.addresses[nth]
    return await trio.open_tcp_stream(address.host, address.port)


def said(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(words)]


async def is_reset(forwarder: Forwarder) -> bool:
    """Whether a connection ends by a reset, without a byte."""
    async with await call(forwarder) as client:
        try:
            await client.receive_some()
        except trio.BrokenResourceError:
            return True
        return False


# -- listening and dialling


async def test_each_port_leads_to_its_target(house: House, echoes: Service, start: Start) -> None:
    async def greet(stream: trio.SocketStream) -> None:
        await stream.send_all(b"welcome")

    forwarder = await start(forward(echoes.target), forward((await house.service(greet)).target))
    async with await call(forwarder) as first, await call(forwarder, 1) as second:
        assert await talks(first)
        assert await receive_all(second) == b"welcome"


async def test_every_address_is_logged_with_its_target(
    echoes: Service, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    targets = [Target("db.internal", 5432), Target("web.internal", 80)]
    caplog.clear()
    forwarder = await start(*map(forward, targets))
    assert said(caplog, "listening") == [
        f"listening use=forward address={address} target={target}"
        for address, target in zip(forwarder.addresses, targets, strict=True)
    ]


async def test_all_connections_share_one_link(house: House, echoes: Service, start: Start) -> None:
    forwarder = await start(forward(echoes.target))
    await forwarder.client.connect()
    link = forwarder.client.link
    for _ in range(3):
        async with await call(forwarder) as client:
            assert await talks(client)
    assert forwarder.client.link is link


async def test_the_agent_that_is_named_is_used(house: House, echoes: Service, start: Start) -> None:
    named = await house.agent("two")
    forwarder = await start(forward(echoes.target, "two"))
    clients = [await call(forwarder) for _ in range(4)]
    for client in clients:
        assert await talks(client)
    assert named.life.open.value == 4
    for client in clients:
        await client.aclose()


@pytest.mark.parametrize(("agent", "code"), [(None, "refused"), ("nobody", "no_backend")])
async def test_a_dial_that_fails_is_a_reset_and_logged(
    house: House, echoes: Service, start: Start, caplog: pytest.LogCaptureFixture, agent: str | None, code: str
) -> None:
    target = house.closed_port()
    forwarder = await start(forward(target, agent))
    assert await is_reset(forwarder)
    (failure,) = said(caplog, '"dial failed" use=forward')
    assert f"target={target}" in failure
    assert f"code={code}" in failure


# -- without a server


async def test_without_a_server_it_listens_warns_and_resets(
    house: House, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = house.closed_port()
    forwarder = await start(forward(Target("db.internal", 5432)), server=nowhere)
    await wait_all_tasks_blocked()
    assert await is_reset(forwarder)
    (warning,) = said(caplog, '"no server yet"')
    assert str(nowhere) in warning
    (failure,) = said(caplog, '"dial failed" use=forward')
    assert "code=no_server" in failure


async def test_a_link_that_was_lost_is_made_again(house: House, echoes: Service, start: Start) -> None:
    forwarder = await start(forward(echoes.target))
    link = await forwarder.client.connect()
    link.drop("lost")
    async with await call(forwarder) as client:
        assert await talks(client)


async def test_a_port_in_use_ends_the_start_and_closes_what_was_opened(house: House) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        forwards = [
            forward(Target("x", 1)),
            Forward(ListenAddress("127.0.0.1", taken.getsockname()[1]), Target("x", 1)),
        ]
        turns.of_this_run()  # has a descriptor itself
        before = descriptors()
        with pytest.RaisesGroup(BindError, flatten_subgroups=True):
            await Forwarder(ClientConfig((house.closed_port(),)), forwards).life.run()
        assert descriptors() == before + 1  # the closed port's


# -- leaving


async def test_leaving_waits_for_what_is_open_and_takes_nothing_new(echoes: Service, start: Start) -> None:
    forwarder = await start(forward(echoes.target))
    async with await call(forwarder) as client:
        assert await talks(client)
        forwarder.life.leave()
        await forwarder.life.phase.wait_value(Phase.DRAINING)
        await wait_all_tasks_blocked()
        with pytest.raises(OSError, match="all attempts to connect"):
            await call(forwarder)
        assert await talks(client)
    assert await ended(forwarder) == 0


async def test_the_server_is_told_of_the_end(house: House, echoes: Service, start: Start) -> None:
    forwarder = await start(forward(echoes.target))
    link = await forwarder.client.connect()
    forwarder.life.leave()
    assert await ended(forwarder) == 0
    assert "leaving" in str(link.why)
    await house.idle()


async def test_what_was_sent_before_leaving_arrives(house: House, echoes: Service, start: Start) -> None:
    received: list[bytes] = []

    async def listen(stream: trio.SocketStream) -> None:
        received.append(await receive_all(stream))

    service = await house.service(listen)
    forwarder = await start(forward(service.target))
    async with await call(forwarder) as client:
        await client.send_all(bytes(3_000_000))
    forwarder.life.leave()
    assert await ended(forwarder) == 0
    await service.open.wait_value(0)
    assert received == [bytes(3_000_000)]


def test_a_program_that_cannot_start_is_exit_1(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = ListenAddress("127.0.0.1", taken.getsockname()[1])
        config = ClientConfig((Target("127.0.0.1", 1),))
        assert programs.run_forwarder(config, [Forward(address, Target("x", 1))]) == 1
    (line,) = said(caplog, '"cannot start"')
    assert str(address) in line
