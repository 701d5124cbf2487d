"""The way out of a link: what goes at the end of a turn, what waits, who is told of room, and how long a burst is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tunnel.errors import LinkClosed, TunnelError
from tunnel.limits import Limits
from tunnel.outbox import Line, Outbox
from tunnel.outflow import Outflow
from tunnel.packets import Ping
from tunnel.transport import Buffer, More, unsent

KIB = 1024


@dataclass
class Wire:
    """A transport that takes so many bytes at once, and whatever is left at a rate, in bytes a second.

    Attributes:
        sent: what each call of ``send_now`` got on its way.
        written: what was given to ``send``.
    """

    room: int = 1 << 30
    rate: float = 0.0  # nothing goes
    last: float = 0.0  # seconds from there to the next step of the task that has sent all
    broken: bool = False
    address: str = "a wire"
    binding: bytes = b""
    sent: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)

    def send_now(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        if self.broken:
            raise BrokenPipeError("gone")
        taken = min(self.room, sum(map(len, buffers)))
        self.room -= taken
        self.sent.append(taken)
        return unsent(buffers, taken)

    async def send(self, more: More) -> None:
        while buffers := more():
            size = sum(map(len, buffers))
            self.written.append(size)
            await trio.sleep(size / self.rate if self.rate else math.inf)
        await trio.sleep(self.last)

    async def receive(self, *_: object) -> bool:
        raise AssertionError("nobody receives here")

    linger = aclose = receive  # type: ignore[assignment]  # nor ends it


@dataclass
class Way:
    """A way out, with one stream's line on it."""

    wire: Wire
    outbox: Outbox = field(default_factory=Outbox)
    line: Line = field(default_factory=Line)
    hits: list[str] = field(default_factory=list)
    ends: list[TunnelError] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.flow = Outflow(self.outbox, self.wire, self.limits, self.hits.append, self._end)

    def _end(self, why: TunnelError) -> None:
        self.ends.append(why)
        self.flow.end()

    def queue(self, *sizes: int) -> None:
        for size in sizes:
            self.outbox.queue(self.line, bytes(size), size)
        self.flow.flush()


class TestSending:
    async def test_what_a_turn_has_queued_goes_out_at_its_end_in_one_call(self) -> None:
        way = Way(Wire())
        way.queue(10)
        way.queue(20)
        assert (way.wire.sent, way.flow.sending) == ([], True)
        await trio.testing.wait_all_tasks_blocked()
        assert (way.wire.sent, way.flow.sending) == ([30], False)

    async def test_what_is_not_taken_is_the_writers_and_later_ends_of_turns_send_nothing(
        self, nursery: trio.Nursery
    ) -> None:
        way = Way(Wire(room=4))
        nursery.start_soon(way.flow.write)
        way.queue(10)
        await wait_all_tasks_blocked()
        way.queue(5)
        way.flow.end_turn()
        assert (way.wire.sent, way.wire.written, way.flow.sending) == ([4], [6], True)

    async def test_when_the_writer_has_sent_all_turns_send_again(
        self, nursery: trio.Nursery, autojump_clock: MockClock
    ) -> None:
        way = Way(Wire(room=4, rate=1000))
        nursery.start_soon(way.flow.write)
        way.queue(10)
        way.queue(5)
        await way.flow.all_sent()
        way.wire.room = 100
        way.queue(7)
        way.flow.end_turn()
        assert (way.wire.sent, way.wire.written) == ([4, 7], [11])

    async def test_a_transport_that_breaks_ends_the_link(self) -> None:
        way = Way(Wire(broken=True))
        way.queue(10)
        way.flow.end_turn()
        assert [type(why) for why in way.ends] == [LinkClosed]
        assert not way.flow.sending

    async def test_once_ended_nothing_is_sent(self) -> None:
        way = Way(Wire())
        way.queue(10)
        way.flow.end()
        way.flow.end_turn()
        assert way.wire.sent == []

    async def test_who_takes_nothing_although_much_passes_through_is_ended(self) -> None:
        way = Way(Wire(room=0), limits=Limits(link_queue=100))
        way.queue(60)
        way.flow.end_turn()  # that is in the transport's hands
        way.queue(100)
        way.flow.end_turn()
        assert way.ends == []
        way.queue(1)
        way.flow.end_turn()
        assert str(way.ends[0]) == "the peer does not take the 101 bytes that wait for it"
        assert way.hits == ["link_queue"]


class TestRoom:
    async def test_it_is_congested_above_the_high_water_mark(self) -> None:
        way = Way(Wire(), limits=Limits(high_water=100))
        way.queue(100)
        assert not way.flow.congested
        way.queue(1)
        assert way.flow.congested

    async def test_what_only_passes_through_does_not_congest(self) -> None:
        way = Way(Wire(), limits=Limits(high_water=100))
        way.line.passing = True
        way.queue(1000)
        assert not way.flow.congested

    async def test_who_waits_is_called_once_when_half_has_gone(
        self, nursery: trio.Nursery, autojump_clock: MockClock
    ) -> None:
        way = Way(Wire(room=0, rate=100 * KIB), limits=Limits(high_water=200 * KIB))
        way.flow.burst = 100 * KIB
        nursery.start_soon(way.flow.write)
        way.queue(*[50 * KIB] * 6)
        assert way.flow.congested
        calls: list[float] = []
        way.flow.when_room(lambda: calls.append(trio.current_time()))
        await way.flow.all_sent()
        assert calls == [2.0]  # 200 of 300 KiB have gone

    async def test_a_fault_in_one_who_waits_costs_the_others_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        way, calls = Way(Wire()), list[str]()

        def fail() -> None:
            raise RuntimeError("a fault of ours")

        way.flow.when_room(fail)
        way.flow.when_room(lambda: calls.append("called"))
        way.queue(1)
        way.flow.end_turn()
        assert calls == ["called"]
        assert [record.levelname for record in caplog.records] == ["ERROR"]

    async def test_what_they_bring_goes_out_at_once(self) -> None:
        way = Way(Wire())
        way.flow.when_room(lambda: way.queue(7))
        way.queue(5)
        way.flow.end_turn()
        assert way.wire.sent == [5, 7]

    async def test_they_are_called_when_the_link_has_ended(self) -> None:
        way, calls = Way(Wire(room=0)), list[str]()
        way.queue(2 << 20)
        way.flow.end_turn()
        way.flow.when_room(lambda: calls.append("called"))
        way.flow.end()
        way.flow.tell_all()
        assert calls == ["called"]


class TestBursts:
    """Nothing overtakes what the transport has in hand: it is to be gone in two milliseconds."""

    @staticmethod
    async def _after(way: Way, nursery: trio.Nursery) -> int:
        """How long a burst is, when many have been sent."""
        nursery.start_soon(way.flow.write)
        way.queue(*[16 * KIB] * 1000)
        await way.flow.all_sent()
        return way.flow.burst

    @pytest.mark.parametrize(
        ("rate", "burst"), [(1 << 40, 512 * KIB), (128_000 * KIB, 256 * KIB), (100 * KIB, 64 * KIB)]
    )
    async def test_a_burst_is_what_goes_in_two_milliseconds_within_its_bounds(
        self, nursery: trio.Nursery, autojump_clock: MockClock, rate: float, burst: int
    ) -> None:
        found = await self._after(Way(Wire(room=0, rate=rate)), nursery)
        assert abs(found - burst) < 16 * KIB

    async def test_it_grows_again_when_more_goes(self, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
        way = Way(Wire(room=0, rate=100 * KIB))
        await self._after(way, nursery)
        way.wire.rate = 1 << 40
        way.queue(*[16 * KIB] * 1000)
        await way.flow.all_sent()
        assert way.flow.burst == 512 * KIB

    async def test_what_the_writer_begins_with_counts_too(
        self, nursery: trio.Nursery, autojump_clock: MockClock
    ) -> None:
        way = Way(Wire(room=0, rate=100 * KIB))
        nursery.start_soon(way.flow.write)
        for _ in range(10):
            way.queue(16 * KIB)
            await way.flow.all_sent()
        assert way.flow.burst < 66 * KIB

    @pytest.mark.parametrize("last", [0.0, 1.0])
    async def test_the_time_in_which_nothing_was_to_be_sent_does_not_count(
        self, nursery: trio.Nursery, autojump_clock: MockClock, last: float
    ) -> None:
        way = Way(Wire(room=0, rate=1 << 40, last=last))
        before = await self._after(way, nursery)
        for _ in range(10):
            await trio.sleep(0.9)  # when the writer has nothing left, but may not know it yet
            way.outbox.control(Ping(0, 1))
            way.queue(16 * KIB)
        await way.flow.all_sent()
        assert way.flow.burst >= before - 16 * KIB
