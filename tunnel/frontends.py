"""The ways in: HTTP CONNECT and forwarded ports, each a handler for one accepted socket; and the streams of clients.

Rules that hold here:

- The handler's task owns its connection from the accepted socket, or the DIAL_REQ, to the end of both directions.
- No byte reaches the client before the reply that is due, and none of the client's is lost or repeated.
- A dial that fails is answered in the front-end's own terms: a status and a text, a reset without a byte, a DIAL_RSP.
- No connection waits for ever for its request: the head has one total deadline.

This file must not know how a backend is chosen, how bytes are moved, or the server that owns the listeners.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from tunnel import logs, turns
from tunnel.address import Target
from tunnel.backends import Backends
from tunnel.book import Book
from tunnel.bounds import Bounds, Place, Seat
from tunnel.bridge import Bridge
from tunnel.config import Forward, parse_agent_name
from tunnel.core import State
from tunnel.credentials import Token
from tunnel.errors import CUT, ConfigError, Denied, DialError, DialProtocolError, RefusedDraining, StreamReset
from tunnel.http_connect import ESTABLISHED, BadRequest, ConnectRequest, Head
from tunnel.limits import Timeouts
from tunnel.listen import Handler, source_of
from tunnel.packets import DialReq
from tunnel.poller import READ
from tunnel.relay import Switchboard, close_with_reset
from tunnel.stream import TunnelStream, Unanswered

log = logs.get_logger(__name__)

_READ = 16 * 1024
_LINGER = 1.0  # seconds in which a client may take a refusal
_BOUNDS = {408: "head_time", 431: "head"}  # what a request that is refused so has met


TakesUser = Callable[[str], bool]
"""Whether the value of ``Proxy-Authorization`` is taken."""
Dial = Callable[[Target, str | None], Awaitable[TunnelStream]]
"""A stream to a target, through the agents of one name if it is given; raises ``DialError``."""


class FrontEnds:
    """The ways in for sockets, and what they need: somewhere to dial, and something that moves the bytes."""

    def __init__(
        self,
        dial: Dial,
        board: Switchboard,
        book: Book,
        bounds: Bounds,
        timeouts: Timeouts,
        takes_user: TakesUser | None = None,
    ) -> None:
        self._dial_target = dial
        self._book = book
        self._board = board
        self._bounds = bounds
        self._timeouts = timeouts
        self._takes_user = takes_user

    def forward(self, forward: Forward) -> Handler:
        """The handler of a port that leads to a target."""
        return partial(self._forward, forward)

    async def _forward(self, forward: Forward, sock: socket.socket) -> None:
        with sock:
            try:
                with self._bounds.admit(None) as place:
                    stream = await self._dial("forward", forward.target, forward.agent)
                    place.answered()
                    await self._join("forward", forward.target, sock, stream)
            except DialError:
                close_with_reset(sock)
            except trio.Cancelled:  # an end without a byte would look like the target's own
                close_with_reset(sock)
                raise

    async def connect(self, sock: socket.socket, seat: Seat) -> None:
        """The handler of the CONNECT front-end; the seat is among those whose request is not whole yet."""
        head = Head(self._bounds.limits.head, self._takes_user)
        with sock:
            try:
                with seat:
                    request = await self._read_head(sock, head)
                if request is not None:
                    with self._bounds.admit(None) as place:
                        await self._tunnel(sock, request, place)
            except BadRequest as error:
                if error.status in _BOUNDS:
                    self._bounds.hit(_BOUNDS[error.status], source=source_of(sock))
                await _refuse(sock, head.reply(error.status, str(error)))
            except DialError as error:
                await _refuse(sock, head.reply(error.http_status, f"{error.code}: {error.text}"))
            except trio.Cancelled:  # who waits for an answer gets one; the socket of a stream is closed by now
                if head.begun:
                    with contextlib.suppress(OSError):
                        sock.send(head.reply(503, f"{RefusedDraining.code}: the server was stopped"))
                raise

    async def _read_head(self, sock: socket.socket, head: Head) -> ConnectRequest | None:
        """The request; None if the client left without one."""
        take, seconds = partial(_take, sock, head), self._timeouts.head
        try:
            return take() or await turns.of_this_run().serve(sock.fileno(), READ, take, seconds)
        except trio.TooSlowError:
            raise BadRequest(408, f"no whole request within {seconds:g} s") from None
        except _Left:
            return None

    async def _tunnel(self, sock: socket.socket, request: ConnectRequest, place: Place) -> None:
        stream = await self._dial("connect", request.target, request.agent)
        place.answered()
        try:
            sock.send(ESTABLISHED)  # a new socket takes so little at once; if not, it is broken
        except OSError as error:
            stream.reset("reset", f"client: {error.strerror}")
            return
        await self._join("connect", request.target, sock, stream, request.early)

    async def _dial(self, use: str, target: Target, agent: str | None) -> TunnelStream:
        try:
            return await self._dial_target(target, agent)
        except DialError as error:
            _log_failed(use, target, error)
            raise

    async def _join(
        self, use: str, target: Target, sock: socket.socket, stream: TunnelStream, early: bytes = b""
    ) -> None:
        with self._book.entry(use, target, stream.via, stream.core):
            try:
                await self._board.join(sock, stream, early)
            except StreamReset as error:
                _log_reset(use, target, stream, error)


class ClientLinks:
    """The way in for clients' links: each DIAL_REQ is dialled through an agent, and the two streams are bridged.

    Args:
        seconds: longest time that a dial may take, whatever the client says.
        most_window: bytes that a client may take unasked.
    """

    def __init__(self, backends: Backends, bridge: Bridge, book: Book, seconds: float, most_window: int) -> None:
        self._most_window = most_window
        self._backends = backends
        self._bridge = bridge
        self._book = book
        self._seconds = seconds

    async def serve(self, stream: TunnelStream, request: DialReq, place: Place, token: Token | None = None) -> None:
        """One stream of a client, which has proved to know the token, if any are wanted."""
        with place:
            await self._serve(stream, request, place, token)

    async def _serve(self, stream: TunnelStream, request: DialReq, place: Place, token: Token | None) -> None:
        window = stream.core.credit
        if window > self._most_window:
            stream.refuse(DialProtocolError(f"a window of {window} bytes; taken: at most {self._most_window}"))
            return
        with trio.CancelScope() as scope:
            stream.core.attach(Unanswered(scope))
            try:
                through = await self._dial(request, window, token)
            except DialError as error:
                _log_failed("client", request.target, error)
                stream.refuse(error)
                return
        place.answered()
        if scope.cancelled_caught:
            return
        if stream.core.state is not State.DIALLING:  # given up while the answer was on its way
            through.reset("cancelled", "the dial was given up")
            return
        target = request.target
        with self._book.entry("client", target, through.via, through.core):
            try:
                await self._bridge.join(stream, through, window)
            except StreamReset as error:
                _log_reset("client", target, through, error)

    async def _dial(self, request: DialReq, window: int, token: Token | None) -> TunnelStream:
        agent = request.options.get("agent")
        if not isinstance(agent, str | None):
            raise DialProtocolError("the option agent is not a text")
        try:
            target = Target(request.host, request.port)
            if agent is not None:
                parse_agent_name(agent)
        except ConfigError as error:
            raise DialProtocolError(str(error)) from error
        if token and not token.grant.allows_target(target):
            raise Denied(f"{target}: the token {token.id} is not for it")
        seconds = min(self._seconds, request.ms / 1000)
        return await self._backends.dial(target, seconds, agent, window)


def _log_failed(use: str, target: object, error: DialError) -> None:
    asked = {"agent": error.agent} if error.agent else {}
    log.info("dial failed", use=use, target=target, **asked, code=error.code, cause=error.text)


def _log_reset(use: str, target: object, stream: TunnelStream, error: StreamReset) -> None:
    say = log.info if error.code == CUT else log.debug
    say("stream reset", use=use, target=target, agent=stream.via, code=error.code, cause=error.text)


class _Left(Exception):
    """A client has gone without a request."""


def _take(sock: socket.socket, head: Head) -> ConnectRequest | None:
    """What has arrived of a head; the request once it is whole."""
    try:
        data = sock.recv(_READ)
    except BlockingIOError:
        return None
    except OSError:
        raise _Left from None
    if not data and not head.begun:
        raise _Left
    return head.feed(data)


async def _refuse(sock: socket.socket, reply: bytes) -> None:
    """Send a last reply and make sure it arrives: end our direction, then let the client finish its own."""
    with contextlib.suppress(OSError), trio.move_on_after(_LINGER):
        sock.send(reply)
        sock.shutdown(socket.SHUT_WR)
        while True:
            await turns.of_this_run().ready(sock.fileno(), READ)
            if not sock.recv(_READ):
                return
