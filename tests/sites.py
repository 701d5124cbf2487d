"""An agent and the far end of each of its connections, made of frames: over memory, for a clock that jumps."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from typing import cast

import pytest
import trio
from stream_transport import StreamTransport
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from tunnel import secure
from tunnel.address import Target
from tunnel.agent import Agent
from tunnel.config import AgentConfig
from tunnel.connect import Address, Connector
from tunnel.errors import Refused
from tunnel.frames import Decoder
from tunnel.handshake import welcome
from tunnel.identity import Identity
from tunnel.limits import Limits, Timeouts
from tunnel.packets import DrainStatus, Hello, Packet


class Peer:
    """A server made of frames: the far end of one of the agent's connections."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._packets: deque[Packet] = deque()
        self._decoder = Decoder(Limits().body, self._packets.append, lambda stream, data: None)

    async def send(self, *packets: Packet) -> None:
        await self._stream.send_all(b"".join(packet.encode() for packet in packets))

    async def next(self) -> Packet:
        while not self._packets:
            self._decoder.feed(await self._stream.receive_some())
        return self._packets.popleft()


class Site:
    """An agent, and the far end of each connection that it makes, over memory.

    Attributes:
        refusing: nobody listens.
        peers: the far ends, in the order in which they were connected.
    """

    def __init__(self, *doors: str) -> None:
        self.refusing = False
        self.peers: list[Peer] = []
        servers = tuple(Target(door, 7400) for door in doors)
        self.agent = Agent(AgentConfig(servers, "one", timeouts=Timeouts(keepalive=1e6)))
        self.agent.sync._connector = cast(Connector, self)

    async def resolve(self, host: str, port: int) -> list[Address]:
        await trio.lowlevel.checkpoint()
        return [(int(socket.AF_INET), (host, port))]

    async def connect_to(self, address: Address) -> socket.socket:
        await trio.lowlevel.checkpoint()
        if self.refusing:
            raise Refused("nobody listens")
        near, far = memory_stream_pair()
        self.peers.append(Peer(far))
        return cast(socket.socket, near)

    async def link(self, number: int = 0) -> Peer:
        """Answer the agent's HELLO on one of its connections."""
        await wait_all_tasks_blocked()
        peer = self.peers[number]
        assert isinstance(await peer.next(), Hello)
        await peer.send(welcome(Identity("server", f"server-{number}"), 1))
        await wait_all_tasks_blocked()
        return peer

    @property
    def state(self) -> str:
        return self.agent.state.value.value


async def seen(peer: Peer) -> list[Packet]:
    """All packets that are there once nobody does anything. Takes a moment of the clock's time."""
    packets: list[Packet] = []
    with trio.move_on_after(0.001):
        while True:
            packets.append(await peer.next())
    return packets


def statuses(packets: list[Packet]) -> list[DrainStatus]:
    return [packet for packet in packets if isinstance(packet, DrainStatus)]


def run_site(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, *doors: str) -> Site:
    """One whose agent runs in the nursery."""
    monkeypatch.setattr(secure, "SocketTransport", StreamTransport)
    site = Site(*doors)
    nursery.start_soon(site.agent.run)
    return site


MakeSite = Callable[..., Site]
"""``run_site``, for so many doors."""


async def hold(agent: Agent, until: trio.Event) -> None:
    """A connection of the agent's, as a stream is."""
    agent.life.spawn(until.wait)
    await wait_all_tasks_blocked()
