"""What a scrape of a big server costs: a thousand agents are linked, and ten thousand streams are open.

    python tests/benchmarks/scrape.py [--agents 1000] [--streams 10000] [--scrapes 20]

The server is a process of its own; agents, clients and what is reached live in this one. Linux only, for the server's
CPU time. Needs descriptors: one for each stream and agent.
"""

from __future__ import annotations

import argparse
import http.client
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import trio
from many_agents import BURST, memory, start_server

from tunnel.address import Target
from tunnel.agent import Agent
from tunnel.config import AgentConfig

SERVICE = Target("hold.internal", 7)
TICKS = os.sysconf("SC_CLK_TCK")


def cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", path)
    content = connection.getresponse().read()
    connection.close()
    return content


async def hold(stream: trio.abc.HalfCloseableStream) -> None:
    await stream.receive_some()


async def open_streams(port: int, count: int) -> list[trio.SocketStream]:
    streams: list[trio.SocketStream] = []

    async def open_one() -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(f"CONNECT {SERVICE} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")
        streams.append(stream)

    for start in range(0, count, BURST):
        async with trio.open_nursery() as burst:
            for _ in range(min(BURST, count - start)):
                burst.start_soon(open_one)
    return streams


async def measure(pid: int, times: int, ask: Callable[[], bytes], what: str) -> None:
    took, size, before = [], 0, cpu(pid)
    for _ in range(times):
        began = time.perf_counter()
        size = len(await trio.to_thread.run_sync(ask))
        took.append(time.perf_counter() - began)
    each = (cpu(pid) - before) / times
    print(f"{what}: median {statistics.median(took) * 1000:.0f} ms, {each * 1000:.0f} ms of CPU, {size / 1024:.0f} KiB")


async def main(count: int, streams: int, scrapes: int, log: Path) -> None:
    server, ports = start_server(log)
    async with trio.open_nursery() as nursery:
        at = (Target("127.0.0.1", ports["links"]),)
        agents = [Agent(AgentConfig(at, f"a{n}"), services={str(SERVICE): hold}) for n in range(count)]
        for agent in agents:
            await nursery.start(agent.run)
        for agent in agents:
            await agent.linked.wait()
        held = await open_streams(ports["connect"], streams)
        await trio.sleep(6)  # until round trips are measured
        print(f"{count} agents, {len(held)} streams, {memory(server.pid) / 2**20:.0f} MiB")
        first = time.perf_counter()
        await trio.to_thread.run_sync(get, ports["admin"], "/metrics")
        print(f"the first scrape, which loads the library: {(time.perf_counter() - first) * 1000:.0f} ms")
        for path in ("/metrics", "/readyz", "/api/v1/drain", "/api/v1/agents", "/api/v1/streams?limit=1000"):
            await measure(server.pid, scrapes, lambda path=path: get(ports["admin"], path), path)  # type: ignore[misc]
        for stream in held:
            stream.socket.close()
        nursery.cancel_scope.cancel()
    server.kill()
    server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--scrapes", type=int, default=20)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as place:
        trio.run(main, options.agents, options.streams, options.scrapes, Path(place) / "log")
