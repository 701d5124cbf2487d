"""Connecting to a host and port: resolve the name, try every address, give back a socket.

Rules that hold here:

- Names are resolved in threads of their own limiter: a resolver that stalls starves nothing else.
- What is connected to was permitted by the rules there are, by its name and by its address: it is looked up once, and
  what was judged is what is connected to.
- All addresses of a name are tried, each with a short head start over the next (RFC 8305).
- Every failure is a ``DialError``; the caller's deadline bounds everything here.

This file must not know who wants the socket, or for what.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import Any, NoReturn

import trio

from tunnel import turns
from tunnel.address import Target
from tunnel.errors import AddressError, Denied, DialError, DialTimeout, DnsError, Refused, Unreachable
from tunnel.patterns import Rules
from tunnel.poller import WRITE

_HEAD_START = 0.25
_ANYWHERE = Rules()
Address = tuple[int, Any]
"""Family, and the address as sockets take it; hashable."""


class Connector:
    """Connects, and owns the threads that resolve names.

    Args:
        lookups: how many names may be in resolution at once.
        rules: where ``connect`` may lead. ``resolve`` and ``connect_to`` ask nobody.
    """

    def __init__(self, lookups: int = 32, rules: Rules = _ANYWHERE) -> None:
        self._rules = rules
        self._limiter = trio.CapacityLimiter(lookups)

    async def connect(self, host: str, port: int) -> socket.socket:
        """A connected, non-blocking TCP socket with ``TCP_NODELAY``. If cancelled, nothing stays open.

        Raises:
            Denied: the rules forbid the name, or all of its addresses. The others are tried.
            DnsError: the name has no address, or no resolver answered.
            Refused: every address refused.
            DialTimeout: the system gave up waiting for an answer.
            Unreachable: anything else that the network, or this machine, had against it.
        """
        attempt = self.begin(host, port)
        if attempt is not None:
            return await attempt.end()
        addresses = await self._permitted(host, port) if self._rules else await self.resolve(host, port)
        if len(addresses) == 1:
            return await self.connect_to(addresses[0])
        return await _connect_any(addresses)

    async def connect_to(self, address: Address) -> socket.socket:
        """The same, for one address."""
        return await Attempt(address).end()

    def begin(self, host: str, port: int) -> Attempt | None:
        """What ``connect`` begins with at a literal address; None for a name. It may be over at once, on loopback.

        Raises:
            DialError: as ``connect`` does.
        """
        literal = _literal(host, port)
        if literal is None:
            return None
        if self._rules:
            self._rules.permitted(Target(host, port), [host])
        return Attempt(literal)

    async def resolve(self, host: str, port: int) -> list[Address]:
        """Every address of a host, in the resolver's order, none twice. A literal address needs no resolver.

        Raises:
            DnsError: the name has no address, or no resolver answered.
        """
        literal = _literal(host, port)
        if literal is not None:
            return [literal]
        try:
            found = await trio.to_thread.run_sync(
                lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM),
                limiter=self._limiter,
                abandon_on_cancel=True,
            )
        except OSError as error:
            raise DnsError(f"{host}: {error.strerror or error}") from error
        except UnicodeError as error:  # a name that the system's own encoding does not take
            raise DnsError(f"{host}: {error}") from error
        return list(dict.fromkeys((int(family), address) for family, _, _, _, address in found))

    async def _permitted(self, host: str, port: int) -> list[Address]:
        """Those addresses of a host that the rules leave."""
        try:
            target = Target(host, port)
        except AddressError as error:  # what the rules cannot read they cannot permit
            raise Denied(str(error)) from error
        self._rules.check_name(target)
        found = await self.resolve(target.host, target.port)
        left = set(self._rules.permitted(target, [str(address[0]) for _, address in found]))
        return [(family, address) for family, address in found if str(address[0]) in left]


def _literal(host: str, port: int) -> Address | None:
    """The address itself, for a host that needs no resolver."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host)
    except OSError:
        return None
    return int(family), (host, port)


class Attempt:
    """A connection to one address, being made from here on: to be ended with ``end``, or by closing ``sock``.

    Attributes:
        sock: connected if it is ``over``.
        over: there is nothing to wait for.

    Raises:
        DialError: it failed at once.
    """

    __slots__ = ("_address", "over", "sock")

    def __init__(self, where: Address) -> None:
        family, self._address = where
        try:
            self.sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise _dial_error(error, self._address) from error
        try:
            self.sock.setblocking(False)
            self._check(self.sock.connect_ex(self._address), errno.EINPROGRESS)
            self.over = self._is_made()
        except OSError as error:
            self._fail(error)

    async def end(self) -> socket.socket:
        """The socket, as ``Connector.connect`` gives it, and raises. If cancelled, it is closed."""
        try:
            if not self.over:
                await turns.of_this_run().ready(self.sock.fileno(), WRITE)
                if not self._is_made():
                    self._check(self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or errno.ENOTCONN)
        except OSError as error:
            self._fail(error)
        except BaseException:
            self.sock.close()
            raise
        return self.sock

    def _is_made(self) -> bool:
        try:
            peer = self.sock.getpeername()
        except OSError:  # it is not connected
            return False
        if self.sock.getsockname() == peer:  # no one listens, and the system chose that very port for our own end
            self._check(errno.ECONNREFUSED)
        with contextlib.suppress(OSError):  # some systems refuse it once the peer has gone
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return True

    @staticmethod
    def _check(code: int, also_well: int = 0) -> None:
        if code not in (0, also_well):
            raise OSError(code, os.strerror(code))

    def _fail(self, error: OSError) -> NoReturn:
        self.sock.close()
        raise _dial_error(error, self._address) from error


async def _connect_any(addresses: list[Address]) -> socket.socket:
    won: list[socket.socket] = []
    errors: list[DialError] = []

    async def attempt(where: Address, failed: trio.Event) -> None:
        try:
            sock = await Attempt(where).end()
        except DialError as error:
            errors.append(error)
            failed.set()
            return
        if won:
            sock.close()
        won.append(sock)
        nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            for where in addresses:
                failed = trio.Event()
                nursery.start_soon(attempt, where, failed)
                with trio.move_on_after(_HEAD_START):
                    await failed.wait()
        await trio.lowlevel.checkpoint_if_cancelled()
    except BaseException:
        for sock in won:
            sock.close()
        raise
    if won:
        return won[0]
    raise errors[0] if len({error.code for error in errors}) == 1 else Unreachable("; ".join(map(str, errors)))


def _dial_error(error: OSError, address: tuple[Any, ...]) -> DialError:
    text = f"{address[0]} port {address[1]}: {error.strerror or error}"
    if isinstance(error, ConnectionRefusedError):
        return Refused(text)
    if isinstance(error, TimeoutError):
        return DialTimeout(text)
    return Unreachable(text)
