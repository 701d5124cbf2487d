"""A whole tunnel in one process, over real loopback sockets: one server, agents, services to reach, and clients.

Rules that hold here:

- Every port is chosen by the system; whatever was opened is closed when the house is left.
- A killed agent says no last word, as after SIGKILL.
- Nothing here asserts, and nothing waits for a time to pass.
"""

from __future__ import annotations

import gc
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import h11
import pytest
import trio
from trio.testing import wait_all_tasks_blocked
from trio_util import AsyncValue

from tunnel.address import ListenAddress, Target
from tunnel.agent import Agent
from tunnel.agent import Service as InProcess
from tunnel.client import Client, open_client
from tunnel.config import AgentConfig, Forward, ServerConfig
from tunnel.connect import Connector
from tunnel.http_connect import ESTABLISHED
from tunnel.lifecycle import Phase
from tunnel.limits import Timeouts
from tunnel.link import Link
from tunnel.server import Server

LOOPBACK = ListenAddress("127.0.0.1", 0)
PROMPT = Timeouts(backoff_first=0.01, backoff_max=0.02)

Talk = Callable[[trio.SocketStream], Awaitable[None]]


# -- what a service does with a connection


async def echo(stream: trio.SocketStream) -> None:
    async for data in stream:
        await stream.send_all(data)


async def greet(stream: trio.SocketStream) -> None:
    """Speaks first."""
    await stream.send_all(b"welcome\n")
    await echo(stream)


async def firehose(stream: trio.SocketStream) -> None:
    """Sends for ever."""
    while True:
        await stream.send_all(bytes(64 * 1024))


async def reset_after_one_piece(stream: trio.SocketStream) -> None:
    await stream.receive_some()
    reset(stream)


class Service:
    """What a target leads to.

    Attributes:
        target: where it is.
        opened: connections so far; can be waited for.
        open: connections now; can be waited for.
    """

    def __init__(self, port: int, talk: Talk) -> None:
        self.target = Target("127.0.0.1", port)
        self.opened: AsyncValue[int] = AsyncValue(0)
        self.open: AsyncValue[int] = AsyncValue(0)
        self._talk = talk

    async def serve(self, stream: trio.SocketStream) -> None:
        self.opened.value += 1
        self.open.value += 1
        try:
            async with stream:
                await self._talk(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self.open.value -= 1


class Held:
    """Dials to the host ``held.test`` wait until ``open`` is set; then they lead to 127.0.0.1.

    Attributes:
        arrived: how many there were; can be waited for.
        given_up: how many were cancelled while they waited.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = trio.Event()
        self.arrived: AsyncValue[int] = AsyncValue(0)
        self.given_up = 0
        connect = Connector.connect

        async def held(connector: Connector, host: str, port: int) -> socket.socket:
            if host != "held.test":
                return await connect(connector, host, port)
            self.arrived.value += 1
            try:
                await self.open.wait()
            except trio.Cancelled:
                self.given_up += 1
                raise
            return await connect(connector, "127.0.0.1", port)

        monkeypatch.setattr(Connector, "connect", held)


def through(target: Target) -> Target:
    """The same target, by the name whose dials are held."""
    return Target("held.test", target.port)


class House:
    """See the head of this file.

    Attributes:
        server: the one that was started last.
    """

    server: Server

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self._scopes: dict[Server | Agent, trio.CancelScope] = {}
        self._sockets: list[socket.socket] = []

    # -- who lives in it

    async def serve(self, **config: Any) -> Server:
        """Start a server that takes links and CONNECT."""
        self.server = Server(ServerConfig(**{"listen": LOOPBACK, "connect": LOOPBACK, "timeouts": PROMPT, **config}))
        await self.nursery.start(self._run, self.server)
        return self.server

    async def agent(self, name: str = "one", services: Mapping[str, InProcess] | None = None, **config: Any) -> Agent:
        """Start an agent, and wait until it is linked to the server."""
        links = self.server.addresses["links"][0]
        defaults = {"servers": (Target(links.host, links.port),), "name": name, "timeouts": PROMPT}
        agent = Agent(AgentConfig(**{**defaults, **config}), services)
        await self.nursery.start(self._run, agent)
        await agent.linked.wait()
        return agent

    async def _run(self, program: Server | Agent, *, task_status: trio.TaskStatus[Any]) -> None:
        with trio.CancelScope() as scope:
            self._scopes[program] = scope
            await program.run(task_status=task_status)
        self._scopes.pop(program, None)

    def kill(self, agent: Agent) -> None:
        for link in list(agent.sync.links.values()):
            link.drop("killed")
        self._scopes[agent].cancel()

    async def service(self, talk: Talk) -> Service:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=1024)
        service = Service(listener.socket.getsockname()[1], talk)
        await self.nursery.start(trio.serve_listeners, service.serve, [listener])
        return service

    def closed_port(self) -> Target:
        """Where nobody listens, and nobody else will."""
        sock = socket.socket()
        self._sockets.append(sock)
        sock.bind(("127.0.0.1", 0))
        return Target("127.0.0.1", sock.getsockname()[1])

    # -- clients

    async def call(self, use: str = "connect") -> trio.SocketStream:
        """A connection to a front-end."""
        address = self.server.addresses[use][0]
        stream = await trio.open_tcp_stream(address.host, address.port)
        self._sockets.append(stream.socket)  # type: ignore[arg-type]  # it closes like one
        return stream

    async def ask(self, target: object, *headers: str) -> trio.SocketStream:
        """A connection on which a CONNECT was sent, and nothing read."""
        stream = await self.call()
        await stream.send_all(head(target, *headers))
        return stream

    async def connect(self, target: object, *headers: str) -> trio.SocketStream:
        """A connection through CONNECT; the reply was read."""
        stream = await self.ask(target, *headers)
        await expect(stream, ESTABLISHED)
        return stream

    def client(self, **config: Any) -> AbstractAsyncContextManager[Client]:
        """A client of the server, for ``async with``."""
        return open_client(str(self.server.addresses["links"][0]), **config)

    def client_links(self) -> list[Link]:
        """The server's ends of the links that it has with clients."""
        return [link for link in self.server._links if link.peer is not None and link.peer.role == "client"]

    # -- moments

    async def idle(self) -> None:
        """Return when the server has no connection, and nobody does anything."""
        await self.server.life.open.wait_value(0)
        await wait_all_tasks_blocked()

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


@asynccontextmanager
async def open_house() -> AsyncIterator[House]:
    async with trio.open_nursery() as nursery:
        house = House(nursery)
        try:
            yield house
        finally:
            house.close()
            nursery.cancel_scope.cancel()


# -- what clients do and see


def forward(target: Target, agent: str | None = None) -> Forward:
    return Forward(LOOPBACK, target, agent)


def head(target: object, *headers: str) -> bytes:
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def reset(stream: trio.SocketStream) -> None:
    """Close so that the other side sees a reset."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


async def receive_exactly(stream: trio.SocketStream, size: int) -> bytes:
    """So many bytes, or fewer if the other side ends."""
    data = bytearray()
    while len(data) < size and (piece := await stream.receive_some(size - len(data))):
        data += piece
    return bytes(data)


async def receive_all(stream: trio.SocketStream) -> bytes:
    """Everything up to the end."""
    return b"".join([data async for data in stream])


async def expect(stream: trio.SocketStream, wanted: bytes) -> None:
    """Read so many bytes, which must be these."""
    data = await receive_exactly(stream, len(wanted))
    if data != wanted:
        raise LookupError(f"{data!r} instead of {wanted!r}")


async def talks(stream: trio.SocketStream, words: bytes = b"hello") -> bool:
    """Whether an echo comes back: False if the connection was reset."""
    with suppress(trio.BrokenResourceError):
        await stream.send_all(words)
        return await receive_exactly(stream, len(words)) == words
    return False


async def refusal(stream: trio.SocketStream, method: str = "CONNECT") -> tuple[int, dict[bytes, bytes], str]:
    """Status, headers and body of a reply that ends the connection, as an HTTP client understands it."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="x:1", headers=[("Host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(await receive_all(stream))
    client.receive_data(b"")
    response, body = client.next_event(), b""
    while isinstance(event := client.next_event(), h11.Data):
        body += event.data
    if not isinstance(response, h11.Response) or not isinstance(event, h11.EndOfMessage):
        raise LookupError(f"no whole reply: {response!r} {event!r}")
    return response.status_code, dict(response.headers), body.decode()


# -- what a process holds


def descriptors() -> int:
    gc.collect()  # a selector is closed when nobody knows it any more
    return len(os.listdir("/dev/fd"))


def tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


async def ended(program: Server | Agent) -> int:
    """The exit code, when it has ended."""
    await program.life.phase.wait_value(Phase.EXIT)
    return program.life.exit_code
