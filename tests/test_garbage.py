"""What has ended is freed at once, however it ended.

A circle of objects would stay until the collector finds it, and looking for it costs every other stream.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import trio
from house import Held, House, Service, echo, reset_after_one_piece, talks

from tunnel.core import Stream

TIMES = 20


def _streams() -> int:
    return sum(isinstance(each, Stream) for each in gc.get_objects())


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """There are as many streams afterwards as before, though nobody collects."""
    gc.collect()
    gc.disable()
    try:
        before = _streams()
        yield
        assert _streams() == before
    finally:
        gc.enable()


@pytest.fixture
async def linked(house: House) -> House:
    """A server and an agent."""
    await house.serve()
    await house.agent()
    return house


@pytest.fixture
async def echoes(house: House) -> Service:
    return await house.service(echo)


async def test_a_connection_that_was_served(linked: House, echoes: Service) -> None:
    with nothing_left():
        for _ in range(TIMES):
            async with await linked.connect(echoes.target) as client:
                assert await talks(client)
        await linked.idle()


async def test_a_connection_whose_target_resets_it(linked: House) -> None:
    service = await linked.service(reset_after_one_piece)
    with nothing_left():
        for _ in range(TIMES):
            async with await linked.connect(service.target) as client:
                await client.send_all(b"x")
                with contextlib.suppress(trio.BrokenResourceError):
                    await client.receive_some()
        await linked.idle()


async def test_a_dial_that_was_refused(linked: House) -> None:
    target = linked.closed_port()
    with nothing_left():
        for _ in range(TIMES):
            async with await linked.ask(target) as client:
                await client.receive_some()
        await linked.idle()


async def test_a_dial_that_was_given_up(linked: House, held: Held) -> None:
    async with linked.client() as client:
        with nothing_left():
            for number in range(TIMES):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.dial, "held.test", 1)
                    await held.arrived.wait_value(number + 1)
                    nursery.cancel_scope.cancel()
            await linked.idle()


async def test_a_stream_of_a_client(linked: House, echoes: Service) -> None:
    async def once() -> None:
        stream = await client.dial(echoes.target.host, echoes.target.port)
        await stream.send_all(b"x")
        assert await stream.receive_some() == b"x"
        await stream.send_eof()
        assert await stream.receive_some() == b""
        await stream.aclose()

    async with linked.client() as client:
        await once()
        with nothing_left():
            for _ in range(TIMES):
                await once()
            await linked.idle()
