"""Listening for an operator: binds the addresses, hands over whoever comes, and ends when it is told, at once.

Rules that hold here:

- Everything is bound before anything is answered, and said in the log. A socket file that nobody listens on any more is
  replaced; one of ours is removed at the end.
- Nobody who talks to these listeners is counted among what is open, and nobody holds the end up: what is on its way
  gets a second, and then sockets are closed, whatever waits on them.
- What talks HTTP is loaded when the first one comes, in a thread: a program that nobody asks does not pay for it.

This file must not know HTTP, or what is answered.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio
from trio_util import AsyncValue

from tunnel import logs
from tunnel.admin.heart import Heart
from tunnel.config import AdminAddress, AdminConfig, UnixAddress
from tunnel.listen import BindError, Handler, accept, bind, bound_address
from tunnel.operate import Operated

if TYPE_CHECKING:
    from tunnel.admin.talk import Talk

log = logs.get_logger(__name__)

_GRACE = 1.0  # seconds that answers on their way have at the end
_MOST_CONNECTIONS = 200  # of each use
_OWNER_ONLY = 0o177  # the umask for a socket file


@dataclass(frozen=True, slots=True)
class Listening:
    """One use of the interface, bound."""

    use: str
    address: str
    sockets: list[socket.socket]


@asynccontextmanager
async def listening(config: AdminConfig) -> AsyncIterator[list[Listening]]:
    """Bind what the config says, for as long as the block lasts.

    Raises:
        BindError: an address cannot be listened on, and it is required.
    """
    with ExitStack() as stack:
        bound = []
        if config.listen is not None:
            try:
                bound.append(await _bind("admin", config.listen, stack))
            except BindError as error:
                if config.required:
                    raise
                log.warning("admin off", cause=error)
        if config.health is not None:
            bound.append(await _bind("health", config.health, stack))
        yield bound


async def _bind(use: str, address: AdminAddress, stack: ExitStack) -> Listening:
    if isinstance(address, UnixAddress):
        sockets, where = [_bind_path(address, stack)], str(address)
    else:
        sockets = await bind(address)
        where = str(bound_address(sockets[0]))
    for sock in sockets:
        stack.callback(sock.close)
    log.info("listening", use=use, address=where)
    return Listening(use, where, sockets)


# -- socket files


def _bind_path(address: UnixAddress, stack: ExitStack) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    umask = os.umask(_OWNER_ONLY)
    try:
        _remove_stale(address.path)
        sock.bind(address.path)
        sock.listen()
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise BindError(f"cannot listen on {address}: {error.strerror or error}") from error
    finally:
        os.umask(umask)
    stack.callback(_remove, address.path, _identity(address.path))
    return sock


def _remove_stale(path: str) -> None:
    """Make room for a socket file, unless somebody listens there, or it is no socket file."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(0, "there is a file that is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.setblocking(False)
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
                return
            except BlockingIOError:  # somebody listens, and is busy
                pass
        raise FileExistsError(0, "another process listens there")


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _remove(path: str, ours: tuple[int, int]) -> None:
    with suppress(OSError):
        if _identity(path) == ours:
            os.unlink(path)


# -- whoever comes


async def serve(
    operated: Operated,
    config: AdminConfig,
    closing: trio.Event,
    *,
    task_status: trio.TaskStatus[dict[str, str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer until ``closing`` is set, and a second more at most; ``started`` with the addresses, by use.

    Raises:
        BindError: before ``started``; an address cannot be listened on.
    """
    async with listening(config) as bound, trio.open_nursery() as background:
        heart = Heart()
        background.start_soon(heart.run)
        talker = _Talker(partial(_load, operated, config, heart, closing))
        async with trio.open_nursery() as talking:
            try:
                async with trio.open_nursery() as accepting:
                    for one in bound:
                        door = _Door(one.use, talker, talking)
                        for listener in one.sockets:
                            accepting.start_soon(accept, listener, door.handle, door.spawn)
                    task_status.started({one.use: one.address for one in bound})
                    await closing.wait()
                    accepting.cancel_scope.cancel()
                await talker.finish()
            finally:
                talker.abort()
                talking.cancel_scope.cancel()
        background.cancel_scope.cancel()


def _load(operated: Operated, config: AdminConfig, heart: Heart, closing: trio.Event) -> Talk:
    from tunnel.admin.talk import Talk

    return Talk(operated, config, heart, closing)


class _Talker:
    """Who talks to those who come; not there before the first one is."""

    def __init__(self, load: Callable[[], Talk]) -> None:
        self.open: AsyncValue[int] = AsyncValue(0)
        self._load = load
        self._loading = trio.Lock()
        self._talk: Talk | None = None

    async def talk(self, use: str, sock: socket.socket) -> None:
        """One connection, from its accepted socket to its end."""
        self.open.value += 1
        try:
            with sock:
                talk = await self._loaded()
                await talk.talk(use, sock)
        except* Exception:
            log.exception("fault in the admin interface")
        finally:
            self.open.value -= 1

    async def _loaded(self) -> Talk:
        async with self._loading:
            if self._talk is None:
                self._talk = await trio.to_thread.run_sync(self._load)
            return self._talk

    async def finish(self) -> None:
        """Let everybody end, for a while."""
        if self._talk:
            await self._talk.finish()
        with trio.move_on_after(_GRACE):
            await self.open.wait_value(0)

    def abort(self) -> None:
        """End everybody now."""
        if self._talk:
            self._talk.abort()


class _Door:
    """The listeners of one use; a crowd at one leaves the other alone."""

    def __init__(self, use: str, talker: _Talker, talking: trio.Nursery) -> None:
        self._use = use
        self._talker = talker
        self._talking = talking
        self._inside = 0

    def spawn(self, handler: Handler, sock: socket.socket) -> bool:
        """See ``listen.accept``."""
        if self._inside >= _MOST_CONNECTIONS:
            return False
        self._inside += 1
        self._talking.start_soon(handler, sock)
        return True

    async def handle(self, sock: socket.socket) -> None:
        """See ``listen.accept``."""
        try:
            await self._talker.talk(self._use, sock)
        finally:
            self._inside -= 1
