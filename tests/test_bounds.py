"""Bounds: what is counted and said when they bite, and that whoever is beyond one harms nobody who is not."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import fields

import pytest
import trio
from house import Held, House, echo, expect, forward, receive_all, refusal, talks, through
from hypothesis import given
from hypothesis import strategies as st

from tunnel import bounds as bounds_module
from tunnel.bounds import Bounds, Crowd, Pace, Rate
from tunnel.desk import AgentDesk, ServerDesk
from tunnel.errors import TooMany
from tunnel.frames import Decoder
from tunnel.http_connect import ESTABLISHED
from tunnel.identity import Identity
from tunnel.limits import Limits, Timeouts
from tunnel.packets import VERSION, Close, DialReq, DialRsp, Hello, Packet, Welcome

LONG = Timeouts(handshake=60, head=60)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


# -- counting and saying


def test_a_bound_that_bites_is_counted_and_said_at_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    bounds = Bounds(Limits(), clock)
    bounds.hit("heads", source="10.0.0.1")
    assert bounds.hits == {"heads": 1}
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.WARNING, "bound bound=heads times=1 source=10.0.0.1")


def test_it_is_said_once_a_minute_with_what_was_not_said_before(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    bounds = Bounds(Limits(), clock)
    for clock.now in range(130):
        bounds.hit("heads")
    assert [record.getMessage() for record in caplog.records] == [
        "bound bound=heads times=1",
        "bound bound=heads times=60",
        "bound bound=heads times=60",
    ]
    assert bounds.hits["heads"] == 130


def test_each_bound_is_said_by_itself(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    bounds = Bounds(Limits(), clock)
    bounds.hit("heads")
    bounds.hit("streams")
    assert len(caplog.records) == 2


# -- crowds


def crowd(clock: Clock, total: int, each: int) -> tuple[Bounds, Crowd]:
    bounds = Bounds(Limits(heads=total, heads_per_source=each), clock)
    return bounds, bounds.heads


def test_a_crowd_takes_as_many_as_it_may(clock: Clock) -> None:
    bounds, heads = crowd(clock, 3, 9)
    seats = [heads.enter("one"), heads.enter("two"), heads.enter("three")]
    assert all(seats)
    assert heads.enter("four") is None
    assert bounds.hits == {"heads": 1}


def test_a_crowd_takes_as_many_of_a_source_as_it_may(clock: Clock) -> None:
    bounds, heads = crowd(clock, 9, 2)
    assert heads.enter("one")
    assert heads.enter("one")
    assert heads.enter("one") is None
    assert heads.enter("two")
    assert bounds.hits == {"heads_per_source": 1}


def test_those_without_a_source_count_in_all_only(clock: Clock) -> None:
    bounds, heads = crowd(clock, 3, 1)
    assert all(heads.enter(None) for _ in range(3))
    assert heads.enter(None) is None
    assert bounds.hits == {"heads": 1}


def test_a_seat_is_left_once(clock: Clock) -> None:
    _, heads = crowd(clock, 2, 2)
    one, _ = heads.enter("a"), heads.enter("a")
    assert one
    one.leave()
    one.leave()
    assert heads.inside == 1
    assert heads.enter("a")
    assert heads.enter("a") is None


@given(st.lists(st.integers(-5, 3)))
def test_a_crowd_remembers_nobody_who_has_left(moves: list[int]) -> None:
    """A move enters as that source, or has the seat of that number leave."""
    _, heads = crowd(Clock(), 6, 3)
    seats: list[tuple[int, bounds_module.Seat]] = []
    for move in moves:
        if move < 0:
            if len(seats) >= -move:
                seats.pop(move)[1].leave()
            continue
        mine = sum(source == move for source, _ in seats)
        seat = heads.enter(move)
        assert (seat is not None) == (len(seats) < 6 and mine < 3)
        if seat:
            seats.append((move, seat))
    assert heads.inside == len(seats)
    for _, seat in seats:
        seat.leave()
    assert (heads.inside, heads._by_source) == (0, {})


def test_a_stream_has_a_place_among_all_and_among_those_being_dialled(clock: Clock) -> None:
    bounds = Bounds(Limits(), clock)
    with bounds.admit("a link") as place:
        assert (bounds.streams.inside, bounds.dials.inside) == (1, 1)
        place.answered()
        assert (bounds.streams.inside, bounds.dials.inside) == (1, 0)
    assert (bounds.streams.inside, bounds.dials.inside) == (0, 0)


@pytest.mark.parametrize("bound", ["streams", "streams_per_link", "pending_dials", "pending_per_link"])
def test_one_stream_too_many_has_no_place_and_takes_none(clock: Clock, bound: str) -> None:
    bounds = Bounds(Limits(**{bound: 1}), clock)
    bounds.admit("a link")
    with pytest.raises(TooMany):
        bounds.admit("a link")
    assert bounds.hits == {bound: 1}
    assert (bounds.streams.inside, bounds.dials.inside) == (1, 1)


# -- rates


def test_a_rate_that_is_kept_waits_for_nothing(clock: Clock) -> None:
    bounds = Bounds(Limits(ping_rate=10), clock)
    rate = Rate(bounds, "ping_rate")
    for clock.now in range(100):
        assert rate.spend(10) == 0
    assert not bounds.hits


def test_twice_as_many_may_come_at_once_after_any_rest(clock: Clock) -> None:
    rate = Rate(Bounds(Limits(ping_rate=10), clock), "ping_rate")
    assert rate.spend(20) == 0
    clock.now = 1000
    assert rate.spend(20) == 0
    assert rate.spend(1) == pytest.approx(0.1)


def test_what_is_too_much_is_waited_for(clock: Clock) -> None:
    bounds = Bounds(Limits(ping_rate=10), clock)
    rate = Rate(bounds, "ping_rate")
    assert rate.spend(50) == pytest.approx(3)
    clock.now = 3
    assert rate.spend(10) == pytest.approx(1)
    assert bounds.hits == {"ping_rate": 2}


def test_a_ping_with_each_frame_that_was_sent_is_free(clock: Clock) -> None:
    pace = Pace(Bounds(Limits(ping_rate=10), clock))
    assert pace.asked(pings=30, dials=0, frames=10) == 0  # 20 of them count: as many as may come at once
    assert pace.asked(pings=1, dials=0, frames=10) == pytest.approx(0.1)


def test_frames_pay_once(clock: Clock) -> None:
    pace = Pace(Bounds(Limits(ping_rate=10), clock))
    assert pace.asked(pings=20, dials=0, frames=10) == 0
    assert pace.asked(pings=20, dials=0, frames=10) == pytest.approx(1)


def test_no_number_of_frames_pays_for_more_pings_than_a_seconds_worth(clock: Clock) -> None:
    pace = Pace(Bounds(Limits(ping_rate=10), clock))
    assert pace.asked(pings=40, dials=0, frames=1000) == pytest.approx(1)


def test_whoever_asks_for_both_too_often_waits_for_what_takes_longer(clock: Clock) -> None:
    pace = Pace(Bounds(Limits(ping_rate=10, dial_rate=10), clock))
    assert pace.asked(pings=30, dials=50, frames=0) == pytest.approx(3)


# -- links that are not linked


class Raw:
    """A peer at the server's link listener that does what it is told."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.packets: list[Packet] = []
        self._decoder = Decoder(1 << 20, self.packets.append, lambda stream, data: None)

    async def send(self, *packets: Packet) -> None:
        await self.stream.send_all(b"".join(packet.encode() for packet in packets))

    async def next(self) -> Packet:
        while not self.packets:
            data = await self.stream.receive_some()
            assert data, "the server closed it"
            self._decoder.feed(data)
        return self.packets.pop(0)

    async def link(self, role: str) -> None:
        await self.send(Hello(VERSION, Identity(role, "raw").to_info()))
        assert isinstance(await self.next(), Welcome)


async def gone(stream: trio.SocketStream) -> bool:
    """Wait for its end; whether nothing came before it."""
    try:
        return await receive_all(stream) == b""
    except trio.BrokenResourceError:
        return True


async def has_more(crowd: Crowd, than: int) -> None:
    while crowd.inside <= than:
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("bound", ["unauthenticated", "unauthenticated_per_source"])
async def test_a_link_too_many_is_closed_at_once_and_another_may_come_later(house: House, bound: str) -> None:
    server = await house.serve(limits=Limits(**{bound: 2}), timeouts=LONG)
    idle = [await house.call("links") for _ in range(2)]
    await has_more(server.bounds.handshakes, 1)
    assert await gone(await house.call("links"))
    assert server.bounds.hits == {bound: 1}
    await idle[0].aclose()
    while server.bounds.handshakes.inside == 2:
        await trio.lowlevel.checkpoint()
    await house.agent()
    assert server.bounds.handshakes.inside == 1


async def test_links_that_are_up_do_not_count(house: House) -> None:
    server = await house.serve(limits=Limits(unauthenticated=1), timeouts=LONG)
    for name in ("one", "two", "three"):
        await house.agent(name)
    assert server.bounds.handshakes.inside == 0


async def test_links_that_were_refused_do_not_count(house: House) -> None:
    server = await house.serve(limits=Limits(unauthenticated=1), timeouts=LONG)
    for _ in range(3):
        raw = Raw(await house.call("links"))
        await raw.send(Hello(99, {}))
        assert isinstance(await raw.next(), Close)
        await raw.stream.aclose()
        while server.bounds.handshakes.inside:
            await trio.lowlevel.checkpoint()
    assert "unauthenticated" not in server.bounds.hits


async def test_whoever_drips_is_gone_at_the_deadline_and_counted(house: House) -> None:
    server = await house.serve(timeouts=Timeouts(handshake=0.1))
    async with trio.open_nursery() as nursery:
        for stream in [await house.call("links") for _ in range(5)]:
            nursery.start_soon(drip, stream)
    assert server.bounds.hits == {"handshake_time": 5}


async def drip(stream: trio.SocketStream) -> None:
    """A byte of a long HELLO now and then, until that breaks."""
    hello = Hello(VERSION, Identity("agent", "a" * 100).to_info()).encode()
    with suppress(trio.BrokenResourceError):
        for byte in hello * 10:
            await stream.send_all(bytes([byte]))
            await trio.sleep(0.01)
        pytest.fail("it was never closed")


async def test_a_long_frame_is_counted_by_when_it_comes(house: House) -> None:
    server = await house.serve()
    stranger, known = Raw(await house.call("links")), Raw(await house.call("links"))
    await stranger.stream.send_all((4097).to_bytes(4, "big"))
    assert isinstance(await stranger.next(), Close)
    await known.link("agent")
    await known.stream.send_all((1 << 21).to_bytes(4, "big"))
    while not isinstance(await known.next(), Close):
        pass
    assert server.bounds.hits == {"body_before_auth": 1, "body": 1}


# -- CONNECT without a request


@pytest.mark.parametrize("bound", ["heads", "heads_per_source"])
async def test_a_connection_without_a_request_too_many_is_closed_at_once(house: House, bound: str) -> None:
    server = await house.serve(limits=Limits(**{bound: 2}), timeouts=LONG)
    await house.agent()
    service = await house.service(echo)
    idle = [await house.call() for _ in range(2)]
    await has_more(server.bounds.heads, 1)
    assert await gone(await house.call())
    assert server.bounds.hits == {bound: 1}
    await idle[0].aclose()
    while server.bounds.heads.inside == 2:
        await trio.lowlevel.checkpoint()
    streams = [await house.connect(service.target) for _ in range(3)]  # whose requests are whole
    assert all([await talks(stream) for stream in streams])
    assert server.bounds.heads.inside == 1


async def test_requests_that_are_too_long_or_too_late_are_counted(house: House) -> None:
    server = await house.serve(timeouts=Timeouts(head=0.05))
    assert (await refusal(await house.ask("x:1", "Filler: " + "a" * 16 * 1024)))[0] == 431
    assert (await refusal(await house.call()))[0] == 408
    assert server.bounds.hits == {"head": 1, "head_time": 1}


# -- streams and dials


async def test_a_stream_too_many_is_503_and_the_others_go_on(house: House) -> None:
    server = await house.serve(limits=Limits(streams=2))
    await house.agent()
    service = await house.service(echo)
    one, two = [await house.connect(service.target) for _ in range(2)]
    status, _, text = await refusal(await house.ask(service.target))
    assert (status, text) == (503, "too_many: too many streams are open\n")
    assert await talks(one)
    await two.aclose()
    while server.bounds.streams.inside == 2:
        await trio.lowlevel.checkpoint()
    assert await talks(await house.connect(service.target))
    assert server.bounds.hits == {"streams": 1}


async def test_a_dial_too_many_is_503_and_those_that_wait_are_served(house: House, held: Held) -> None:
    server = await house.serve(limits=Limits(pending_dials=2))
    await house.agent()
    service = await house.service(echo)
    waiting = [await house.ask(through(service.target)) for _ in range(2)]
    await held.arrived.wait_value(2)
    status, _, text = await refusal(await house.ask(service.target))
    assert (status, text) == (503, "too_many: too many dials wait for their answers\n")
    held.open.set()
    for stream in waiting:
        await expect(stream, ESTABLISHED)
    assert server.bounds.dials.inside == 0
    assert await talks(await house.connect(service.target))
    assert server.bounds.hits == {"pending_dials": 1}


async def test_a_forward_beyond_a_bound_is_reset_without_a_byte(house: House) -> None:
    service = await house.service(echo)
    await house.serve(limits=Limits(streams=1), forwards=(forward(service.target),))
    await house.agent()
    one = await house.call("forward")
    assert await talks(one)
    with pytest.raises(trio.BrokenResourceError):
        await (await house.call("forward")).receive_some()
    assert await talks(one)


async def test_an_agent_that_has_too_many_says_so_and_its_server_passes_it_on(house: House) -> None:
    await house.serve()
    agent = await house.agent(limits=Limits(streams_per_link=1))
    service = await house.service(echo)
    one = await house.connect(service.target)
    status, _, text = await refusal(await house.ask(service.target))
    assert (status, text) == (503, "too_many: too many streams are open\n")
    assert await talks(one)
    assert agent.bounds.hits == {"streams_per_link": 1}
    assert agent.dials.failed == {"too_many": 1}


async def test_another_agent_is_asked_once_when_one_has_too_many(house: House) -> None:
    await house.serve()
    few = [await house.agent(name, limits=Limits(streams=1)) for name in ("one", "two")]
    service = await house.service(echo)
    streams = [await house.connect(service.target) for _ in range(2)]
    assert all([await talks(stream) for stream in streams])
    assert (await refusal(await house.ask(service.target)))[0] == 503
    assert [agent.dials.served for agent in few] == [1, 1]


def dial(number: int, host: str = "held.test", port: int = 80) -> DialReq:
    return DialReq(number, host, port, 1000, 10_000, {})


async def test_a_client_with_too_many_dials_is_refused_those_alone(house: House, held: Held) -> None:
    server = await house.serve(limits=Limits(pending_per_link=3))
    await house.agent()
    raw = Raw(await house.call("links"))
    await raw.link("client")
    await raw.send(*(dial(number) for number in range(1, 6)))
    for number in (4, 5):
        assert await raw.next() == DialRsp(number, "too_many", "too many dials wait for their answers", 0)
    await held.arrived.wait_value(3)
    service = await house.service(echo)
    assert await talks(await house.connect(service.target))
    assert server.bounds.hits == {"pending_per_link": 2}


async def test_a_client_with_as_many_dials_as_one_may_have_leaves_room_at_the_agent(house: House, held: Held) -> None:
    few = Limits(pending_per_link=3)
    await house.serve(limits=few)
    agent = await house.agent(limits=few)
    raw = Raw(await house.call("links"))
    await raw.link("client")
    await raw.send(*(dial(number) for number in range(1, 4)))
    await held.arrived.wait_value(3)
    service = await house.service(echo)
    assert await talks(await house.connect(service.target))
    assert not agent.bounds.hits


async def test_dials_that_their_client_gives_up_make_room_again(house: House, held: Held) -> None:
    server = await house.serve(limits=Limits(pending_per_link=3))
    agent = await house.agent()
    raw = Raw(await house.call("links"))
    await raw.link("client")
    for number in range(1, 31, 3):
        await raw.send(*(dial(number + each) for each in range(3)))
        await held.arrived.wait_value(number + 2)
        await raw.send(*(Close(number + each, "cancelled", "") for each in range(3)))
        while server.bounds.streams.inside or agent.bounds.streams.inside:
            await trio.lowlevel.checkpoint()
    assert not server.bounds.hits
    assert server.bounds.streams._by_source == agent.bounds.streams._by_source == {}


@pytest.mark.parametrize("end", ["link", "agent"])
async def test_whatever_ends_streams_makes_room_again(house: House, held: Held, end: str) -> None:
    server = await house.serve()
    agent = await house.agent()
    service = await house.service(echo)
    streams = [await house.connect(service.target) for _ in range(3)] + [await house.ask(through(service.target))]
    await held.arrived.wait_value(1)
    if end == "link":
        (link,) = agent.sync.links.values()
        link.drop("cut")
    else:
        house.kill(agent)
    for bounds in (server.bounds, agent.bounds):
        while bounds.streams.inside or bounds.dials.inside:
            await trio.lowlevel.checkpoint()
    assert len(streams) == 4


# -- what an operator sees


async def test_what_has_bitten_is_in_both_programs_counts(house: House, caplog: pytest.LogCaptureFixture) -> None:
    server, agent = await house.serve(), await house.agent()
    server.bounds.hit("streams")
    agent.bounds.hit("dial_rate")
    assert ServerDesk(server).counts()["bounds_total"] == {("streams",): 1}
    assert AgentDesk(agent).counts()["bounds_total"] == {("dial_rate",): 1}


def test_every_crowd_and_rate_is_called_like_its_limit(clock: Clock) -> None:
    bounds = Bounds(Limits(), clock)
    names = {field.name for field in fields(Limits)}
    for crowd in (bounds.handshakes, bounds.heads, bounds.streams, bounds.dials):
        assert {crowd._total[0], crowd._each[0]} <= names


# -- floods


async def test_a_client_that_opens_and_closes_without_end_harms_no_other(house: House) -> None:
    server = await house.serve(limits=Limits(dial_rate=200))
    agent = await house.agent()
    service = await house.service(echo)
    beside = await house.connect(service.target)
    raw = Raw(await house.call("links"))
    await raw.link("client")
    (link,) = house.client_links()

    async def flood() -> None:
        for number in range(1, 100_000):
            await raw.send(dial(number, "127.0.0.1", service.target.port), Close(number, "cancelled", ""))

    async def drain_answers() -> None:
        while await raw.stream.receive_some():
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(flood)
        nursery.start_soon(drain_answers)
        while not server.bounds.hits["dial_rate"]:
            await trio.lowlevel.checkpoint()
        for _ in range(20):
            assert await talks(beside)
            assert await talks(await house.connect(service.target))
        nursery.cancel_scope.cancel()
    assert link.why is None
    assert agent.bounds.hits["dial_rate"] == 0
