"""The ways in: HTTP CONNECT and forwarded ports. Each is a handler for one accepted socket.

Rules that hold here:

- The handler's task owns its connection from the accepted socket to the end of both directions.
- No byte reaches the client before the reply that is due, and none of the client's is lost or repeated.
- A dial that fails is answered in the front-end's own terms: a status and a text, or a reset without a byte.
- No connection waits for ever for its request: the head has one total deadline.

This file must not know how a backend is chosen, how bytes are moved, or the server that owns the listeners.
"""

from __future__ import annotations

import contextlib
import socket
from functools import partial

import trio

from tunnel import logs
from tunnel.address import Target
from tunnel.backends import Backends
from tunnel.config import Forward, ServerConfig
from tunnel.errors import DialError, StreamReset
from tunnel.http_connect import ESTABLISHED, BadRequest, ConnectRequest, Head
from tunnel.listen import Handler
from tunnel.relay import Switchboard, close_with_reset
from tunnel.stream import TunnelStream

log = logs.get_logger(__name__)

_READ = 16 * 1024
_LINGER = 1.0  # seconds in which a client may take a refusal


class FrontEnds:
    """What every front-end needs: somewhere to dial, and something that moves the bytes."""

    def __init__(self, backends: Backends, board: Switchboard, config: ServerConfig) -> None:
        self._backends = backends
        self._board = board
        self._config = config

    def forward(self, forward: Forward) -> Handler:
        """The handler of a port that leads to a target."""
        return partial(self._forward, forward)

    async def _forward(self, forward: Forward, sock: socket.socket) -> None:
        with sock:
            try:
                stream = await self._dial("forward", forward.target, forward.agent)
            except DialError:
                close_with_reset(sock)
                return
            await self._join(sock, stream)

    async def connect(self, sock: socket.socket) -> None:
        """The handler of the CONNECT front-end."""
        head = Head(self._config.limits.head)
        with sock:
            try:
                request = await self._read_head(sock, head)
                if request is not None:
                    await self._tunnel(sock, request)
            except BadRequest as error:
                await _refuse(sock, head.reply(error.status, str(error)))
            except DialError as error:
                await _refuse(sock, head.reply(error.http_status, f"{error.code}: {error.text}"))

    async def _read_head(self, sock: socket.socket, head: Head) -> ConnectRequest | None:
        """The request; None if the client left without one."""
        started = False
        with trio.move_on_after(self._config.timeouts.head):
            while True:
                await trio.lowlevel.wait_readable(sock)
                try:
                    data = sock.recv(_READ)
                except BlockingIOError:
                    continue
                except OSError:
                    return None
                if not data and not started:
                    return None
                started = True
                request = head.feed(data)
                if request is not None:
                    return request
        raise BadRequest(408, f"no whole request within {self._config.timeouts.head:g} s")

    async def _tunnel(self, sock: socket.socket, request: ConnectRequest) -> None:
        stream = await self._dial("connect", request.target, request.agent)
        try:
            sock.send(ESTABLISHED)  # a new socket takes so little at once; if not, it is broken
        except OSError as error:
            stream.reset("reset", f"client: {error.strerror}")
            return
        await self._join(sock, stream, request.early)

    async def _dial(self, use: str, target: Target, agent: str | None) -> TunnelStream:
        try:
            return await self._backends.dial(target, self._config.dial_timeout, agent)
        except DialError as error:
            asked = {"agent": error.agent} if error.agent else {}
            log.info("dial failed", use=use, target=target, **asked, code=error.code, cause=error.text)
            raise

    async def _join(self, sock: socket.socket, stream: TunnelStream, early: bytes = b"") -> None:
        try:
            await self._board.join(sock, stream, early)
        except StreamReset as error:
            log.debug("stream reset", stream=stream.core.id, code=error.code, cause=error.text)


async def _refuse(sock: socket.socket, reply: bytes) -> None:
    """Send a last reply and make sure it arrives: end our direction, then let the client finish its own."""
    with contextlib.suppress(OSError), trio.move_on_after(_LINGER):
        sock.send(reply)
        sock.shutdown(socket.SHUT_WR)
        while True:
            await trio.lowlevel.wait_readable(sock)
            if not sock.recv(_READ):
                return
