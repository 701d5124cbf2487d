"""What holds for every transport, as tests to inherit: whoever does has a fixture ``ends`` that gives two, connected.

What was not taken is given back, everything arrives in order, and every failure is a ``BROKEN``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tunnel.transport import BROKEN, Buffer, Transport

Ends = tuple[Transport, Transport]


async def receive_all(transport: Transport) -> bytes:
    received, scratch = bytearray(), memoryview(bytearray(16 * 1024))

    def take(count: int) -> bool:
        received.extend(scratch[:count])
        return True

    assert not await transport.receive(lambda: scratch, take)
    return bytes(received)


async def send_all(transport: Transport, buffers: Sequence[Buffer]) -> None:
    given = iter([buffers])
    await transport.send(lambda: next(given, ()))


async def receive_once(transport: Transport, size: int) -> bytes:
    """What is there, up to so many bytes."""
    view, received = memoryview(bytearray(size)), bytearray()

    def take(count: int) -> bool:
        received.extend(view[:count])
        return False

    await transport.receive(lambda: view, take)
    return bytes(received)


async def send_for_ever(transport: Transport) -> None:
    while True:
        await send_all(transport, [bytes(100_000)])


class TransportContract:
    async def test_everything_arrives_in_order(self, ends: Ends) -> None:
        buffers = [os.urandom(size) for size in (1, 70_000, 3, 1_000_000)]
        received = b""

        async def send() -> None:
            await send_all(ends[0], ends[0].send_now(buffers))
            await ends[0].aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            received = await receive_all(ends[1])
        assert received == b"".join(buffers)

    async def test_receiving_stops_at_the_size_of_the_view(self, ends: Ends) -> None:
        await send_all(ends[0], [b"abcdef"])
        assert await receive_once(ends[1], 4) == b"abcd"

    async def test_the_end_is_no_bytes(self, ends: Ends) -> None:
        await ends[0].aclose()
        assert await receive_once(ends[1], 8) == b""

    async def test_what_is_not_taken_any_more_is_there_later(self, ends: Ends) -> None:
        await send_all(ends[0], [b"abcdefgh"])
        view, taken = memoryview(bytearray(2)), bytearray()

        def take(count: int) -> bool:
            taken.extend(view[:count])
            return len(taken) < 4

        assert await ends[1].receive(lambda: view, take)
        assert taken == b"abcd"
        await ends[0].aclose()
        assert await receive_all(ends[1]) == b"efgh"

    async def test_what_taking_raises_is_raised(self, ends: Ends) -> None:
        await send_all(ends[0], [b"abc"])
        view = memoryview(bytearray(2))

        def take(count: int) -> bool:
            raise ValueError(count)

        with pytest.raises(ValueError, match="2"):
            await ends[1].receive(lambda: view, take)
        await ends[0].aclose()
        assert await receive_all(ends[1]) == b"c"

    async def test_a_receive_that_is_cancelled_has_taken_nothing(self, ends: Ends) -> None:
        with trio.move_on_after(0):
            await receive_once(ends[1], 8)
        await send_all(ends[0], [b"abc"])
        await ends[0].aclose()
        assert await receive_all(ends[1]) == b"abc"

    async def test_closing_wakes_whoever_receives(self, ends: Ends) -> None:
        async def receive() -> None:
            with pytest.raises(BROKEN):
                await receive_once(ends[0], 8)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await wait_all_tasks_blocked()
            await ends[0].aclose()

    async def test_sending_to_a_peer_that_is_gone_is_broken(self, ends: Ends) -> None:
        await ends[1].aclose()
        with pytest.raises(BROKEN):
            await send_for_ever(ends[0])

    async def test_lingering_lets_a_peer_that_still_sends_read_everything(self, ends: Ends) -> None:
        leaving, peer = ends
        received = b""

        async def leave() -> None:
            await send_all(leaving, [bytes(300_000)])
            await leaving.linger()
            await leaving.aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            await send_all(peer, [bytes(500_000)])
            received = await receive_all(peer)
            await peer.aclose()
        assert len(received) == 300_000
