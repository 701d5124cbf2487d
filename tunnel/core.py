"""One stream of a link, without I/O: what it may do now, and what is done about what arrives for it.

A stream, on either side::

    DIALLING --answer ok--> OPEN --our EOF--> LOCAL_EOF --their EOF--> CLOSED
       |                      +--their EOF--> REMOTE_EOF --our EOF---> CLOSED
       +--answer not ok--> CLOSED        any --CLOSE, sent or received--> CLOSED

Everything that happens to it is told its **sink**, in synchronous calls.

Rules that hold here:

- A sender never has more bytes on their way than the receiver gave credit for; a receiver that sees more ends the
  link. Credit goes back when a sink says the bytes were *consumed*. How much, and when windows grow: ``windows.py``.
- A stream that only leads on to another link grants no credit of its own, and answers no PING: both are its other
  end's, and are handed ``onward``.
- EOF stays behind the DATA of its stream; a reset throws that DATA away.
- What arrives before a sink is attached is held (it is within the window) and given to the sink first.

This file must not know waiting, tasks, sockets, how a session finds its streams, or what a stream is for.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from tunnel.errors import DialError, LocalProtocolError, RemoteProtocolError, dial_error
from tunnel.frames import DATA_OVERHEAD, data_header
from tunnel.outbox import JOIN_BELOW, Line, Outbox
from tunnel.packets import Credit, DialReq, DialRsp, Eof, Packet, Ping, Pong
from tunnel.windows import Window, Windows

_MAX_CREDIT = 1 << 31
_PROBE = 0  # the token of a PING that measures a stream

OnAnswer = Callable[[DialError | None], None]
"""Told how a dial ended: None is a stream that may be used."""
Onward = Callable[[Credit | Ping | Pong], None]
"""Takes what is meant for the real end of a stream."""


def check_window(packet: DialReq | DialRsp) -> None:
    """Nobody may be asked to keep that much.

    Raises:
        RemoteProtocolError: it is more than anybody may be granted.
    """
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


class Multiplexer(Protocol):
    """What a stream needs of the session that it belongs to; see ``session.Session``."""

    opener: bool
    most_data: int
    out: Outbox
    windows: Windows

    def __hash__(self) -> int:
        """There is one for each link."""

    def send_control(self, packet: Packet) -> None:
        """Queue a control packet, ahead of all DATA."""

    def send_close(self, number: int, code: str, text: str) -> None:
        """Queue a CLOSE."""

    def say_window(self, stream: Stream, size: int | None) -> None:
        """For a stream that has no window yet; None: what the link lends."""

    def forget(self, stream: Stream) -> None:
        """For a stream that closed."""


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

    def __init__(self, session: Multiplexer, number: int, credit: int) -> None:
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
        self._answer = None
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
            self._sink = self._onward = None

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
        if not self.window.arrived(size):
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
        check_window(packet)
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
        sink, self._sink, self._onward = self._sink, None, None
        return sink
