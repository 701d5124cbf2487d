"""The relay: bytes, ends and resets between local sockets and streams, by the switchboard and by ``pump`` alike."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import os
import random
import selectors
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tunnel import turns
from tunnel.core import State
from tunnel.errors import StreamReset
from tunnel.limits import Limits
from tunnel.poller import HUNG_UP, SelectorPoller
from tunnel.pumps import pump
from tunnel.relay import Switchboard
from tunnel.stream import Outlet, TunnelStream

if TYPE_CHECKING:
    from conftest import LinkPair, MakeLinks, TcpPair

Carry = Callable[[socket.socket, TunnelStream, bytes], Awaitable[None]]
Broken = Callable[[BaseException], bool]
MIB = 1 << 20
_LIMITS = Limits()
PUMPS = ["pump", "pump-tasks"]  # a plain socket, which goes through a switchboard; and what has no socket to give
KINDS = ["epoll", "selector", *PUMPS] if hasattr(selectors, "EpollSelector") else ["selector", *PUMPS]


class Side:
    """One end of a connection through the tunnel: who carries it, and how that ended."""

    def __init__(self, stream: TunnelStream) -> None:
        self.stream = stream
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.error: StreamReset | None = None

    async def run(self, carry: Carry, sock: socket.socket, early: bytes) -> None:
        try:
            with self.scope:
                await carry(sock, self.stream, early)
        except StreamReset as error:
            self.error = error
        self.done.set()


class Connection:
    """client -- near side == link == far side -- target; the outer two are what a test holds."""

    def __init__(self, client: trio.SocketStream, target: trio.SocketStream, near: Side, far: Side) -> None:
        self.client = client
        self.target = target
        self.near = near
        self.far = far

    async def ended(self) -> tuple[StreamReset | None, StreamReset | None]:
        await self.near.done.wait()
        await self.far.done.wait()
        assert self.near.stream.core.state is self.far.stream.core.state is State.CLOSED
        return self.near.error, self.far.error


class Relay:
    """Connections over one link, all carried in one way."""

    def __init__(
        self,
        links: LinkPair,
        way: str,
        boards: list[Switchboard],
        nursery: trio.Nursery,
        tcp_pair: TcpPair,
        buffers: int | None,
    ) -> None:
        self.links = links
        self.boards = boards
        self.way = way
        self._nursery = nursery
        self._tcp_pair = tcp_pair
        self._buffers = buffers

    def carry(self, index: int) -> Carry:
        async def pumped(sock: socket.socket, stream: TunnelStream, early: bytes) -> None:
            if self.way == "pump-tasks":
                stream._attach()
            await pump(_as_stream(sock), stream, early)

        return self.boards[index].join if self.boards else pumped

    async def connect(
        self, early: bytes = b"", first_words: bytes = b"", target_buffers: int | None = None
    ) -> Connection:
        """A connection; the target may have said ``first_words`` before anyone listens at the client's side."""
        client, near_sock = self._tcp_pair(self._buffers)
        far_sock, target = self._tcp_pair(target_buffers or self._buffers)
        near, far = (Side(stream) for stream in await self.links.open())
        self._nursery.start_soon(far.run, self.carry(1), far_sock, b"")
        connection = Connection(_as_stream(client), _as_stream(target), near, far)
        if first_words:
            await connection.target.send_all(first_words)
            await wait_all_tasks_blocked(0.01)
        self._nursery.start_soon(near.run, self.carry(0), near_sock, early)
        return connection


def _as_stream(sock: socket.socket) -> trio.SocketStream:
    return trio.SocketStream(trio.socket.from_stdlib_socket(sock))


MakeRelay = Callable[..., Awaitable[Relay]]


@pytest.fixture(params=KINDS)
def way(request: pytest.FixtureRequest) -> str:
    """Who carries the bytes."""
    return str(request.param)


@pytest.fixture
def make_relay(
    make_links: MakeLinks, nursery: trio.Nursery, tcp_pair: TcpPair, monkeypatch: pytest.MonkeyPatch
) -> MakeRelay:
    async def make(way: str, *, buffers: int | None = None, limits: Limits = _LIMITS) -> Relay:
        if way == "selector":
            monkeypatch.setattr(turns, "new_poller", lambda: SelectorPoller(selectors.DefaultSelector()))
        links = await make_links("sockets", buffers=buffers, limits=limits)
        boards = [] if way in PUMPS else [Switchboard(), Switchboard()]
        return Relay(links, way, boards, nursery, tcp_pair, buffers)

    return make


@pytest.fixture
async def relay(make_relay: MakeRelay, way: str) -> Relay:
    return await make_relay(way)


async def read_all(stream: trio.SocketStream) -> bytes:
    received = bytearray()
    async for data in stream:
        received += data
    return bytes(received)


async def read_exactly(stream: trio.SocketStream, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        data = await stream.receive_some(size - len(received))
        if not data:
            break
        received += data
    return bytes(received)


async def sees_reset(stream: trio.SocketStream, was_reset: Broken) -> None:
    """Read on until the reset."""
    with pytest.raises(trio.BrokenResourceError) as broken:
        await read_all(stream)
    assert was_reset(broken.value)


class TestRelay:
    """Everything here holds for each way of carrying bytes."""

    async def test_bytes_go_both_ways(self, relay: Relay) -> None:
        there = await relay.connect()
        for end, other in ((there.client, there.target), (there.target, there.client)):
            await end.send_all(b"hello")
            assert await read_exactly(other, 5) == b"hello"

    async def test_the_client_may_shut_down_first(self, relay: Relay) -> None:
        there, answer = await relay.connect(), os.urandom(MIB)
        await there.client.send_all(b"question")
        await there.client.send_eof()
        assert await read_all(there.target) == b"question"
        await wait_all_tasks_blocked(0.01)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send_and_end, there.target, answer)
            assert await read_all(there.client) == answer
        assert await there.ended() == (None, None)

    async def test_the_target_may_shut_down_first(self, relay: Relay) -> None:
        there, upload = await relay.connect(), os.urandom(10 * MIB)
        await there.target.send_eof()
        assert await read_all(there.client) == b""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send_and_end, there.client, upload)
            assert await read_all(there.target) == upload
        assert await there.ended() == (None, None)

    async def test_a_connection_without_a_byte(self, relay: Relay) -> None:
        there = await relay.connect()
        await there.client.send_eof()
        await there.target.send_eof()
        assert await read_all(there.client) == await read_all(there.target) == b""
        assert await there.ended() == (None, None)

    async def test_everything_before_a_close_is_delivered(self, make_relay: MakeRelay, way: str) -> None:
        relay = await make_relay(way, buffers=8192)
        there, data = await relay.connect(), os.urandom(MIB // 2)
        digest, total = hashlib.sha256(), 0

        async def send() -> None:
            for _ in range(20):
                await there.target.send_all(data)
            await there.target.aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            while chunk := await there.client.receive_some(10_000):
                digest.update(chunk)
                total += len(chunk)
                await trio.lowlevel.checkpoint()
        await there.client.send_eof()
        assert (total, digest.digest()) == (10 * MIB, hashlib.sha256(data * 20).digest())
        assert await there.ended() == (None, None)
        await relay.links.idle()
        assert [len(board._joints) for board in relay.boards] == [0] * len(relay.boards)

    async def test_a_reset_of_the_target_is_a_reset_for_the_client(
        self, relay: Relay, reset_socket: Callable[..., Awaitable[None]], was_reset: Broken
    ) -> None:
        there = await relay.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(there.target.send_all, bytes(MIB))
            await read_exactly(there.client, MIB)
        await reset_socket(there.target)
        await sees_reset(there.client, was_reset)
        assert None not in await there.ended()

    async def test_a_reset_in_the_middle_of_data_is_never_a_clean_end(
        self, relay: Relay, reset_socket: Callable[..., Awaitable[None]], was_reset: Broken
    ) -> None:
        there = await relay.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(there.target.send_all, bytes(64 * MIB))
            await read_exactly(there.client, MIB)
            nursery.cancel_scope.cancel()
        await reset_socket(there.target)
        await sees_reset(there.client, was_reset)
        assert None not in await there.ended()

    async def test_a_reset_of_the_client_is_a_reset_for_the_target(
        self, relay: Relay, reset_socket: Callable[..., Awaitable[None]], was_reset: Broken
    ) -> None:
        there = await relay.connect()
        await there.client.send_all(b"x")
        await read_exactly(there.target, 1)
        await reset_socket(there.client)
        await sees_reset(there.target, was_reset)
        near, far = await there.ended()
        assert near
        assert far
        assert (near.code, far.code) == ("reset", "reset")
        assert near.text == far.text

    async def test_a_target_that_shut_down_can_still_reset(
        self, relay: Relay, was_reset: Broken, reset_socket: Callable[..., Awaitable[None]]
    ) -> None:
        """Noticed as soon as the client sends, if not before."""
        there = await relay.connect()
        await there.target.send_eof()
        assert await read_all(there.client) == b""
        await reset_socket(there.target)
        with pytest.raises(trio.BrokenResourceError):
            await _send_on(there.client, b"anyone there?")
        assert None not in await there.ended()

    async def test_a_stream_reset_behind_eof_reaches_a_silent_client(self, relay: Relay) -> None:
        there = await relay.connect()
        await there.target.send_eof()
        assert await read_all(there.client) == b""
        there.far.scope.cancel()
        with trio.fail_after(3):
            await there.near.done.wait()
        assert there.near.error

    async def test_early_bytes_come_first_and_once(self, relay: Relay) -> None:
        there = await relay.connect(early=b"early ")
        await there.client.send_all(b"and late")
        await there.client.send_eof()
        assert await read_all(there.target) == b"early and late"

    async def test_early_bytes_of_a_client_that_says_nothing_more(self, relay: Relay) -> None:
        there = await relay.connect(early=b"only this")
        assert await read_exactly(there.target, 9) == b"only this"

    async def test_more_early_bytes_than_credit(self, make_relay: MakeRelay, way: str) -> None:
        relay = await make_relay(way, limits=Limits(first_window=1000))
        early = os.urandom(50_000)
        there = await relay.connect(early=early)
        await there.client.send_all(b"late")
        await there.client.send_eof()
        assert await read_all(there.target) == early + b"late"

    async def test_early_bytes_of_a_client_that_has_shut_down(self, relay: Relay, tcp_pair: TcpPair) -> None:
        there = await relay.connect(early=b"early")
        await there.client.send_eof()
        assert await read_all(there.target) == b"early"

    async def test_a_target_that_speaks_first_is_heard_in_order(self, relay: Relay) -> None:
        words = os.urandom(300_000)
        there = await relay.connect(first_words=words)
        await there.target.send_all(b"and more")
        assert await read_exactly(there.client, len(words) + 8) == words + b"and more"

    async def test_a_target_that_spoke_and_left_is_heard(self, relay: Relay) -> None:
        one, other = await relay.links.open()
        await other.send_all(b"220 hello")
        await other.send_eof()
        await wait_all_tasks_blocked(0.01)
        client, sock = relay._tcp_pair()
        near = Side(one)
        relay._nursery.start_soon(near.run, relay.carry(0), sock, b"")
        async with _as_stream(client) as stream:
            assert await read_all(stream) == b"220 hello"

    async def test_a_stream_that_was_reset_before_resets_the_client(self, relay: Relay, was_reset: Broken) -> None:
        one, other = await relay.links.open()
        other.reset("reset", "gone")
        await wait_all_tasks_blocked(0.01)
        client, sock = relay._tcp_pair()
        near = Side(one)
        relay._nursery.start_soon(near.run, relay.carry(0), sock, b"")
        await sees_reset(_as_stream(client), was_reset)
        await near.done.wait()
        assert near.error
        assert near.error.text == "gone"

    @pytest.mark.parametrize("side", ["near", "far"])
    async def test_cancelling_one_side_resets_both(self, relay: Relay, was_reset: Broken, side: str) -> None:
        there = await relay.connect()
        await there.client.send_all(b"x")
        await read_exactly(there.target, 1)
        getattr(there, side).scope.cancel()
        await sees_reset(there.client, was_reset)
        await sees_reset(there.target, was_reset)
        near, far = await there.ended()
        error = near or far
        assert error
        assert error.code == "cancelled"

    async def test_a_lost_link_resets_both(self, relay: Relay, was_reset: Broken) -> None:
        there = await relay.connect()
        await there.client.send_all(b"x")
        await read_exactly(there.target, 1)
        await relay.links.agent.close("leaving", "the agent is leaving")
        await sees_reset(there.client, was_reset)
        await sees_reset(there.target, was_reset)
        near, _ = await there.ended()
        assert near
        assert near.code == "link_lost"
        assert "the agent is leaving" in near.text

    async def test_20_mb_each_way_in_chunks_of_any_size(self, relay: Relay) -> None:
        there = await relay.connect()
        dice = random.Random(1)
        ends = (there.client, there.target)
        sent, received = ([hashlib.sha256(), hashlib.sha256()] for _ in range(2))
        data = os.urandom(MIB)

        async def send(index: int) -> None:
            left = 20 * MIB
            while left:
                chunk = data[: min(left, int(2 ** dice.uniform(0, 20)))]
                sent[index].update(chunk)
                await ends[index].send_all(chunk)
                left -= len(chunk)
            await ends[index].send_eof()

        async def receive(index: int) -> None:
            while chunk := await ends[index].receive_some(int(2 ** dice.uniform(8, 20))):
                received[index].update(chunk)

        async with trio.open_nursery() as nursery:
            for index in range(2):
                nursery.start_soon(send, index)
                nursery.start_soon(receive, index)
        assert received[0].digest() == sent[1].digest()
        assert received[1].digest() == sent[0].digest()
        assert await there.ended() == (None, None)

    async def test_one_that_never_reads_harms_no_other(self, relay: Relay) -> None:
        stuck, fine = await relay.connect(), await relay.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stuck.target.send_all, bytes(64 * MIB))
            nursery.start_soon(_echo, fine.target)
            for _ in range(100):
                await fine.client.send_all(b"x" * 1000)
                assert await read_exactly(fine.client, 1000) == b"x" * 1000
            for board in relay.boards:
                for joint in board._joints:
                    kept = sum(map(len, joint.pending or ()))
                    assert kept <= joint.core.window.size <= Limits().window
                    assert len(joint.pending or ()) <= 2 + kept // (32 * 1024)  # small pieces are kept together
            nursery.cancel_scope.cancel()

    async def test_a_link_that_is_full_pauses_and_goes_on(self, make_relay: MakeRelay, way: str) -> None:
        relay = await make_relay(way, buffers=8192, limits=Limits(high_water=64 * 1024))
        connections = [await relay.connect() for _ in range(8)]
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                await trio.lowlevel.checkpoint()
                most = max(most, relay.links.agent.session.out.queued)

        async def through(connection: Connection) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_send_and_end, connection.target, bytes(MIB))
                assert len(await read_all(connection.client)) == MIB

        async with trio.open_nursery() as watching:
            watching.start_soon(watch)
            async with trio.open_nursery() as nursery:
                for connection in connections:
                    nursery.start_soon(through, connection)
            watching.cancel_scope.cancel()
        assert 64 * 1024 < most < 400 * 1024  # it was full; and no more than one read came on top

    async def test_twelve_echoes_of_more_than_all_buffers_hold(self, make_relay: MakeRelay, way: str) -> None:
        relay = await make_relay(way, buffers=8192, limits=Limits(first_window=64 * 1024))
        size = 500_000

        async def through() -> None:
            there = await relay.connect()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_echo, there.target)
                nursery.start_soon(_send_and_end, there.client, bytes(size))
                assert len(await read_all(there.client)) == size

        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(through)
        await relay.links.idle()

    @pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors through /proc")
    async def test_no_descriptor_is_left(self, relay: Relay, reset_socket: Callable[..., Awaitable[None]]) -> None:
        async def once(number: int) -> None:
            there = await relay.connect()
            await there.client.send_all(b"x")
            await read_exactly(there.target, 1)
            if number % 3 == 0:
                await reset_socket(there.client)
            elif number % 3 == 1:
                there.far.scope.cancel()
            else:
                await there.client.send_eof()
                await there.target.send_eof()
            await there.ended()
            await there.client.aclose()
            await there.target.aclose()

        await once(0)
        gc.collect()
        before = os.listdir("/proc/self/fd")
        for number in range(30):
            await once(number)
        assert len(os.listdir("/proc/self/fd")) == len(before)


async def _send_and_end(stream: trio.SocketStream, data: bytes) -> None:
    await stream.send_all(data)
    await stream.send_eof()


async def _send_on(stream: trio.SocketStream, data: bytes) -> None:
    while True:
        await stream.send_all(data)


async def _echo(stream: trio.SocketStream) -> None:
    async for data in stream:
        await stream.send_all(data)
    await stream.send_eof()


@pytest.mark.skipif(not hasattr(selectors, "EpollSelector"), reason="needs epoll")
class TestPaused:
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


class TestSwitchboard:
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
        await sees_reset(_as_stream(client), was_reset)
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
        await sees_reset(_as_stream(client), was_reset)
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
BOARDS = [kind for kind in KINDS if kind not in PUMPS]


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


class TestCut:
    @pytest.mark.parametrize("way", BOARDS)
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

    @pytest.mark.parametrize("way", BOARDS)
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

    @pytest.mark.parametrize("way", BOARDS)
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

    @pytest.mark.parametrize("way", BOARDS)
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

    @pytest.mark.parametrize("way", BOARDS)
    async def test_lets_a_transfer_that_was_whole_end_as_one(self, make_relay: MakeRelay, way: str) -> None:
        """Its last bytes are on their way to a slow client, and neither side has anything more to say."""
        relay = await make_relay(way, buffers=8192)
        there = await relay.connect()
        await there.client.send_eof()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send_and_end, there.target, bytes(200_000))  # which the window has room for
            await there.far.done.wait()
            while there.near.stream.core.state is not State.CLOSED:
                await trio.lowlevel.checkpoint()
            assert not there.near.done.is_set()
            nursery.start_soon(partial(relay.boards[0].cut, *CUT, 30.0))
            await wait_all_tasks_blocked()
            assert len(await read_all(there.client)) == 200_000

    @pytest.mark.parametrize("way", BOARDS)
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


class TestReap:
    @pytest.mark.parametrize("way", BOARDS)
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

    @pytest.mark.parametrize("way", BOARDS)
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

    @pytest.mark.parametrize("way", BOARDS)
    async def test_spares_what_is_open_both_ways_however_idle(self, relay: Relay) -> None:
        there = await relay.connect()
        await there.client.send_all(b"x")
        await read_exactly(there.target, 1)
        for _ in range(3):
            relay.boards[0].reap()
        assert not there.near.done.is_set()
        await there.target.send_all(b"y")
        assert await read_exactly(there.client, 1) == b"y"
