"""The agent: its links, how it drains and how it leaves."""

from __future__ import annotations

import logging
import random
import socket
from dataclasses import replace

import pytest
import trio
from house import (
    PROMPT,
    Held,
    House,
    Service,
    descriptors,
    echo,
    ended,
    expect,
    firehose,
    head,
    receive_all,
    receive_exactly,
    refusal,
    talks,
    tasks,
    through,
)
from raw_server import RawServer
from trio.testing import wait_all_tasks_blocked

from tunnel.address import Target
from tunnel.agent import Agent
from tunnel.config import AgentConfig
from tunnel.connect import Address, Connector
from tunnel.drain import DrainPhase
from tunnel.explain import explain
from tunnel.http_connect import ESTABLISHED
from tunnel.lifecycle import Phase
from tunnel.limits import Limits, Timeouts
from tunnel.packets import Close, DialReq, DialRsp, Drain, DrainAck, GoAway, GoAwayAck, Hello


@pytest.fixture
async def echoes(house: House) -> Service:
    """A server, and a target that echoes; no agent."""
    await house.serve()
    return await house.service(echo)


def _above(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno > level]


def _states(house: House) -> list[str]:
    """Of all backends, as the server sees them."""
    considered = explain(house.server.backends, Target("anything", 1)).considered
    return [candidate.state for key in considered for candidate in key.candidates]


async def _drain(agent: Agent) -> None:
    """Drain, and wait until every server knows."""
    agent.drain()
    await agent.draining.wait_acked()


# -- links


async def test_who_waits_for_a_link_wakes_although_the_first_attempt_fails(raw: RawServer) -> None:
    linked = raw.agent.linked
    await raw.stream.aclose()
    await raw.accept()
    await raw.welcome()
    await linked.wait()


async def test_linked_is_replaced_when_the_last_link_is_lost(raw: RawServer) -> None:
    await raw.welcome()
    (link,) = raw.agent.sync.links.values()
    await raw.stream.aclose()
    await link.ended.wait()
    assert not raw.agent.linked.is_set()


async def test_an_agent_links_to_every_server_it_is_given(house: House) -> None:
    servers = [await house.serve(), await house.serve()]
    doors = tuple(Target(address.host, address.port) for server in servers for address in server.addresses["links"])
    agent = await house.agent(servers=doors)
    await wait_all_tasks_blocked()
    assert set(agent.sync.links) == {server.identity.instance for server in servers}


async def test_an_agent_without_any_server_can_leave(house: House) -> None:
    agent = Agent(AgentConfig((house.closed_port(),), "one", timeouts=PROMPT))
    await house.nursery.start(agent.run)
    agent.life.leave()
    assert await ended(agent) == 0


async def test_an_agent_can_leave_in_the_middle_of_a_handshake(raw: RawServer) -> None:
    raw.agent.life.leave()
    assert await ended(raw.agent) == 0
    assert await raw.stream.receive_some() == b""


# -- draining


async def test_new_dials_go_elsewhere_once_a_drain_is_acknowledged(house: House, echoes: Service) -> None:
    draining, other = await house.agent("one"), await house.agent("two")
    await _drain(draining)
    for _ in range(20):
        assert await talks(await house.connect(echoes.target))
    assert (draining.dials.served, other.dials.served) == (0, 20)
    assert house.server.backends.fallbacks == 0


async def test_streams_that_run_when_a_drain_begins_go_on(house: House, echoes: Service) -> None:
    agent = await house.agent()
    client = await house.connect(echoes.target)
    await _drain(agent)
    assert await talks(client)


async def test_no_dial_fails_while_an_agent_drains(house: House, echoes: Service) -> None:
    draining, _ = await house.agent("one"), await house.agent("two")
    served: list[bool] = []

    async def client() -> None:
        async with await house.connect(echoes.target) as stream:
            served.append(await talks(stream))

    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(client)
            if number == 100:
                draining.drain()
            await trio.lowlevel.checkpoint()
    assert served == [True] * 200


async def test_a_dial_that_is_pending_when_a_drain_begins_is_served(house: House, held: Held, echoes: Service) -> None:
    draining, _ = await house.agent("one"), await house.agent("two")
    client = await house.ask(through(echoes.target), "Tunnel-Agent: one")
    await held.arrived.wait_value(1)
    await _drain(draining)
    held.open.set()
    await expect(client, ESTABLISHED)
    assert draining.dials.served == 1


async def test_a_draining_agent_serves_when_no_other_can_and_that_is_counted(house: House, echoes: Service) -> None:
    agent = await house.agent()
    await _drain(agent)
    assert await talks(await house.connect(echoes.target))
    assert (agent.dials.served, house.server.backends.fallbacks) == (1, 1)


async def test_an_agent_that_drains_says_so_when_it_links_again(house: House, echoes: Service) -> None:
    agent = await house.agent()
    await _drain(agent)
    (link,) = agent.sync.links.values()
    link.drop("for the test")
    await link.ended.wait()
    await agent.linked.wait()
    assert _states(house) == ["draining"]


async def test_a_drain_between_hello_and_welcome_is_the_first_packet(raw: RawServer) -> None:
    raw.agent.drain()
    await raw.welcome(DialReq(1, "127.0.0.1", 1, 65536, 1000, {}))
    first = await raw.next()
    assert isinstance(first, Drain)
    assert (first.seq, first.phase) == (1, "soft")


async def test_an_agent_that_drains_says_so_in_hello(raw: RawServer) -> None:
    await raw.welcome()
    raw.agent.drain()
    await raw.next()
    await raw.stream.aclose()
    hello = await raw.accept()
    assert isinstance(hello, Hello)
    assert hello.info["draining"] is True


async def test_a_busy_link_delays_no_drain(house: House) -> None:
    await house.serve()
    service = await house.service(firehose)
    busy, other = await house.agent("one"), await house.agent("two")

    async def swallow(*, task_status: trio.TaskStatus[None]) -> None:
        async with await house.connect(service.target, "Tunnel-Agent: one") as client:
            await receive_exactly(client, 1_000_000)
            task_status.started()
            async for _ in client:
                pass

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            await nursery.start(swallow)
        await _drain(busy)
        for _ in range(10):
            await house.connect(service.target)
        assert (busy.dials.served, other.dials.served) == (10, 10)
        nursery.cancel_scope.cancel()


async def test_a_drain_goes_ahead_of_the_data_that_waits_on_a_full_link(raw: RawServer, house: House) -> None:
    window = 16 * 1024 * 1024
    service = await house.service(firehose)
    await raw.welcome(DialReq(1, service.target.host, service.target.port, window, 10_000, {}))
    assert isinstance(await raw.next(), DialRsp)
    await wait_all_tasks_blocked()
    (link,) = raw.agent.sync.links.values()
    waiting = link.session.out.queued
    raw.agent.drain()
    assert isinstance(await raw.next(), Drain)
    assert waiting > 0
    assert raw.received < window - waiting * 0.9  # the rest is framing


async def test_a_drain_does_not_wait_for_a_link_that_was_lost(raw: RawServer) -> None:
    await raw.welcome()
    raw.agent.drain()
    assert isinstance(await raw.next(), Drain)
    await raw.stream.aclose()
    await raw.agent.draining.wait_acked()


async def test_two_drains_at_once_end_with_the_acknowledgement_of_the_second(
    raw: RawServer, caplog: pytest.LogCaptureFixture
) -> None:
    await raw.welcome()
    for seq in (1, 2):
        raw.agent.drain()
        while not isinstance(drain := await raw.next(), Drain):
            pass
        assert drain.seq == seq
    await raw.send(DrainAck(1, "soft"), DrainAck(2, "soft"))
    await raw.agent.draining.wait_acked()
    assert not _above(caplog, logging.INFO)


# -- leaving


async def test_an_agent_without_streams_leaves_with_0(house: House) -> None:
    await house.serve()
    agent = await house.agent()
    agent.life.leave()
    assert await ended(agent) == 0
    await wait_all_tasks_blocked()
    assert len(house.server.backends) == 0


async def test_a_leaving_agent_waits_for_its_streams(house: House, echoes: Service) -> None:
    agent, _ = await house.agent("one"), await house.agent("two")
    client = await house.connect(echoes.target, "Tunnel-Agent: one")
    agent.life.leave()
    await agent.life.phase.wait_value(Phase.DRAINING)
    await wait_all_tasks_blocked()
    assert await talks(client)
    assert agent.life.phase.value is Phase.DRAINING
    await client.send_eof()
    assert await receive_exactly(client, 1) == b""
    assert await ended(agent) == 0


async def test_the_only_agent_serves_dials_while_it_leaves(house: House, echoes: Service) -> None:
    agent = await house.agent()
    first = await house.connect(echoes.target)
    agent.life.leave()
    await agent.life.phase.wait_value(Phase.DRAINING)
    second = await house.connect(echoes.target)
    assert await talks(second)
    await first.aclose()
    await second.aclose()
    assert await ended(agent) == 0


async def test_streams_that_outlast_the_budget_are_reset_and_the_exit_is_3(house: House, echoes: Service) -> None:
    agent = await house.agent(timeouts=Timeouts(shutdown=0.1))
    client = await house.connect(echoes.target)
    agent.life.leave()
    assert await ended(agent) == 3
    with pytest.raises(trio.BrokenResourceError):
        await client.receive_some()
    await echoes.open.wait_value(0)


async def test_a_cut_resets_streams_at_once_and_the_exit_is_4(house: House, echoes: Service) -> None:
    agent = await house.agent()
    client = await house.connect(echoes.target)
    agent.life.leave()
    await agent.life.phase.wait_value(Phase.DRAINING)
    agent.life.cut()
    assert await ended(agent) == 4
    with pytest.raises(trio.BrokenResourceError):
        await client.receive_some()
    await echoes.open.wait_value(0)


async def test_a_dial_that_is_pending_at_the_cut_is_503(house: House, held: Held, echoes: Service) -> None:
    agent = await house.agent()
    client = await house.ask(through(echoes.target))
    await held.arrived.wait_value(1)
    agent.life.cut()
    assert await ended(agent) == 4
    assert (await refusal(client))[0] == 503


async def test_a_clean_leave_logs_nothing_above_info(
    house: House, echoes: Service, caplog: pytest.LogCaptureFixture
) -> None:
    agent, _ = await house.agent("one"), await house.agent("two")
    client = await house.connect(echoes.target, "Tunnel-Agent: one")
    agent.life.leave()
    await agent.life.phase.wait_value(Phase.DRAINING)
    await client.send_eof()
    await receive_all(client)
    assert await ended(agent) == 0
    await wait_all_tasks_blocked()
    assert not _above(caplog, logging.INFO)


async def test_what_goes_out_when_the_turn_ends_is_not_unsent(house: House) -> None:
    """An agent that says how its drain goes in its very last turn is not one that had to cut something."""
    await house.serve()
    agent = await house.agent()
    (link,) = agent.sync.links.values()
    link.session.send_control(agent.watch.status)
    link.flush()
    assert not agent.unsent


async def test_agents_that_leave_cleanly_leave_nothing(house: House, echoes: Service) -> None:
    async def come_and_leave() -> None:
        agent = await house.agent()
        client = await house.connect(echoes.target)
        assert await talks(client)
        agent.life.leave()
        await client.send_eof()
        assert await receive_exactly(client, 1) == b""
        await client.aclose()
        assert await ended(agent) == 0
        await house.idle()

    await come_and_leave()
    before = tasks(), descriptors()
    for _ in range(20):
        await come_and_leave()
    assert (tasks(), descriptors()) == before
    assert len(house.server.backends) == 0


async def test_neither_side_sends_longer_frames_than_the_other_takes(house: House) -> None:
    small = Limits(body=4096)
    await house.serve(limits=small)
    await house.agent(limits=small)
    service = await house.service(echo)
    words = random.Random(1).randbytes(300_000)
    stream = await house.connect(service.target)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.send_all, words)
        assert await receive_exactly(stream, len(words)) == words


async def test_bytes_behind_the_head_go_out_in_frames_that_the_agent_takes(house: House) -> None:
    await house.serve()
    await house.agent(limits=Limits(body=4096))
    service = await house.service(echo)
    words = random.Random(2).randbytes(15_000)
    stream = await house.call()
    await stream.send_all(head(service.target) + words)
    await expect(stream, ESTABLISHED)
    assert await receive_exactly(stream, len(words)) == words


# -- drains, servers that leave, servers that refuse


async def test_a_dial_that_comes_after_the_last_word_is_served_by_another(house: House, echoes: Service) -> None:
    gone, other = await house.agent("one"), await house.agent("two")
    gone.draining.phase = DrainPhase.FINAL  # as between DRAIN(final) and its arrival
    for _ in range(10):
        assert await talks(await house.connect(echoes.target))
    assert (gone.dials.served, other.dials.served) == (0, 10)
    assert gone.dials.failed["refused_draining"] == house.server.backends.redispatched["refused_draining"] > 0


async def test_a_dial_that_comes_after_the_last_word_of_the_only_agent_is_503_at_once(
    house: House, echoes: Service
) -> None:
    gone = await house.agent()
    gone.draining.phase = DrainPhase.FINAL
    status, _, text = await refusal(await house.ask(echoes.target))
    assert (status, text) == (503, f"no_backend: no other agent matches {echoes.target}\n")


async def test_an_agent_that_was_drained_and_undone_is_picked_again(house: House, echoes: Service) -> None:
    agent = await house.agent("one")
    other = await house.agent("two")
    await _drain(agent)
    assert agent.undrain()
    await agent.draining.wait_acked()
    assert sorted(_states(house)) == ["active", "active"]
    for _ in range(20):
        await house.connect(echoes.target)
    assert (agent.dials.served, other.dials.served) == (10, 10)
    assert house.server.backends.fallbacks == 0


async def test_a_goaway_is_acknowledged_each_time(raw: RawServer) -> None:
    await raw.welcome(GoAway("soft", 1000), GoAway("final", 0))
    assert [await raw.next(), await raw.next()] == [GoAwayAck("soft"), GoAwayAck("final")]


async def test_an_agent_links_elsewhere_and_keeps_what_it_has_when_a_server_leaves(
    house: House, echoes: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leaving, staying = await house.serve(), await house.serve()
    addresses = [
        (int(socket.AF_INET), (address.host, address.port))
        for server in (leaving, staying)
        for address in server.addresses["links"]
    ]
    here = addresses[:1]

    async def resolve(connector: Connector, host: str, port: int) -> list[Address]:
        await trio.lowlevel.checkpoint()
        return list(here) if host == "servers.test" else [(int(socket.AF_INET), (host, port))]

    monkeypatch.setattr(Connector, "resolve", resolve)
    agent = await house.agent(servers=(Target("servers.test", 7400),))
    house.server = leaving
    client = await house.connect(echoes.target)
    here[:] = addresses
    leaving.life.leave()
    await leaving.life.phase.wait_value(Phase.DRAINING)
    await _linked_to(agent, 2)
    assert set(agent.sync.links) == {leaving.identity.instance, staying.identity.instance}
    assert staying.backends.active == 1
    assert await talks(client)
    await client.aclose()
    assert await ended(leaving) == 0
    await _linked_to(agent, 1)
    assert set(agent.sync.links) == {staying.identity.instance}
    assert agent.linked.is_set()
    # its address is still in the name: a try at it may have failed by now, which is worth a warning
    assert [text for text in _above(caplog, logging.INFO) if "link failed" not in text] == []


async def _linked_to(agent: Agent, count: int) -> None:
    with trio.fail_after(30):
        while len(agent.sync.links) != count:
            await trio.lowlevel.checkpoint()


def _strict(agent: Agent) -> Agent:
    """The same agent, told to exit on failure."""
    agent.config = replace(agent.config, exit_on_failure=True)
    return agent


async def test_told_so_an_agent_that_finds_no_server_exits_with_5(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(AgentConfig((house.closed_port(), house.closed_port()), "one", exit_on_failure=True, timeouts=PROMPT))
    await agent.run()
    assert agent.life.exit_code == 5
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage().startswith('"cannot link" cause=')
    caplog.clear()


async def test_told_so_an_agent_that_finds_one_of_its_servers_stays(house: House) -> None:
    address = (await house.serve()).addresses["links"][0]
    servers = (house.closed_port(), Target(address.host, address.port))
    agent = await house.agent(servers=servers, exit_on_failure=True)
    with trio.fail_after(30):
        while not agent.sync._doors[0].failed:
            await trio.lowlevel.checkpoint()
    await wait_all_tasks_blocked()
    assert not agent.life.leaving


async def test_told_so_an_agent_that_has_been_linked_waits_for_its_server(raw: RawServer) -> None:
    agent = _strict(raw.agent)
    await raw.welcome()
    await raw.stream.aclose()
    await raw.accept()
    await raw.stream.aclose()  # a failure, as of a server that starts again
    await raw.accept()
    assert not agent.life.leaving


@pytest.mark.parametrize("before", [False, True])
async def test_told_so_an_agent_that_is_refused_for_good_exits_with_5(
    raw: RawServer, before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    agent = _strict(raw.agent)
    if before:
        await raw.welcome()
        await raw.stream.aclose()
        await raw.accept()
    await raw.send(Close(0, "denied", "not you"))
    assert await ended(agent) == 5
    assert '"cannot link" cause="not you (denied)"' in caplog.messages
    caplog.clear()


@pytest.mark.parametrize("code", ["leaving", "duplicate"])
async def test_told_so_an_agent_that_is_refused_for_now_tries_again(raw: RawServer, code: str) -> None:
    agent = _strict(raw.agent)
    await raw.send(Close(0, code, "0" * 32))
    await raw.stream.aclose()
    assert isinstance(await raw.accept(), Hello)
    assert not agent.life.leaving
    agent.life.leave()
    assert await ended(agent) == 0


async def test_an_agent_that_is_refused_for_good_tries_again_unless_told_otherwise(raw: RawServer) -> None:
    await raw.send(Close(0, "denied", "not you"))
    await raw.stream.aclose()
    assert isinstance(await raw.accept(), Hello)
    assert not raw.agent.life.leaving
