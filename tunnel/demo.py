"""``tunnel demo``: a server, two agents and a small HTTP target in one process, on loopback and free ports.

Rules that hold here:

- Everything shown really happened: requests go through the CONNECT front-end of a real server, over real links.
- A step that does not come out as it should ends the demo with exit 1, and says so.
- It uses servers and agents as anyone could who embeds them.

This file must not know more of them than their public attributes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import trio

from tunnel import turns
from tunnel.address import ListenAddress, Target
from tunnel.agent import Agent
from tunnel.config import AgentConfig, ServerConfig
from tunnel.errors import TunnelError, first_of
from tunnel.lifecycle import Phase
from tunnel.server import Server
from tunnel.watch import AgentState

_HELLO = b"hello from a private network\n"
_CHUNK = 64 * 1024
_CHUNKS, _PAUSE = 24, 0.05  # the slow download: so many chunks with so many seconds between them
_BETWEEN = 0.3  # seconds between two agents that are replaced


class DemoFailed(TunnelError):
    """A step did not come out as it should."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one request through the tunnel came to. Sizes in bytes, times in seconds."""

    agent: str
    path: str
    size: int
    first_byte: float


async def _target(stream: trio.SocketStream) -> None:
    """A small HTTP target: ``/`` answers at once, ``/slow`` takes its time."""
    async with stream:
        head = b""
        while b"\r\n\r\n" not in head:
            data = await stream.receive_some()
            if not data:
                return
            head += data
        slow = head.startswith(b"GET /slow ")
        size = _CHUNKS * _CHUNK if slow else len(_HELLO)
        await stream.send_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % size)
        if not slow:
            await stream.send_all(_HELLO)
            return
        for _ in range(_CHUNKS):
            await stream.send_all(bytes(_CHUNK))
            await trio.sleep(_PAUSE)


class Demo:
    """The cast: who is on stage, and how to ask for something."""

    def __init__(self, server: Server, target: Target) -> None:
        self.server = server
        self.agents: list[Agent] = []
        self.target = target

    async def add(self, nursery: trio.Nursery, name: str) -> None:
        """One more agent, linked."""
        links = self.server.addresses["links"][0]
        agent = Agent(AgentConfig((Target(links.host, links.port),), name))
        await nursery.start(agent.run)
        await agent.linked.wait()
        self.agents.append(agent)

    async def get(self, path: str, name: str | None = None, started: trio.Event | None = None) -> Result:
        """GET a path of the target, through the agent called ``name`` if given; ``started``: at the first byte."""
        served = {agent: agent.dials.served for agent in self.agents}
        began = trio.current_time()
        async with await self._connect(name) as stream:
            agent = next((agent for agent in self.agents if agent.dials.served > served.get(agent, 0)), None)
            await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: {self.target}\r\n\r\n".encode())
            answer = bytearray(await stream.receive_some())
            first_byte = trio.current_time() - began
            if started is not None:
                started.set()
            async for data in stream:
                answer += data
        head, _, body = bytes(answer).partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 ") or len(body) != int(head.rpartition(b" ")[2]):
            raise DemoFailed(f"GET {path} was not answered whole")
        return Result(agent.config.name if agent else "?", path, len(body), first_byte)

    async def _connect(self, name: str | None) -> trio.SocketStream:
        door = self.server.addresses["connect"][0]
        stream = await trio.open_tcp_stream(door.host, door.port)
        choice = f"Tunnel-Agent: {name}\r\n" if name else ""
        await stream.send_all(f"CONNECT {self.target} HTTP/1.1\r\nHost: {self.target}\r\n{choice}\r\n".encode())
        reply = await stream.receive_some()
        if not reply.startswith(b"HTTP/1.1 200 "):
            await stream.aclose()
            raise DemoFailed(f"CONNECT was refused: {reply.decode(errors='replace')}")
        return stream


def _table(results: Iterable[Result]) -> None:
    print("    agent    request          bytes   first byte")
    for result in results:
        print(f"    {result.agent:8} GET {result.path:6} {result.size:11,} {result.first_byte * 1000:9.1f} ms")


async def _drain_one(demo: Demo) -> None:
    """Drain the agent that a slow download runs on, and undo it."""
    slow: list[Result] = []
    started = trio.Event()

    async def download() -> None:
        slow.append(await demo.get("/slow", started=started))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(download)
        await started.wait()
        leaving = max(demo.agents, key=lambda agent: agent.life.open.value)
        name = leaving.config.name
        print(f"\n--> a slow download runs through {name}; draining {name} now")
        leaving.drain()
        await leaving.draining.wait_acked()
        during = {result.agent for result in [await demo.get("/") for _ in range(10)]}
        print(f"    ten new dials meanwhile went to: {', '.join(sorted(during))}")
        if name in during:
            raise DemoFailed("a draining agent was chosen although another one was there")
    await leaving.state.wait_value(AgentState.DRAINED)
    _table(slow)
    print(f"    the download finished whole, and {name} is drained")
    leaving.undrain()
    after = await demo.get("/", name)
    print(f"    undrained: {after.agent} serves again")


async def _fall_back(demo: Demo) -> None:
    """Drain everybody: somebody has to serve all the same."""
    for agent in demo.agents:
        agent.drain()
        await agent.draining.wait_acked()
    result = await demo.get("/")
    print(
        f"\n--> all agents are draining, and none is left to prefer: {result.agent} still serves ({result.size} bytes)"
    )
    for agent in demo.agents:
        agent.undrain()


async def _replace(demo: Demo, nursery: trio.Nursery) -> None:
    """Roll every agent, one by one, under requests that go on."""
    answered = 0
    rolled = trio.Event()

    async def ask() -> None:
        nonlocal answered
        while not rolled.is_set():
            await demo.get("/")
            answered += 1

    async def roll() -> None:
        for old in list(demo.agents):
            await demo.add(nursery, f"{old.config.name}-2")
            old.life.leave()
            await old.life.phase.wait_value(Phase.EXIT)
            demo.agents.remove(old)
            await trio.sleep(_BETWEEN)
        rolled.set()

    names = " and ".join(agent.config.name for agent in demo.agents)
    print(f"\n--> replacing {names} by new agents, as a rollout does, under steady requests")
    async with trio.open_nursery() as requests:
        requests.start_soon(roll)
        for _ in range(4):
            requests.start_soon(ask)
    print(f"    {answered} requests were answered meanwhile, none failed")


async def _play(demo: Demo, nursery: trio.Nursery) -> None:
    print(f"--> a server takes links on {demo.server.addresses['links'][0]}")
    print(f"    and HTTP CONNECT on {demo.server.addresses['connect'][0]}")
    names = " and ".join(agent.config.name for agent in demo.agents)
    print(f"--> agents {names} are linked to it; both can reach http://{demo.target}/")
    print("\n--> one request through each")
    _table([await demo.get("/", agent.config.name) for agent in demo.agents])
    await _drain_one(demo)
    await _fall_back(demo)
    await _replace(demo, nursery)


async def _main() -> int:
    server = Server(ServerConfig(ListenAddress("127.0.0.1", 0), ListenAddress("127.0.0.1", 0)))
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        targets = trio.CancelScope()
        nursery.start_soon(_serve_targets, listener, targets)
        await nursery.start(server.run)
        demo = Demo(server, Target("127.0.0.1", listener.socket.getsockname()[1]))
        for name in ("blue", "green"):
            await demo.add(nursery, name)
        await _play(demo, nursery)
        lives = [*(agent.life for agent in demo.agents), server.life]
        for life in lives:
            life.leave()
            await life.phase.wait_value(Phase.EXIT)
        targets.cancel()
    print("\n--> the agents and the server have shut down cleanly")
    return max(life.exit_code for life in lives)


async def _serve_targets(listener: trio.SocketListener, scope: trio.CancelScope) -> None:
    with scope:
        await trio.serve_listeners(_target, [listener])


def run() -> int:
    """Play the demo; the exit code."""
    code = 1
    try:
        code = turns.run(_main)
    except* KeyboardInterrupt:
        code = 130
    except* BrokenPipeError:  # nobody reads any more; nor may the interpreter try to flush at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except* DemoFailed as group:
        print(f"--> the demo failed: {first_of(group)}")
    return code
