"""A thousand agents on one server: how long until all are linked, what each costs the server, and how dials spread.

    python tests/benchmarks/many_agents.py [--agents 1000] [--dials 1000]

The server is a process of its own, started from this checkout's environment; all agents live in this process, and so
does the echo target. Linux only, for the server's memory. Needs descriptors: about twice the number of agents.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import trio

from tunnel.address import Target
from tunnel.agent import Agent
from tunnel.config import AgentConfig

BURST = 32  # dials in progress at once


def start_server(log: Path) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
    uses = ("admin", "listen", "connect")
    flags = [word for use in uses for word in (f"--{use}", "127.0.0.1:0")]
    with log.open("wb") as file:
        argv = [sys.executable, "-m", "tunnel", "server", *flags, "--log-format", "json"]
        server = subprocess.Popen(argv, stderr=file)
    events: list[dict[str, str]] = []
    while not any(event["event"] == "ready" for event in events):
        time.sleep(0.05)
        events = [json.loads(line) for line in log.read_text().splitlines()]
        said = [event for event in events if event["event"] == "listening"]
        ports = {event["use"]: int(event["address"].rpartition(":")[2]) for event in said}
    return server, ports


def memory(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


async def dial(port: int, target: Target, times: list[float]) -> None:
    began = time.perf_counter()
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(f"CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")
        await stream.send_all(b"x")
        assert await stream.receive_some() == b"x"
    times.append(time.perf_counter() - began)


async def echo(stream: trio.SocketStream) -> None:
    async for data in stream:
        await stream.send_all(data)


async def main(count: int, dials: int, log: Path) -> None:
    server, ports = start_server(log)
    before = memory(server.pid)
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, echo, [listener])
        target = Target("127.0.0.1", listener.socket.getsockname()[1])
        agents = [Agent(AgentConfig((Target("127.0.0.1", ports["links"]),), f"a{n}")) for n in range(count)]
        began = time.perf_counter()
        for agent in agents:
            await nursery.start(agent.run)
        for agent in agents:
            await agent.linked.wait()
        linked = time.perf_counter() - began
        each = (memory(server.pid) - before) / count
        times: list[float] = []
        began = time.perf_counter()
        for start in range(0, dials, BURST):
            async with trio.open_nursery() as burst:
                for _ in range(min(BURST, dials - start)):
                    burst.start_soon(dial, ports["connect"], target, times)
        took = time.perf_counter() - began
        nursery.cancel_scope.cancel()
    server.terminate()
    server.wait()
    served = Counter(agent.dials.served for agent in agents)
    times.sort()
    print(f"{count} agents linked in {linked:.2f} s; {each / 1024:.1f} KiB each in the server")
    print(f"{dials} dials in {took:.2f} s, {BURST} at once; median {times[len(times) // 2] * 1000:.1f} ms")
    print("dials served: " + ", ".join(f"{times} by {agents} agents" for times, agents in sorted(served.items())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--dials", type=int, default=1000)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as place:
        trio.run(main, options.agents, options.dials, Path(place) / "log")
