"""An agent's drain: what it says to its servers, what they acknowledge, and what they may command."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import cast

import pytest
import trio
from sites import MakeSite, Site, run_site, seen
from trio.testing import MockClock, wait_all_tasks_blocked

from tunnel.drain import AgentDrain, DrainPhase
from tunnel.link import Link
from tunnel.packets import (
    MAX_U32,
    DialReq,
    DialRsp,
    Drain,
    DrainAck,
    DrainCmd,
    Packet,
    Undrain,
    UndrainAck,
)

MINUTES = 600.0  # some
DAY = 24 * 3600.0


class FakeSession:
    def __init__(self) -> None:
        self.queued: list[Packet] = []

    def send_control(self, packet: Packet) -> None:
        self.queued.append(packet)


class FakeLink:
    """What the exchange needs of a link: says what was sent, once it is flushed.

    Attributes:
        breaks: called instead, when there is something to send.
    """

    def __init__(self) -> None:
        self.session = FakeSession()
        self.sent: list[Packet] = []
        self.breaks: Callable[[], None] | None = None

    def flush(self) -> None:
        if self.breaks:
            self.breaks()
        else:
            self.sent += self.session.queued
            self.session.queued.clear()


class Exchange:
    """An ``AgentDrain`` and the links that are up.

    Attributes:
        remaining: seconds that are left, and streams that are open.
    """

    def __init__(self, *links: FakeLink) -> None:
        self.up = dict.fromkeys(links)
        self.remaining = (25.0, 3)
        self.drain = AgentDrain(lambda: cast(dict[Link, None], self.up).keys(), lambda: self.remaining)

    def linked(self, said: bool) -> FakeLink:
        """One more link, whose HELLO said so."""
        link = FakeLink()
        self.up[link] = None
        self.drain.linked(cast(Link, link), said)
        return link

    def ack(self, link: FakeLink, seq: int) -> None:
        self.drain.acked(cast(Link, link), DrainAck(seq, "soft"))

    def lose(self, link: FakeLink) -> None:
        del self.up[link]
        self.drain.gone(cast(Link, link))


@pytest.fixture
def one() -> FakeLink:
    return FakeLink()


@pytest.fixture
def other() -> FakeLink:
    return FakeLink()


@pytest.fixture
def exchange(one: FakeLink, other: FakeLink) -> Exchange:
    return Exchange(one, other)


# -- what is said


def test_a_drain_is_said_on_every_link(exchange: Exchange, one: FakeLink, other: FakeLink) -> None:
    exchange.drain.drain("admin")
    assert one.sent == other.sent == [Drain(1, "soft", "admin", 25_000, 3)]
    assert (exchange.drain.phase, exchange.drain.draining, exchange.drain.unacked) == (DrainPhase.SOFT, True, 2)


def test_every_change_has_a_greater_number(exchange: Exchange, one: FakeLink) -> None:
    exchange.drain.drain("admin")
    exchange.drain.undrain("admin")
    exchange.drain.drain("admin")
    exchange.drain.drain("signal")
    exchange.drain.final()
    assert one.sent == [
        Drain(1, "soft", "admin", 25_000, 3),
        Undrain(2),
        Drain(3, "soft", "admin", 25_000, 3),
        Drain(4, "soft", "admin,signal", 25_000, 3),
        Drain(5, "final", "admin,signal", 25_000, 3),
    ]


def test_what_is_left_is_said_anew_each_time(exchange: Exchange, one: FakeLink) -> None:
    exchange.drain.drain("admin")
    exchange.remaining = (1.5, 1)
    exchange.drain.drain("signal")
    assert one.sent[1] == Drain(2, "soft", "admin,signal", 1_500, 1)


def test_more_time_than_the_wire_can_say_is_the_most_it_can(exchange: Exchange, one: FakeLink) -> None:
    exchange.remaining = (100 * DAY, 0)
    exchange.drain.drain("admin")
    assert one.sent == [Drain(1, "soft", "admin", MAX_U32, 0)]


# -- reasons


def test_a_reason_is_there_once_however_often_it_is_given(exchange: Exchange) -> None:
    exchange.drain.drain("admin")
    exchange.drain.drain("admin")
    assert exchange.drain.reasons == {"admin"}
    assert exchange.drain.undrain("admin")


def test_undrain_takes_back_its_own_reason_only(exchange: Exchange, one: FakeLink) -> None:
    exchange.drain.drain("admin")
    exchange.drain.drain("server")
    assert not exchange.drain.undrain("admin")
    assert (exchange.drain.reasons, exchange.drain.phase) == ({"server"}, DrainPhase.SOFT)
    assert not any(isinstance(packet, Undrain) for packet in one.sent)
    assert exchange.drain.undrain("server")
    assert (exchange.drain.phase, one.sent[-1]) == (DrainPhase.ACTIVE, Undrain(3))


def test_undrain_of_a_reason_that_is_not_there_changes_nothing(exchange: Exchange, one: FakeLink) -> None:
    exchange.drain.drain("admin")
    assert not exchange.drain.undrain("server")
    assert exchange.drain.phase is DrainPhase.SOFT
    assert len(one.sent) == 1


def test_undrain_when_active_says_nothing(exchange: Exchange, one: FakeLink) -> None:
    assert exchange.drain.undrain("admin")
    assert (exchange.drain.phase, one.sent) == (DrainPhase.ACTIVE, [])


def test_undrain_after_final_is_refused(exchange: Exchange, one: FakeLink) -> None:
    exchange.drain.drain("admin")
    exchange.drain.final()
    assert not exchange.drain.undrain("admin")
    assert exchange.drain.phase is DrainPhase.FINAL
    assert len(one.sent) == 2


def test_a_drain_after_final_stays_final(exchange: Exchange, one: FakeLink) -> None:
    exchange.drain.drain("signal")
    exchange.drain.final()
    exchange.drain.drain("admin")
    assert exchange.drain.phase is DrainPhase.FINAL
    assert len(one.sent) == 2


# -- acknowledgements


def test_an_acknowledgement_counts_for_its_link(exchange: Exchange, one: FakeLink, other: FakeLink) -> None:
    exchange.drain.drain("admin")
    exchange.ack(one, 1)
    exchange.ack(one, 1)
    assert exchange.drain.unacked == 1
    exchange.ack(other, 1)
    assert exchange.drain.unacked == 0


@pytest.mark.parametrize("seq", [1, 3])
def test_an_acknowledgement_counts_for_its_number(exchange: Exchange, one: FakeLink, seq: int) -> None:
    exchange.drain.drain("admin")
    exchange.drain.drain("signal")
    exchange.ack(one, seq)
    assert exchange.drain.unacked == 2


def test_an_undrain_is_acknowledged_too(exchange: Exchange, one: FakeLink) -> None:
    exchange.drain.drain("admin")
    exchange.drain.undrain("admin")
    exchange.ack(one, 1)
    assert exchange.drain.unacked == 2
    exchange.drain.acked(cast(Link, one), UndrainAck(2))
    assert exchange.drain.unacked == 1


def test_a_link_that_ends_owes_nothing(exchange: Exchange, one: FakeLink, other: FakeLink) -> None:
    exchange.drain.drain("admin")
    exchange.lose(one)
    assert exchange.drain.unacked == 1
    exchange.lose(other)
    assert exchange.drain.unacked == 0


def test_a_link_that_breaks_as_it_is_told_does_not_keep_others_from_hearing(
    exchange: Exchange, one: FakeLink, other: FakeLink
) -> None:
    one.breaks = lambda: exchange.lose(one)
    exchange.drain.drain("admin")
    assert other.sent == [Drain(1, "soft", "admin", 25_000, 3)]
    assert exchange.drain.unacked == 1


async def begin_to_wait(exchange: Exchange, nursery: trio.Nursery) -> trio.Event:
    """Wait for the acknowledgements that are owed; what is set when that is over."""
    done = trio.Event()

    async def wait() -> None:
        await exchange.drain.wait_acked()
        done.set()

    nursery.start_soon(wait)
    await wait_all_tasks_blocked()
    return done


async def test_waiting_ends_when_all_have_acknowledged_or_ended(
    exchange: Exchange, one: FakeLink, other: FakeLink, nursery: trio.Nursery
) -> None:
    exchange.drain.drain("admin")
    done = await begin_to_wait(exchange, nursery)
    exchange.ack(one, 1)
    await wait_all_tasks_blocked()
    assert not done.is_set()
    exchange.lose(other)
    await wait_all_tasks_blocked()
    assert done.is_set()


async def test_who_waits_waits_for_the_newest_change(
    exchange: Exchange, one: FakeLink, other: FakeLink, nursery: trio.Nursery
) -> None:
    exchange.drain.drain("admin")
    done = await begin_to_wait(exchange, nursery)
    exchange.drain.drain("signal")
    for link in (one, other):
        exchange.ack(link, 1)
    await wait_all_tasks_blocked()
    assert not done.is_set()
    for link in (one, other):
        exchange.ack(link, 2)
    await wait_all_tasks_blocked()
    assert done.is_set()


async def test_waiting_does_not_outlast_a_link_that_is_not_told_any_more(
    exchange: Exchange, one: FakeLink, other: FakeLink, nursery: trio.Nursery
) -> None:
    """As a link that is replaced by another of the same server: it is not among those that are up."""
    exchange.drain.drain("admin")
    nursery.start_soon(exchange.drain.wait_acked)
    await wait_all_tasks_blocked()
    del exchange.up[one]
    exchange.drain.drain("signal")
    exchange.ack(other, 2)
    await exchange.drain.wait_acked()


async def test_without_links_nothing_is_owed(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    exchange = Exchange()
    exchange.drain.drain("admin")
    await exchange.drain.acknowledged(5.0)
    assert (exchange.drain.ack_timeouts, caplog.messages) == (0, [])


async def test_acknowledgements_that_do_not_come_are_counted_and_warned_about(
    exchange: Exchange, one: FakeLink, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    exchange.drain.drain("admin")
    exchange.ack(one, 1)
    began = trio.current_time()
    await exchange.drain.acknowledged(5.0)
    assert trio.current_time() - began == 5.0
    assert exchange.drain.ack_timeouts == 1
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", '"drain not acked" servers=1')
    ]


async def test_acknowledgements_that_come_in_time_are_no_news(
    exchange: Exchange, one: FakeLink, other: FakeLink, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    exchange.drain.drain("admin")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.drain.acknowledged, 5.0)
        await trio.sleep(4.9)
        for link in (one, other):
            exchange.ack(link, 1)
    assert (exchange.drain.ack_timeouts, caplog.messages) == (0, [])


# -- links that come up


@pytest.mark.parametrize(
    ("changes", "said", "first"),
    [
        ([], False, []),
        (["drain"], True, []),
        (["drain", "undrain"], False, []),
        (["drain"], False, [Drain(1, "soft", "admin", 25_000, 3)]),
        (["drain", "undrain"], True, [Undrain(2)]),
        (["drain", "final"], False, [Drain(2, "final", "admin", 25_000, 3)]),
        (["drain", "final"], True, [Drain(2, "final", "admin", 25_000, 3)]),
    ],
)
def test_a_link_is_told_what_its_hello_did_not_say(changes: list[str], said: bool, first: list[Packet]) -> None:
    exchange = Exchange()
    for change in changes:
        if change == "final":
            exchange.drain.final()
        else:
            getattr(exchange.drain, change)("admin")
    link = exchange.linked(said)
    assert link.sent == first
    assert exchange.drain.unacked == len(first)


def test_a_link_whose_hello_said_so_owes_no_acknowledgement_until_the_next_change() -> None:
    exchange = Exchange()
    exchange.drain.drain("admin")
    link = exchange.linked(said=True)
    assert exchange.drain.unacked == 0
    exchange.drain.drain("signal")
    assert exchange.drain.unacked == 1
    assert link.sent == [Drain(2, "soft", "admin,signal", 25_000, 3)]


# -- the agent


@pytest.fixture
def make_site(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> MakeSite:
    return partial(run_site, nursery, monkeypatch)


@pytest.fixture
async def site(make_site: MakeSite) -> Site:
    """An agent with one link; ``peers[0]`` is its server. For tests whose clock jumps."""
    site = make_site("one")
    await site.link()
    return site


async def test_a_link_that_comes_up_during_a_drain_that_it_does_not_know_of_has_to_acknowledge_it(
    autojump_clock: MockClock, make_site: MakeSite
) -> None:
    site = make_site("one")
    await wait_all_tasks_blocked()
    site.agent.drain()  # HELLO has been sent
    peer = await site.link()
    assert isinstance((await seen(peer))[0], Drain)
    assert site.agent.draining.unacked == 1
    assert site.state == "draining"


# -- commands


def command(site: Site, action: str, ms: int = 0, leave: int = 0) -> DrainCmd:
    return DrainCmd(site.agent.instance, action, "disk full", ms, leave)


async def test_a_command_drains_the_agent_on_all_its_links(autojump_clock: MockClock, make_site: MakeSite) -> None:
    site = make_site("one", "two")
    peers = [await site.link(0), await site.link(1)]
    await peers[0].send(command(site, "drain"))
    for peer in peers:
        first = (await seen(peer))[0]
        assert isinstance(first, Drain)
        assert (first.phase, first.reason) == ("soft", "admin")


async def test_a_command_undrains_the_agent(autojump_clock: MockClock, site: Site) -> None:
    (peer,) = site.peers
    await peer.send(command(site, "drain"), command(site, "undrain"))
    assert Undrain(2) in await seen(peer)
    assert site.state == "ready"


async def test_a_command_is_logged_with_what_it_says(
    autojump_clock: MockClock, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tunnel.agent")
    await site.peers[0].send(command(site, "drain"))
    await wait_all_tasks_blocked()
    (server,) = site.agent.sync.links
    assert f'command action=drain text="disk full" server_id={server}' in caplog.messages


async def test_a_command_has_its_time(autojump_clock: MockClock, site: Site) -> None:
    await site.peers[0].send(command(site, "drain", ms=60_000))
    await wait_all_tasks_blocked()
    assert site.agent.watch.remaining == 60.0


async def test_a_command_without_a_time_has_no_end(autojump_clock: MockClock, site: Site) -> None:
    await site.peers[0].send(command(site, "drain"))
    await wait_all_tasks_blocked()
    assert math.isinf(site.agent.watch._until)


async def test_a_command_may_want_the_agent_to_leave(autojump_clock: MockClock, site: Site) -> None:
    await site.peers[0].send(command(site, "drain", leave=1))
    await wait_all_tasks_blocked()
    assert not site.agent.life.leaving
    await site.peers[0].send(DrainAck(1, "soft"))
    await trio.sleep(3)
    assert site.agent.life.leaving


async def test_a_command_for_another_process_is_ignored_and_warned_about(
    autojump_clock: MockClock, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    stale = "0" * 32
    await site.peers[0].send(DrainCmd(stale, "drain", "disk full", 0, 1))
    await wait_all_tasks_blocked()
    assert site.state == "ready"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f'"command for another process" action=drain instance={stale}'
    ]


# -- after final


async def test_after_final_a_dial_is_refused_and_counted(autojump_clock: MockClock, site: Site) -> None:
    (peer,) = site.peers
    site.agent.life.leave()
    await wait_all_tasks_blocked()
    await peer.send(DrainAck(1, "soft"))
    packets = await seen(peer)
    assert [packet.phase for packet in packets if isinstance(packet, Drain)] == ["soft", "final"]
    await peer.send(DialReq(1, "db.internal", 5432, 65536, 1000, {}))
    (answer,) = [packet for packet in await seen(peer) if isinstance(packet, DialRsp)]
    assert (answer.stream, answer.code, site.agent.dials.failed["refused_draining"]) == (1, "refused_draining", 1)


async def test_final_is_said_only_when_every_server_knows(autojump_clock: MockClock, site: Site) -> None:
    (peer,) = site.peers
    site.agent.life.leave()
    await trio.sleep(4)
    assert [packet.phase for packet in await seen(peer) if isinstance(packet, Drain)] == ["soft"]
    await peer.send(DrainAck(1, "soft"))
    assert [packet.phase for packet in await seen(peer) if isinstance(packet, Drain)] == ["final"]


async def test_a_server_that_acknowledges_nothing_does_not_keep_the_agent(
    autojump_clock: MockClock, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    began = trio.current_time()
    site.agent.life.leave()
    await trio.sleep(MINUTES)
    assert site.agent.life.exit_code == 0
    assert began < trio.current_time()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        '"drain not acked" servers=1'
    ] * 2
    assert site.agent.draining.ack_timeouts == 2


async def test_a_dial_that_arrives_while_draining_is_counted_as_late(autojump_clock: MockClock, site: Site) -> None:
    (peer,) = site.peers
    site.agent.drain()
    await peer.send(DialReq(1, "", 1, 65536, 1000, {}))
    await wait_all_tasks_blocked()
    assert (site.agent.late, site.agent.dials.failed["refused_draining"]) == (1, 0)
