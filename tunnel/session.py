"""The multiplexer, without I/O: what streams exist, what each may do now, and what is to be sent next.

One ``Session`` is one side of one link. Received packets go in through ``receive_packet`` and ``receive_data``;
``take`` gives the bytes that are to be sent. Everything else happens in synchronous calls to a stream's **sink**.

A stream, on either side::

    DIALLING --answer ok--> OPEN --our EOF--> LOCAL_EOF --their EOF--> CLOSED
       |                      +--their EOF--> REMOTE_EOF --our EOF---> CLOSED
       +--answer not ok--> CLOSED        any --CLOSE, sent or received--> CLOSED

Rules that hold here:

- Only one side of a link opens streams. Ids grow, and are never used again.
- A sender never has more bytes on their way than the receiver gave credit for; a receiver that sees more ends the
  link. Credit goes back when a sink says the bytes were *consumed*, half a window or a MiB at a time.
- A window that is what bounds its stream doubles, up to a limit and within what the link has to spare. That is so if
  the sink was waiting for bytes, and the peer had used up all its credit before more of it arrived. A PING of the
  stream goes along with the credit to tell: what comes ahead of the PONG was sent without it.
- A stream that only leads on to another link grants no credit of its own, and answers no PING: both are its other
  end's, and are handed ``onward``.
- Control packets go out before DATA. DATA of all streams takes turns, frame by frame. EOF stays behind the DATA of
  its stream; a reset throws that DATA away.
- DATA for a stream that is not there is answered by one CLOSE and dropped.
- The first window of a stream is counted in what the link may have of them, from when the peer hears of it to the end
  of the stream. A few streams have a large one each, many have small ones; that bounds what can be held for them.
- What arrives before a sink is attached is held (it is within the window) and given to the sink first.

This file must not know waiting, tasks, sockets, or what a stream is for.
"""

from __future__ import annotations

from collections import OrderedDict, deque
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

_JOIN_BELOW = 8 * 1024  # header and payload of a frame this small are one buffer: cheaper than two in a gather list
_MAX_BUFFERS = 512  # per take; systems refuse more than 1024 in one gather list
_REMEMBERED = 1024  # ids for which a CLOSE was sent lately: their late DATA needs no further answer
_MAX_CREDIT = 1 << 31
_MAX_CONTROL = 4 * 1024 * 1024  # bytes of control packets that may wait for a peer that reads nothing
_RETURNED = 1024 * 1024  # bytes of credit that go back together: what is kept of a large window shall not slow it down
_PROBE = 0  # the token of a PING that measures a stream
_LEAST_WINDOW = 16 * 1024  # what a stream gets however many there are
_NO_BUDGET = 1 << 62
_PATIENCE = 64  # probes not made because another one's PONG is missing, before that is given up

Frame = bytes | tuple[bytes, bytes]
"""One buffer, or header and payload."""
OnAnswer = Callable[[DialError | None], None]
"""Told how a dial ended: None is a stream that may be used."""
Onward = Callable[[Credit | Ping | Pong], None]
"""Takes what is meant for the real end of a stream."""


def _size(frame: Frame) -> int:
    return len(frame) if isinstance(frame, bytes) else len(frame[0]) + len(frame[1])


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


class Stream:
    """One stream of a session.

    Attributes:
        id: its number on this link.
        state: see the head of this file.
        credit: bytes that may be sent now.
        window: bytes the peer may have on their way.
        lent: how much of ``window`` is counted in what the link may have.
        grown: how much of ``window`` came after the first.
        sent, received: bytes of payload so far.
        onward: set on a stream that only leads on to another link.
    """

    __slots__ = (
        "_answer", "_held", "_sink", "_unreturned", "_window_left", "credit", "frame", "frames", "grown", "id", "lent",
        "onward", "received", "sent", "session", "state", "why", "window",
    )  # fmt: skip

    def __init__(self, session: Session, number: int, credit: int) -> None:
        self.session = session
        self.id = number
        self.state = State.DIALLING
        self.credit = credit
        self.why: tuple[str, str] | None = None  # of the reset, if there was one
        self.window = self._window_left = 0  # until it is said
        self.lent = 0
        self.grown = 0
        self.sent = self.received = 0
        self.onward: Onward | None = None
        self._unreturned = 0
        self._sink: Sink | None = None
        self._held: bytearray | None = None
        self.frame: Frame | None = None  # the next to be sent
        self.frames: deque[Frame] | None = None  # those behind it: mostly there are none
        self._answer: OnAnswer | None = None

    def __repr__(self) -> str:
        return f"<Stream {self.id} {self.state.name} credit={self.credit} window_left={self._window_left}>"

    # -- the accepting side's answer

    def accept(self, window: int | None = None) -> None:
        """DIALLING -> OPEN: the target is connected. ``window``: bytes taken unasked, if not what the session says.

        Raises:
            LocalProtocolError: not DIALLING, or this side opened it.
        """
        self._check_answering()
        self.state = State.OPEN
        self.take_window(self.session.lend(self) if window is None else window)
        self.session.send_control(DialRsp(self.id, "ok", "", self.window))

    def take_window(self, size: int) -> None:
        """For the session: so many bytes may come unasked."""
        self.window = self._window_left = size

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
    def window_left(self) -> int:
        """Bytes that the peer may still send now."""
        return self._window_left

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
        self._queue(header + data if size < _JOIN_BELOW else (header, data), size + DATA_OVERHEAD)

    def send_eof(self) -> None:
        """Queue the end of this direction, behind what was sent.

        Raises:
            LocalProtocolError: not in a state to send.
        """
        if self.state not in _MAY_SEND:
            raise LocalProtocolError(f"cannot send EOF on {self!r}")
        frame = Eof(self.id).encode()
        self._queue(frame, len(frame))
        if self.state is State.OPEN:
            self.state = State.LOCAL_EOF
        else:
            self._close()

    def _queue(self, frame: Frame, size: int) -> None:
        self.session.queued += size
        if self.onward is not None:
            self.session.passing += size
        if self.frame is None:
            self.frame = frame
            self.session.ready.append(self)
        elif self.frames is None:
            self.frames = deque((frame,))
        else:
            self.frames.append(frame)

    def reset(self, code: str, text: str) -> None:
        """End both directions now, dropping what is queued. No effect once CLOSED."""
        if self.state is State.CLOSED:
            return
        self._drop_queue()
        self.why = (code, text)
        self.session.send_close(self.id, code, text)
        self._close()
        if self._sink is not None:
            self._sink.on_reset(code, text)

    def _drop_queue(self) -> None:
        if self.frame is not None:
            size = sum(map(_size, (self.frame, *(self.frames or ()))))
            self.session.queued -= size
            if self.onward is not None:
                self.session.passing -= size
            self.frame = self.frames = None

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

    def consumed(self, size: int) -> None:
        """So many received bytes are gone for good: give credit back, half a window or a MiB at a time."""
        self._unreturned += size
        due = self._unreturned * 2 >= self.window or self._unreturned >= _RETURNED
        if due and self.state in _MAY_RECEIVE:
            left, sink_waits = self._window_left, self._window_left + self._unreturned == self.window
            self.give_credit(self._unreturned)
            self._unreturned = 0
            if sink_waits:
                self.session.probe(self, left)

    def grow(self, size: int) -> None:
        """For the session: let the peer have so many bytes more on their way from now on."""
        self.window += size
        self.grown += size
        self.give_credit(size)

    def give_credit(self, size: int) -> None:
        """Let the peer send so many bytes more. No effect once its direction has ended."""
        if self.state in _MAY_RECEIVE:
            self._window_left += size
            self.session.send_control(Credit(self.id, size))

    def receive_data(self, data: memoryview) -> None:
        """For the session."""
        size = len(data)
        if self.state not in _MAY_RECEIVE:
            raise RemoteProtocolError(f"DATA for stream {self.id}, which is {self.state.name}")
        if size > self._window_left:
            text = f"DATA of {size} bytes for stream {self.id}, with credit for {self._window_left}"
            raise RemoteProtocolError(text, bound="credit")
        self._window_left -= size
        self.received += size
        if self.session.probed is self:
            self.session.probed_left -= size
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
        self.session.look_away(self)
        if self.state is State.OPEN:
            self.state = State.REMOTE_EOF
        else:
            self._close()
        if self._sink is not None:
            self._sink.on_eof()

    def receive_credit(self, packet: Credit) -> None:
        """For the session."""
        had = self.credit
        self.credit += packet.amount
        if not packet.amount or self.credit > _MAX_CREDIT:
            raise RemoteProtocolError(
                f"CREDIT of {packet.amount} for stream {self.id}, which has {had}", bound="credit"
            )
        if self.onward is not None:
            self.onward(packet)
        elif not had and self._sink is not None and self.state in _MAY_SEND:
            self._sink.on_credit()

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
        self._drop_queue()
        self.why = (code, text)
        self._close()
        if dialling and self.session.opener:
            self._tell_answer(dial_error(code, text))
        elif self._sink is not None:
            self._sink.on_reset(code, text)

    def on_answer(self, call: OnAnswer) -> None:
        """For the opener: who is told how the dial ended."""
        self._answer = call

    def _tell_answer(self, error: DialError | None) -> None:
        call, self._answer = self._answer, None
        if call is not None:
            call(error)

    def _close(self) -> None:
        self.state = State.CLOSED
        self.session.forget(self)


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

    Attributes:
        pings, dials: how many PINGs and DIAL_REQs have come since whoever looks has set them to 0.
        queued: bytes of DATA and EOF frames waiting to be taken.
        passing: how many of them came from another link; their sender is bound by its window alone.
        most_data: longest payload that the peer takes in one frame.
        frames_sent, frames_received: of streams, so far.
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
    ) -> None:
        self.opener = opener
        self.first_window = window
        self.most_data = MAX_U32
        self.probed: Stream | None = None  # whose window is being looked at
        self.probed_left = 0  # what its peer may still send without the credit that the PING goes along with
        self._waited = 0
        self._most_window = most_window
        self._spare = spare
        self._budget = budget
        self.pings = self.dials = 0
        self.queued = 0
        self.passing = 0
        self.frames_sent = self.frames_received = 0
        self._closed_sent = self._closed_received = 0  # bytes of the streams that are CLOSED
        self.ready: deque[Stream] = deque()  # streams with frames, in the order of their turns
        self._on_dial = on_dial
        self._on_control = on_control
        self._on_streams = on_streams
        self._on_bound = on_bound
        self._streams: dict[int, Stream] = {}
        self._control: list[bytes] = []
        self._control_size = 0
        self._last_id = 0
        self._closes: OrderedDict[int, None] = OrderedDict()

    def __repr__(self) -> str:
        side = "opener" if self.opener else "acceptor"
        return f"<Session {side} streams={len(self._streams)} queued={self.queued} control={len(self._control)}>"

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
        stream.take_window(self.lend(stream) if window is None else window)
        stream.on_answer(on_answer)
        self.send_control(DialReq(stream.id, host, port, stream.window, min(ms, MAX_U32), options))
        return stream

    def send_control(self, packet: Packet) -> None:
        """Queue a control packet, ahead of all DATA."""
        frame = packet.encode()
        self._control.append(frame)
        self._control_size += len(frame)

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

    def lend(self, stream: Stream) -> int:
        """A first window for a stream that has none yet."""
        size = min(self.first_window, max(_LEAST_WINDOW, self._budget // 4))
        if size < self.first_window:
            self._on_bound("link_window")
        stream.lent = size
        self._budget -= size
        return size

    def _add(self, number: int, credit: int) -> Stream:
        self._last_id = number
        stream = self._streams[number] = Stream(self, number, credit)
        self._on_streams(len(self._streams))
        return stream

    def forget(self, stream: Stream) -> None:
        """For a stream that closed."""
        if self._streams.pop(stream.id, None) is not None:
            self._spare += stream.grown
            self._budget += stream.lent
            self._closed_sent += stream.sent
            self._closed_received += stream.received
            self.look_away(stream)
            self._on_streams(len(self._streams))

    # -- what is to be sent

    @property
    def own_queued(self) -> int:
        """Bytes queued by those on this side, who can wait."""
        return self.queued - self.passing

    @property
    def has_output(self) -> bool:
        """Whether ``take`` would give anything."""
        return bool(self._control or self.queued)

    def take(self, limit: int) -> list[bytes]:
        """The buffers to send next, in order: all control packets, then whole frames up to about ``limit`` bytes."""
        buffers: list[bytes] = []
        if self._control:
            buffers.append(self._control[0] if len(self._control) == 1 else b"".join(self._control))
            self._control.clear()
            self._control_size = 0
        taken = 0
        ready = self.ready
        while ready and taken < limit and len(buffers) < _MAX_BUFFERS:
            stream = ready.popleft()
            frame = stream.frame
            if frame is None:  # it was reset
                continue
            if stream.frames:
                stream.frame = stream.frames.popleft()
                ready.append(stream)
            else:
                stream.frame = stream.frames = None
            if isinstance(frame, bytes):
                buffers.append(frame)
                size = len(frame)
            else:
                buffers += frame
                size = len(frame[0]) + len(frame[1])
            if stream.onward is not None:
                self.passing -= size
            self.frames_sent += 1
            taken += size
        self.queued -= taken
        return buffers

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

    @property
    def clogged(self) -> bool:
        """Whether more control packets wait for the peer than it should leave unread."""
        return self._control_size > _MAX_CONTROL

    @property
    def crowded(self) -> bool:
        """Whether so much waits that what comes from other links should stop: only this peer's own may end its link."""
        return self._control_size * 2 > _MAX_CONTROL

    def _check_control(self) -> None:
        """Who sends what has to be answered must read the answers."""
        if self.clogged:
            raise RemoteProtocolError(f"{self._control_size} bytes of answers are waiting to be read", bound="answers")

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

    def probe(self, stream: Stream, left: int) -> None:
        """For a stream that returns credit, and whose peer had ``left`` before: is it the window that bounds it?"""
        self._waited += 1
        free = self.probed is None or self._waited > _PATIENCE
        if free and self._spare and stream.window < self._most_window:
            self._waited = 0
            self.probed, self.probed_left = stream, left
            self.send_control(Ping(stream.id, _PROBE))

    def look_away(self, stream: Stream) -> None:
        """For a stream to which no byte will come any more: another one may be probed."""
        if self.probed is stream:
            self.probed = None

    def _receive_pong(self, packet: Pong) -> None:
        stream = self._streams.get(packet.stream)
        if packet.stream == 0:
            self._on_control(packet)
        if stream is None:
            return
        if stream.onward is not None:
            stream.onward(packet)
        elif stream is self.probed:
            self.probed = None
            if not self.probed_left and stream.state in _MAY_RECEIVE:
                size = min(stream.window, self._most_window - stream.window, self._spare)
                self._spare -= size
                stream.grow(size)

    def _receive_ping(self, packet: Ping) -> None:
        self.pings += 1
        stream = self._streams.get(packet.stream)
        if stream is not None and stream.onward is not None:
            stream.onward(packet)
        elif stream is not None or packet.stream == 0:
            self.send_control(Pong(packet.stream, packet.token))


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
