"""What an agent does with a dial: targets, services of its own, and rules."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
import trio
from house import (
    PROMPT,
    Held,
    House,
    echo,
    ended,
    head,
    receive_all,
    refusal,
    talks,
)
from raw_server import RawServer
from trio.testing import wait_all_tasks_blocked

from tunnel.address import Target
from tunnel.agent import Agent
from tunnel.client import Client
from tunnel.config import AgentConfig
from tunnel.connect import Connector
from tunnel.errors import CUT, AddressError, Denied, Refused, StreamReset
from tunnel.lifecycle import Phase
from tunnel.packets import Close, DialReq, DialRsp
from tunnel.patterns import Pattern, Rules
from tunnel.stream import TunnelStream

# -- dials


async def test_a_dial_that_is_given_up_stops_connecting(raw: RawServer, held: Held) -> None:
    await raw.welcome()
    await raw.send(DialReq(1, "held.test", 1, 65536, 1_000_000, {}))
    await held.arrived.wait_value(1)
    await raw.send(Close(1, "cancelled", ""))
    await raw.agent.life.open.wait_value(0)
    assert held.given_up == 1


async def test_a_dial_that_is_given_up_in_the_moment_it_succeeds_leaves_nothing_open(
    raw: RawServer, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = Connector.connect
    service = await house.service(echo)

    async def connect_while_it_is_given_up(connector: Connector, host: str, port: int) -> socket.socket:
        sock = await connect(connector, host, port)
        with trio.CancelScope(shield=True):  # too late to notice, as for a connection made in the same round
            await raw.send(Close(1, "cancelled", ""))
            await wait_all_tasks_blocked()
        return sock

    monkeypatch.setattr(Connector, "connect", connect_while_it_is_given_up)
    await raw.welcome(DialReq(1, "localhost", service.target.port, 65536, 10_000, {}))
    await service.opened.wait_value(1)
    await service.open.wait_value(0)
    assert raw.agent.dials.served == 0


async def test_a_dial_that_was_given_up_before_it_began_does_not(raw: RawServer, house: House) -> None:
    service = await house.service(echo)
    await raw.welcome()
    asked = DialReq(1, service.target.host, service.target.port, 65536, 10_000, {})
    await raw.stream.send_all(asked.encode() + Close(1, "cancelled", "").encode())
    await wait_all_tasks_blocked()
    assert (service.opened.value, raw.agent.dials.served, raw.agent.life.open.value) == (0, 0, 0)


async def test_a_dial_waits_no_longer_than_its_asker(raw: RawServer, held: Held) -> None:
    await raw.welcome()
    await raw.send(DialReq(1, "held.test", 1, 65536, 20, {}))
    answer = await raw.next()
    assert isinstance(answer, DialRsp)
    assert (answer.stream, answer.code, held.given_up) == (1, "timeout", 1)


@pytest.mark.parametrize(("host", "port"), [("", 80), ("a b", 80), ("x", 0), ("x", 65536)])
async def test_a_dial_to_what_is_no_target_is_answered_as_a_protocol_error(
    raw: RawServer, host: str, port: int
) -> None:
    await raw.welcome()
    await raw.send(DialReq(1, host, port, 65536, 1000, {}))
    answer = await raw.next()
    assert isinstance(answer, DialRsp)
    assert (answer.stream, answer.code) == (1, "protocol")


# -- services of its own


Talks = Callable[[trio.abc.HalfCloseableStream], Awaitable[None]]


async def _echo_here(stream: trio.abc.HalfCloseableStream) -> None:
    async for data in stream:
        await stream.send_all(data)


@pytest.fixture
async def client(house: House) -> AsyncIterator[Client]:
    """A client, and no agent yet."""
    await house.serve()
    async with house.client() as client:
        yield client


async def _reset_of(stream: TunnelStream) -> str:
    """The code, when it has been reset."""
    with pytest.raises(trio.BrokenResourceError) as caught:
        await stream.wait_ended()
    assert isinstance(caught.value.__cause__, StreamReset)
    return caught.value.__cause__.code


async def test_a_service_talks_to_clients_through_the_tunnel(house: House, client: Client) -> None:
    agent = await house.agent(services={"svc.internal:7": _echo_here})
    stream = await client.dial("svc.internal", 7)
    assert await talks(stream)
    await stream.send_eof()
    assert await receive_all(stream) == b""
    await agent.life.open.wait_value(0)
    assert agent.dials.served == 1


async def test_a_service_talks_to_clients_of_connect(house: House, client: Client) -> None:
    await house.agent(services={"svc.internal:7": _echo_here})
    assert await talks(await house.connect("svc.internal:7"))


async def test_each_service_is_reached_by_its_own_target(house: House, client: Client) -> None:
    def say(word: bytes) -> Talks:
        return lambda stream: stream.send_all(word)

    await house.agent(services={"a.internal:1": say(b"a1"), "a.internal:2": say(b"a2"), "b.internal:1": say(b"b1")})
    for host, port, word in (("a.internal", 1, b"a1"), ("A.internal.", 2, b"a2"), ("b.internal", 1, b"b1")):
        assert await receive_all(await client.dial(host, port)) == word


async def test_an_agent_with_services_refuses_other_targets_and_connects_nowhere(house: House, client: Client) -> None:
    elsewhere = await house.service(echo)
    agent = await house.agent(services={"svc.internal:7": _echo_here})
    with pytest.raises(Refused, match="this agent has no such service"):
        await client.dial(elsewhere.target.host, elsewhere.target.port)
    assert (elsewhere.opened.value, agent.dials.served) == (0, 0)


async def test_an_agent_with_no_services_at_all_refuses_every_target(house: House, client: Client) -> None:
    await house.agent(services={})
    with pytest.raises(Refused):
        await client.dial("svc.internal", 7)


@pytest.mark.parametrize("key", ["svc.internal", "svc.internal:0", ":7", "a b:7", "::1:7"])
def test_a_service_at_what_is_no_target_is_an_address_error(key: str) -> None:
    with pytest.raises(AddressError):
        Agent(AgentConfig((Target("x", 1),), "one"), {key: _echo_here})


async def test_a_service_that_returns_ends_its_direction_after_what_it_sent(house: House, client: Client) -> None:
    async def say_and_return(stream: trio.abc.HalfCloseableStream) -> None:
        await stream.send_all(bytes(300_000))

    await house.agent(services={"svc.internal:7": say_and_return})
    stream = await client.dial("svc.internal", 7)
    assert await receive_all(stream) == bytes(300_000)
    await stream.send_eof()
    await stream.wait_ended()


@pytest.mark.parametrize("error", [ValueError("oops"), Refused("oops"), AddressError("oops")], ids=repr)
async def test_a_service_that_fails_is_a_reset_for_its_client_and_a_fault_in_the_log(
    house: House, client: Client, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async def fail(stream: trio.abc.HalfCloseableStream) -> None:
        await stream.receive_some()
        raise error

    await house.agent(services={"svc.internal:7": fail, "echo.internal:7": _echo_here})
    stream = await client.dial("svc.internal", 7)
    await stream.send_all(b"x")
    code = await _reset_of(stream)
    survived = await talks(await client.dial("echo.internal", 7))
    faults = [record for record in caplog.records if record.levelno >= logging.ERROR]
    caplog.clear()
    assert (code, survived) == ("reset", True)
    assert ["fault in a connection" in record.getMessage() for record in faults] == [True]


async def test_a_service_in_a_nursery_whose_stream_is_reset_is_no_fault(house: House, client: Client) -> None:
    async def talk(stream: trio.abc.HalfCloseableStream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_echo_here, stream)
            nursery.start_soon(trio.sleep_forever)

    agent = await house.agent(services={"svc.internal:7": talk})
    stream = await client.dial("svc.internal", 7)
    assert await talks(stream)
    stream.reset("reset", "gone")
    await agent.life.open.wait_value(0)


async def test_a_service_whose_own_connection_breaks_is_a_reset_and_no_end(house: House, client: Client) -> None:
    """It may have been carrying bytes from there: a client must not take what it got for all there is."""

    async def carry(stream: trio.abc.HalfCloseableStream) -> None:
        await stream.send_all(b"the first half")
        raise trio.BrokenResourceError("the connection behind this service broke")

    await house.agent(services={"svc.internal:7": carry})
    stream = await client.dial("svc.internal", 7)
    with pytest.raises(trio.BrokenResourceError):
        await receive_all(stream)


async def test_a_service_may_close_its_stream_itself(house: House, client: Client) -> None:
    async def talk(stream: trio.abc.HalfCloseableStream) -> None:
        async with stream:
            await stream.send_all(b"bye")

    await house.agent(services={"svc.internal:7": talk})
    assert await receive_all(await client.dial("svc.internal", 7)) == b"bye"


async def test_a_service_of_an_agent_that_is_cut_is_a_reset_for_its_client(house: House, client: Client) -> None:
    agent = await house.agent(services={"svc.internal:7": _echo_here})
    stream = await client.dial("svc.internal", 7)
    assert await talks(stream)
    agent.life.cut()
    await _reset_of(stream)


async def test_a_leaving_agent_waits_for_its_services(house: House, client: Client) -> None:
    agent = await house.agent(services={"svc.internal:7": _echo_here})
    stream = await client.dial("svc.internal", 7)
    agent.life.leave()
    await agent.life.phase.wait_value(Phase.DRAINING)
    assert await talks(stream)
    await stream.send_eof()
    assert await receive_all(stream) == b""
    assert await ended(agent) == 0


# -- rules


def _denying(*patterns: str) -> Rules:
    return Rules(deny=tuple(map(Pattern.parse, patterns)))


async def test_a_target_that_is_denied_by_name_is_answered_with_denied(house: House, client: Client) -> None:
    agent = await house.agent(rules=_denying("*.internal"))
    with pytest.raises(Denied, match=r"db\.internal:5432: denied by \*\.internal"):
        await client.dial("DB.internal.", 5432)
    assert agent.dials.failed == {"denied": 1}


async def test_a_target_that_is_denied_by_address_is_not_connected_to(house: House, client: Client) -> None:
    await house.agent(rules=_denying("127.0.0.0/8"))  # its server is there, too, and is linked to all the same
    service = await house.service(echo)
    with pytest.raises(Denied):
        await client.dial("0.0.0.0", service.target.port)
    assert service.opened.value == 0


async def test_a_name_that_leads_to_a_denied_address_is_answered_with_403(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.serve()
    echoes = await house.service(echo)
    await house.agent(rules=_denying("127.0.0.0/8"))
    stream = await house.call()
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (echoes.target.host, echoes.target.port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    await stream.send_all(head(Target("harmless.example", echoes.target.port)))
    status, _, text = await refusal(stream)
    assert status == 403
    assert "denied" in text
    assert echoes.opened.value == 0


async def test_a_service_whose_target_is_denied_is_not_called(house: House, client: Client) -> None:
    await house.agent(services={"svc.internal:7": _echo_here}, rules=_denying("svc.internal"))
    with pytest.raises(Denied):
        await client.dial("svc.internal", 7)


async def test_of_services_those_whose_targets_are_allowed_are_called(house: House, client: Client) -> None:
    services = {"svc.internal:7": _echo_here, "other.internal:7": _echo_here}
    await house.agent(services=services, rules=Rules(allow=(Pattern("svc.internal"), Pattern("10.0.0.0/8"))))
    assert await talks(await client.dial("svc.internal", 7))
    with pytest.raises(Denied):
        await client.dial("other.internal", 7)


async def test_a_dial_to_a_service_that_was_given_up_before_it_began_is_no_fault(
    house: House, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[object] = []

    async def service(stream: trio.abc.HalfCloseableStream) -> None:
        called.append(stream)

    agent = await house.agent(services={"svc.internal:7": service})
    (link,) = agent.sync.links.values()
    link.session.receive_packet(DialReq(1, "svc.internal", 7, 65536, 10_000, {}))
    link.session.receive_packet(Close(1, "cancelled", ""))
    await agent.life.open.wait_value(0)
    assert called == []
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_service_that_is_cut_is_reset_as_cut(house: House, client: Client) -> None:
    async def forever(stream: trio.abc.HalfCloseableStream) -> None:
        while await stream.receive_some():
            pass

    agent = await house.agent(services={"svc.internal:7": forever}, timeouts=replace(PROMPT, shutdown=0.5))
    stream = await client.dial("svc.internal", 7)
    agent.life.leave()
    with pytest.raises(trio.BrokenResourceError) as caught:
        await stream.receive_some()
    assert isinstance(caught.value.__cause__, StreamReset)
    assert caught.value.__cause__.code == CUT
