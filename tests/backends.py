"""Backends whose links are no links: who is there is made up, and what is sent to them is kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

import trio

from tunnel.address import Identifier, Target
from tunnel.backends import Backend, Backends
from tunnel.config import Claims
from tunnel.errors import LinkClosed
from tunnel.identity import Identity, new_instance
from tunnel.link import Link
from tunnel.packets import Packet

TARGET = Target("db.internal", 5432)
NOTHING = Claims()

Serve = Callable[[str, int], Awaitable[str]]


class FakeSession:
    def __init__(self) -> None:
        self.streams = 0
        self.sent: list[Packet] = []

    def send_control(self, packet: Packet) -> None:
        self.sent.append(packet)


class FakeStream(str):
    """Takes what is noted on a stream."""

    via: str


class FakeLink:
    """What a backend needs of a link; ``serve`` is what a dial through it comes to."""

    def __init__(self, backend: Backend, peer: Identity) -> None:
        self.peer = peer
        self.session = FakeSession()
        self.why: Exception | None = None
        self.dials: list[float] = []  # the seconds that each was given
        self.serve: Serve | None = None
        self.flushes = 0
        self._backend = backend

    def flush(self) -> None:
        self.flushes += 1

    def drop(self, text: str) -> None:
        if self.why is None:
            self.why = LinkClosed(text)
            self._backend.on_end()

    async def dial(self, host: str, port: int, *, seconds: float, window: int | None) -> str:
        self.dials.append(seconds)
        self.session.streams += 1
        try:
            with trio.fail_after(max(0.0, seconds)):
                return await self.serve(host, port) if self.serve else FakeStream(f"stream through {self.peer.name}")
        except BaseException:
            self.session.streams -= 1
            raise


def claims(*identifiers: str, default_route: bool = False, priority: int = 0) -> Claims:
    return Claims(tuple(map(Identifier.parse, identifiers)), default_route, priority)


def joined(
    backends: Backends,
    name: str = "edge",
    said: Claims = NOTHING,
    *,
    instance: str | None = None,
    draining: bool = False,
) -> Backend:
    """A backend whose link is up; its texts are objects of its own, as if off the wire."""
    backend = Backend(backends)
    peer = Identity(
        "agent", name.encode().decode(), (instance or new_instance()).encode().decode(), draining=draining, claims=said
    )
    backend.link = cast(Link, FakeLink(backend, peer))
    backend.on_linked()
    return backend


def link_of(backend: Backend) -> FakeLink:
    return cast(FakeLink, backend.link)


def crowd(backends: Backends, count: int, said: Claims = NOTHING, name: str = "edge") -> list[Backend]:
    return [joined(backends, f"{name}-{number}", said) for number in range(count)]
