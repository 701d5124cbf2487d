"""TLS on a connected socket: the handshake at either end, and the transport that comes out of it.

Rules that hold here:

- All bytes go through a ``SocketTransport``, and through the ssl module in memory. trio's ``SSLStream`` is not used:
  it keeps back the alert of a handshake that fails, and the peer would never hear why.
- Whatever was encrypted must be sent, all of it and in this order; what breaks that ends the connection.
- Reading never sends. What TLS itself has to say then goes out with the next bytes of ours.
- A connection that ends without TLS's own goodbye ends like any other: packets say where streams end.

This file must not know links, or where certificates come from.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from collections.abc import Sequence

import trio

from tunnel.certificates import ServerContext, binding_of
from tunnel.errors import LinkClosed
from tunnel.transport import BROKEN, Buffer, More, Room, SocketTransport, Take

_CHUNK = 64 * 1024
_LAST_WORD = 1.0  # seconds that a peer has for hearing why the handshake failed

_ALERT = re.compile(r"(?:SSLV3|TLSV1|TLSV13)_ALERT_(\w+)")
_NO_TLS = "the peer does not speak TLS"
_REASONS = {
    "WRONG_VERSION_NUMBER": _NO_TLS,
    "HTTP_REQUEST": _NO_TLS,
    "HTTPS_PROXY_REQUEST": _NO_TLS,
    "UNSUPPORTED_PROTOCOL": "the peer speaks no version of TLS that is taken; taken: 1.2 and later",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the peer shows no certificate",
}


class TlsTransport:
    """A ``Transport`` over a connected, non-blocking TCP socket; ``shake_hands`` comes first.

    Args:
        name: the host name or address that the peer's certificate must be for; None at the accepting side.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, name: str | None) -> None:
        self._socket = SocketTransport(sock)
        self.address = self._socket.address
        self.binding = b""
        self._broken: ssl.SSLError | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=name is None, server_hostname=name)

    async def shake_hands(self) -> bytes:
        """Do the handshake; the peer's certificate (DER), empty if it shows none.

        Raises ``BROKEN``. If cancelled, only closing is left.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            else:
                await self._flush()
                return self._tls.getpeercert(binary_form=True) or b""

    async def receive(self, room: Room, take: Take) -> bool:
        """See ``Transport``. Where what came makes no whole record yet, ``room`` is asked for again."""
        chunk = memoryview(b"")
        on = self._hand_over(room, take)

        def fresh() -> memoryview:
            nonlocal chunk
            chunk = memoryview(bytearray(_CHUNK))  # for this time only: links are many, and most of them idle
            return chunk

        def decrypt(count: int) -> bool:
            nonlocal chunk, on
            self._incoming.write(chunk[:count])
            chunk = memoryview(b"")
            on = self._hand_over(room, take)
            return on is None

        if on is None and not await self._socket.receive(fresh, decrypt):
            self._incoming.write_eof()
            on = self._hand_over(room, take)
        return bool(on)

    def _hand_over(self, room: Room, take: Take) -> bool | None:
        """What came already and makes whole records: as ``receive``, but None to go on."""
        try:
            while count := self._tls.read(len(view := room()), view):
                if not take(int(count)):
                    return True
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLEOFError:
            pass
        except ssl.SSLError as error:
            self._broken = error
            raise trio.BrokenResourceError(_text(error)) from error
        return False

    def send_now(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """See ``Transport``. Takes nothing: what was encrypted could not be given back."""
        return buffers

    async def send(self, more: More) -> None:
        """See ``Transport``."""

        def encrypted() -> Sequence[Buffer]:
            if self._broken:  # what the peer said, and not that nothing can be written after it
                raise trio.BrokenResourceError(_text(self._broken)) from self._broken
            if buffers := more():
                self._tls.write(b"".join(buffers))
            return [data] if (data := self._outgoing.read()) else ()

        await self._socket.send(encrypted)

    async def linger(self) -> None:
        """See ``Transport``. What comes from the peer now is not even decrypted."""
        with contextlib.suppress(ssl.SSLError):  # the peer has not said the same yet, or never shook hands
            self._tls.unwrap()
        with contextlib.suppress(*BROKEN):  # at once or never: a peer that sends must be read from
            self._socket.send_now([self._outgoing.read()])
        await self._socket.linger()

    async def aclose(self) -> None:
        """See ``Transport``."""
        await self._socket.aclose()

    async def _flush(self) -> None:
        await self._socket.send(lambda: [data] if (data := self._outgoing.read()) else ())

    async def _fill(self) -> None:
        chunk = memoryview(bytearray(_CHUNK))

        def once(count: int) -> bool:
            self._incoming.write(chunk[:count])
            return False

        if not await self._socket.receive(lambda: chunk, once):
            self._incoming.write_eof()


async def accept_tls(sock: socket.socket, server: ServerContext) -> tuple[TlsTransport, bytes]:
    """Shake hands on an accepted, non-blocking socket; the transport, and the binding of our certificate.

    The socket is taken over: if this fails or is cancelled, it is closed.

    Raises:
        LinkClosed: there is no TLS with this peer; the text says why.
    """
    transport, _ = await _shake_hands(sock, server.context, None)
    return transport, server.binding


async def dial_tls(sock: socket.socket, context: ssl.SSLContext, name: str) -> tuple[TlsTransport, bytes]:
    """Shake hands on a connected, non-blocking socket; the transport, and the binding of the server's certificate.

    ``name`` is the host name or address that the server's certificate must be for. The socket is taken over: if this
    fails or is cancelled, it is closed. A server that wants a client's certificate, and does not take this one, may
    say so only afterwards: then receiving raises ``trio.BrokenResourceError``, and its text says why.

    Raises:
        LinkClosed: there is no TLS with this server; the text says why.
    """
    transport, certificate = await _shake_hands(sock, context, name)
    return transport, binding_of(certificate)


async def _shake_hands(sock: socket.socket, context: ssl.SSLContext, name: str | None) -> tuple[TlsTransport, bytes]:
    try:
        transport = TlsTransport(sock, context, name)
        try:
            return transport, await transport.shake_hands()
        except BROKEN as error:
            with trio.move_on_after(_LAST_WORD):
                await transport.linger()
            raise LinkClosed(_text(error)) from error
    except BaseException:
        sock.close()
        raise


def _text(error: BaseException) -> str:
    return f"TLS: {_why(error)}"


def _why(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is not taken: {error.verify_message.removesuffix('.')}"
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
        return "the peer closed the connection"
    if not isinstance(error, ssl.SSLError):
        return f"the connection broke: {error}"
    reason = error.reason or str(error)
    if alert := _ALERT.fullmatch(reason):
        return f"the peer refuses: {alert[1].lower().replace('_', ' ')}"
    return _REASONS.get(reason) or reason.lower().replace("_", " ")
