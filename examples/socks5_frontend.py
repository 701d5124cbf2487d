"""A SOCKS5 server (RFC 1928, RFC 1929) for the machine of whoever wants to reach services through a tunnel.

    python examples/socks5_frontend.py --listen 127.0.0.1:1080 --server 127.0.0.1:7400
    curl --socks5-hostname 127.0.0.1:1080 http://db.internal/

Names go to the agent unresolved; BIND and UDP ASSOCIATE are refused. A first SIGINT or SIGTERM ends accepting and
gives open connections ten seconds; after these, or at the second signal, they are cut and the exit code is 3.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import signal
from functools import partial
from typing import IO

import click
import trio

import tunnel

log = logging.getLogger("socks5")
HANDSHAKE, LINGER, GRACE = 10.0, 1.0, 10.0  # seconds: to say what is wanted, to take a refusal, to end after a signal
SIZES = {1: 4, (NAME := 3): 0, 4: 16}  # of addresses by their type; a name says its own
REPLY = b"\x05%c\x00\x01" + bytes(6)  # where the agent connects from is not told


class Refusal(Exception):
    """The connection ends. The argument is the last that the client gets, which may be nothing."""


async def take(local: trio.SocketStream, size: int) -> bytes:
    """So many bytes and none beyond: what is behind the request stays in the socket until there is a stream."""
    data = b""
    while len(data) < size:
        if not (more := await local.receive_some(size - len(data))):
            raise Refusal(b"")
        data += more
    return data


async def handshake(local: trio.SocketStream, login: bytes | None) -> tuple[str, int]:
    """All that is said before the dial; host and port. ``login``: SHA-256 of user and password, framed as they come."""
    version, count = await take(local, 2)
    method = 2 if login else 0
    if version != 5 or method not in await take(local, count):
        raise Refusal(b"\x05\xff" if version == 5 else b"")
    await local.send_all(bytes((5, method)))
    if login:
        version, size = await take(local, 2)
        user = await take(local, size + 1)  # and the length of the password
        said = hashlib.sha256(bytes((size,)) + user + await take(local, user[-1])).digest()
        if not hmac.compare_digest(said, login) or version != 1:
            raise Refusal(b"\x01\x01")
        await local.send_all(b"\x01\x00")
    version, command, _, kind = await take(local, 4)
    if version != 5 or command != 1 or kind not in SIZES:
        raise Refusal(b"" if version != 5 else REPLY % (7 if command != 1 else 8))
    host = await take(local, SIZES[kind] or (await take(local, 1))[0])
    port = int.from_bytes(await take(local, 2))
    return host.decode(errors="replace") if kind == NAME else str(ipaddress.ip_address(host)), port


async def open_stream(client: tunnel.Client, login: bytes | None, local: trio.SocketStream) -> tunnel.TunnelStream:
    with trio.fail_after(HANDSHAKE):
        host, port = await handshake(local, login)
    try:
        return await client.dial(host, port)
    except (tunnel.DialError, tunnel.ConfigError) as error:
        log.info("dial failed host=%r port=%d cause=%r", host, port, error)
        # What is no host (empty, too long) or no port is 1: 4, "unreachable", would say that someone had looked.
        raise Refusal(REPLY % getattr(error, "socks_reply", 1)) from error


async def serve(client: tunnel.Client, login: bytes | None, local: trio.SocketStream) -> None:
    """One connection. No fault in it reaches the others."""
    try:
        async with local:
            try:
                stream = await open_stream(client, login, local)
            except Refusal as refusal:
                with trio.move_on_after(LINGER):
                    await local.send_all(refusal.args[0])
                    await local.send_eof()
                    while await local.receive_some():  # to close with input unread would destroy what was sent
                        pass
                return
            try:
                await local.send_all(REPLY % 0)
                await tunnel.pump(local, stream)
            finally:
                stream.reset("reset", "the client has left")  # no effect once both directions have ended
    except* (trio.BrokenResourceError, trio.TooSlowError, tunnel.StreamReset) as group:
        log.debug("ended early: %r", group.exceptions)
    except* Exception:
        log.exception("fault in a connection")


async def main(listen: tunnel.ListenAddress, servers: tuple[tunnel.Target, ...], login: bytes | None) -> int:
    async def leave() -> None:
        await anext(signals)
        accepting.cancel()
        with trio.move_on_after(GRACE):
            await anext(signals)
        connections.cancel_scope.cancel()

    try:
        listeners = await trio.open_tcp_listeners(listen.port, host=listen.host)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {listen}: {error.strerror or error}") from error
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with tunnel.open_client(*map(str, servers)) as client, trio.open_nursery() as background:
            async with trio.open_nursery() as connections:
                with trio.CancelScope() as accepting:
                    background.start_soon(leave)
                    for listener in listeners:
                        click.echo(f"listening on {tunnel.ListenAddress(*listener.socket.getsockname()[:2])}")
                    await trio.serve_listeners(partial(serve, client, login), listeners, handler_nursery=connections)
            background.cancel_scope.cancel()
    return 3 if connections.cancel_scope.cancel_called else 0


@click.command()
@click.option("--listen", metavar="HOST:PORT", default="127.0.0.1:1080", type=tunnel.ListenAddress.parse)
@click.option("--server", metavar="HOST:PORT", multiple=True, required=True, type=tunnel.Target.parse)
@click.option("--user", metavar="NAME", help="Serve only who gives this name and the password.")
@click.option("--password-file", type=click.File("rb"), help="Holds the password; a newline at its end is not part.")
def command(
    listen: tunnel.ListenAddress, server: tuple[tunnel.Target, ...], user: str | None, password_file: IO[bytes] | None
) -> None:
    """Serve SOCKS5."""
    login = None
    if user is not None or password_file is not None:
        parts = (user or "").encode(), password_file.read().removesuffix(b"\n") if password_file else b""
        if not all(0 < len(part) < 256 for part in parts):
            raise click.UsageError("--user and --password-file go together, with 1 to 255 bytes each")
        login = hashlib.sha256(b"".join(bytes((len(part),)) + part for part in parts)).digest()
    elif not listen.is_loopback:
        raise click.UsageError(f"--listen {listen} is no loopback address, and without --user anyone could use it")
    logging.basicConfig(level=logging.INFO)
    raise SystemExit(trio.run(main, listen, server, login))


if __name__ == "__main__":
    command()
