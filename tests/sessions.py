"""Sessions back to back, without a link: two sides, the ways between them, and sinks that remember."""

from __future__ import annotations

from typing import Any

from tunnel.core import Stream
from tunnel.errors import (
    DialError,
)
from tunnel.frames import Decoder
from tunnel.packets import DialReq, Packet
from tunnel.session import Session

WINDOW = 1000
LIMIT = 1024 * 1024
ALL = 1 << 40

Seen = Packet | tuple[int, bytes]


class Sink:
    """Remembers every call; data in a row is one entry."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_data(self, data: memoryview) -> None:
        if self.calls and isinstance(self.calls[-1], bytes):
            self.calls[-1] += bytes(data)
        else:
            self.calls.append(bytes(data))

    def on_eof(self) -> None:
        self.calls.append("eof")

    def on_reset(self, code: str, text: str) -> None:
        self.calls.append(("reset", code, text))

    def on_credit(self) -> None:
        self.calls.append("credit")


class Side:
    """One session, with everything it says remembered."""

    def __init__(
        self, *, opener: bool, window: int = WINDOW, most_window: int = 0, spare: int = 0, budget: int = 1 << 40
    ) -> None:
        self.dialled: list[tuple[Stream, DialReq]] = []
        self.control: list[Packet] = []
        self.counts: list[int] = []
        self.session = Session(
            opener=opener,
            window=window,
            most_window=most_window,
            spare=spare,
            budget=budget,
            on_dial=lambda stream, request: self.dialled.append((stream, request)),
            on_control=self.control.append,
            on_streams=self.counts.append,
        )
        self.decoder = Decoder(LIMIT, self.session.receive_packet, self.session.receive_data)

    def receive(self, *packets: Packet) -> None:
        for packet in packets:
            self.session.receive_packet(packet)

    def takes(self, limit: int = ALL) -> list[Seen]:
        """What it sends now, decoded."""
        return decode(b"".join(self.session.out.take(limit)))


def decode(data: bytes) -> list[Seen]:
    seen: list[Seen] = []
    Decoder(LIMIT, seen.append, lambda stream, payload: seen.append((stream, bytes(payload)))).feed(data)
    return seen


class Pair:
    """An opener and an acceptor, and the two ways between them."""

    def __init__(self, **windows: int) -> None:
        self.opener = Side(opener=True, **windows)
        self.acceptor = Side(opener=False, **windows)

    def pump(self) -> None:
        """Carry everything both ways until nobody has anything to send."""
        while self._carry(self.opener, self.acceptor) + self._carry(self.acceptor, self.opener):
            pass

    def _carry(self, source: Side, sink: Side) -> int:
        data = b"".join(source.session.out.take(ALL))
        sink.decoder.feed(data)
        return len(data)

    def dial(self) -> tuple[Stream, Stream, list[DialError | None]]:
        """Both ends of a stream in DIALLING state, and where the answer will be."""
        answers: list[DialError | None] = []
        near = self.opener.session.open("db.internal", 5432, 10_000, {}, answers.append)
        self.pump()
        return near, self.acceptor.dialled[-1][0], answers

    def open(self) -> tuple[Stream, Stream]:
        """Both ends of an open stream, without sinks."""
        near, far, answers = self.dial()
        far.accept()
        self.pump()
        assert answers == [None]
        return near, far

    def joined(self) -> tuple[Stream, Stream, Sink, Sink]:
        """Both ends of an open stream, and their sinks."""
        near, far = self.open()
        sinks = Sink(), Sink()
        near.attach(sinks[0])
        far.attach(sinks[1])
        return near, far, *sinks


def acceptor(**windows: int) -> Side:
    """An acceptor with one open stream, number 1, whose peer takes WINDOW bytes."""
    side = Side(opener=False, **windows)
    side.receive(DialReq(1, "x", 1, WINDOW, 1, {}))
    side.dialled[0][0].accept()
    side.takes()
    return side
