"""What the two ends of a link put below it, and show in its handshake: TLS and tokens, which follow their files.

Rules that hold here:

- Files are read when this is made, and again when they change; see ``reload.py``. Links that are up keep their TLS.
- Where nothing is configured, nothing is read, and links are plain.

This file must not know what is said on a link, or what a token allows.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import trio

from tunnel.certificates import ClientTls, ServerTls
from tunnel.credentials import Token, Tokens, of_role, read_tokens
from tunnel.reload import Reloaded
from tunnel.transport import SocketTransport, Transport


class Files:
    """What a program was told to follow. ``run`` follows it; ``look`` has it look at once."""

    def __init__(self) -> None:
        self.followed: list[Reloaded[Any]] = []

    def look(self) -> None:
        """Look at all of them now."""
        for each in self.followed:
            each.look()

    async def run(self) -> None:
        """Follow them until cancelled."""
        async with trio.open_nursery() as nursery:
            for each in self.followed:
                nursery.start_soon(each.run)


class Dialling(Files):
    """An agent's or a client's side.

    Args:
        role: of the token that it shows, ``agent`` or ``client``.
        on_change: called whenever something was read again: what failed may work now.

    Raises:
        ConfigError: a file is not taken.
    """

    def __init__(
        self, role: str, token_file: str | None, tls: ClientTls | None, on_change: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._role = role
        self._tokens = token_file and Reloaded(
            (token_file,), lambda: read_tokens(token_file, own=role), lambda _: on_change()
        )
        self._tls = tls and Reloaded(tls.paths, tls.load, lambda _: on_change())
        self._name = tls and tls.name
        self.followed += [each for each in (self._tokens, self._tls) if each]

    @property
    def token(self) -> Token | None:
        """What this side shows."""
        return of_role(self._role, self._tokens.value)[0] if self._tokens else None

    @property
    def admins(self) -> tuple[Token, ...]:
        """What an operator may show."""
        return of_role("admin", self._tokens.value) if self._tokens else ()

    async def transport(self, sock: socket.socket, host: str) -> Transport:
        """Over a connected, non-blocking socket to a host. If this fails or is cancelled, the socket is closed.

        Raises:
            LinkClosed: there is no TLS with this server; the text says why.
        """
        if not self._tls:
            return SocketTransport(sock)
        from tunnel.tls import dial_tls

        transport, binding = await dial_tls(sock, self._tls.value, self._name or host)
        transport.binding = binding
        return transport


class Accepting(Files):
    """A server's side.

    Args:
        on_tokens: called with the tokens whenever they have changed.

    Raises:
        ConfigError: a file is not taken.
    """

    def __init__(
        self, token_file: str | None, tls: ServerTls | None, on_tokens: Callable[[Tokens], None] = lambda _: None
    ) -> None:
        super().__init__()
        self._tokens = token_file and Reloaded((token_file,), lambda: read_tokens(token_file), on_tokens)
        self._tls = tls and Reloaded(tls.paths, tls.load)
        self.followed += [each for each in (self._tokens, self._tls) if each]

    @property
    def tokens(self) -> Callable[[], Tokens] | None:
        """What gives those that are taken now; None if nobody has to prove anything."""
        followed = self._tokens
        return (lambda: followed.value) if followed else None

    @property
    def admins(self) -> tuple[Token, ...]:
        """What an operator may show."""
        return of_role("admin", self._tokens.value) if self._tokens else ()

    async def transport(self, sock: socket.socket) -> Transport:
        """Over an accepted, non-blocking socket. If this fails or is cancelled, the socket is closed.

        Raises:
            LinkClosed: there is no TLS with this peer; the text says why.
        """
        if not self._tls:
            return SocketTransport(sock)
        from tunnel.tls import accept_tls

        transport, binding = await accept_tls(sock, self._tls.value)
        transport.binding = binding
        return transport
