"""A TCP service that gives back what it gets, for trying a tunnel out.

    python examples/echo_target.py --listen 127.0.0.1:7007
    curl -p -x http://127.0.0.1:7401 telnet://127.0.0.1:7007

A client that ends its direction still gets the rest of its echo, then the end. Ctrl-C ends the program.
"""

from __future__ import annotations

import click
import trio

import tunnel


async def echo(stream: trio.SocketStream) -> None:
    try:
        async for data in stream:
            await stream.send_all(data)
    except trio.BrokenResourceError:
        pass  # the client has reset the connection


async def main(listen: tunnel.ListenAddress) -> None:
    try:
        listeners = await trio.open_tcp_listeners(listen.port, host=listen.host)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {listen}: {error.strerror or error}") from error
    for listener in listeners:
        click.echo(f"listening on {tunnel.ListenAddress(*listener.socket.getsockname()[:2])}")
    await trio.serve_listeners(echo, listeners)


@click.command()
@click.option("--listen", metavar="HOST:PORT", default="127.0.0.1:0", type=tunnel.ListenAddress.parse)
def command(listen: tunnel.ListenAddress) -> None:
    """Give back what comes."""
    try:
        trio.run(main, listen)
    except* KeyboardInterrupt:
        click.echo("bye")


if __name__ == "__main__":
    command()
