"""``TunnelStream`` over real links: trio's contract, who is told what at the end, and what cancellation leaves."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import check_half_closeable_stream, wait_all_tasks_blocked

from tunnel.core import State
from tunnel.errors import StreamReset
from tunnel.identity import Identity
from tunnel.limits import Limits
from tunnel.packets import Close, DialReq, Eof, Ping, Pong
from tunnel.stream import TunnelStream

if TYPE_CHECKING:
    from conftest import LinkPair, MakeRaw

Two = tuple[TunnelStream, TunnelStream]
WINDOW = Limits().first_window


@pytest.fixture
async def ends(links: LinkPair) -> Two:
    return await links.open()


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    received = bytearray()
    async for data in stream:
        received += data
    return bytes(received)


async def send_on(stream: TunnelStream, data: bytes) -> None:
    while True:
        await stream.send_all(data)


async def fill(stream: TunnelStream) -> int:
    """Send until the peer takes no more; how much that was."""
    sent = 0
    while stream.core.credit:
        size = min(stream.core.credit, 64 * 1024)
        await stream.send_all(bytes(size))
        sent += size
    return sent


class TestContract:
    async def test_trios_checker(self, links: LinkPair) -> None:
        await check_half_closeable_stream(links.open, _clogged(links))

    async def test_trios_checker_the_other_way_round(self, links: LinkPair) -> None:
        async def swapped() -> Two:
            one, other = await links.open()
            return other, one

        await check_half_closeable_stream(swapped, None)

    async def test_the_checker_leaves_no_stream(self, links: LinkPair) -> None:
        await check_half_closeable_stream(links.open, None)
        await links.idle()


def _clogged(links: LinkPair) -> Callable[[], Awaitable[Two]]:
    async def make() -> Two:
        one, other = await links.open()
        await fill(one)
        await fill(other)
        return one, other

    return make


class TestErrors:
    async def test_two_senders_are_one_too_many(self, ends: Two) -> None:
        await fill(ends[0])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends[0].send_all, b"x")
            await wait_all_tasks_blocked()
            for again in (ends[0].send_all, lambda _: ends[0].send_eof()):
                with pytest.raises(trio.BusyResourceError):
                    await again(b"y")
            nursery.cancel_scope.cancel()

    async def test_two_receivers_are_one_too_many(self, ends: Two) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends[0].receive_some)
            await wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await ends[0].receive_some()
            nursery.cancel_scope.cancel()

    async def test_nothing_can_be_sent_behind_eof(self, ends: Two) -> None:
        await ends[0].send_eof()
        with pytest.raises(trio.ClosedResourceError):
            await ends[0].send_all(b"x")

    async def test_eof_may_be_sent_twice(self, ends: Two) -> None:
        await ends[0].send_eof()
        await ends[0].send_eof()
        assert await ends[1].receive_some() == b""

    async def test_a_closed_stream_neither_sends_nor_receives(self, ends: Two) -> None:
        await ends[0].aclose()
        for call in (ends[0].receive_some, ends[0].send_eof, lambda: ends[0].send_all(b"x")):
            with pytest.raises(trio.ClosedResourceError):
                await call()

    async def test_a_reset_is_broken_and_its_cause_says_why(self, ends: Two) -> None:
        ends[1].reset("reset", "the target broke")
        for call in (ends[0].receive_some, lambda: ends[0].send_all(b"x"), ends[0].send_eof):
            with pytest.raises(trio.BrokenResourceError) as broken:
                await call()
            cause = broken.value.__cause__
            assert isinstance(cause, StreamReset)
            assert (cause.code, cause.text) == ("reset", "the target broke")

    async def test_a_reset_wakes_the_peers_sender_and_receiver(self, ends: Two) -> None:
        await fill(ends[0])

        async def broken(call: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(trio.BrokenResourceError):
                await call()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(broken, lambda: ends[0].send_all(b"x"))
            nursery.start_soon(broken, ends[0].receive_some)
            await wait_all_tasks_blocked()
            ends[1].reset("reset", "no more")

    async def test_ones_own_reset_wakes_ones_own_receiver(self, ends: Two) -> None:
        async def receive() -> None:
            with pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):
                await ends[0].receive_some()

        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive)
                await wait_all_tasks_blocked()
                ends[0].reset("cancelled", "given up")

    async def test_ones_own_reset_ends_sending(self, ends: Two) -> None:
        await ends[0].send_all(b"x")
        ends[0].reset("cancelled", "given up")
        with pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):
            await ends[0].send_all(b"y")

    async def test_a_stream_reset_before_its_first_use_is_not_a_clean_end(self, ends: Two) -> None:
        ends[0].reset("cancelled", "given up")
        with pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):
            await ends[0].receive_some()

    async def test_an_ended_stream_cannot_be_reset(self, ends: Two) -> None:
        for end in ends:
            await end.send_eof()
        assert [await end.receive_some() for end in ends] == [b"", b""]
        ends[0].reset("reset", "too late")
        assert await ends[1].receive_some() == b""

    @pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError)])
    async def test_a_size_to_receive_is_a_positive_integer(self, ends: Two, size: int, error: type[Exception]) -> None:
        with pytest.raises(error):
            await ends[0].receive_some(size)

    async def test_a_lost_link_resets_its_streams_with_its_reason(self, links: LinkPair) -> None:
        one, _ = await links.open()
        await links.agent.close("leaving", "the agent is leaving")
        with pytest.raises(trio.BrokenResourceError, match="the agent is leaving"):
            await one.receive_some()


class TestCancellation:
    async def test_a_cancelled_send_leaves_a_whole_prefix(self, ends: Two) -> None:
        data = os.urandom(WINDOW * 2)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ends[0].send_all, data)
                await wait_all_tasks_blocked()
                scope.cancel()
        await ends[0].send_eof()
        assert await read_all(ends[1]) == data[:WINDOW]

    async def test_a_cancelled_receive_takes_nothing(self, ends: Two) -> None:
        await ends[0].send_all(b"abc")
        with trio.CancelScope() as scope:
            scope.cancel()
            await ends[1].receive_some()
        assert scope.cancelled_caught
        assert await ends[1].receive_some() == b"abc"

    async def test_a_receive_cancelled_while_waiting_takes_nothing(self, ends: Two) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ends[1].receive_some)
                await wait_all_tasks_blocked()
                ends[0].core.send(b"abc")
                ends[0].outlet.flush()
                scope.cancel()
        assert await ends[1].receive_some() == b"abc"

    async def test_a_cancelled_close_resets(self, ends: Two) -> None:
        await trio.aclose_forcefully(ends[0])
        with pytest.raises(trio.BrokenResourceError):
            await ends[1].receive_some()


class TestClosing:
    async def test_what_was_sent_is_delivered_and_then_the_end(self, ends: Two) -> None:
        data = os.urandom(WINDOW)
        await ends[0].send_all(data)
        await ends[0].aclose()
        assert await read_all(ends[1]) == data

    async def test_data_for_a_closed_stream_is_answered_by_a_reset(self, ends: Two) -> None:
        await ends[0].aclose()
        await ends[1].send_all(b"too late")
        assert await ends[1].receive_some() == b""
        with pytest.raises(trio.BrokenResourceError, match="closed"), trio.fail_after(5):
            await send_on(ends[1], b"far too late")

    async def test_a_sender_whose_peer_closed_without_reading_is_told(self, ends: Two) -> None:
        """With the window used up there is nothing more to send that could be answered."""
        await fill(ends[1])
        await ends[0].receive_some(1)
        await wait_all_tasks_blocked()
        await ends[0].aclose()
        with pytest.raises(trio.BrokenResourceError), trio.fail_after(5):
            await send_on(ends[1], bytes(1000))

    async def test_both_sides_closing_leaves_nothing(self, links: LinkPair) -> None:
        for end in await links.open():
            await end.aclose()
        await links.idle()

    async def test_closing_twice_is_closing_once(self, ends: Two) -> None:
        await ends[0].aclose()
        await ends[0].aclose()
        assert await ends[1].receive_some() == b""


class TestBytes:
    async def test_one_send_of_8_mib_arrives_whole(self, ends: Two) -> None:
        data = os.urandom(8 << 20)
        digest = hashlib.sha256()

        async def receive() -> None:
            async for chunk in ends[1]:
                digest.update(chunk)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await ends[0].send_all(data)
            await ends[0].send_eof()
        assert digest.digest() == hashlib.sha256(data).digest()

    async def test_an_empty_send_sends_nothing(self, ends: Two) -> None:
        await ends[0].send_all(b"")
        await ends[0].send_all(b"x")
        assert await ends[1].receive_some() == b"x"

    async def test_what_is_sent_may_be_changed_afterwards(self, ends: Two) -> None:
        data = bytearray(b"abc")
        await ends[0].send_all(data)
        data[:] = b"xyz"
        assert await ends[1].receive_some() == b"abc"

    async def test_any_buffer_can_be_sent(self, ends: Two) -> None:
        await ends[0].send_all(memoryview(b"abcdef")[::1].cast("H"))
        assert await ends[1].receive_some() == b"abcdef"

    async def test_a_small_receive_leaves_the_rest(self, ends: Two) -> None:
        await ends[0].send_all(b"abcdef")
        assert [await ends[1].receive_some(size) for size in (1, 2, 10)] == [b"a", b"bc", b"def"]

    async def test_what_came_before_the_first_use_is_not_lost(self, ends: Two) -> None:
        await ends[0].send_all(b"first ")
        await ends[0].send_all(b"words")
        await ends[0].send_eof()
        await wait_all_tasks_blocked()
        assert await read_all(ends[1]) == b"first words"

    async def test_eof_one_way_leaves_the_other_way_open(self, ends: Two) -> None:
        await ends[0].send_eof()
        assert await ends[1].receive_some() == b""
        await ends[1].send_all(b"answer")
        await ends[1].send_eof()
        assert await read_all(ends[0]) == b"answer"

    async def test_a_reader_that_never_reads_holds_no_more_than_the_window(self, ends: Two) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends[0].send_all, bytes(WINDOW * 8))
            ends[1]._attach()
            while ends[0].core.credit:
                await wait_all_tasks_blocked()
            await wait_all_tasks_blocked()
            assert len(ends[1]._held) <= WINDOW
            nursery.cancel_scope.cancel()


async def test_the_reset_of_a_closed_stream_reaches_the_peer_once(nursery: trio.Nursery, make_raw: MakeRaw) -> None:
    taken: list[TunnelStream] = []

    def take(stream: TunnelStream, request: DialReq) -> None:
        stream.core.accept()
        taken.append(stream)

    raw = make_raw("agent", on_dial=take)
    nursery.start_soon(raw.link.run)
    await raw.peer.shake_hands(Identity("server", "server"))
    await raw.peer.send(DialReq(1, "target", 80, 1000, 1000, {}))
    await raw.peer.next()
    await taken[0].aclose()
    data = bytes.fromhex("0000000d9307ce00000001c60000000178")
    await raw.peer.send(data, data, data, Ping(0, 5))
    heard = [await raw.peer.next() for _ in range(3)]
    assert heard == [Eof(1), Close(1, "closed", "the peer of this stream closed it"), Pong(0, 5)]
    assert taken[0].core.state is State.CLOSED
