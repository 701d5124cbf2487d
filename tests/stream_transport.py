"""A transport over any trio stream, so that links can be tested over memory, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from tunnel.transport import Buffer, More, Room, Take

_CHUNK = 64 * 1024


class StreamTransport:
    """It takes nothing at once: all bytes go through ``send``."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self.address = "a stream"
        self.binding = b""
        self._over = b""  # received, but there was no room

    async def receive(self, room: Room, take: Take) -> bool:
        """See ``Transport``."""
        while data := self._over or bytes(await self._stream.receive_some(_CHUNK)):
            view = room()[: len(data)]
            size = len(view)
            view[:] = data[:size]
            self._over = data[size:]
            if not take(size):
                return True
        return False

    def send_now(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """See ``Transport``."""
        return buffers

    async def send(self, more: More) -> None:
        """See ``Transport``."""
        while buffers := more():
            await self._stream.send_all(b"".join(buffers))

    async def linger(self) -> None:
        """Nothing: such a stream's own closing hands over what was sent."""

    async def aclose(self) -> None:
        """See ``Transport``."""
        await trio.aclose_forcefully(self._stream)
