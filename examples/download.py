"""Download a file over plain HTTP from a service that only an agent can reach.

    python examples/download.py --server 127.0.0.1:7400 http://files.internal/big.iso big.iso

The file gets its name when it is whole; until then it is ``big.iso.part``. Exit codes: 1 for an answer that is no file
or that breaks off, 2 for a wrong command line, 69 if the service cannot be reached, 75 if it may be worth trying later.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from urllib.parse import quote, urlsplit

import click
import h11
import trio

import tunnel


class NoFile(Exception):
    """The answer is not a file; the text says what it is."""


def parse_url(url: str) -> tuple[tunnel.Target, h11.Request]:
    """Where to dial, and what to ask for there. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or "@" in parts.netloc:
        raise ValueError("only http://HOST[:PORT]/PATH can be downloaded")
    target = tunnel.Target(parts.hostname, 80 if parts.port is None else parts.port)
    path = quote(f"{parts.path or '/'}?{parts.query}".removesuffix("?"), safe="/?%:@!$&'()*+,;=~")
    headers = [("Host", str(target).removesuffix(":80")), ("Connection", "close")]
    return target, h11.Request(method="GET", target=path, headers=headers)


async def next_event(http: h11.Connection, stream: tunnel.TunnelStream) -> object:
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await stream.receive_some())
    return event


async def download(server: str, target: tunnel.Target, request: h11.Request, path: Path) -> None:
    http = h11.Connection(h11.CLIENT)
    async with tunnel.dial(server, target.host, target.port) as stream, await trio.open_file(path, "wb") as file:
        await stream.send_all((http.send(request) or b"") + (http.send(h11.EndOfMessage()) or b""))
        while isinstance(response := await next_event(http, stream), h11.InformationalResponse):
            pass
        if not isinstance(response, h11.Response) or response.status_code != 200:
            raise NoFile(f"the answer is {getattr(response, 'status_code', response)}, not 200")
        size = next((int(value) for name, value in response.headers if name == b"content-length"), None)
        with click.progressbar(itertools.count(), size, path.stem, file=sys.stderr) as bar:
            while isinstance(event := await next_event(http, stream), h11.Data):
                await file.write(event.data)
                bar.update(len(event.data))


@click.command()
@click.option("--server", metavar="HOST:PORT", required=True, type=tunnel.Target.parse)
@click.argument("url")
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
def command(server: tunnel.Target, url: str, output: Path) -> None:
    """Download URL into the file OUTPUT, through a tunnel."""
    try:
        target, request = parse_url(url)
    except ValueError as error:
        raise click.BadParameter(f"{url}: {error}", param_hint="URL") from error
    part = output.with_name(f"{output.name}.part")
    try:
        trio.run(download, str(server), target, request, part)
        part.replace(output)
    except tunnel.DialError as error:
        click.echo(f"Error: {url}: {error}", err=True)
        raise SystemExit(error.exit_code) from error
    except (NoFile, OSError, h11.RemoteProtocolError, trio.BrokenResourceError) as error:
        raise click.ClickException(f"{url}: {error}") from error
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":
    command()
