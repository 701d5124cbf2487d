"""Listening: bind an address, and hand every connection that arrives to a task of its own.

Rules that hold here:

- Connections are accepted in batches, until the kernel has no more.
- A listener outlives a shortage of descriptors or memory: it waits a little and goes on, and says so once a minute for
  each cause.
- Whoever is one too many is closed when accepted, before anything is made for it.
- Closing a listener ends no connection, and resets none that the kernel had already taken: its queue is emptied first.

This file must not know what the connections are for.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from tunnel import logs, turns
from tunnel.address import ListenAddress
from tunnel.bounds import Crowd
from tunnel.errors import TunnelError
from tunnel.poller import READ

log = logs.get_logger(__name__)

_BACKLOG = 4096  # the system lowers it to its own bound
_BATCH = 8  # accepted in one turn: what few connections ask for goes out while the next are accepted
_PAUSE = 0.1  # seconds after the system had no resources for one more connection
_SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Handler = Callable[..., Awaitable[None]]
"""Takes an accepted socket, and whatever ``Spawn`` adds."""
Spawn = Callable[[Handler, socket.socket], bool]
"""Starts a task for an accepted socket, or says False."""


class BindError(TunnelError):
    """An address could not be listened on; the text names it and says why."""


async def bind(address: ListenAddress) -> list[socket.socket]:
    """Listening, non-blocking sockets on every address that the host stands for.

    With port 0 and several addresses, all get the port that the system chose for the first.

    Raises:
        BindError: the host has no address here, or one of them cannot be listened on.
    """
    sockets: list[socket.socket] = []
    port = address.port
    try:
        found = await trio.socket.getaddrinfo(address.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, where in dict.fromkeys(found):
            sockets.append(_bind_one(family, (where[0], port, *where[2:])))
            port = sockets[0].getsockname()[1]
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise BindError(f"cannot listen on {address}: {error.strerror or error}") from error
    return sockets


def _bind_one(family: int, where: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what is accepted has it from here
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def bound_address(sock: socket.socket) -> ListenAddress:
    """Where a socket of ``bind`` really listens."""
    host, port = sock.getsockname()[:2]
    return ListenAddress(host.partition("%")[0], port)


def _spelled(listener: socket.socket) -> str:
    unix = listener.family == socket.AF_UNIX
    return f"unix:{listener.getsockname()}" if unix else str(bound_address(listener))


async def accept(listener: socket.socket, handler: Handler, spawn: Spawn) -> None:
    """Have ``spawn(handler, socket)`` start a task for each connection, until cancelled; then close the listener.

    The sockets are non-blocking, and have ``TCP_NODELAY`` where ``bind`` made the listener; each handler closes its
    own. Where ``spawn`` says False, the connection is closed at once.
    """
    seldom = logs.Seldom(trio.current_time)
    with listener:
        try:
            while True:
                shortage = await turns.of_this_run().serve(
                    listener.fileno(), READ, partial(_accept_batch, listener, handler, spawn)
                )
                if times := seldom.times(shortage.errno):
                    log.warning("cannot accept", address=_spelled(listener), times=times, cause=shortage.strerror)
                await trio.sleep(_PAUSE)
        finally:
            _accept_batch(listener, handler, spawn, most=_BACKLOG)


def source_of(sock: socket.socket) -> str:
    """The address that a connection comes from, without its port; empty if it has gone already."""
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return ""


def admitted(crowd: Crowd, spawn: Callable[..., bool]) -> Spawn:
    """``spawn``, for as many as the crowd takes. The handler gets a seat in it too, and leaves that."""

    def spawn_admitted(handler: Handler, sock: socket.socket) -> bool:
        seat = crowd.enter(source_of(sock))
        if seat is None:
            return False
        if not spawn(handler, sock, seat):
            seat.leave()
            return False
        return True

    return spawn_admitted


def _accept_batch(listener: socket.socket, handler: Handler, spawn: Spawn, most: int = _BATCH) -> OSError | None:
    for _ in range(most):
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in _SHORTAGE:
                return error
            continue  # this one connection failed before it was accepted
        sock.setblocking(False)
        if not spawn(handler, sock):
            sock.close()
    return None
