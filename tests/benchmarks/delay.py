"""A long wire: takes connections, and passes their bytes on to a port later, and no faster than a rate.

    python tests/benchmarks/delay.py --to 7400 --rtt 50 --mbit 1000 [--queue 10]

Rules that hold here:

- Each connection has a wire of its own, and each of its directions half the round trip.
- Before each wire is a queue of ``--queue`` milliseconds at its rate. Nothing is lost: who sends into a full queue has
  to wait, as on a link whose congestion control has found its rate. The kernel's buffers here are small (a quarter of
  a mebibyte at most, which adds 2 ms of queue at 1 Gbit/s, and 10 at 200 Mbit/s), so that they
  do not become a second and longer queue.
- What the other end does not read stays on the wire, which then is full.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import select
import socket
from collections import deque
from time import monotonic

from processes import announce

_CHUNK = 64 * 1024
_KERNEL = 128 * 1024  # of socket buffer; Linux doubles it
_SEGMENT = 1448  # as on a wire; with loopback's 64 KiB, buffers that small would stall


class Wire:
    """One direction of a connection. ``rate`` in bytes a second, ``delay`` and ``queue`` in seconds."""

    def __init__(self, source: socket.socket, sink: socket.socket, rate: float, delay: float, queue: float) -> None:
        self.source, self.sink = source, sink
        self.stuck = self.ended = False  # the sink takes nothing; the source has no more
        self._rate, self._delay, self._queue = rate, delay, queue
        self._most = int(rate * (delay + queue))
        self._flying: deque[tuple[float, bytes]] = deque()  # when due, in order
        self._bytes = 0
        self._free = 0.0  # when the last byte of the queue is on the wire

    def takes(self, now: float) -> bool:
        """Whether the source should be read."""
        return not self.ended and self._bytes < self._most and self._free - now < self._queue

    def wake(self, now: float) -> float:
        """When there is something to do, without an event of a socket."""
        due = self._flying[0][0] if self._flying and not self.stuck else math.inf
        room = self._free - self._queue
        return due if self.ended or room <= now else min(due, room)

    @property
    def over(self) -> bool:
        """Whether everything has arrived."""
        return self.ended and not self._flying

    def read(self, now: float) -> None:
        """Something is there."""
        try:
            data = self.source.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.ended = not data
        self._free = max(self._free, now) + len(data) / self._rate
        self._flying.append((self._free + self._delay, data))
        self._bytes += len(data)

    def write(self, now: float) -> None:
        """Pass on what is due."""
        self.stuck = False
        while self._flying and self._flying[0][0] <= now and not self.stuck:
            due, data = self._flying.popleft()
            if not data:
                with contextlib.suppress(OSError):
                    self.sink.shutdown(socket.SHUT_WR)
                continue
            sent = self._send(data)
            self._bytes -= sent
            if sent < len(data):
                self.stuck = True
                self._flying.appendleft((due, data[sent:]))

    def _send(self, data: bytes) -> int:
        try:
            return self.sink.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # nobody is there any more
            return len(data)


def prepare(sock: socket.socket) -> socket.socket:
    """Small buffers, from before it is connected."""
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _KERNEL)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def turn(listener: socket.socket, wires: list[Wire]) -> bool:
    """Wait for what comes first, and do it; whether there is a new connection."""
    now = monotonic()
    sources = {wire.source: wire for wire in wires if wire.takes(now)}
    sinks = [wire.sink for wire in wires if wire.stuck]
    wake = min((wire.wake(now) for wire in wires), default=math.inf)
    readable, writable, _ = select.select([listener, *sources], sinks, [], max(0.0, min(wake - now, 1.0)))
    now = monotonic()
    for sock in readable:
        if sock is not listener:
            sources[sock].read(now)
    for wire in wires:
        if not wire.stuck or wire.sink in writable:
            wire.write(now)
    return listener in readable


def main() -> None:
    """Carry until killed."""
    parser = argparse.ArgumentParser(description="Pass connections on over a long wire.")
    parser.add_argument("--to", type=int, required=True, help="port on loopback")
    parser.add_argument("--rtt", type=float, required=True, help="milliseconds, both ways together")
    parser.add_argument("--mbit", type=float, required=True, help="rate of each direction in Mbit/s")
    parser.add_argument("--queue", type=float, default=10, help="milliseconds of queue before the wire")
    options = parser.parse_args()
    rate, delay, queue = options.mbit * 125_000, options.rtt / 2000, options.queue / 1000
    listener = prepare(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    announce("wire", listener.getsockname()[1])
    wires: list[Wire] = []
    while True:
        if turn(listener, wires):
            near, far = listener.accept()[0], prepare(socket.socket())
            far.connect(("127.0.0.1", options.to))
            near.setblocking(False)
            far.setblocking(False)
            wires += [Wire(near, far, rate, delay, queue), Wire(far, near, rate, delay, queue)]
        wires = [wire for wire in wires if not wire.over]


if __name__ == "__main__":
    main()
