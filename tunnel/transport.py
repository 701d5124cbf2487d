"""How a link's bytes get in and out: the same few calls over a plain socket and over TLS.

Rules that hold here:

- ``send_now`` never waits. A plain socket takes what the kernel takes; TLS takes nothing, and its bytes
  go through ``send``. Either way what was not taken is returned, so a frame is never torn.
- A plain socket's bytes move in calls (``turns.py``): the tasks in ``receive`` and ``send`` run only at the end.
- Only one task is in ``receive``, and only one in ``send``.
- Errors of the transport are ``OSError``, ``trio.BrokenResourceError`` or ``trio.ClosedResourceError``: ``BROKEN``.

This file must not know packets, sessions or links.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from tunnel import turns
from tunnel.poller import READ, WRITE

Buffer = bytes | memoryview
Room = Callable[[], memoryview]
"""Where received bytes go; asked for when they are there, and used before anything else runs."""
Take = Callable[[int], bool]
"""Told how many bytes are in the room; whether to go on."""
More = Callable[[], Sequence[Buffer]]
"""What to send next; asked when all of what it gave before was taken."""

BROKEN = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)

_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)  # Linux's number, which older Pythons do not name
_NOTSENT_BYTES = 256 * 1024


class Transport(Protocol):
    """What a link needs of a connection.

    Attributes:
        address: where the other end is, for people.
        binding: what both ends know of the server at the other end of the channel; empty where there is nothing.
    """

    address: str
    binding: bytes

    async def receive(self, room: Room, take: Take) -> bool:
        """Whenever bytes come, ask for ``room()``, put them there, and tell ``take``, until that says no more.

        False if it was the peer that ended. Raises ``BROKEN``, and what ``take`` raises. If cancelled, what was not
        taken can be received later.
        """

    def send_now(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Send what goes without waiting; what did not go. Raises ``BROKEN``."""

    async def send(self, more: More) -> None:
        """Send what ``more`` gives, until that is nothing. Raises ``BROKEN``. If cancelled, send no more."""

    async def linger(self) -> None:
        """Say that nothing more will come, and wait for the peer's end, so that it gets everything."""

    async def aclose(self) -> None:
        """Close at once."""


def unsent(buffers: Sequence[Buffer], sent: int) -> list[Buffer]:
    """What of ``buffers`` is left after the first ``sent`` bytes."""
    for index, buffer in enumerate(buffers):
        if sent < len(buffer):
            return [memoryview(buffer)[sent:], *buffers[index + 1 :]]
        sent -= len(buffer)
    return []


def _address_of(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except (OSError, ValueError):  # it has gone already, or is no TCP socket
        return "?"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class SocketTransport:
    """A connected, non-blocking TCP socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._turns = turns.of_this_run()
        self.address = _address_of(sock)
        self.binding = b""
        with contextlib.suppress(OSError):  # some systems refuse it once the peer has gone
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # a hint: keeps what waits in our queue, where control packets overtake
            sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _NOTSENT_BYTES)

    async def receive(self, room: Room, take: Take) -> bool:
        """See ``Transport``."""
        recv_into = self._sock.recv_into

        def receive() -> bool | None:
            try:
                count = recv_into(room())
            except BlockingIOError:
                return None
            if not count:
                return False
            return None if take(count) else True

        return await self._turns.serve(self._sock.fileno(), READ, receive)

    def send_now(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """See ``Transport``."""
        try:
            if len(buffers) == 1:
                sent = self._sock.send(buffers[0])
                if sent == len(buffers[0]):
                    return ()
            else:
                sent = self._sock.sendmsg(buffers)
        except BlockingIOError:
            return buffers
        return unsent(buffers, sent)

    async def send(self, more: More) -> None:
        """See ``Transport``."""
        rest = more()

        def send() -> bool | None:
            nonlocal rest
            rest = self.send_now(rest) or more()
            return None if rest else True

        if rest:
            await self._turns.serve(self._sock.fileno(), WRITE, send)

    async def linger(self) -> None:
        """See ``Transport``."""
        with contextlib.suppress(*BROKEN):
            self._sock.shutdown(socket.SHUT_WR)
            scratch = memoryview(bytearray(64 * 1024))
            await self.receive(lambda: scratch, lambda count: True)

    async def aclose(self) -> None:
        """See ``Transport``."""
        self._turns.closing(self._sock.fileno())
        self._sock.close()
