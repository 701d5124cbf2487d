"""``tunnel forward``: local ports of a user's machine that lead to targets, through a server.

Rules that hold here:

- The ports are served as a server serves its forwarded ports: the same front-end, another way to dial.
- It listens whether or not a server can be reached now; a connection that finds none is reset, and the log says why.
- It leaves as a server does: nothing new, then open connections get the shutdown time, then the link says goodbye.

This file must not know the command line, or how a client finds its server.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from tunnel import logs
from tunnel.address import ListenAddress, Target
from tunnel.book import Book
from tunnel.bounds import Bounds
from tunnel.client import Client
from tunnel.config import ClientConfig, Forward
from tunnel.errors import CUT, NoServer
from tunnel.frontends import FrontEnds
from tunnel.lifecycle import Lifecycle, Slices
from tunnel.listen import accept, bind, bound_address
from tunnel.relay import Switchboard
from tunnel.stream import TunnelStream

log = logs.get_logger(__name__)


class Forwarder:
    """Forwarded ports over one client.

    Attributes:
        client: what dials.
        life: where it is between start and exit.
        addresses: what is really listened on, in the order given.
    """

    slices = Slices(final=0.0, cut=1.0, close=1.0)
    lame_duck = 0.0

    def __init__(self, config: ClientConfig, forwards: Sequence[Forward]) -> None:
        self.client = Client(config)
        self.life = Lifecycle(self, config.timeouts.shutdown)
        self.addresses: list[ListenAddress] = []
        self._config = config
        self._forwards = forwards
        self._board = Switchboard()
        self._bounds = Bounds(config.limits, trio.current_time)

    def __repr__(self) -> str:
        return f"<Forwarder {self.life!r} {self.client!r}>"

    async def start(self, life: Lifecycle) -> None:
        """See ``lifecycle.Program``."""
        await life.background.start(self.client.run)
        front_ends = FrontEnds(self._dial, self._board, Book(), self._bounds, self._config.timeouts)
        for forward in self._forwards:
            for listener in await bind(forward.listen):
                self.addresses.append(bound_address(listener))
                log.info("listening", use="forward", address=bound_address(listener), target=forward.target)
                life.accepting.start_soon(accept, listener, front_ends.forward(forward), life.spawn)
        life.accepting.start_soon(self._look_for_server)

    async def _look_for_server(self) -> None:
        """Say now, rather than at the first connection, that there is none."""
        try:
            await self.client.connect()
        except NoServer as error:
            log.warning("no server yet", cause=error)

    async def _dial(self, target: Target, agent: str | None) -> TunnelStream:
        return await self.client.dial(target.host, target.port, agent=agent)

    def announce(self) -> None:
        """See ``lifecycle.Program``. The server sees each connection end."""

    async def soft(self) -> None:
        """See ``lifecycle.Program``."""

    @property
    def unsent(self) -> bool:
        """See ``lifecycle.Program``."""
        return self.client.unsent

    async def settle(self) -> None:
        """See ``lifecycle.Program``."""
        await self.client.settle()

    async def final(self) -> None:
        """See ``lifecycle.Program``."""

    async def cut(self, seconds: float) -> None:
        """See ``lifecycle.Program``."""
        await self._board.cut(CUT, "the forwarder is leaving, and the time is over", seconds)

    async def close(self, seconds: float) -> None:
        """See ``lifecycle.Program``."""
        await self.client.leave(seconds)

    def tally(self) -> dict[str, int]:
        """See ``lifecycle.Program``."""
        return {}
