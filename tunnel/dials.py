"""What an agent does with a dial: connect the target, or find the service, answer once, and carry the stream.

    PENDING --connected, or a service--> answered ok --> carried until both directions have ended
       +--any DialError--> refused with it        +--given up by the peer--> what was opened is closed at once

Rules that hold here:

- A dial ends in exactly one answer, within the time that came with it.
- An agent with services of its own connects nowhere.
- The rules judge every dial: those of services here, those of sockets where they are connected.

This file must not know links, drains, or who asks.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import trio

from tunnel import logs
from tunnel.address import Target
from tunnel.book import Book
from tunnel.bounds import Place
from tunnel.connect import Attempt, Connector
from tunnel.core import State
from tunnel.errors import (
    CUT,
    AddressError,
    DialError,
    DialProtocolError,
    DialTimeout,
    Refused,
    StreamReset,
    first_of,
)
from tunnel.packets import DialReq
from tunnel.patterns import Rules
from tunnel.relay import Switchboard
from tunnel.stream import TunnelStream, Unanswered

log = logs.get_logger(__name__)

Service = Callable[[trio.abc.HalfCloseableStream], Awaitable[None]]
"""Serves one connection, as a handler of ``trio.serve_tcp`` does."""
Carry = Callable[[], Awaitable[None]]


class Dials:
    """All dials of an agent.

    Args:
        board: moves the bytes of connected targets.
        services: what serves a target in this process; see ``Agent``.
        rules: which targets may be served, by either.

    Attributes:
        pending: how many are not answered yet.
        served: how many were answered with a stream.
        failed: how many were answered otherwise, by code.
        book: those that are open.
    """

    def __init__(self, board: Switchboard, services: Mapping[Target, Service] | None, rules: Rules) -> None:
        self.pending = 0
        self.served = 0
        self.failed: Counter[str] = Counter()
        self.book = Book()
        self._board = board
        self._services = services
        self._rules = rules
        self._connector = Connector(rules=rules)

    def refuse(self, stream: TunnelStream, error: DialError) -> None:
        """Answer a dial that is not even begun."""
        self.failed[error.code] += 1
        stream.refuse(error)

    async def serve(self, stream: TunnelStream, request: DialReq, place: Place) -> None:
        """One stream, from its DIAL_REQ to the end of both directions."""
        with place:
            await self._serve(stream, request, place)

    async def _serve(self, stream: TunnelStream, request: DialReq, place: Place) -> None:
        self.pending += 1
        try:
            carry = await self._open(stream, request)
        except AddressError as error:
            self._fail(stream, request, DialProtocolError(str(error)))
            return
        except DialError as error:
            self._fail(stream, request, error)
            return
        finally:
            self.pending -= 1
            place.answered()
        if carry is not None:
            self.served += 1
            with self.book.entry("dial", request.target, "", stream.core):
                await carry()

    def cut(self, code: str, text: str) -> None:
        """Reset what is still open: what services of this process talk on."""
        for entry in list(self.book.entries.values()):
            entry.stream.reset(code, text)

    async def _open(self, stream: TunnelStream, request: DialReq) -> Carry | None:
        """Accept the stream, and say how to carry it; None if it was given up."""
        if stream.core.state is not State.DIALLING:  # given up already
            return None
        target = Target(request.host, request.port)
        if self._services is None:
            return await self._connect(stream, target, request.ms / 1000)
        self._rules.permitted(target, [target.host])
        service = self._services.get(target)
        if service is None:
            raise Refused(f"{target}: this agent has no such service")
        stream.core.accept()
        stream.outlet.flush()
        return partial(_serve_here, service, stream, target)

    async def _connect(self, stream: TunnelStream, target: Target, seconds: float) -> Carry | None:
        attempt = self._connector.begin(target.host, target.port)
        if attempt is not None and attempt.over:
            sock: socket.socket | None = attempt.sock
        else:
            sock = await self._wait(stream, target, seconds, attempt)
        if sock is None:
            return None
        stream.core.accept()
        return partial(self._join, sock, stream, target)

    async def _wait(
        self, stream: TunnelStream, target: Target, seconds: float, attempt: Attempt | None
    ) -> socket.socket | None:
        """The connected socket; None if the dial was given up meanwhile."""
        with trio.move_on_after(seconds) as scope:
            stream.core.attach(Unanswered(scope))
            sock = await (attempt.end() if attempt else self._connector.connect(target.host, target.port))
            if stream.core.state is State.DIALLING:
                return sock
            sock.close()  # given up in this very moment
        if stream.core.state is State.DIALLING:
            raise DialTimeout(f"{target.host} port {target.port}: no answer within {seconds:g} s")
        return None

    def _fail(self, stream: TunnelStream, request: DialReq, error: DialError) -> None:
        if stream.core.state is State.DIALLING:  # still wanted
            log.info("dial failed", target=request.target, code=error.code, cause=error.text)
            self.refuse(stream, error)

    async def _join(self, sock: socket.socket, stream: TunnelStream, target: Target) -> None:
        try:
            await self._board.join(sock, stream)
        except StreamReset as error:
            _log_reset(stream, target, error)


async def _serve_here(service: Service, stream: TunnelStream, target: Target) -> None:
    """Have a service of this process talk on the stream."""
    try:
        await _talk(service, stream, target)
        await stream.aclose()
    except BaseException:
        stream.reset("reset", "the service failed")
        raise


async def _talk(service: Service, stream: TunnelStream, target: Target) -> None:
    try:
        await service(stream)
    except* trio.BrokenResourceError as group:  # the stream, or what the service carried from elsewhere
        stream.reset("reset", f"service: {first_of(group)}")
        cause = first_of(group).__cause__
        _log_reset(stream, target, cause if isinstance(cause, StreamReset) else StreamReset("reset", str(group)))


def _log_reset(stream: TunnelStream, target: Target, error: StreamReset) -> None:
    say = log.info if error.code == CUT else log.debug
    say("stream reset", target=target, stream=stream.core.id, code=error.code, cause=error.text)
