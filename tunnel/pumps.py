"""``pump``: what the switchboard does, for a local connection that is any half-closeable trio stream.

Rules that hold here:

- A plain socket is given to a switchboard that all of the run share: two tasks over a trio socket never hear of a
  reset while they are not reading. Whatever else there is gets two tasks, and the same semantics.
- The local connection is closed however this ends.

This file must not know who asked for the connection, or where it leads.
"""

from __future__ import annotations

import socket

import trio

from tunnel.errors import StreamReset
from tunnel.relay import RST_ON_CLOSE, Switchboard
from tunnel.stream import TunnelStream

_CHUNK = 64 * 1024

_board: trio.lowlevel.RunVar[Switchboard] = trio.lowlevel.RunVar("tunnel.pumps")


def _shared_board() -> Switchboard:
    """The switchboard of this run of trio, for sockets whose process has no other."""
    try:
        return _board.get()
    except LookupError:
        board = Switchboard()
        _board.set(board)
        return board


async def pump(local: trio.abc.HalfCloseableStream, stream: TunnelStream, early: bytes = b"") -> None:
    """What ``Switchboard.join`` does, for a local connection that is any half-closeable trio stream.

    Raises:
        StreamReset: one of the two was reset, and so is the other now.
    """
    if isinstance(local, trio.SocketStream) and not stream.used:
        with socket.socket(fileno=local.socket.detach()) as sock:
            sock.setblocking(False)
            await _shared_board().join(sock, stream, early)
    else:
        await _copy_both_ways(local, stream, early)


async def _copy_both_ways(local: trio.abc.HalfCloseableStream, stream: TunnelStream, early: bytes) -> None:
    failure: StreamReset | None = None

    async def copy(source: trio.abc.ReceiveStream, sink: trio.abc.HalfCloseableStream, first: bytes = b"") -> None:
        nonlocal failure
        try:
            if first:
                await sink.send_all(first)
            while data := await source.receive_some(_CHUNK):
                await sink.send_all(data)
            await sink.send_eof()
            await stream.wait_ended()  # a reset can still come, and must not wait for the other way to notice
        except trio.BrokenResourceError as error:
            cause = error.__cause__
            failure = failure or (cause if isinstance(cause, StreamReset) else StreamReset("reset", str(error)))
            nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(copy, local, stream, early)
            nursery.start_soon(copy, stream, local)
    except BaseException:
        failure = failure or StreamReset("cancelled", "this side was stopped")
        raise
    finally:
        if failure:
            stream.reset(failure.code, failure.text)
            if isinstance(local, trio.SocketStream):
                local.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST_ON_CLOSE)
        await trio.aclose_forcefully(local)
    if failure:
        raise failure
