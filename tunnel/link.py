"""A link: one ``Session`` on one transport, with the tasks that keep it alive.

    START --run()--> SHAKING HANDS --peer known--> LINKED --> ENDED
                            +------------------------------> ENDED

A link ends when the peer closes or breaks the transport, breaks a rule, says goodbye, or is silent for three
keepalive intervals; when ``close`` is called; or when ``run`` is cancelled. Then all its streams are reset.

Rules that hold here:

- The reader never waits for a stream. How bytes go out is ``outflow.py``'s.
- Who asks too often is read more slowly, and ended by nobody for that. Servers are not: others ask through them.
- Whoever queues something on the session calls ``flush`` afterwards; it goes out when the turn ends.

This file must not know targets, backends, or what the streams are for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio
from trio_util import AsyncValue

from tunnel import deadlines, logs, wiretrace
from tunnel.bounds import Bounds, Pace
from tunnel.core import Stream
from tunnel.deadlines import Deadline
from tunnel.errors import (
    HandshakeRefused,
    LinkClosed,
    LinkLost,
    LinkStopped,
    RemoteProtocolError,
    TunnelError,
)
from tunnel.frames import DATA_BODY_OVERHEAD, Decoder
from tunnel.handshake import Handshake
from tunnel.identity import Identity
from tunnel.limits import Limits, Timeouts
from tunnel.liveness import MISSES, Liveness
from tunnel.outflow import Outflow
from tunnel.packets import Close, DialReq, Packet, Pong, Welcome, milliseconds
from tunnel.parked import Parked
from tunnel.session import Session
from tunnel.stream import TunnelStream
from tunnel.transport import BROKEN, Transport

log = logs.get_logger(__name__)

_GOODBYE = 1.0  # seconds that a last word may take, unless its speaker says otherwise


def refuse_dials(stream: TunnelStream, request: DialReq) -> None:
    """The ``on_dial`` of a link whose peer never asks for streams."""
    raise RemoteProtocolError(f"DIAL_REQ for {request.target!r:.80} on a link that takes none")


def ignore_control(packet: Packet) -> None:
    """The ``on_control`` of a link that expects nothing in particular."""


class Link:
    """One connection between two of ours.

    Args:
        transport: connected; the link closes it.
        handshake: the side of it that this is.
        bounds: where it is counted that a bound bites; its own if there are none.
        on_dial: called with each stream that the peer asks for.
        on_control: called with packets about the link, such as DRAIN.
        on_linked: called once, when the peer is known and before anything else it sends is looked at.
        on_end: called once, at the moment it is certain that the link ends.

    Attributes:
        open_streams: how many streams are open or being dialled; wait for 0 to see the link idle.
        since: when it was linked, on trio's clock.
        liveness: whether the peer is still there, and how far away.
        going: the peer said that it is leaving; whoever owns the link sets it.
        why: why it ended, from the moment that is certain.
        ended: set when nothing of it is left.
        outflow: the way out, which its streams share.
    """

    def __init__(
        self,
        transport: Transport,
        handshake: Handshake,
        *,
        limits: Limits,
        timeouts: Timeouts,
        on_dial: Callable[[TunnelStream, DialReq], None] = refuse_dials,
        on_control: Callable[[Packet], None] = ignore_control,
        on_linked: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
        bounds: Bounds | None = None,
    ) -> None:
        self.open_streams: AsyncValue[int] = AsyncValue(0)
        self.ended = trio.Event()
        self.why: TunnelError | None = None
        self.since = 0.0
        self.going = False
        self.liveness = Liveness()
        self._transport = transport
        self._handshake = handshake
        self._limits = limits
        self._timeouts = timeouts
        self._bounds = bounds or Bounds(limits, trio.current_time)
        self._pace = Pace(self._bounds)
        self._pause = 0.0  # seconds for which nothing is read just now
        self._on_dial = on_dial
        self._on_control = on_control
        self._on_linked = on_linked
        self._on_end = on_end
        self.session = self._new_session(limits)
        self._deadlines = deadlines.of_this_run()
        self.outflow = Outflow(self.session.out, transport, limits, self._hit, self._end)
        self._decoder = self._new_decoder(limits)
        self._scope = trio.CancelScope()
        self._linked = trio.Event()
        self._farewell: TunnelError | None = None  # why this side said goodbye, if it did
        self._patience = 0.0  # until when it waits for that to arrive

    def _new_session(self, limits: Limits) -> Session:
        return Session(
            opener=False,
            window=limits.first_window,
            most_window=limits.window,
            spare=limits.spare_window,
            budget=limits.link_window,
            on_dial=self._dialled,
            on_control=self._control,
            on_streams=partial(setattr, self.open_streams, "value"),
            on_bound=self._hit,
            out=wiretrace.TracedOutbox(self._peer_name) if wiretrace.wanted() else None,
        )

    def _new_decoder(self, limits: Limits) -> Decoder:
        """For the handshake."""
        take = wiretrace.traced(self._peer_name, self._shake_hands)
        decoder = Decoder(limits.body_before_auth, take, self._refuse_data)
        decoder.strict = True
        return decoder

    def __repr__(self) -> str:
        state = f"ended: {self.why}" if self.why else "linked" if self._linked.is_set() else "shaking hands"
        return f"<Link {self._peer_name()} {state} {self.session!r}>"

    @property
    def peer(self) -> Identity | None:
        """Who is at the other end."""
        return self._handshake.peer

    def _peer_name(self) -> str:
        return self.peer.name if self.peer else "?"

    @property
    def server_count(self) -> int:
        """How many servers there are in all, as a server at the other end said last."""
        return self._handshake.servers

    @property
    def address(self) -> str:
        """Where the peer is."""
        return self._transport.address

    # -- life

    async def run(self, *, task_status: trio.TaskStatus[Link] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the link to its end; ``task_status.started`` is called with it when it is linked.

        Returns when a link that was linked has ended; ``why`` says why. Cancelling it ends the link.

        Raises:
            HandshakeRefused: one side does not want the other; before ``started`` only.
            RemoteProtocolError: the peer broke a rule of the handshake; before ``started`` only.
            LinkClosed: the handshake failed otherwise, or took too long; before ``started`` only.
        """
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._guard, self._read)
                    nursery.start_soon(self._guard, self.outflow.write)
                    await self._greet()
                    task_status.started(self)
                    await self._guard(self._keep_alive)
        finally:
            await self._bury()  # noqa: ASYNC102  # it bounds itself, and shields what the peer is to hear
        if not self._linked.is_set() and self.why:
            raise self.why

    async def _guard(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run one of the link's tasks: what fails in it ends this link, and no other."""
        try:
            await task()
        except BROKEN as error:
            self._end(LinkClosed(f"the link broke: {error}"))
        except Exception as error:  # a fault of ours
            log.exception("fault in a link")
            await self.close("protocol", "internal fault", LinkClosed(f"internal fault: {error!r}"))

    async def _greet(self) -> None:
        first = self._handshake.first()
        if first is not None:
            self.session.send_control(first)
            self.flush()
        with trio.move_on_after(self._timeouts.handshake):
            await self._linked.wait()
        if self._linked.is_set():  # be it in the very moment in which the time was over
            return
        if first is None:
            self._hit("handshake_time")
        await self.close("timeout", f"the handshake took longer than {self._timeouts.handshake:g} s")
        await trio.sleep_forever()  # until the scope's cancellation, just requested, arrives

    async def _bury(self) -> None:
        self._end(LinkStopped("this side was stopped"))
        self.session.end(LinkLost.code, str(self.why))
        self.outflow.tell_all()
        try:
            if self._farewell:
                with trio.CancelScope(deadline=self._patience, shield=self._linked.is_set()):
                    await self._transport.linger()
        finally:
            with trio.move_on_after(_GOODBYE, shield=True):
                await self._transport.aclose()
            self.ended.set()

    def _end(self, why: TunnelError) -> None:
        if self.why is None:
            self.why = self._farewell or why  # once it is said, that the peer closes is only what follows
            self._scope.cancel()
            self.outflow.end()
            self._on_end()

    def drop(self, text: str) -> None:
        """End the link now, without a word: its peer is not there any more."""
        self._end(LinkStopped(text))

    async def close(self, code: str, text: str, why: TunnelError | None = None, *, seconds: float = _GOODBYE) -> None:
        """Say goodbye and end the link, within so many seconds. Its streams are reset. Cancelling it changes nothing,
        unless it was never linked: then nobody waits any more for the peer to hear it.

        ``why`` is what ``why`` says then, if not that this side wanted it.
        """
        if self.why is None and self._farewell is None:
            self._farewell = why or LinkStopped(text)
            self._patience = trio.current_time() + seconds
            self.session.send_control(Close(0, code, text))
            try:
                with trio.CancelScope(deadline=self._patience, shield=self._linked.is_set()):
                    await self.outflow.all_sent()
            finally:
                self._end(self._farewell)

    # -- sending

    def flush(self) -> None:
        """Have what is queued on the session sent when this turn ends."""
        self.outflow.flush()

    # -- receiving

    async def _read(self) -> None:
        try:
            while await self._transport.receive(self._decoder.buffer, self._received):
                await trio.sleep(self._pause)
                self._pause = 0.0
            self._end(LinkClosed("the peer closed the connection"))
        except HandshakeRefused as error:
            await self.close(error.code, error.text, error)
        except RemoteProtocolError as error:
            if error.bound:
                self._hit("body_before_auth" if error.bound == "body" and self.peer is None else error.bound)
            await self.close("protocol", str(error), error)

    def _hit(self, bound: str) -> None:
        peer = {"peer": self.peer.name} if self.peer else {}
        self._bounds.hit(bound, **peer, address=self.address)

    def _received(self, count: int) -> bool:
        """Take so many bytes from the decoder's buffer; whether to read on without a pause."""
        self.liveness.heard = True
        self._decoder.received(count)
        self.flush()
        return not (self.session.pings or self.session.dials) or self._may_ask_on()

    def _may_ask_on(self) -> bool:
        """Whether the peer has not asked too often; else, in how many seconds it may again."""
        session, peer = self.session, self.peer
        pings, dials = session.pings, session.dials
        session.pings = session.dials = 0
        if peer is None or peer.role == "server":
            return True
        self._pause = self._pace.asked(pings, dials, session.frames_sent, peer=peer.name, address=self.address)
        return not self._pause

    def _shake_hands(self, packet: Packet) -> None:
        if self.why is not None or self._farewell is not None:  # too late: with the last bytes, or after goodbye
            return
        for answer in self._handshake.receive(packet, self._decoder.body):
            self.session.send_control(answer)
        if self.peer is not None:
            self.session.opener = self._handshake.opens
            self.session.most_data = self.peer.body_limit - DATA_BODY_OVERHEAD
            self._decoder.limit = self._limits.body
            self._decoder.strict = False
            self._decoder.on_packet = wiretrace.traced(self._peer_name, self.session.receive_packet)
            self._decoder.on_data = self.session.receive_data
            self.since = trio.current_time()
            self._linked.set()
            self._on_linked()

    def _refuse_data(self, stream: int, data: memoryview) -> None:
        raise RemoteProtocolError("DATA during the handshake")

    def _dialled(self, stream: Stream, request: DialReq) -> None:
        self._on_dial(TunnelStream(stream, self.outflow), request)

    def _control(self, packet: Packet) -> None:
        if isinstance(packet, Close):
            self._end(LinkClosed(f"the peer said: {packet.text} ({packet.code})"))
        elif isinstance(packet, Pong):
            self.liveness.answered(packet, trio.current_time())
        elif isinstance(packet, Welcome):
            self._handshake.recount(packet)
            self._on_control(packet)
        else:
            self._on_control(packet)

    async def _keep_alive(self) -> None:
        seconds = self._timeouts.keepalive
        while True:
            await trio.sleep(seconds)
            if not self.liveness.interval_over(reading=not self._pause):
                self._end(LinkClosed(f"nothing was heard for {seconds * MISSES:g} s"))
            self.session.send_control(self.liveness.ping(trio.current_time()))
            self.flush()

    # -- streams

    async def dial(
        self, host: str, port: int, *, seconds: float, options: dict[str, Any] | None = None, window: int | None = None
    ) -> TunnelStream:
        """Ask the peer for a stream to ``host:port``, which it should reach within so many seconds.

        ``window``: bytes that may come unasked, if not what the limits say.
        If it is cancelled, or too slow, the peer is told, and no stream is left on either side.

        Raises:
            DialError: what the peer answered, or ``LinkLost`` when the link ends first.
            trio.TooSlowError: there was no answer in time.
        """
        if self.why is not None:
            raise LinkLost(str(self.why))
        if self.session.out.crowded:
            raise LinkLost("the link does not take what comes for it")
        dial = _Dial(self.flush)
        ms = max(1, milliseconds(seconds))
        dial.stream = self.session.open(host, port, ms, options or {}, dial.answered, window)
        self.flush()
        dial.deadline = self._deadlines.at(trio.current_time() + seconds, dial.late)
        await dial.wait()
        return TunnelStream(dial.stream, self.outflow)


class _Dial(Parked):
    """A dial whose task is parked until there is an answer, or it is too late: whichever is first."""

    __slots__ = ("_flush", "deadline", "stream")

    stream: Stream
    deadline: Deadline

    def __init__(self, flush: Callable[[], None]) -> None:
        super().__init__()
        self._flush = flush

    def answered(self, error: Exception | None) -> None:
        """Wake the task: None is a stream that may be used."""
        self.deadline.take_back()
        self.end(error)

    def late(self) -> None:
        """There was no answer in time."""
        self.abandoned()
        self.end(trio.TooSlowError())

    def abandoned(self) -> None:
        """See ``Parked``. Nobody waits for the answer any more."""
        self.deadline.take_back()
        self.stream.reset("cancelled", "the dial was given up")
        self._flush()
