"""Pumps: whatever local connection there is, bytes, ends and resets are those of the switchboard.

What holds for them as for every way of carrying bytes is in ``relays``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from house import receive_all
from relays import PUMPS, RelayContract
from trio.testing import memory_stream_pair

from tunnel.errors import StreamReset
from tunnel.pumps import pump

if TYPE_CHECKING:
    from conftest import MakeLinks


@pytest.fixture(params=PUMPS)
def way(request: pytest.FixtureRequest) -> str:
    """Who carries the bytes."""
    return str(request.param)


class TestPump(RelayContract):
    """With a socket to give, and without."""


async def test_a_local_stream_may_be_any_that_can_be_half_closed(make_links: MakeLinks, nursery: trio.Nursery) -> None:
    stream, far = await (await make_links()).open()
    local, near = memory_stream_pair()
    nursery.start_soon(pump, near, stream, b"early ")
    await local.send_all(b"question")
    await local.send_eof()
    assert await receive_all(far) == b"early question"
    await far.send_all(b"answer")
    await far.send_eof()
    assert await receive_all(local) == b"answer"


async def test_a_local_stream_that_is_no_socket_is_closed_at_a_reset(make_links: MakeLinks) -> None:
    stream, far = await (await make_links()).open()
    local, near = memory_stream_pair()
    far.reset("reset", "gone")
    with pytest.raises(StreamReset, match="gone"):
        await pump(near, stream)
    with pytest.raises(trio.BrokenResourceError):
        await local.send_all(b"anyone there?")


async def test_a_local_stream_that_is_no_socket_and_breaks_resets_the_other_side(
    make_links: MakeLinks,
) -> None:
    stream, far = await (await make_links()).open()
    local, near = memory_stream_pair()
    await local.aclose()
    await far.send_all(b"x")
    with pytest.raises(StreamReset):
        await pump(near, stream)
    with pytest.raises(trio.BrokenResourceError):
        await far.wait_ended()
