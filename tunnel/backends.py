"""The backend manager: which agents are linked, which of them should serve a dial, and dialling through it.

    ACTIVE --DRAIN, or HELLO with ``draining``--> DRAINING --link ended--> GONE
       +------------------link ended------------------------------------> GONE

Rules that hold here:

- A draining backend is picked only when no active one is left; in either case the better of two random ones.
- Every operation is O(1), and ``pick`` scans nothing.
- Between a pick and the registration of its dial on the link there is no await: one thread is the only lock.

This file must not know front-ends, sockets, or how an agent came to be linked.
"""

from __future__ import annotations

import random

import trio

from tunnel import logs
from tunnel.address import Target
from tunnel.errors import DialTimeout, NoBackend
from tunnel.frames import Drain, DrainAck, Packet
from tunnel.link import Link
from tunnel.stream import TunnelStream

log = logs.get_logger(__name__)


class Backend:
    """One agent link, as the backend manager sees it.

    Attributes:
        link: set by whoever makes the link, before it runs.
        draining: whether it should be avoided.
        place: where it stands in its pool; for the pool.
    """

    __slots__ = ("drain_seq", "draining", "link", "manager", "place")

    link: Link

    def __init__(self, manager: Backends) -> None:
        self.manager = manager
        self.draining = False
        self.drain_seq = 0
        self.place = -1

    def __repr__(self) -> str:
        return f"<Backend {self.name} {'DRAINING' if self.draining else 'ACTIVE'} streams={self.link.session.streams}>"

    @property
    def name(self) -> str:
        """What the agent calls itself."""
        peer = self.link.peer
        return peer.name if peer else "?"

    def on_control(self, packet: Packet) -> None:
        """A packet about the link: DRAIN marks and acknowledges in one step; others mean nothing here."""
        if isinstance(packet, Drain):
            if packet.seq > self.drain_seq:
                self.drain_seq = packet.seq
                self.manager.mark_draining(self)
            self.link.session.send_control(DrainAck(packet.seq, packet.phase))


class _Pool:
    """A set with a random choice: an array in which removal swaps in the last."""

    __slots__ = ("_members",)

    def __init__(self) -> None:
        self._members: list[Backend] = []

    def __len__(self) -> int:
        return len(self._members)

    def add(self, backend: Backend) -> None:
        backend.place = len(self._members)
        self._members.append(backend)

    def remove(self, backend: Backend) -> None:
        last = self._members.pop()
        if last is not backend:
            self._members[backend.place] = last
            last.place = backend.place
        backend.place = -1

    def better_of_two(self) -> Backend | None:
        members = self._members
        count = len(members)
        if count < 2:
            return members[0] if members else None
        first = int(random.random() * count)  # noqa: S311  # load balancing; randrange costs five times as much
        second = (first + 1 + int(random.random() * (count - 1))) % count  # noqa: S311
        one, other = members[first], members[second]
        return one if one.link.session.streams <= other.link.session.streams else other


class Backends:
    """All linked agents of a server.

    Attributes:
        fallbacks: dials that went to a draining backend because there was no other.
    """

    def __init__(self) -> None:
        self.fallbacks = 0
        self._active = _Pool()
        self._draining = _Pool()

    def __repr__(self) -> str:
        return f"<Backends active={len(self._active)} draining={len(self._draining)}>"

    def __len__(self) -> int:
        return len(self._active) + len(self._draining)

    def add(self, backend: Backend) -> None:
        """A link is usable. One whose agent says it is draining is never active, not for one pick."""
        peer = backend.link.peer
        backend.draining = backend.draining or (peer is not None and peer.draining)
        self._pool(backend).add(backend)
        log.info("agent linked", agent=backend.name, agents=len(self), draining=backend.draining)

    def remove(self, backend: Backend) -> None:
        """Its link has ended."""
        if backend.place >= 0:
            self._pool(backend).remove(backend)
            log.info("agent gone", agent=backend.name, agents=len(self), cause=backend.link.why)

    def mark_draining(self, backend: Backend) -> None:
        """Avoid it from now on. No effect on one that is draining."""
        if backend.draining:
            return
        if backend.place >= 0:
            self._active.remove(backend)
            self._draining.add(backend)
        backend.draining = True
        log.info("backend draining", agent=backend.name, left_active=len(self._active))
        if not self._active:
            log.warning("no active backend left", draining=len(self._draining))

    def _pool(self, backend: Backend) -> _Pool:
        return self._draining if backend.draining else self._active

    def pick(self) -> Backend:
        """Who should serve a dial now.

        Raises:
            NoBackend: no agent is linked.
        """
        backend = self._active.better_of_two()
        if backend is None:
            backend = self._draining.better_of_two()
            if backend is None:
                raise NoBackend("no agent is linked")
            self.fallbacks += 1
        return backend

    async def dial(self, target: Target, seconds: float) -> TunnelStream:
        """A stream to ``target`` through the backend that should serve it, within ``seconds``.

        If cancelled, the agent is told, and no stream is left.

        Raises:
            DialError: ``NoBackend``, ``DialTimeout``, ``LinkLost``, or what the agent answered.
        """
        with trio.move_on_after(seconds):
            return await self.pick().link.dial(target.host, target.port, ms=int(seconds * 1000))
        raise DialTimeout(f"{target}: no answer within {seconds:g} s")
