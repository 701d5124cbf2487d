"""``TunnelStream``: one stream as a trio stream, for code that reads and writes it itself.

It is a handle until it is first used: the switchboard can take the stream beneath it (``core``) and move its bytes
without it. Once used, it is that stream's sink and holds what arrived until it is read; the window bounds that.

Rules that hold here:

- trio's contract for half-closeable streams, as its own checker sees it.
- ``aclose`` is graceful, as on a socket: what was sent is still delivered, then EOF. What arrives afterwards is
  answered by a reset. A cancelled ``aclose`` resets at once.
- A cancelled ``send_all`` leaves a whole prefix of the data sent; a cancelled ``receive_some`` takes nothing.

This file must not know links (only that there is an ``Outlet`` to flush), targets, or who uses the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import trio

from tunnel.core import State, Stream
from tunnel.errors import DialError, StreamReset

_CHUNK = 64 * 1024


class Outlet(Protocol):
    """The way out that a stream shares with others.

    Attributes:
        burst: bytes that a frame should have at most, for what comes behind it.
    """

    burst: int

    @property
    def congested(self) -> bool:
        """Whether more is queued than should be; who can wait, should."""

    def flush(self) -> None:
        """Have what is queued sent when this turn of the loop ends."""

    def when_room(self, call: Callable[[], None]) -> None:
        """Have ``call`` called, once, when ``congested`` is over or the way out is gone."""


class _Turn:
    """One task at a time, or ``trio.BusyResourceError``."""

    __slots__ = ("_taken", "_text")

    def __init__(self, text: str) -> None:
        self._taken = False
        self._text = text

    def __enter__(self) -> None:
        if self._taken:
            raise trio.BusyResourceError(self._text)
        self._taken = True

    def __exit__(self, *_: object) -> None:
        self._taken = False


class Unanswered:
    """The sink of a stream whose dial is not answered yet: only a reset can come, and it cancels the scope."""

    __slots__ = ("_scope",)

    def __init__(self, scope: trio.CancelScope) -> None:
        self._scope = scope

    def on_reset(self, code: str, text: str) -> None:
        """The dial was given up."""
        self._scope.cancel()

    def on_data(self, data: memoryview) -> None: ...
    def on_eof(self) -> None: ...
    def on_credit(self) -> None: ...


class TunnelStream(trio.abc.HalfCloseableStream):
    """A stream through the tunnel.

    Attributes:
        core: the session's half: id, state, credit.
        outlet: what to flush after anything was queued on ``core``.
        via: the name of the agent that serves it, where that is known.
    """

    __slots__ = (
        "_attached", "_closed", "_ended", "_eof_sent", "_held", "_receiving", "_reset", "_sending", "_wake", "core",
        "outlet", "via",
    )  # fmt: skip

    def __init__(self, core: Stream, outlet: Outlet) -> None:
        self.via = ""
        self.core = core
        self.outlet = outlet
        self._attached = False

    def __repr__(self) -> str:
        return f"<TunnelStream {self.core!r}>"

    @property
    def used(self) -> bool:
        """Whether it holds what arrives; until then, the switchboard can take what is beneath it."""
        return self._attached

    def _attach(self) -> None:
        if not self._attached:
            self._attached = True
            self._held = bytearray()
            self._ended = self._closed = self._eof_sent = False
            self._reset: StreamReset | None = None
            self._wake = trio.lowlevel.ParkingLot()
            self._sending = _Turn("another task is sending on this stream")
            self._receiving = _Turn("another task is receiving from this stream")
            self.core.attach(self)

    # -- trio's face

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of ``data``, waiting while the peer takes no more.

        Raises:
            trio.BrokenResourceError: the stream was reset; the cause is a ``StreamReset``.
            trio.ClosedResourceError: this side closed it, or sent EOF.
            trio.BusyResourceError: another task is sending.
        """
        self._attach()
        with self._sending:
            await trio.lowlevel.checkpoint()
            self._check_sendable()
            with memoryview(data).cast("B") as rest:
                start = 0
                while start < len(rest):
                    if start:  # others have their turn, and what is queued goes out
                        await trio.lowlevel.checkpoint()
                    await self._room()
                    size = min(_CHUNK, self.core.credit, self.core.session.most_data, len(rest) - start)
                    self.core.send(bytes(rest[start : start + size]))
                    self.outlet.flush()
                    start += size

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until some bytes could be sent. Raises as ``send_all`` does."""
        self._attach()
        with self._sending:
            await trio.lowlevel.checkpoint()
            await self._room()

    async def send_eof(self) -> None:
        """End this direction, behind what was sent. Raises as ``send_all`` does; twice is allowed."""
        self._attach()
        with self._sending:
            await trio.lowlevel.checkpoint()
            if self._eof_sent and not self._closed:
                return
            self._check_sendable()
            self._send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """The next bytes, at most ``max_bytes``; ``b""`` at the end.

        Raises:
            trio.BrokenResourceError: the stream was reset; the cause is a ``StreamReset``.
            trio.ClosedResourceError: this side closed it.
            trio.BusyResourceError: another task is receiving.
        """
        self._attach()
        size = _CHUNK if max_bytes is None else _check_size(max_bytes)
        with self._receiving:
            await trio.lowlevel.checkpoint()
            while not self._held or self._closed:
                if self._closed:
                    raise trio.ClosedResourceError("this stream was closed")
                if self._reset:
                    raise trio.BrokenResourceError(str(self._reset)) from self._reset
                if self._ended:
                    return b""
                await self._wake.park()
            return self._take(size)

    async def aclose(self) -> None:
        """Close. What was sent is still delivered. If cancelled, the stream is reset instead."""
        self._attach()
        if not self._closed:
            self._closed = True
            self.core.consumed(len(self._held))  # a peer without credit could not send what we must answer
            self._held.clear()
            self._wake.unpark_all()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled:
            self.reset("cancelled", "closed forcefully")
            raise
        if self.core.may_send:
            self._send_eof()
        self.outlet.flush()

    async def wait_ended(self) -> None:
        """Wait until both directions have ended.

        Raises:
            trio.BrokenResourceError: the stream was reset; the cause is a ``StreamReset``.
        """
        self._attach()
        await trio.lowlevel.checkpoint()
        while self.core.state is not State.CLOSED:
            await self._wake.park()
        if self._reset:
            raise trio.BrokenResourceError(str(self._reset)) from self._reset

    def reset(self, code: str, text: str) -> None:
        """End both directions at once; the peer is told ``code`` and ``text``. No effect on an ended stream."""
        self.core.reset(code, text)
        self.outlet.flush()

    def refuse(self, error: DialError) -> None:
        """Answer a dial with an error. No effect if it was given up, or answered, before."""
        if self.core.state is State.DIALLING:
            self.core.refuse(error)
            self.outlet.flush()

    # -- insides

    def _check_sendable(self) -> None:
        if self._closed or self._eof_sent:
            raise trio.ClosedResourceError("this stream was closed for sending")
        if self._reset:
            raise trio.BrokenResourceError(str(self._reset)) from self._reset

    async def _room(self) -> None:
        self._check_sendable()
        while not self.core.credit or self.outlet.congested:
            if self.core.credit:
                self.outlet.when_room(self.on_credit)
            await self._wake.park()
            self._check_sendable()

    def _send_eof(self) -> None:
        self._eof_sent = True
        self.core.send_eof()
        self.outlet.flush()
        self._wake.unpark_all()

    def _take(self, size: int) -> bytes:
        with memoryview(self._held) as held:
            data = bytes(held[:size])
        del self._held[:size]
        self.core.consumed(len(data))
        self.outlet.flush()
        return data

    # -- the session's face

    def on_data(self, data: memoryview) -> None:
        """Hold it for the reader."""
        if self._closed:
            self.reset("closed", "the peer of this stream closed it")
        else:
            self._held += data
            self._wake.unpark_all()

    def on_eof(self) -> None:
        """Tell the reader, after what is held."""
        self._ended = True
        self._wake.unpark_all()

    def on_reset(self, code: str, text: str) -> None:
        """Tell whoever waits; what is held is lost, as on a socket."""
        self._reset = StreamReset(code, text)
        self._held.clear()
        self._wake.unpark_all()

    def on_credit(self) -> None:
        """Tell the sender."""
        self._wake.unpark_all()


def _check_size(max_bytes: int) -> int:
    if not isinstance(max_bytes, int):
        raise TypeError("max_bytes must be an integer")
    if max_bytes < 1:
        raise ValueError("max_bytes must be positive")
    return max_bytes
