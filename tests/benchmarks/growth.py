"""What an echo and a dial cost while more and more streams are open, or more and more agents are linked.

    python tests/benchmarks/growth.py [--streams 1,10,100,1000,10000] [--agents 1,10,100,1000] [--rounds 3] --json FILE
    python tests/benchmarks/growth.py --from FILE --plot docs/growth.svg

Server, agents and target are processes of their own, and so is the load, which is this one. The streams that are open
beside are idle, through a forward and one ``tunnel agent``; where agents grow in number they are all in one process,
and each dial may be served by any. Linux only, for CPU time. Needs descriptors: one for each stream.

Rules that hold here:

- Cost is CPU of the server and of the agents, less what both use in the same time without any load: keepalives.
- Operations come one at a time: an echo is 64 bytes there and back on one stream, a dial is connect, an echo, close.
- Each figure is the median of some rounds. A round goes through all sizes with programs that were started for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import resource
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import trio
from processes import ANY, Program, announce, running, tunnel

from tunnel.address import Target
from tunnel.agent import Agent
from tunnel.config import AgentConfig

_WORD = bytes(64)
_BURST = 32  # streams opened at once
_IDLE = 3.0  # seconds of looking at what no load costs
Row = dict[str, Any]


# -- helpers: what runs in processes of its own


async def be_target() -> None:
    """Echo, on any number of connections."""

    async def echo(stream: trio.SocketStream) -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            async for data in stream:
                await stream.send_all(data)

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=1024)
    announce("target", listener.socket.getsockname()[1])
    await trio.serve_listeners(echo, [listener])


async def be_agents(count: int, port: int) -> None:
    """So many agents of the server on a port."""
    async with trio.open_nursery() as nursery:
        agents = [Agent(AgentConfig((Target("127.0.0.1", port),), f"a{number}")) for number in range(count)]
        for agent in agents:
            await nursery.start(agent.run)
        for agent in agents:
            await agent.linked.wait()
        announce("agents", port)


# -- load


def connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), 30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def echo(sock: socket.socket) -> None:
    """There and back."""
    sock.sendall(_WORD)
    left = len(_WORD)
    while left:
        left -= len(sock.recv(left))


def dial(port: int) -> None:
    """A stream for one echo."""
    with connect(port) as sock:
        echo(sock)


async def hold(port: int, count: int) -> list[socket.socket]:
    """Open streams that stay, each proven by a byte."""
    held: list[socket.socket] = []

    async def open_one() -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(b"x")
        assert await stream.receive_some() == b"x"
        held.append(socket.socket(fileno=stream.socket.detach()))

    while len(held) < count:
        async with trio.open_nursery() as burst:
            for _ in range(min(_BURST, count - len(held))):
                burst.start_soon(open_one)
    return held


# -- measurements


def used(programs: Sequence[Program]) -> float:
    """Seconds of CPU."""
    return sum(program.cpu() for program in programs)


def idle(programs: Sequence[Program]) -> float:
    """Seconds of CPU per second, without load."""
    before, began = used(programs), time.monotonic()
    time.sleep(_IDLE)
    return (used(programs) - before) / (time.monotonic() - began)


def cost(programs: Sequence[Program], rest: float, times: int, operation: Callable[[], None]) -> dict[str, float]:
    """Microseconds per operation."""
    for _ in range(times // 10):
        operation()
    before, began = used(programs), time.monotonic()
    for _ in range(times):
        operation()
    took = time.monotonic() - began
    cpu = used(programs) - before - rest * took
    return {"cpu": cpu / times * 1e6, "wall": took / times * 1e6}


def costs(programs: Sequence[Program], port: int, echoes: int, dials: int) -> dict[str, dict[str, float]]:
    """Of both operations."""
    rest = idle(programs)
    with connect(port) as sock:
        of_echo = cost(programs, rest, echoes, lambda: echo(sock))
    return {"echo": of_echo, "dial": cost(programs, rest, dials, lambda: dial(port))}


def start_server(programs: list[Program]) -> tuple[Program, int, int]:
    """A server with a forward to a target: it, and its ports for links and of the forward."""
    target = Program(__file__, "--be-target")
    programs.append(target)
    forward = f"{ANY}=127.0.0.1:{target.port('target')}"
    server = tunnel("server", "--listen", ANY, "--connect", "off", "--forward", forward)
    programs.append(server)
    return server, server.port("links"), server.port("forward")


def with_streams(sizes: list[int], echoes: int, dials: int) -> Iterator[Row]:
    """One agent, and so many streams that are open."""
    with running() as programs:
        server, links, port = start_server(programs)
        agent = tunnel("agent", "--server", f"127.0.0.1:{links}", "--name", "a0")
        programs.append(agent)
        server.wait_for("agent linked")
        held: list[socket.socket] = []
        for size in sizes:
            held += trio.run(hold, port, size - len(held))
            yield {"streams": size, "agents": 1, **costs((server, agent), port, echoes, dials)}
        for sock in held:
            sock.close()


def with_agents(sizes: list[int], echoes: int, dials: int) -> Iterator[Row]:
    """So many agents that are linked, and no other streams."""
    for size in sizes:
        with running() as programs:
            server, links, port = start_server(programs)
            agents = Program(__file__, "--be-agents", str(size), str(links))
            programs.append(agents)
            agents.port("agents")
            server.wait_for("agent linked", size)
            yield {"streams": 0, "agents": size, **costs((server, agents), port, echoes, dials)}


def medians(rounds: list[list[Row]]) -> list[Row]:
    """Of each figure of each row."""
    merged = []
    for rows in zip(*rounds, strict=True):
        row = {"streams": rows[0]["streams"], "agents": rows[0]["agents"]}
        for what in ("echo", "dial"):
            row[what] = {kind: statistics.median(row[what][kind] for row in rows) for kind in ("cpu", "wall")}
        merged.append(row)
    return merged


def show(row: Row) -> str:
    """A row of the table."""
    figures = [row[what][kind] for what in ("echo", "dial") for kind in ("cpu", "wall")]
    return f"{row['streams']:8,}{row['agents']:8,}" + "".join(f"{us:12,.0f}" for us in figures)


def measure(streams: list[int], agents: list[int], rounds: int, echoes: int, dials: int) -> dict[str, list[Row]]:
    """All medians; each round is printed when it is done."""
    print(" streams  agents    echo cpu   echo wall    dial cpu   dial wall   microseconds")
    kept: dict[str, list[list[Row]]] = {"streams": [], "agents": []}
    for _ in range(rounds):
        for name, rows in (
            ("streams", with_streams(streams, echoes, dials)),
            ("agents", with_agents(agents, echoes, dials)),
        ):
            kept[name].append([])
            for row in rows:
                kept[name][-1].append(row)
                print(show(row), flush=True)
    result = {name: medians(rows) for name, rows in kept.items()}
    print("medians")
    for row in (*result["streams"], *result["agents"]):
        print(show(row))
    return result


# -- plot

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #57606a }
.axis { stroke: #8c959f; stroke-width: 1; fill: none } .grid { stroke: #8c959f; stroke-width: .5; opacity: .4 }
.echo { stroke: #0969da } .dial { stroke: #bc4c00 }
polyline { fill: none; stroke-width: 2 } .wall { stroke-dasharray: 5 4 }
circle.echo { fill: #0969da } circle.dial { fill: #bc4c00 }
@media (prefers-color-scheme: dark) {
  text { fill: #b1bac4 }
  .echo { stroke: #58a6ff } .dial { stroke: #f0883e } circle.echo { fill: #58a6ff } circle.dial { fill: #f0883e }
}
"""
_WIDTH, _HEIGHT, _LEFT, _TOP = 300, 220, 64, 44  # of a panel, of what is around it


def step_of(most: float) -> float:
    """Between two lines of the grid: 1, 2 or 5 times a power of ten, for at most six lines."""
    power: float = 10 ** math.floor(math.log10(most / 5))
    return next(power * each for each in (1, 2, 5, 10) if most / (power * each) <= 5)


def panel(left: int, name: str, rows: list[Row], top: float) -> Iterator[str]:
    """One chart: log of how many there are, to the right; microseconds, upwards."""
    decades = max(1.0, math.log10(max(row[name] for row in rows)))
    step = step_of(top)

    def x(count: float) -> float:
        return left + math.log10(count) / decades * _WIDTH

    def y(us: float) -> float:
        return _TOP + _HEIGHT * (1 - us / top)

    for line in range(math.floor(top / step) + 1):
        at = y(line * step)
        yield f'<line class="grid" x1="{left}" x2="{left + _WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{line * step:,.0f}</text>'
    yield f'<path class="axis" d="M{left} {_TOP}v{_HEIGHT}h{_WIDTH}"/>'
    for row in rows:
        yield f'<text x="{x(row[name]):.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{row[name]:,}</text>'
    label = {"streams": "open streams", "agents": "linked agents"}[name]
    yield f'<text x="{left + _WIDTH / 2}" y="{_TOP + _HEIGHT + 38}" text-anchor="middle">{label}</text>'
    for what, kind in (("echo", "cpu"), ("echo", "wall"), ("dial", "cpu"), ("dial", "wall")):
        points = [(x(row[name]), y(row[what][kind])) for row in rows]
        yield f'<polyline class="{what} {kind}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}"/>'
        if kind == "cpu":
            yield from (f'<circle class="{what}" cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in points)


def plot(result: dict[str, list[Row]]) -> str:
    """Both charts, as SVG."""
    every = [*result["streams"], *result["agents"]]
    top = max(row[what][kind] for row in every for what in ("echo", "dial") for kind in ("cpu", "wall")) * 1.08
    width, height = 2 * (_LEFT + _WIDTH) + 28, _TOP + _HEIGHT + 52
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">']
    parts += ["<title>What an echo and a dial cost, by how much is open</title>", f"<style>{_STYLE}</style>"]
    legend = ((what, kind) for what in ("dial", "echo") for kind in ("cpu", "wall"))
    for number, (what, kind) in enumerate(legend):
        at = _LEFT + number * 120
        parts.append(f'<polyline class="{what} {kind}" points="{at},18 {at + 28},18"/>')
        parts.append(f'<text x="{at + 34}" y="22">{what}, {"CPU" if kind == "cpu" else "wall"}</text>')
    parts.append(f'<text x="{width - 12}" y="22" text-anchor="end">microseconds</text>')
    parts += panel(_LEFT, "streams", result["streams"], top)
    parts += panel(2 * _LEFT + _WIDTH, "agents", result["agents"], top)
    return "\n".join([*parts, "</svg>\n"])


# -- command


def numbers(text: str) -> list[int]:
    """A comma list."""
    return [int(word) for word in text.split(",")]


def main() -> None:
    """Measure, or draw what was measured."""
    parser = argparse.ArgumentParser(description="Measure how costs grow.")
    parser.add_argument("--streams", type=numbers, default=[1, 10, 100, 1_000, 10_000], help="open beside, ascending")
    parser.add_argument("--agents", type=numbers, default=[1, 10, 100, 1_000], help="linked")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--echoes", type=int, default=5_000, help="for each figure of a round")
    parser.add_argument("--dials", type=int, default=1_000, help="for each figure of a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the medians there")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="take them from there instead")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there, as SVG")
    parser.add_argument("--be-target", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--be-agents", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.be_target:
        trio.run(be_target)
    elif options.be_agents:
        trio.run(be_agents, *options.be_agents)
    else:
        if options.source:
            result = json.loads(options.source.read_text())
        else:
            result = measure(options.streams, options.agents, options.rounds, options.echoes, options.dials)
        if options.json:
            options.json.write_text(json.dumps(result, indent=2))
        if options.plot:
            options.plot.write_text(plot(result))


if __name__ == "__main__":
    main()
