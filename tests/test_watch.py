"""An agent's drain as its operator sees it: its state, what servers are told of it, and when it is over."""

from __future__ import annotations

import logging
import math
import socket
from functools import partial
from typing import cast

import pytest
import trio
from sites import MakeSite, Site, hold, run_site, seen, statuses
from trio.testing import MockClock, wait_all_tasks_blocked

from tunnel.address import Target
from tunnel.agent import Agent
from tunnel.config import AgentConfig
from tunnel.connect import Connector
from tunnel.lifecycle import Lifecycle, Phase
from tunnel.limits import Timeouts
from tunnel.packets import MAX_U32, DialReq, Drain, DrainAck, DrainStatus
from tunnel.watch import AgentState

MINUTES = 600.0  # some
DAY = 24 * 3600.0


@pytest.fixture
def make_site(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> MakeSite:
    return partial(run_site, nursery, monkeypatch)


@pytest.fixture
async def site(make_site: MakeSite) -> Site:
    """An agent with one link; ``peers[0]`` is its server. For tests whose clock jumps."""
    site = make_site("one")
    await site.link()
    return site


# -- its state


async def test_an_agent_that_has_started_is_ready(autojump_clock: MockClock, site: Site) -> None:
    assert site.state == "ready"
    assert Agent(AgentConfig((Target("one", 1),), "one")).state.value is AgentState.STARTING


async def test_an_agent_is_drained_when_its_server_knows(autojump_clock: MockClock, site: Site) -> None:
    (peer,) = site.peers
    site.agent.drain()
    assert site.state == "draining"
    await wait_all_tasks_blocked()
    assert site.state == "draining"
    await peer.send(DrainAck(1, "soft"))
    await site.agent.state.wait_value(AgentState.DRAINED)


async def test_an_agent_is_drained_when_its_last_stream_has_ended(autojump_clock: MockClock, site: Site) -> None:
    over = trio.Event()
    await hold(site.agent, over)
    site.agent.drain()
    await site.peers[0].send(DrainAck(1, "soft"))
    await wait_all_tasks_blocked()
    assert site.state == "draining"
    over.set()
    await wait_all_tasks_blocked()
    assert site.state == "drained"


async def test_a_dial_takes_a_drained_agent_back_to_draining(autojump_clock: MockClock, site: Site) -> None:
    site.agent.drain()
    await site.peers[0].send(DrainAck(1, "soft"))
    await wait_all_tasks_blocked()
    over = trio.Event()
    await hold(site.agent, over)
    assert site.state == "draining"
    over.set()
    await wait_all_tasks_blocked()
    assert site.state == "drained"


@pytest.mark.parametrize("drained", [False, True])
async def test_an_agent_whose_drain_is_undone_is_ready(autojump_clock: MockClock, site: Site, drained: bool) -> None:
    site.agent.drain()
    if drained:
        await site.peers[0].send(DrainAck(1, "soft"))
        await wait_all_tasks_blocked()
    assert site.agent.undrain()
    assert site.state == "ready"
    await trio.sleep(MINUTES)
    assert site.state == "ready"


async def test_an_undrain_without_a_drain_is_done_already(
    autojump_clock: MockClock, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tunnel.watch")
    assert site.agent.undrain()
    assert site.state == "ready"
    assert caplog.messages == await seen(site.peers[0]) == []


async def test_a_drained_agent_that_has_taken_a_dial_is_not_drained_for_one_turn_more(
    autojump_clock: MockClock, site: Site
) -> None:
    site.agent.drain()
    await site.peers[0].send(DrainAck(1, "soft"))
    await wait_all_tasks_blocked()
    site.agent.watch.dial_came()
    assert site.state == "draining"


async def test_a_dial_makes_no_agent_drain(autojump_clock: MockClock, site: Site) -> None:
    site.agent.watch.dial_came()
    assert site.state == "ready"


async def test_an_agent_can_drain_again(autojump_clock: MockClock, site: Site) -> None:
    for seq in (1, 3):
        site.agent.drain()
        assert site.state == "draining"
        await site.peers[0].send(DrainAck(seq, "soft"))
        await wait_all_tasks_blocked()
        assert site.state == "drained"
        assert site.agent.undrain()


async def test_an_agent_that_leaves_is_stopping_and_takes_no_undrain(autojump_clock: MockClock, site: Site) -> None:
    over = trio.Event()
    await hold(site.agent, over)
    site.agent.drain()
    site.agent.life.leave()
    await wait_all_tasks_blocked()
    assert site.state == "stopping"
    assert not site.agent.undrain()
    assert site.agent.draining.reasons == {"admin", "signal"}
    over.set()


async def test_an_agent_that_leaves_is_not_drained_anew(autojump_clock: MockClock, site: Site) -> None:
    over = trio.Event()
    await hold(site.agent, over)
    site.agent.life.leave()
    await wait_all_tasks_blocked()
    site.agent.drain()
    assert site.state == "stopping"
    assert site.agent.draining.reasons == {"signal"}
    over.set()


async def test_drained_is_never_said_while_anything_is_open_or_unacknowledged(
    autojump_clock: MockClock, make_site: MakeSite, nursery: trio.Nursery
) -> None:
    site = make_site("one", "two")
    agent, peers = site.agent, [await site.link(0), await site.link(1)]
    over = [trio.Event() for _ in range(3)]
    when_drained: list[tuple[int, int]] = []

    async def watch() -> None:
        while True:
            await agent.state.wait_value(AgentState.DRAINED)
            when_drained.append((agent.life.open.value, agent.draining.unacked))
            await agent.state.wait_value(AgentState.DRAINING)

    nursery.start_soon(watch)
    await hold(agent, over[0])
    agent.drain()
    await peers[0].send(DrainAck(1, "soft"))
    await hold(agent, over[1])
    over[0].set()
    await wait_all_tasks_blocked()
    await peers[1].send(DrainAck(1, "soft"))
    await wait_all_tasks_blocked()
    assert when_drained == []
    over[1].set()
    await wait_all_tasks_blocked()
    assert when_drained == [(0, 0)]
    await hold(agent, over[2])
    over[2].set()
    await wait_all_tasks_blocked()
    assert when_drained == [(0, 0)] * 2
    await trio.sleep(5)
    told = [status for peer in peers for status in statuses(await seen(peer)) if status.state == "drained"]
    assert {(status.open, status.pending, status.servers - status.acked) for status in told} == {(0, 0, 0)}


# -- what servers are told of it


async def test_the_status_says_how_far_a_drain_is(autojump_clock: MockClock, site: Site) -> None:
    over = trio.Event()
    await hold(site.agent, over)
    await trio.sleep(90)
    assert site.agent.watch.status == DrainStatus("ready", 1, 0, 90_000, 1, 1)
    site.agent.drain()
    assert site.agent.watch.status == DrainStatus("draining", 1, 0, 90_000, 0, 1)
    over.set()


async def test_a_dial_that_is_not_answered_is_pending(
    autojump_clock: MockClock, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forever(connector: Connector, host: str, port: int) -> socket.socket:
        await trio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(Connector, "connect", forever)
    await site.peers[0].send(DialReq(1, "db.internal", 5432, 65536, 100_000, {}))
    await wait_all_tasks_blocked()
    status = site.agent.watch.status
    assert (status.open, status.pending) == (0, 1)


async def test_an_age_that_the_wire_cannot_say_is_the_most_it_can(
    autojump_clock: MockClock, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lifecycle, "oldest", 100 * DAY)
    assert site.agent.watch.status.oldest_ms == MAX_U32


async def test_the_status_is_told_when_it_changes(autojump_clock: MockClock, site: Site) -> None:
    (peer,) = site.peers
    site.agent.drain()
    await wait_all_tasks_blocked()
    await peer.send(DrainAck(1, "soft"))
    await trio.sleep(10)
    assert statuses(await seen(peer)) == [
        DrainStatus("draining", 0, 0, 0, 0, 1),
        DrainStatus("drained", 0, 0, 0, 1, 1),
    ]


async def test_the_status_is_told_to_every_server(autojump_clock: MockClock, make_site: MakeSite) -> None:
    site = make_site("one", "two")
    peers = [await site.link(0), await site.link(1)]
    site.agent.drain()
    for peer in peers:
        await peer.send(DrainAck(1, "soft"))
    await trio.sleep(10)
    told = [statuses(await seen(peer))[-1] for peer in peers]
    assert told == [DrainStatus("drained", 0, 0, 0, 2, 2)] * 2


async def test_a_link_that_breaks_as_it_is_told_of_the_status_ends_alone(
    autojump_clock: MockClock, make_site: MakeSite
) -> None:
    site = make_site("one", "two")
    peers = [await site.link(0), await site.link(1)]
    site.agent.drain()
    first, second = site.agent.sync.links.values()
    flush = first.flush
    first.flush = lambda: first.drop("it broke") or flush()  # type: ignore[method-assign, func-returns-value]
    await wait_all_tasks_blocked()
    assert statuses(await seen(peers[1]))
    assert first.why is not None
    assert second.why is None


async def test_no_status_is_told_without_a_drain(autojump_clock: MockClock, site: Site) -> None:
    over = trio.Event()
    await hold(site.agent, over)
    over.set()
    await trio.sleep(10)
    assert await seen(site.peers[0]) == []


async def test_no_status_is_told_after_an_undrain(autojump_clock: MockClock, site: Site) -> None:
    (peer,) = site.peers
    site.agent.drain()
    await wait_all_tasks_blocked()
    site.agent.undrain()
    await seen(peer)
    over = trio.Event()
    await hold(site.agent, over)
    await trio.sleep(10)
    assert await seen(peer) == []
    over.set()


async def test_the_status_is_told_at_most_once_a_second(autojump_clock: MockClock, site: Site) -> None:
    (peer,) = site.peers
    site.agent.drain()
    await peer.send(DrainAck(1, "soft"))
    await trio.sleep(5)
    await seen(peer)
    began = trio.current_time()
    while trio.current_time() - began < 10:
        over = trio.Event()
        await hold(site.agent, over)
        await trio.sleep(0.05)
        over.set()
        await trio.sleep(0.05)
    assert len(statuses(await seen(peer))) <= 11


@pytest.mark.parametrize(("seconds", "ms"), [(math.inf, 0), (60.0, 60_000)])
async def test_servers_are_told_how_long_a_drain_may_take(
    autojump_clock: MockClock, site: Site, seconds: float, ms: int
) -> None:
    """0 is no end."""
    site.agent.drain(seconds=seconds)
    said = await site.peers[0].next()
    assert isinstance(said, Drain)
    assert said.ms == ms


# -- how long drains took


@pytest.mark.parametrize("outcome", ["drained", "undone"])
async def test_how_long_a_drain_took_is_counted_by_how_it_ended(
    autojump_clock: MockClock, site: Site, outcome: str
) -> None:
    over = trio.Event()
    await hold(site.agent, over)
    site.agent.drain()
    await site.peers[0].send(DrainAck(1, "soft"))
    await trio.sleep(10)
    if outcome == "undone":
        site.agent.undrain()
    over.set()
    await wait_all_tasks_blocked()
    assert {name: took.sum for name, took in site.agent.watch.drains.items() if any(took.counts)} == {outcome: 10.0}


async def test_a_drain_is_counted_once_however_often_it_is_asked_for(autojump_clock: MockClock, site: Site) -> None:
    over = trio.Event()
    await hold(site.agent, over)
    site.agent.drain()
    await site.peers[0].send(DrainAck(1, "soft"))
    await trio.sleep(10)
    site.agent.drain()
    await site.peers[0].send(DrainAck(2, "soft"))
    await trio.sleep(10)
    over.set()
    await wait_all_tasks_blocked()
    took = site.agent.watch.drains["drained"]
    assert (sum(took.counts), took.sum) == (1, 20.0)


# -- what would never end


async def test_half_closed_streams_are_looked_at_when_a_drain_begins_and_once_a_minute(
    autojump_clock: MockClock, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    monkeypatch.setattr(site.agent.watch, "_reap", lambda: looks.append(trio.current_time()))
    await trio.sleep(MINUTES)
    assert looks == []
    began = trio.current_time()
    site.agent.drain()
    await trio.sleep(200)
    assert [when - began for when in looks] == pytest.approx([0, 60, 120, 180], abs=3)
    site.agent.undrain()
    looks.clear()
    await trio.sleep(MINUTES)
    assert looks == []


async def test_half_closed_streams_are_looked_at_while_the_agent_leaves(
    autojump_clock: MockClock, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(AgentConfig((Target("one", 1),), "one", timeouts=Timeouts(shutdown=MINUTES)))
    agent.sync._connector = cast(Connector, Site("one"))
    agent.sync._connector.refusing = True  # type: ignore[attr-defined]
    looks: list[float] = []
    monkeypatch.setattr(agent.watch, "_reap", lambda: looks.append(trio.current_time()))
    await nursery.start(agent.run)
    agent.life.spawn(trio.sleep, 100.0)
    agent.life.leave()
    await agent.life.phase.wait_value(Phase.EXIT)
    assert looks == pytest.approx([60], abs=2)


# -- a drain with an end


async def test_what_remains_of_an_operators_drain_is_said(autojump_clock: MockClock, site: Site) -> None:
    site.agent.drain(seconds=60.0)
    await trio.sleep(20)
    assert site.agent.watch.remaining == 40.0
    (drain,) = [packet for packet in await seen(site.peers[0]) if isinstance(packet, Drain)]
    assert drain.ms == 60_000


async def test_the_end_of_a_drain_may_only_come_nearer(autojump_clock: MockClock, site: Site) -> None:
    site.agent.drain(seconds=60.0)
    site.agent.drain(seconds=90.0)
    assert site.agent.watch.remaining == 60.0
    site.agent.drain(seconds=30.0)
    assert site.agent.watch.remaining == 30.0


async def test_an_undrain_forgets_the_end_and_the_exit(autojump_clock: MockClock, site: Site) -> None:
    site.agent.drain(seconds=60.0, leave=True)
    site.agent.undrain()
    site.agent.drain()
    await site.peers[0].send(DrainAck(3, "soft"))
    await trio.sleep(MINUTES)
    assert site.state == "drained"
    assert not site.agent.life.leaving


async def test_a_drain_alone_never_leaves(autojump_clock: MockClock, site: Site) -> None:
    site.agent.drain(seconds=60.0)
    await site.peers[0].send(DrainAck(1, "soft"))
    await trio.sleep(MINUTES)
    assert site.state == "drained"
    assert not site.agent.life.leaving


async def test_with_leave_the_agent_leaves_when_it_is_drained(autojump_clock: MockClock, site: Site) -> None:
    over = trio.Event()
    await hold(site.agent, over)
    site.agent.drain(leave=True)
    await site.peers[0].send(DrainAck(1, "soft"))
    await trio.sleep(MINUTES)
    assert not site.agent.life.leaving
    over.set()
    await trio.sleep(3)  # so that whoever asks a server sees it drained
    assert site.agent.life.leaving


async def test_with_leave_servers_hear_that_it_is_drained_before_it_leaves(
    autojump_clock: MockClock, site: Site
) -> None:
    (peer,) = site.peers
    site.agent.drain(leave=True)
    await wait_all_tasks_blocked()
    await peer.send(DrainAck(1, "soft"))
    await trio.sleep(3)
    packets = await seen(peer)
    told = [packet for packet in packets if isinstance(packet, DrainStatus) and packet.state == "drained"]
    left = [packet for packet in packets if isinstance(packet, Drain) and "signal" in packet.reason]
    assert packets.index(told[0]) < packets.index(left[0])


async def test_with_leave_the_agent_leaves_when_the_time_is_over(autojump_clock: MockClock, site: Site) -> None:
    over = trio.Event()
    await hold(site.agent, over)
    site.agent.drain(seconds=60.0, leave=True)
    await trio.sleep(59)
    assert not site.agent.life.leaving
    await trio.sleep(2)
    assert site.agent.life.leaving
    over.set()
