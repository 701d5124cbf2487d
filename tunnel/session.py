"""The multiplexer, without I/O: what streams there are on a link, and whose each received packet is.

One ``Session`` is one side of one link. Received packets go in through ``receive_packet`` and ``receive_data``; the
``out``box gives the bytes that are to be sent. What one stream does with what arrives for it: ``core.py``.

Rules that hold here:

- Only one side of a link opens streams. Ids grow, and are never used again.
- DATA for a stream that is not there is answered by one CLOSE and dropped.
- Who sends what has to be answered must read the answers.
- What goes out when: ``outbox.py``.

This file must not know waiting, tasks, sockets, or what a stream is for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from tunnel.core import OnAnswer, Stream, check_window
from tunnel.errors import LinkLost, LocalProtocolError, RemoteProtocolError
from tunnel.outbox import Outbox
from tunnel.packets import MAX_U32, Auth, Challenge, Close, Credit, DialReq, DialRsp, Eof, Hello, Packet, Ping, Pong
from tunnel.windows import Windows

_REMEMBERED = 1024  # ids for which a CLOSE was sent lately: their late DATA needs no further answer
_NO_BUDGET = 1 << 62


class Session:
    """One side of one link. See the head of this file.

    Args:
        opener: whether this side opens streams.
        window: bytes each stream's peer may send unasked, while ``budget`` lasts.
        budget: bytes that first windows may have together; beyond it each gets 16 KiB at most.
        most_window: what a stream's window may grow to.
        spare: bytes that all windows of the link together may grow by.
        on_dial: called with each new stream in DIALLING state and its DIAL_REQ; never on an opener.
        on_control: called with each packet that is about the link, but for PING, which is answered here.
        on_streams: called with the number of streams whenever it changes.
        on_bound: called with the name of a bound when it bites; see ``bounds.py``.
        out: where what is to be sent waits, if not in an outbox of its own.

    Attributes:
        out: what is to be sent.
        windows: what may come.
        pings, dials: how many PINGs and DIAL_REQs have come since whoever looks has set them to 0.
        most_data: longest payload that the peer takes in one frame.
        frames_received: of DATA, so far; one that arrives in pieces counts once for each.
    """

    def __init__(
        self,
        *,
        opener: bool,
        window: int,
        most_window: int = 0,
        spare: int = 0,
        budget: int = _NO_BUDGET,
        on_dial: Callable[[Stream, DialReq], None],
        on_control: Callable[[Packet], None],
        on_streams: Callable[[int], None],
        on_bound: Callable[[str], None] = lambda _bound: None,
        out: Outbox | None = None,
    ) -> None:
        self.opener = opener
        self.most_data = MAX_U32
        self.out = Outbox() if out is None else out
        self.windows = Windows(window, budget, most_window, spare, lambda: on_bound("link_window"))
        self.pings = self.dials = 0
        self.frames_received = 0
        self._closed_sent = self._closed_received = 0  # bytes of the streams that are CLOSED
        self._on_dial = on_dial
        self._on_control = on_control
        self._on_streams = on_streams
        self._streams: dict[int, Stream] = {}
        self._last_id = 0
        self._closes: OrderedDict[int, None] = OrderedDict()

    def __repr__(self) -> str:
        side = "opener" if self.opener else "acceptor"
        return f"<Session {side} streams={len(self._streams)} {self.out}>"

    @property
    def streams(self) -> int:
        """How many streams are not CLOSED."""
        return len(self._streams)

    @property
    def sent(self) -> int:
        """Payload bytes that were queued so far. Costs a look at every stream."""
        return self._closed_sent + sum(stream.sent for stream in self._streams.values())

    @property
    def received(self) -> int:
        """Payload bytes that arrived so far. Costs a look at every stream."""
        return self._closed_received + sum(stream.received for stream in self._streams.values())

    @property
    def frames_sent(self) -> int:
        """Frames of streams that went out so far."""
        return self.out.frames_sent

    # -- what this side does

    def open(
        self, host: str, port: int, ms: int, options: dict[str, Any], on_answer: OnAnswer, window: int | None = None
    ) -> Stream:
        """A new stream in DIALLING state, with its DIAL_REQ queued; ``on_answer`` is told how it ends.

        ``window``: bytes taken unasked, if not what the session says.

        Raises:
            LocalProtocolError: this side does not open streams on this link.
            LinkLost: all ids of this link were used.
        """
        if not self.opener:
            raise LocalProtocolError("this side does not open streams")
        if self._last_id == MAX_U32:
            raise LinkLost("all stream ids of the link were used")
        stream = self._add(self._last_id + 1, 0)
        self.say_window(stream, window)
        stream.on_answer(on_answer)
        self.send_control(DialReq(stream.id, host, port, stream.window.size, min(ms, MAX_U32), options))
        return stream

    def send_control(self, packet: Packet) -> None:
        """Queue a control packet, ahead of all DATA."""
        self.out.control(packet)

    def send_close(self, number: int, code: str, text: str) -> None:
        """Queue a CLOSE, and remember that late DATA of this stream needs no other."""
        self._closes[number] = None
        if len(self._closes) > _REMEMBERED:
            self._closes.popitem(last=False)
        self.send_control(Close(number, code, text))

    def end(self, code: str, text: str) -> None:
        """The link is gone: reset every stream towards its sink."""
        for stream in list(self._streams.values()):
            stream.receive_close(code, text)

    def say_window(self, stream: Stream, size: int | None) -> None:
        """For a stream that has no window yet; None: what the link lends."""
        if size is None:
            self.windows.lend(stream.window)
        else:
            stream.window.say(size)

    def _add(self, number: int, credit: int) -> Stream:
        self._last_id = number
        stream = self._streams[number] = Stream(self, number, credit)
        self._on_streams(len(self._streams))
        return stream

    def forget(self, stream: Stream) -> None:
        """For a stream that closed."""
        if self._streams.pop(stream.id, None) is not None:
            self.windows.take_back(stream.window)
            self._closed_sent += stream.sent
            self._closed_received += stream.received
            self._on_streams(len(self._streams))

    # -- what was received

    def receive_data(self, number: int, data: memoryview) -> None:
        """Payload of a DATA frame, or a part of it.

        Raises:
            RemoteProtocolError: the stream is not in a state to receive, or the credit was exceeded.
        """
        stream = self._streams.get(number)
        self.frames_received += 1
        if stream is not None:
            stream.receive_data(data)
        elif number == 0:
            raise RemoteProtocolError("DATA for stream 0, which is the link itself")
        elif number not in self._closes:
            self._check_control()
            self.send_close(number, "unknown_stream", f"no stream {number} is open on this link")

    def receive_packet(self, packet: Packet) -> None:
        """Any other packet.

        Raises:
            RemoteProtocolError: it is not legal now.
        """
        self._check_control()
        handler = _HANDLERS.get(type(packet))
        if handler is None:
            self._on_control(packet)
        else:
            handler(self, packet)

    def _check_control(self) -> None:
        """Who sends what has to be answered must read the answers."""
        if self.out.clogged:
            raise RemoteProtocolError(f"{self.out.unread} bytes of answers are waiting to be read", bound="answers")

    def _receive_dial_req(self, packet: DialReq) -> None:
        if self.opener:
            raise RemoteProtocolError("DIAL_REQ from the side that does not open streams")
        if packet.stream <= self._last_id:
            raise RemoteProtocolError(f"DIAL_REQ for stream {packet.stream}; ids up to {self._last_id} were used")
        check_window(packet)
        self.dials += 1
        self._on_dial(self._add(packet.stream, packet.window), packet)

    def _receive_dial_rsp(self, packet: DialRsp) -> None:
        if not self.opener:
            raise RemoteProtocolError("DIAL_RSP from the side that opens streams")
        stream = self._streams.get(packet.stream)
        if stream is not None:
            stream.receive_answer(packet)

    def _receive_eof(self, packet: Eof) -> None:
        stream = self._streams.get(packet.stream)
        if stream is not None:
            stream.receive_eof()

    def _receive_close(self, packet: Close) -> None:
        if packet.stream == 0:
            self._on_control(packet)
            return
        stream = self._streams.get(packet.stream)
        if stream is not None:
            stream.receive_close(packet.code, packet.text)

    def _receive_credit(self, packet: Credit) -> None:
        stream = self._streams.get(packet.stream)
        if stream is not None:
            stream.receive_credit(packet)

    def _receive_greeting(self, packet: Packet) -> None:
        raise RemoteProtocolError(f"{type(packet).__name__.upper()} after the handshake")

    def _receive_ping(self, packet: Ping) -> None:
        self.pings += 1
        stream = self._streams.get(packet.stream)
        if stream is not None:
            stream.receive_ping(packet)
        elif packet.stream == 0:
            self.send_control(Pong(packet.stream, packet.token))

    def _receive_pong(self, packet: Pong) -> None:
        stream = self._streams.get(packet.stream)
        if packet.stream == 0:
            self._on_control(packet)
        elif stream is not None:
            stream.receive_pong(packet)


_HANDLERS: dict[type[Packet], Callable[[Session, Any], None]] = {
    DialReq: Session._receive_dial_req,
    DialRsp: Session._receive_dial_rsp,
    Eof: Session._receive_eof,
    Close: Session._receive_close,
    Credit: Session._receive_credit,
    Ping: Session._receive_ping,
    Pong: Session._receive_pong,
    Hello: Session._receive_greeting,
    Challenge: Session._receive_greeting,
    Auth: Session._receive_greeting,
}
