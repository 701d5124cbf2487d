"""A server made of frames, for agents that are to be told exactly this."""

from __future__ import annotations

import trio
from house import (
    PROMPT,
)

from tunnel.address import Target
from tunnel.agent import Agent
from tunnel.config import AgentConfig
from tunnel.frames import Decoder
from tunnel.handshake import welcome
from tunnel.identity import Identity
from tunnel.limits import Limits
from tunnel.packets import Packet


class RawServer:
    """A server made of frames, with an agent that has connected to it: does nothing by itself.

    Attributes:
        agent: it sends whatever there is credit for, however much is queued.
        stream: the agent's connection.
        received: bytes of DATA so far.
    """

    stream: trio.SocketStream

    def __init__(self, listener: trio.SocketListener) -> None:
        port = listener.socket.getsockname()[1]
        limits = Limits(high_water=1 << 30)
        door = Target("127.0.0.1", port)
        self.agent = Agent(AgentConfig((door,), "one", limits=limits, timeouts=PROMPT))
        self.received = 0
        self._listener = listener
        self._packets: list[Packet] = []

    async def accept(self) -> Packet:
        """Take the agent's next connection; its HELLO. What the last one had not been asked for is forgotten."""
        self.stream = await self._listener.accept()
        self._packets.clear()
        self._decoder = Decoder(Limits().body, self._packets.append, self._count)
        return await self.next()

    async def welcome(self, *packets: Packet) -> None:
        """Send WELCOME and more, and wait until the agent has seen it."""
        await self.send(welcome(Identity("server", "raw"), 1), *packets)
        await self.agent.linked.wait()

    async def next(self) -> Packet:
        """The next packet that is not DATA."""
        while not self._packets:
            self._decoder.feed(await self.stream.receive_some())
        return self._packets.pop(0)

    async def send(self, *packets: Packet) -> None:
        await self.stream.send_all(b"".join(packet.encode() for packet in packets))

    def _count(self, stream: int, data: memoryview) -> None:
        self.received += len(data)
