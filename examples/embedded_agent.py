"""An agent inside another program, with a service that needs no port: it is a function of this process.

    python examples/embedded_agent.py --server 127.0.0.1:7400
    curl -p -x http://127.0.0.1:7401 http://hello.internal/

Ctrl-C, or SIGTERM, lets what is open finish; a second one cuts it. Nobody can dial from this agent to anywhere else:
let agents beside it that can have --default-route, or the server may ask this one for what is nobody's.
"""

from __future__ import annotations

import logging
import os
import signal

import click
import trio

import tunnel

BODY = b"hello from inside a Python program\n"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(BODY)
LONGEST_HEAD = 16 * 1024


async def hello(stream: trio.abc.HalfCloseableStream) -> None:
    """Answer one HTTP request, whatever it asks for."""
    head = b""
    while b"\r\n\r\n" not in head:
        data = await stream.receive_some()
        head += data
        if not data or len(head) > LONGEST_HEAD:
            return
    await stream.send_all(ANSWER + (b"" if head.startswith(b"HEAD ") else BODY))


async def announce(agent: tunnel.Agent) -> None:
    await agent.linked.wait()
    click.echo(f"{agent.config.name} is linked")


async def leave_when_told(agent: tunnel.Agent, *, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        await anext(signals)
        agent.life.leave()
        await anext(signals)
        agent.life.cut()


async def main(server: tunnel.Target, name: str) -> int:
    """Serve until a signal; the exit code."""
    claims = tunnel.Claims((tunnel.Identifier.parse("host=hello.internal"),))  # it alone is asked for that
    agent = tunnel.Agent(tunnel.AgentConfig((server,), name, claims), services={"hello.internal:80": hello})
    async with trio.open_nursery() as nursery:
        await nursery.start(leave_when_told, agent)
        nursery.start_soon(announce, agent)
        code = await agent.run()
        nursery.cancel_scope.cancel()
    return code


@click.command()
@click.option("--server", metavar="HOST:PORT", required=True, type=tunnel.Target.parse)
@click.option("--name", metavar="NAME", default=lambda: os.uname().nodename, help="How this agent is called.")
def command(server: tunnel.Target, name: str) -> None:
    """Serve hello.internal:80 through a tunnel."""
    logging.basicConfig(level=logging.INFO)
    try:
        code = trio.run(main, server, name)
    except tunnel.ConfigError as error:
        raise click.UsageError(str(error)) from error
    raise SystemExit(code)


if __name__ == "__main__":
    command()
