"""Talking HTTP on the connections of an operator's interface, by means of Hypercorn.

Rules that hold here:

- A client that ends its direction has gone, and so does what was being answered. One that takes nothing for long is let
  go, as is one on whose connection nothing moves for longer than an answer may take.
- At the end idle connections are closed at once, and others when they were answered.

Of Hypercorn this uses what talks on one connection. Its own listening keeps the sockets to itself, and shields every
send, for ever if need be: nobody could hurry it. It also waits for answers that nobody reads any more, and for ever
after a send that failed; so here a connection has a scope, which is cancelled then.

This file must not know how anybody came here.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import cast

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ConnectionState

from tunnel.address import ListenAddress
from tunnel.admin.app import LONGEST_WAIT, admin_site, health_site
from tunnel.admin.heart import Heart
from tunnel.admin.site import Site
from tunnel.config import AdminConfig
from tunnel.operate import Operated

_SEND_SECONDS = 10.0  # for a client to take what it is sent
_SILENCE = LONGEST_WAIT + 30.0  # seconds in which nothing moves on a connection


class Talk:
    """All connections, by their use: ``admin`` or ``health``."""

    def __init__(self, operated: Operated, config: AdminConfig, heart: Heart, closing: trio.Event) -> None:
        local = config.listen is not None and config.listen.is_loopback
        guarded = local and isinstance(config.listen, ListenAddress)
        self._apps = {
            "admin": _app(admin_site(operated, heart, closing, guarded=guarded, local=local)),
            "health": _app(health_site(operated, heart)),
        }
        self._config = Config()
        self._config.errorlog = None  # what happens is logged by the site
        self._config.include_server_header = False
        self._context = WorkerContext(None)
        self._connections: set[_Connection] = set()

    async def talk(self, use: str, sock: socket.socket) -> None:
        """One connection, to its end."""
        with suppress(ValueError):  # the client is gone already
            await self._serve(self._apps[use], _Connection(sock))

    async def _serve(self, app: ASGIWrapper, connection: _Connection) -> None:
        self._connections.add(connection)
        try:
            with connection.scope:
                await TCPServer(app, self._config, self._context, ConnectionState({}), connection)  # type: ignore[arg-type]
        finally:
            connection.abort()
            self._connections.discard(connection)

    async def finish(self) -> None:
        """Let nobody begin anything new."""
        await self._context.terminated.set()

    def abort(self) -> None:
        """End everybody now."""
        for connection in self._connections:
            connection.abort()


def _app(site: Site) -> ASGIWrapper:
    return ASGIWrapper(cast(ASGIFramework, site))


class _Connection:
    """A socket as Hypercorn talks on it, with an end to its patience.

    Attributes:
        scope: of whoever talks on it; cancelled when that makes no sense any more.

    Raises:
        ValueError: the client has gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = trio.socket.from_stdlib_socket(sock)
        self.scope = trio.CancelScope(deadline=trio.current_time() + _SILENCE)
        try:
            self._stream = trio.SocketStream(self.socket)
        except ValueError:
            sock.close()
            raise

    async def receive_some(self, most: int) -> bytes:
        """See ``trio.SocketStream``. At the end of what the client says there is nothing left to do."""
        data = await self._stream.receive_some(most)
        self._moved()
        if not data:
            self.scope.cancel()
        return bytes(data)

    async def send_all(self, data: bytes) -> None:
        """See ``trio.SocketStream``; a client that does not take it is as good as gone."""
        self._moved()
        try:
            with trio.fail_after(_SEND_SECONDS):
                await self._stream.send_all(data)
        except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError):
            self.scope.cancel()
            raise trio.BrokenResourceError("the client takes nothing any more") from None

    def _moved(self) -> None:
        self.scope.deadline = trio.current_time() + _SILENCE

    async def send_eof(self) -> None:
        """See ``trio.SocketStream``."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """See ``trio.SocketStream``."""
        await self._stream.aclose()

    def abort(self) -> None:
        """Close it now; whoever waits on it gets an error."""
        self.socket.close()
