"""The switchboard: moves bytes between local sockets and streams of links, without a task.

The cost of a tunnel is per operation, not per byte. So every local socket is served by calls (``turns.py``); a
connection's own task is parked in ``join`` and runs again only when it is over.

    local socket --read--> stream.send ---------(sent once per turn)---------> link
    link --on_data, where it is parsed--> local socket, or ``pending`` where the kernel takes no more

Rules that hold here:

- A socket is read only while its stream has credit and its link is not congested; what is read is never dropped.
- What the kernel refuses is kept, within the stream's window, and its credit goes back when it is written.
- EOF is passed on behind the bytes before it, each way by itself. A reset is passed on as a reset (RST), at once.
- ``join`` owns the socket from its call on, and closes it however it ends.

This file must not know who asked for the connection, or where it leads.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import socket
import struct
import sys
import termios
from collections import deque

import trio

from tunnel import logs, turns
from tunnel.errors import StreamReset
from tunnel.parked import Parked
from tunnel.poller import HUNG_UP, READ, WRITE
from tunnel.stream import TunnelStream

log = logs.get_logger(__name__)

_LEAST, _MOST = 8 * 1024, 512 * 1024  # bytes read at once: doubles while reads come back full
RST_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER on, for zero seconds
_CHUNK = 64 * 1024
_TICK = 0.02  # seconds between two looks at what is being cut
_SO_NWRITE = 0x1024  # macOS's number, which Python does not name


def close_with_reset(sock: socket.socket) -> None:
    """Close so that the peer sees a reset, not an end."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST_ON_CLOSE)
    sock.close()


def _unsent(sock: socket.socket) -> int:
    """Bytes that the kernel took and the other side has not acknowledged; 0 where it does not say."""
    try:
        if sys.platform == "darwin":
            return sock.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
        return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0


class _Joint(Parked):
    """One local socket and one stream; the stream's sink.

    OPEN --read EOF--> stream EOF sent ----+--> both: DONE, socket closed
      +----stream EOF--> socket shut down -+
      +----reset of either--> the other reset: DONE with an error
      +----cut--> stream reset, CUTTING --the kernel delivered what it took--> socket reset: DONE with an error
    """

    __slots__ = (
        "board", "core", "cutting", "early", "eof_due", "fd", "mask", "most", "moved", "outlet", "pending", "read_done",
        "reading", "size", "sock", "turns",
    )  # fmt: skip

    def __init__(self, board: Switchboard, sock: socket.socket, stream: TunnelStream, early: bytes) -> None:
        super().__init__()
        self.board = board
        self.turns = turns.of_this_run()
        self.sock = sock
        self.fd = sock.fileno()
        self.core = stream.core
        self.outlet = stream.outlet
        self.early = early
        self.pending: deque[bytearray] | None = None
        self.most = min(_MOST, self.core.session.most_data)
        self.size = min(_LEAST, self.most)
        self.mask = -1  # not watched
        self.reading = True
        self.read_done = False
        self.eof_due = False
        self.cutting = False
        self.moved = (-1, -1)  # bytes sent and received when they were looked at last

    def ready(self, events: int) -> None:
        """What the poller reported."""
        if events == READ and self.reading:  # mostly
            self.readable()
            return
        if events & WRITE:
            self.writable()
        if self.over:
            return
        if self.reading:  # also if it hung up: that may be from before it began to read
            if events & (READ | HUNG_UP):
                self.readable()
        elif events & HUNG_UP:
            self.hung_up()

    def fault(self) -> None:
        """A fault of ours: it ends this connection, not all of them."""
        log.exception("fault in a connection", stream=self.core)
        self.give_up("protocol", "internal fault")

    # -- local socket -> stream

    def readable(self) -> None:
        """Read once, as much as may be sent now."""
        core, size = self.core, self.size
        if core.credit < size:
            size = core.credit
        if self.outlet.burst < size:
            size = self.outlet.burst
        if not size or self.early or self.outlet.congested:
            self._cannot_read()
            return
        try:
            data = self.sock.recv(size)
        except BlockingIOError:
            return
        except OSError as error:
            self.broke(error)
            return
        self.outlet.flush()
        if data:
            core.send(data)
            self._adapt(len(data))
        else:
            self.read_done = True
            core.send_eof()
            self._after_eof()

    def _cannot_read(self) -> None:
        """Not now, that is: there is something else to send first, or no room for more."""
        if not self.core.credit:  # on_credit brings us back
            self.watch(reading=False)
        elif self.outlet.congested:
            self.watch(reading=False)
            self.outlet.when_room(self.resume)
        else:
            self._send_early()

    def _send_early(self) -> None:
        while self.early and (size := min(self.core.credit, self.most)):
            data, self.early = self.early[:size], self.early[size:]
            self.core.send(data)
        self.outlet.flush()

    def _adapt(self, read: int) -> None:
        """So many bytes were there: how many may be there next time?"""
        if read == self.size:
            self.size = min(self.size * 2, self.most)
        elif read * 4 < self.size and self.size > _LEAST:
            self.size //= 2

    def _after_eof(self) -> None:
        if self.eof_due and self.pending is None:
            self.finish()
        else:
            self.watch(reading=False)

    def resume(self) -> None:
        """Read again, after a lack of credit or of room."""
        if not self.over and not self.read_done and not self.cutting:
            self.watch(reading=True)
            self.readable()

    def watch(self, *, reading: bool) -> None:
        """Tell the poller what to wait for."""
        self.reading = reading
        mask = (READ if reading else 0) | (WRITE if self.pending is not None else 0)
        if mask != self.mask and not self.over:
            if self.mask < 0:
                self.turns.watch(self.fd, mask, self)
            else:
                self.turns.watch_for(self.fd, mask)
            self.mask = mask

    # -- stream -> local socket

    def on_data(self, data: memoryview) -> None:
        """Write it now; keep what the kernel does not take."""
        if self.over:
            return
        if self.pending is not None:
            self._keep(self.pending, data)
            return
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.broke(error)
            return
        if sent:
            self.core.consumed(sent)
        if sent < len(data):
            self.pending = deque((bytearray(data[sent:]),))
            self.watch(reading=self.reading)

    def _keep(self, pending: deque[bytearray], data: memoryview) -> None:
        """In pieces: one large buffer would be moved again and again, and small pieces cost more than they hold."""
        if len(pending[-1]) + len(data) <= _CHUNK:
            pending[-1] += data
        else:
            pending.append(bytearray(data))

    def writable(self) -> None:
        """Write some of what was kept."""
        if self.pending is None:
            return
        head = self.pending[0]
        try:
            sent = self.sock.send(head)
        except BlockingIOError:
            return
        except OSError as error:
            self.broke(error)
            return
        if sent < len(head):
            del head[:sent]
        else:
            self.pending.popleft()
        self.core.consumed(sent)
        self.outlet.flush()
        if not self.pending:
            self.pending = None
            if self.eof_due:
                self._shut_down()
            self.watch(reading=self.reading)

    def on_eof(self) -> None:
        """Pass it on, behind what is kept."""
        self.eof_due = True
        if self.pending is None and not self.over:
            self._shut_down()

    def _shut_down(self) -> None:
        if self.read_done:
            self.finish()
            return
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self.broke(error)

    # -- ends

    def on_credit(self) -> None:
        """Read again."""
        self.resume()

    def on_reset(self, code: str, text: str) -> None:
        """The stream was reset by the other side, or its link is gone."""
        if not self.cutting:
            self.finish(StreamReset(code, text))

    def hung_up(self) -> None:
        """The poller says so although nothing was to be read."""
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.broke(OSError(code, "the connection broke"))
        else:  # closed in both directions, with bytes left to read: do not ask again before there is credit
            self.turns.unwatch(self.fd)
            self.mask = -1

    def broke(self, error: OSError) -> None:
        """The local socket failed."""
        self.give_up("reset", f"local connection: {error.strerror or error}")

    def give_up(self, code: str, text: str) -> None:
        """Reset both sides."""
        self.core.reset(code, text)
        self.outlet.flush()
        self.finish(StreamReset(code, text))

    def cut(self, code: str, text: str) -> None:
        """Reset the stream now, and the socket once what it took is delivered."""
        if not self.over:
            self.cutting = True
            self.core.reset(code, text)
            self.outlet.flush()
            self.watch(reading=False)

    @property
    def delivered(self) -> bool:
        """Whether nothing of what came through the stream is left on this side."""
        return self.over or (self.pending is None and not _unsent(self.sock))

    @property
    def stalled(self) -> bool:
        """Whether one direction has ended, and nothing moved in the other since this was asked last."""
        moved, self.moved = self.moved, (self.core.sent, self.core.received)
        return (self.read_done or self.eof_due) and moved == self.moved

    def finish(self, error: StreamReset | None = None) -> None:
        """Close the socket and wake the owner."""
        if self.over:
            return
        self.end(error)
        self.pending = None
        self.turns.unwatch(self.fd)
        self.board.remove(self)
        if error is None:
            self.sock.close()
        else:
            close_with_reset(self.sock)

    def abandoned(self) -> None:
        """See ``Parked``: the owner was cancelled."""
        self.give_up("cancelled", "this side was stopped")


class Switchboard:
    """All plain local sockets of a process, or of a part of it."""

    def __init__(self) -> None:
        self._joints: dict[_Joint, None] = {}

    def __repr__(self) -> str:
        return f"<Switchboard sockets={len(self._joints)}>"

    def remove(self, joint: _Joint) -> None:
        """For a connection that is over."""
        self._joints.pop(joint, None)

    async def join(self, sock: socket.socket, stream: TunnelStream, early: bytes = b"") -> None:
        """Carry bytes both ways until both directions have ended, then close ``sock``.

        ``sock`` is connected and non-blocking; ``early`` goes into the stream ahead of what the socket has.
        If cancelled, both sides are reset.

        Raises:
            StreamReset: one of the two was reset, and so is the other now.
        """
        joint = _Joint(self, sock, stream, early)
        self._joints[joint] = None
        try:
            stream.core.attach(joint)
            if not joint.over:
                joint.resume()
        except Exception:  # a fault of ours
            joint.fault()
        stream.outlet.flush()
        await joint.wait()

    async def cut(self, code: str, text: str, seconds: float) -> None:
        """Reset every stream, spread over half the time, and each socket when what it took is delivered.

        Resets, not ends: nobody shall take half of something for the whole. If cancelled, the rest is reset at once.
        """
        left, cutting = list(self._joints), list[_Joint]()
        batch = math.ceil(len(left) * 2 * _TICK / seconds) if seconds else len(left)
        try:
            while left or cutting:
                for joint in left[:batch]:
                    joint.cut(code, text)
                cutting += left[:batch]
                del left[:batch]
                for joint in cutting:
                    if joint.delivered:
                        joint.finish(StreamReset(code, text))
                cutting = [joint for joint in cutting if not joint.over]
                await trio.sleep(_TICK)
        finally:
            for joint in (*left, *cutting):
                joint.give_up(code, text)

    def reap(self) -> None:
        """Reset the streams that are half-closed, and on which nothing moved since the last call."""
        for joint in list(self._joints):
            if joint.stalled:
                joint.give_up("idle", "half-closed, and nothing moved while others were waited for")
