"""How what a session has to send gets onto its transport: at the end of each turn, or as fast as the peer takes it.

    IDLE --the transport does not take all of it--> BLOCKED --all is sent--> IDLE        either --end()--> ENDED

Rules that hold here:

- The send side belongs to ``end_turn`` while the transport takes bytes at once, and to the task in ``write`` from the
  moment it does not until all is sent. Nothing else touches it.
- What the transport has in hand nothing can overtake. So it gets a *burst* at a time, and a frame should be no longer:
  as much as went through lately in two milliseconds, which is little on a slow wire.
- Who can wait does while it is congested, and is told when there is room. What passes through from another link can
  not wait; if it is kept too long for a peer that takes nothing, the link ends.
- Whoever queues something in the outbox calls ``flush`` afterwards; it goes out when the turn ends.

This file must not know packets, streams, or why a link ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import trio

from tunnel import logs, turns
from tunnel.errors import LinkClosed, TunnelError
from tunnel.limits import Limits
from tunnel.outbox import Outbox
from tunnel.transport import BROKEN, Buffer, Transport

_LEAST, _MOST = 64 * 1024, 512 * 1024  # bytes of a burst
_BEHIND = 0.002  # seconds that what is behind a burst should wait for it

log = logs.get_logger(__name__)


class Outflow:
    """The way out of one link. It is what streams know as their outlet.

    Args:
        on_bound: called with the name of a bound when it bites; see ``bounds.py``.
        on_end: called with the reason why the link has to end.

    Attributes:
        burst: bytes taken from the outbox at once, but for the end of the last frame.
    """

    def __init__(
        self,
        out: Outbox,
        transport: Transport,
        limits: Limits,
        on_bound: Callable[[str], None],
        on_end: Callable[[TunnelError], None],
    ) -> None:
        self._out = out
        self._transport = transport
        self._high_water = limits.high_water
        self._most = limits.link_queue
        self._on_bound = on_bound
        self._on_end = on_end
        self._turns = turns.of_this_run()
        self._ended = False
        self._blocked = trio.Event()  # set: the writer task has the send side
        self._idle = trio.Event()  # set: everything was sent
        self._idle.set()
        self._unsent: Sequence[Buffer] = ()
        self.burst = _MOST
        self._given = (0, 0.0)  # how many bytes the writer's transport has in hand, and since when
        self._waiting: dict[Callable[[], None], None] = {}

    def __repr__(self) -> str:
        state = "ended" if self._ended else "blocked" if self._blocked.is_set() else "idle"
        return f"<Outflow {state} {self._out}>"

    @property
    def congested(self) -> bool:
        """Whether so much DATA is queued that sockets of this link should not be read now."""
        return self._out.own_queued > self._high_water

    def when_room(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once, when the queue is down to half the high-water mark or the link has ended."""
        self._waiting[call] = None

    def _room(self) -> bool:
        """Tell those who wait, if there is room; whether there was anybody."""
        if not self._waiting or not (self._ended or self._out.own_queued * 2 <= self._high_water):
            return False
        calls, self._waiting = self._waiting, {}
        for call in calls:
            try:
                call()
            except Exception:  # a fault of ours
                log.exception("fault when there was room")
        return True

    @property
    def sending(self) -> bool:
        """Whether something is queued that the transport has not taken yet."""
        return not self._idle.is_set() or (not self._ended and bool(self._out))

    async def all_sent(self) -> None:
        """Wait until not ``sending``, or the link has ended."""
        while self.sending:
            self.end_turn()
            await self._idle.wait()

    def flush(self) -> None:
        """Have what is queued sent when this turn ends."""
        self._turns.at_end(self)

    def end_turn(self) -> None:
        """Send what there is to send, as far as the transport takes it now; ``write`` does the rest."""
        if self._ended:
            return
        if self._blocked.is_set():
            self._check_queue()
            return
        try:
            while self._send_all() and self._room():  # those who had waited may have brought something
                pass
        except BROKEN as error:
            self._on_end(LinkClosed(f"the link broke: {error}"))

    def _send_all(self) -> bool:
        """Whether the transport took everything."""
        while self._out:
            self._unsent = self._transport.send_now(self._out.take(self.burst))
            if self._unsent:
                self._note_given(self._unsent)
                self._idle = trio.Event()
                self._blocked.set()
                return False
        return True

    def _check_queue(self) -> None:
        """Whoever takes nothing, although bytes were let through for it, must not make this side keep too many."""
        if self._out.queued > self._most:
            self._on_bound("link_queue")
            self._on_end(LinkClosed(f"the peer does not take the {self._out.queued} bytes that wait for it"))

    async def write(self) -> None:
        """Send what the transport does not take at once; until cancelled. Raises ``BROKEN``."""
        while True:
            await self._blocked.wait()
            while self._unsent or self._out:  # some may have come since the task was woken
                await self._transport.send(self._more)
            self._blocked = trio.Event()
            self._idle.set()

    def _more(self) -> Sequence[Buffer]:
        """What to send next, when everything before was taken."""
        unsent, self._unsent = self._unsent, ()
        if not unsent:
            self._measure()
            self._room()
            unsent = self._out.take(self.burst)
            self._note_given(unsent)
        return unsent

    def _note_given(self, buffers: Sequence[Buffer]) -> None:
        self._given = sum(map(len, buffers)), trio.current_time()

    def _measure(self) -> None:
        """All that was given has been taken: how much should be given next?"""
        size, since = self._given
        took = trio.current_time() - since
        if size and took:
            fits = min(_MOST, max(_LEAST, int(size * _BEHIND / took)))
            self.burst = (self.burst + fits + 1) // 2

    def end(self) -> None:
        """The link ends: nothing more is sent, nobody waits for that, and whoever waits for room shall see."""
        self._ended = True
        self._idle.set()

    def tell_all(self) -> None:
        """The link has ended: call those who wait for room."""
        self._room()


def all_taken(ways: Iterable[Outflow]) -> bool:
    """Send what is queued on any of them, at once; whether the transports took everything."""
    ways = list(ways)  # sending may find one broken, and its owner forgets it
    for way in ways:
        way.end_turn()
    return not any(way.sending for way in ways)


async def all_sent(ways: Callable[[], Iterable[Outflow]]) -> None:
    """Wait until nothing is queued on any of those that there are, also of those that come meanwhile."""
    while blocked := next((way for way in ways() if way.sending), None):
        await blocked.all_sent()
