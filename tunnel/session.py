"""The multiplexer, without I/O: what streams exist, what each may do now, and what is to be sent next.

One ``Session`` is one side of one link. Received packets go in through ``receive_packet`` and ``receive_data``;
the ``out``box gives the bytes that are to be sent. Everything else happens in synchronous calls to a stream's **sink**.

A stream, on either side::

    DIALLING --answer ok--> OPEN --our EOF--> LOCAL_EOF --their EOF--> CLOSED
       |                      +--their EOF--> REMOTE_EOF --our EOF---> CLOSED
       +--answer not ok--> CLOSED        any --CLOSE, sent or received--> CLOSED

Rules that hold here:

- Only one side of a link opens streams. Ids grow, and are never used again.
- A sender never has more bytes on their way than the receiver gave credit for; a receiver that sees more ends the
  link. Credit goes back when a sink says the bytes were *consumed*. How much, and when windows grow: ``windows.py``.
- A stream that only leads on to another link grants no credit of its own, and answers no PING: both are its other
  end's, and are handed ``onward``.
- EOF stays behind the DATA of its stream; a reset throws that DATA away. What goes out when: ``outbox.py``.
- DATA for a stream that is not there is answered by one CLOSE and dropped.
- What arrives before a sink is attached is held (it is within the window) and given to the sink first.

This file must not know waiting, tasks, sockets, or what a stream is for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

from tunnel.errors import DialError, LinkLost, LocalProtocolError, RemoteProtocolError, dial_error
from tunnel.frames import (
    DATA_OVERHEAD,
    MAX_U32,
    Auth,
    Challenge,
    Close,
    Credit,
    DialReq,
    DialRsp,
    Eof,
    Hello,
    Packet,
    Ping,
    Pong,
    data_header,
)
from tunnel.outbox import JOIN_BELOW, Line, Outbox
from tunnel.windows import Window, Windows

_REMEMBERED = 1024  # ids for which a CLOSE was sent lately: their late DATA needs no further answer
_MAX_CREDIT = 1 << 31
_PROBE = 0  # the token of a PING that measures a stream
_NO_BUDGET = 1 << 62

OnAnswer = Callable[[DialError | None], None]
"""Told how a dial ended: None is a stream that may be used."""
Onward = Callable[[Credit | Ping | Pong], None]
"""Takes what is meant for the real end of a stream."""


def _check_window(packet: DialReq | DialRsp) -> None:
    if packet.window > _MAX_CREDIT:
        raise RemoteProtocolError(f"a window of {packet.window} for stream {packet.stream}", bound="credit")


class State(IntEnum):
    """See the head of this file."""

    DIALLING = 0
    OPEN = 1
    LOCAL_EOF = 2
    REMOTE_EOF = 3
    CLOSED = 4


_MAY_SEND = (State.OPEN, State.REMOTE_EOF)
_MAY_RECEIVE = (State.OPEN, State.LOCAL_EOF)


class Sink(Protocol):
    """The consumer of a stream. Every call is synchronous and must not raise."""

    def on_data(self, data: memoryview) -> None:
        """Bytes arrived. The view is valid only now; call ``stream.consumed`` when they are really gone."""

    def on_eof(self) -> None:
        """No more bytes will arrive."""

    def on_reset(self, code: str, text: str) -> None:
        """The stream was reset, by either side; nothing more can be sent or will arrive."""

    def on_credit(self) -> None:
        """``stream.credit`` grew from nothing."""


class Stream(Line):
    """One stream of a session.

    Attributes:
        id: its number on this link.
        state: see the head of this file.
        credit: bytes that may be sent now.
        window: what the peer may have on its way.
        sent, received: bytes of payload so far.
    """

    __slots__ = (
        "_answer", "_held", "_onward", "_sink", "credit", "id", "received", "sent", "session", "state", "why", "window",
    )  # fmt: skip

    def __init__(self, session: Session, number: int, credit: int) -> None:
        super().__init__()
        self.session = session
        self.id = number
        self.state = State.DIALLING
        self.credit = credit
        self.why: tuple[str, str] | None = None  # of the reset, if there was one
        self.window = Window()
        self.sent = self.received = 0
        self._onward: Onward | None = None
        self._sink: Sink | None = None
        self._held: bytearray | None = None
        self._answer: OnAnswer | None = None

    def __repr__(self) -> str:
        return f"<Stream {self.id} {self.state.name} credit={self.credit} window_left={self.window.left}>"

    def lead_on(self, onward: Onward) -> None:
        """It only leads on to another link from now on, and ``onward`` takes what is meant for its real end."""
        self._onward = onward
        self.passing = True

    # -- the accepting side's answer

    def accept(self, window: int | None = None) -> None:
        """DIALLING -> OPEN: the target is connected. ``window``: bytes taken unasked, if not what the session says.

        Raises:
            LocalProtocolError: not DIALLING, or this side opened it.
        """
        self._check_answering()
        self.state = State.OPEN
        self.session.say_window(self, window)
        self.session.send_control(DialRsp(self.id, "ok", "", self.window.size))

    def refuse(self, error: DialError) -> None:
        """DIALLING -> CLOSED: there will be no stream.

        Raises:
            LocalProtocolError: not DIALLING, or this side opened it.
        """
        self._check_answering()
        self.session.send_control(DialRsp(self.id, error.code, error.text, 0))
        self._close()

    def _check_answering(self) -> None:
        if self.state is not State.DIALLING or self.session.opener:
            raise LocalProtocolError(f"cannot answer {self!r}")

    # -- sending

    @property
    def may_send(self) -> bool:
        """Whether ``send`` and ``send_eof`` are legal now."""
        return self.state in _MAY_SEND

    def send(self, data: bytes) -> None:
        """Queue bytes. They must not be changed any more.

        Raises:
            LocalProtocolError: not in a state to send, no bytes, or more than ``credit`` or the peer's frames hold.
        """
        size = len(data)
        if self.state not in _MAY_SEND or not 0 < size <= self.credit or size > self.session.most_data:
            raise LocalProtocolError(f"cannot send {size} bytes on {self!r}")
        self.credit -= size
        self.sent += size
        header = data_header(self.id, size)
        self.session.out.queue(self, header + data if size < JOIN_BELOW else (header, data), size + DATA_OVERHEAD)

    def send_eof(self) -> None:
        """Queue the end of this direction, behind what was sent.

        Raises:
            LocalProtocolError: not in a state to send.
        """
        if self.state not in _MAY_SEND:
            raise LocalProtocolError(f"cannot send EOF on {self!r}")
        frame = Eof(self.id).encode()
        self.session.out.queue(self, frame, len(frame))
        if self.state is State.OPEN:
            self.state = State.LOCAL_EOF
        else:
            self._close()

    def reset(self, code: str, text: str) -> None:
        """End both directions now, dropping what is queued. No effect once CLOSED."""
        if self.state is State.CLOSED:
            return
        self.session.out.drop(self)
        self.why = (code, text)
        self.session.send_close(self.id, code, text)
        sink = self._close()
        if sink is not None:
            sink.on_reset(code, text)

    # -- receiving

    def attach(self, sink: Sink) -> None:
        """Say who consumes the stream from now on; what was held comes first."""
        self._sink = sink
        held, self._held, why = self._held, None, self.why
        if held:
            sink.on_data(memoryview(held))
        if why:
            sink.on_reset(*why)
        elif self.why is None and self.state in (State.REMOTE_EOF, State.CLOSED):  # else the sink reset it just now
            sink.on_eof()
        if self.state is State.CLOSED:
            self._sink = None

    def consumed(self, size: int) -> None:
        """So many received bytes are gone for good: give credit back when there is enough of it."""
        due = self.window.due(size)
        if due and self.state in _MAY_RECEIVE:
            look = self.session.windows.look(self.window)
            self.give_credit(due)
            self.window.unreturned = 0
            if look:
                self.session.send_control(Ping(self.id, _PROBE))

    def give_credit(self, size: int) -> None:
        """Let the peer send so many bytes more. No effect once its direction has ended."""
        if self.state in _MAY_RECEIVE:
            self.window.left += size
            self.session.send_control(Credit(self.id, size))

    def receive_data(self, data: memoryview) -> None:
        """For the session."""
        size = len(data)
        if self.state not in _MAY_RECEIVE:
            raise RemoteProtocolError(f"DATA for stream {self.id}, which is {self.state.name}")
        if not self.session.windows.arrived(self.window, size):
            text = f"DATA of {size} bytes for stream {self.id}, with credit for {self.window.left}"
            raise RemoteProtocolError(text, bound="credit")
        self.received += size
        if self._sink is not None:
            self._sink.on_data(data)
        elif self._held is None:
            self._held = bytearray(data)
        else:
            self._held += data

    def receive_eof(self) -> None:
        """For the session."""
        if self.state not in _MAY_RECEIVE:
            raise RemoteProtocolError(f"EOF for stream {self.id}, which is {self.state.name}")
        self.session.windows.look_away(self.window)
        if self.state is State.OPEN:
            self.state, sink = State.REMOTE_EOF, self._sink
        else:
            sink = self._close()
        if sink is not None:
            sink.on_eof()

    def receive_credit(self, packet: Credit) -> None:
        """For the session."""
        had = self.credit
        self.credit += packet.amount
        if not packet.amount or self.credit > _MAX_CREDIT:
            raise RemoteProtocolError(
                f"CREDIT of {packet.amount} for stream {self.id}, which has {had}", bound="credit"
            )
        if self._onward is not None:
            self._onward(packet)
        elif not had and self._sink is not None and self.state in _MAY_SEND:
            self._sink.on_credit()

    def receive_ping(self, packet: Ping) -> None:
        """For the session."""
        if self._onward is not None:
            self._onward(packet)
        else:
            self.session.send_control(Pong(packet.stream, packet.token))

    def receive_pong(self, packet: Pong) -> None:
        """For the session: what came ahead of it was sent without the credit that the PING went along with."""
        if self._onward is not None:
            self._onward(packet)
            return
        size = self.session.windows.growth(self.window)
        if size and self.state in _MAY_RECEIVE:
            self.session.windows.grow(self.window, size)
            self.give_credit(size)

    def receive_answer(self, packet: DialRsp) -> None:
        """For the session."""
        if self.state is not State.DIALLING:
            raise RemoteProtocolError(f"a second answer for stream {self.id}")
        _check_window(packet)
        error = None if packet.code == "ok" else dial_error(packet.code, packet.text)
        if error is None:
            self.state = State.OPEN
            self.credit = packet.window
        else:
            self._close()
        self._tell_answer(error)

    def receive_close(self, code: str, text: str) -> None:
        """For the session: CLOSE arrived, or the link is gone."""
        dialling = self.state is State.DIALLING
        self.session.out.drop(self)
        self.why = (code, text)
        sink = self._close()
        if dialling and self.session.opener:
            self._tell_answer(dial_error(code, text))
        elif sink is not None:
            sink.on_reset(code, text)

    def on_answer(self, call: OnAnswer) -> None:
        """For the opener: who is told how the dial ended."""
        self._answer = call

    def _tell_answer(self, error: DialError | None) -> None:
        call, self._answer = self._answer, None
        if call is not None:
            call(error)

    def _close(self) -> Sink | None:
        """Who is to be told; let go of: a circle of objects is freed late, and finding it costs everybody time."""
        self.state = State.CLOSED
        self.session.forget(self)
        sink, self._sink = self._sink, None
        return sink


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
        frames_received: of streams, so far.
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
        _check_window(packet)
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
