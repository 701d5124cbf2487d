"""The relay: bytes, ends and resets between local sockets and streams, by the switchboard.

What holds for it as for every way of carrying bytes is in ``relays``.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
from relays import (
    MIB,
    Broken,
    Connection,
    MakeRelay,
    Relay,
    RelayContract,
    Relays,
    as_stream,
    read_all,
    read_exactly,
    sees_reset,
    send_and_end,
)
from trio.testing import MockClock, wait_all_tasks_blocked

from tunnel import turns
from tunnel.core import State
from tunnel.errors import StreamReset
from tunnel.limits import Limits
from tunnel.poller import HUNG_UP
from tunnel.relay import Switchboard
from tunnel.stream import Outlet

if TYPE_CHECKING:
    from conftest import MakeLinks, TcpPair

BOARDS = ["epoll", "selector"] if hasattr(selectors, "EpollSelector") else ["selector"]


@pytest.fixture(params=BOARDS)
def way(request: pytest.FixtureRequest) -> str:
    """Who carries the bytes."""
    return str(request.param)


class TestRelay(RelayContract):
    """With each poller."""


@pytest.mark.skipif(not hasattr(selectors, "EpollSelector"), reason="needs epoll")
class TestPaused(Relays):
    """A socket that is not read because its stream has no credit."""

    @pytest.fixture
    async def paused(self, make_relay: MakeRelay) -> tuple[Relay, Connection]:
        relay = await make_relay("epoll", limits=Limits(first_window=10_000))
        there = await relay.connect(target_buffers=4096)
        await there.client.send_all(bytes(100_000))  # more than can go, less than the socket holds
        quiet = 0
        while quiet < 3:
            await wait_all_tasks_blocked(0.01)
            quiet = 0 if there.near.stream.core.credit else quiet + 1
        return relay, there

    async def test_a_reset_is_noticed(
        self, paused: tuple[Relay, Connection], reset_socket: Callable[..., Awaitable[None]]
    ) -> None:
        await reset_socket(paused[1].client)
        near, far = await paused[1].ended()
        assert near
        assert far

    async def test_a_close_does_not_spin(
        self, paused: tuple[Relay, Connection], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        relay, there = paused
        await there.target.send_eof()  # the tunnel shuts the client's socket down ...
        assert await read_all(there.client) == b""
        await there.client.aclose()  # ... and so does the client: hung up, with bytes left to read
        await wait_all_tasks_blocked(0.01)
        rounds = 0

        def count(joint: object, events: int) -> None:
            nonlocal rounds
            rounds += 1

        (joint,) = relay.boards[0]._joints
        monkeypatch.setattr(type(joint), "ready", count)
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        await wait_all_tasks_blocked(0.01)
        assert rounds < 10

    @pytest.mark.parametrize("code", ["drain_deadline", "idle"])
    async def test_a_close_is_found_by_a_cut_and_by_reaping(self, paused: tuple[Relay, Connection], code: str) -> None:
        """Hung up as above, nothing is watched any more: only the target, which does not read, could end it."""
        relay, there = paused
        await there.target.send_eof()
        assert await read_all(there.client) == b""
        await there.client.aclose()
        await wait_all_tasks_blocked(0.01)
        if code == "idle":
            relay.boards[0].reap()
            relay.boards[0].reap()
        else:
            await relay.boards[0].cut(code, "the time is over", 30.0)
        await wait_all_tasks_blocked(0.01)
        assert there.near.error
        assert there.near.error.code == code

    async def test_what_was_sent_before_a_close_still_arrives(self, make_relay: MakeRelay) -> None:
        relay = await make_relay("epoll", limits=Limits(first_window=10_000))
        there = await relay.connect()
        await there.target.send_eof()
        assert await read_all(there.client) == b""
        await there.client.send_all(bytes(200_000))
        await there.client.aclose()
        await wait_all_tasks_blocked(0.01)
        assert len(await read_all(there.target)) == 200_000
        assert await there.ended() == (None, None)


class TestSwitchboard(Relays):
    async def test_a_frame_is_no_longer_than_what_the_link_sends_at_once(self, relay: Relay) -> None:
        there = await relay.connect()
        await wait_all_tasks_blocked(0.01)
        outlet = _FullOutlet(there.near.stream.outlet)
        outlet.congested, outlet.burst = False, 10_000
        (joint,) = relay.boards[0]._joints
        joint.outlet = outlet
        async with trio.open_nursery() as nursery:
            nursery.start_soon(there.client.send_all, bytes(400_000))
            await read_exactly(there.target, 400_000)
        assert there.near.stream.core.session.out.frames_sent >= 40

    async def test_a_join_that_is_cancelled_at_once_ends_with_a_reset(
        self, make_links: MakeLinks, tcp_pair: TcpPair, was_reset: Broken
    ) -> None:
        """As happens when all is cancelled at once, while a dial has just been answered."""
        board, links = Switchboard(), await make_links("sockets")
        one, other = await links.open()
        client, sock = tcp_pair()
        with trio.CancelScope() as scope:
            scope.cancel()
            await board.join(sock, one)
        assert scope.cancelled_caught
        await sees_reset(as_stream(client), was_reset)
        with pytest.raises(trio.BrokenResourceError):
            await other.receive_some()

    async def test_old_news_that_a_socket_hung_up_do_not_stop_its_reading(self, make_relay: MakeRelay) -> None:
        """It was not read for want of credit, which came in the same turn and ahead of the news."""
        relay = await make_relay("epoll")
        there = await relay.connect()
        await wait_all_tasks_blocked(0.01)
        (joint,) = relay.boards[0]._joints
        assert joint.reading
        joint.ready(HUNG_UP)
        await there.client.send_all(b"x")
        assert await read_exactly(there.target, 1) == b"x"

    async def test_a_fault_as_it_begins_ends_the_connection_and_is_logged(
        self,
        make_links: MakeLinks,
        tcp_pair: TcpPair,
        was_reset: Broken,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        board, links = Switchboard(), await make_links("memory")
        one, other = await links.open()
        client, sock = tcp_pair()

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "no room to watch one more")

        monkeypatch.setattr(turns.Turns, "watch", full)
        with pytest.raises(StreamReset, match="internal fault"):
            await board.join(sock, one)
        monkeypatch.undo()
        assert sock.fileno() == -1
        assert not board._joints
        await sees_reset(as_stream(client), was_reset)
        with pytest.raises(trio.BrokenResourceError):
            await other.receive_some()
        assert [record.levelname for record in caplog.records] == ["ERROR"]

    async def test_a_fault_ends_one_connection_and_is_logged(
        self,
        make_relay: MakeRelay,
        was_reset: Broken,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        relay = await make_relay("epoll")
        doomed, fine = await relay.connect(), await relay.connect()
        await wait_all_tasks_blocked(0.01)

        def fault(data: bytes) -> None:
            raise RuntimeError("a fault of ours")

        joint = next(joint for joint in relay.boards[0]._joints if joint.core is doomed.near.stream.core)
        joint.core = _Faulty(joint.core)  # type: ignore[assignment]
        await doomed.client.send_all(b"x")
        await sees_reset(doomed.client, was_reset)
        await fine.client.send_all(b"y")
        assert await read_exactly(fine.target, 1) == b"y"
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "a fault of ours" in caplog.text


class _Faulty:
    """A stream whose ``send`` fails."""

    def __init__(self, core: object) -> None:
        self._core = core

    def __getattr__(self, name: str) -> object:
        return getattr(self._core, name)

    def send(self, data: bytes) -> None:
        raise RuntimeError("a fault of ours")


# -- what leaving does to connections

CUT = ("drain_deadline", "the time is over")


class _FakeJoint:
    """A connection that has delivered everything as soon as its stream is reset; says when that was."""

    def __init__(self, *, delivered: bool = True) -> None:
        self.delivered = delivered
        self.over = False
        self.cut_at: float | None = None
        self.given_up_at: float | None = None

    def cut(self, code: str, text: str) -> None:
        self.cut_at = trio.current_time()

    def finish(self, error: StreamReset) -> None:
        self.over = True

    def give_up(self, code: str, text: str) -> None:
        self.over = True
        self.given_up_at = trio.current_time()


def _with(joints: list[_FakeJoint]) -> Switchboard:
    board = Switchboard()
    board._joints = cast("dict[Any, None]", dict.fromkeys(joints))
    return board


async def _pour(stream: trio.SocketStream, size: int) -> None:
    """Send so many bytes, or until the other side does not want them."""
    with contextlib.suppress(trio.BrokenResourceError):
        await stream.send_all(bytes(size))


class TestCut(Relays):
    async def test_resets_both_sides_and_says_why(self, relay: Relay, was_reset: Broken) -> None:
        there = await relay.connect()
        await there.client.send_all(b"x")
        await read_exactly(there.target, 1)
        await relay.boards[0].cut(*CUT, 30.0)
        near, far = await there.ended()
        assert near
        assert far
        assert (near.code, near.text) == (far.code, far.text) == CUT
        await sees_reset(there.client, was_reset)
        await sees_reset(there.target, was_reset)

    @pytest.mark.parametrize("size", [10_000, MIB])  # what the kernel takes, and more than that
    async def test_delivers_what_had_arrived_before_the_reset(
        self, make_relay: MakeRelay, way: str, was_reset: Broken, size: int
    ) -> None:
        relay = await make_relay(way, buffers=8192)
        there = await relay.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_pour, there.target, size)
            await wait_all_tasks_blocked(0.05)
            nursery.start_soon(partial(relay.boards[0].cut, *CUT, 30.0))
            await there.far.done.wait()
            arrived = there.near.stream.core.received
            assert 0 < arrived <= size
            received = await read_exactly(there.client, arrived)
            assert len(received) == arrived
            await sees_reset(there.client, was_reset)
            nursery.cancel_scope.cancel()

    async def test_waits_for_a_client_that_has_not_read_yet(self, make_relay: MakeRelay, way: str) -> None:
        relay = await make_relay(way, buffers=8192)
        there = await relay.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_pour, there.target, MIB)
            await wait_all_tasks_blocked(0.05)
            nursery.start_soon(partial(relay.boards[0].cut, *CUT, 30.0))
            await there.far.done.wait()
            assert not there.near.done.is_set()
            nursery.cancel_scope.cancel()

    async def test_that_is_cancelled_resets_the_rest_at_once(
        self, make_relay: MakeRelay, way: str, was_reset: Broken
    ) -> None:
        relay = await make_relay(way, buffers=8192)
        connections = [await relay.connect() for _ in range(5)]
        async with trio.open_nursery() as nursery:
            for there in connections:
                nursery.start_soon(_pour, there.target, MIB)
            await wait_all_tasks_blocked(0.05)
            with trio.CancelScope() as scope:
                scope.cancel()
                await relay.boards[0].cut(*CUT, 30.0)
            for there in connections:
                near, _ = await there.ended()
                assert near
                assert (near.code, near.text) == CUT
                await sees_reset(there.client, was_reset)
            nursery.cancel_scope.cancel()

    async def test_lets_a_transfer_that_was_whole_end_as_one(self, make_relay: MakeRelay, way: str) -> None:
        """Its last bytes are on their way to a slow client, and neither side has anything more to say."""
        relay = await make_relay(way, buffers=8192)
        there = await relay.connect()
        await there.client.send_eof()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_and_end, there.target, bytes(200_000))  # which the window has room for
            await there.far.done.wait()
            while there.near.stream.core.state is not State.CLOSED:
                await trio.lowlevel.checkpoint()
            assert not there.near.done.is_set()
            nursery.start_soon(partial(relay.boards[0].cut, *CUT, 30.0))
            await wait_all_tasks_blocked()
            assert len(await read_all(there.client)) == 200_000

    async def test_reads_no_more_although_there_is_room_again(self, make_relay: MakeRelay, way: str) -> None:
        """As for a client that both sends over a full link and is slow to read."""
        relay = await make_relay(way, buffers=8192)
        there = await relay.connect()
        await wait_all_tasks_blocked(0.01)
        outlet = _FullOutlet(there.near.stream.outlet)
        (joint,) = relay.boards[0]._joints
        joint.outlet = outlet
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_pour, there.target, MIB)
            await there.client.send_all(b"x")
            await wait_all_tasks_blocked(0.05)
            assert outlet.waiting
            nursery.start_soon(partial(relay.boards[0].cut, *CUT, 30.0))
            await there.far.done.wait()
            outlet.make_room()
            assert not there.near.done.is_set()
            nursery.cancel_scope.cancel()

    async def test_of_nothing_is_over_at_once(self, autojump_clock: MockClock) -> None:
        began = trio.current_time()
        await Switchboard().cut(*CUT, 30.0)
        assert trio.current_time() == began

    async def test_is_spread_over_half_the_time(self, autojump_clock: MockClock) -> None:
        joints = [_FakeJoint() for _ in range(1000)]
        began = trio.current_time()
        await _with(joints).cut(*CUT, 2.0)
        times = [round(joint.cut_at - began, 3) for joint in joints if joint.cut_at is not None]
        assert len(times) == 1000
        assert times == sorted(times)
        assert 0.9 <= times[-1] <= 1.0
        assert max(Counter(times).values()) == 20
        assert all(joint.over and joint.given_up_at is None for joint in joints)

    async def test_without_any_time_is_at_once(self, autojump_clock: MockClock) -> None:
        joints = [_FakeJoint(delivered=False) for _ in range(1000)]
        began = trio.current_time()
        with trio.move_on_after(0):
            await _with(joints).cut(*CUT, 0.0)
        assert {joint.given_up_at for joint in joints} == {began}

    async def test_that_is_cancelled_in_the_middle_resets_those_not_yet_cut_too(
        self, autojump_clock: MockClock
    ) -> None:
        joints = [_FakeJoint(delivered=False) for _ in range(100)]
        began = trio.current_time()
        with trio.move_on_after(0.5):
            await _with(joints).cut(*CUT, 2.0)
        assert sum(joint.cut_at is None for joint in joints) > 10
        assert {joint.given_up_at for joint in joints} == {began + 0.5}


class _FullOutlet:
    """A link that is full until it is said that there is room."""

    def __init__(self, real: Outlet) -> None:
        self.congested = True
        self.burst = real.burst
        self.waiting: list[Callable[[], None]] = []
        self.flush = real.flush

    def when_room(self, call: Callable[[], None]) -> None:
        self.waiting.append(call)

    def make_room(self) -> None:
        self.congested = False
        for call in self.waiting:
            call()


class TestReap(Relays):
    @pytest.mark.parametrize("ended", ["client", "target"])
    async def test_resets_what_is_half_closed_and_does_not_move(self, relay: Relay, ended: str) -> None:
        there = await relay.connect()
        await getattr(there, ended).send_eof()
        other = there.target if ended == "client" else there.client
        assert await read_all(other) == b""
        relay.boards[0].reap()
        assert not there.near.done.is_set()
        relay.boards[0].reap()
        near, far = await there.ended()
        assert near
        assert far
        assert near.code == far.code == "idle"

    @pytest.mark.parametrize("sender", ["client", "target"])
    async def test_spares_what_moved_meanwhile(self, relay: Relay, sender: str) -> None:
        there = await relay.connect()
        ends = {"client": there.client, "target": there.target}
        end = ends.pop(sender)
        (other,) = ends.values()
        await other.send_eof()
        assert await read_all(end) == b""
        for _ in range(3):
            relay.boards[0].reap()
            await end.send_all(b"still here")
            assert await read_exactly(other, 10) == b"still here"
        assert not there.near.done.is_set()
        await end.send_eof()
        assert await there.ended() == (None, None)

    async def test_spares_what_is_open_both_ways_however_idle(self, relay: Relay) -> None:
        there = await relay.connect()
        await there.client.send_all(b"x")
        await read_exactly(there.target, 1)
        for _ in range(3):
            relay.boards[0].reap()
        assert not there.near.done.is_set()
        await there.target.send_all(b"y")
        assert await read_exactly(there.client, 1) == b"y"
