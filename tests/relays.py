"""What holds for every way of carrying bytes between local sockets and streams, as tests to inherit; and their tools.

Whoever inherits ``RelayContract`` has a fixture ``way``: one of the switchboard's, or of ``PUMPS``.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import selectors
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tunnel import turns
from tunnel.core import State
from tunnel.errors import StreamReset
from tunnel.limits import Limits
from tunnel.poller import SelectorPoller
from tunnel.pumps import pump
from tunnel.relay import Switchboard
from tunnel.stream import TunnelStream

if TYPE_CHECKING:
    from conftest import LinkPair, MakeLinks, TcpPair

Carry = Callable[[socket.socket, TunnelStream, bytes], Awaitable[None]]
Broken = Callable[[BaseException], bool]
MIB = 1 << 20
PUMPS = ["pump", "pump-tasks"]  # a plain socket, which goes through a switchboard; and what has no socket to give
_LIMITS = Limits()


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
            await pump(as_stream(sock), stream, early)

        return self.boards[index].join if self.boards else pumped

    async def connect(
        self, early: bytes = b"", first_words: bytes = b"", target_buffers: int | None = None
    ) -> Connection:
        """A connection; the target may have said ``first_words`` before anyone listens at the client's side."""
        client, near_sock = self._tcp_pair(self._buffers)
        far_sock, target = self._tcp_pair(target_buffers or self._buffers)
        near, far = (Side(stream) for stream in await self.links.open())
        self._nursery.start_soon(far.run, self.carry(1), far_sock, b"")
        connection = Connection(as_stream(client), as_stream(target), near, far)
        if first_words:
            await connection.target.send_all(first_words)
            await wait_all_tasks_blocked(0.01)
        self._nursery.start_soon(near.run, self.carry(0), near_sock, early)
        return connection


def as_stream(sock: socket.socket) -> trio.SocketStream:
    return trio.SocketStream(trio.socket.from_stdlib_socket(sock))


MakeRelay = Callable[..., Awaitable[Relay]]


class Relays:
    """Has the fixtures for making them."""

    @pytest.fixture
    def make_relay(
        self, make_links: MakeLinks, nursery: trio.Nursery, tcp_pair: TcpPair, monkeypatch: pytest.MonkeyPatch
    ) -> MakeRelay:
        async def make(way: str, *, buffers: int | None = None, limits: Limits = _LIMITS) -> Relay:
            if way == "selector":
                monkeypatch.setattr(turns, "new_poller", lambda: SelectorPoller(selectors.DefaultSelector()))
            links = await make_links("sockets", buffers=buffers, limits=limits)
            boards = [] if way in PUMPS else [Switchboard(), Switchboard()]
            return Relay(links, way, boards, nursery, tcp_pair, buffers)

        return make

    @pytest.fixture
    async def relay(self, make_relay: MakeRelay, way: str) -> Relay:
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


async def send_and_end(stream: trio.SocketStream, data: bytes) -> None:
    await stream.send_all(data)
    await stream.send_eof()


async def send_on(stream: trio.SocketStream, data: bytes) -> None:
    while True:
        await stream.send_all(data)


async def echo(stream: trio.SocketStream) -> None:
    async for data in stream:
        await stream.send_all(data)
    await stream.send_eof()


class RelayContract(Relays):
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
            nursery.start_soon(send_and_end, there.target, answer)
            assert await read_all(there.client) == answer
        assert await there.ended() == (None, None)

    async def test_the_target_may_shut_down_first(self, relay: Relay) -> None:
        there, upload = await relay.connect(), os.urandom(10 * MIB)
        await there.target.send_eof()
        assert await read_all(there.client) == b""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_and_end, there.client, upload)
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
            await send_on(there.client, b"anyone there?")
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
        async with as_stream(client) as stream:
            assert await read_all(stream) == b"220 hello"

    async def test_a_stream_that_was_reset_before_resets_the_client(self, relay: Relay, was_reset: Broken) -> None:
        one, other = await relay.links.open()
        other.reset("reset", "gone")
        await wait_all_tasks_blocked(0.01)
        client, sock = relay._tcp_pair()
        near = Side(one)
        relay._nursery.start_soon(near.run, relay.carry(0), sock, b"")
        await sees_reset(as_stream(client), was_reset)
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
            nursery.start_soon(echo, fine.target)
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
                nursery.start_soon(send_and_end, connection.target, bytes(MIB))
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
                nursery.start_soon(echo, there.target)
                nursery.start_soon(send_and_end, there.client, bytes(size))
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
