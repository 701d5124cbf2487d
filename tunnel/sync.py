"""The sync loop: keeps one link to each server, wherever the servers are found.

    RUNNING --admin drain--> DRAINING --undrain--> RUNNING        RUNNING, DRAINING --run() was cancelled--> STOPPED

A *door* is one configured server name. It may have several addresses, and behind an address may be several servers
(a load balancer). Servers say how many they are; while fewer are linked, the door's addresses are dialled again. A
server that is linked already refuses the link as a duplicate, before anything costly, and says which it is.

Rules that hold here:

- Names are resolved again at every attempt. At most one attempt per address is in progress, back-off included.
- Failures back off with full jitter, capped, and start anew after a link was stable. Duplicates have a back-off of
  their own, short and slowly growing: behind a random balancer the missing server is a few tries away.
- A link that ends is restored while the address that led there is in the name, or fewer servers are linked than there
  are; one whose server is gone from both is not. Links that are up are never given up.
- While DRAINING lost links are restored, still draining, and no more are made than there were.
- A server that said GOAWAY counts as gone: another one is linked to first, and the old link stays while it lasts.
- Everything waits for events: a link that ended, an attempt that is over, a count that changed.

This file must not know streams, targets, or what a link is used for.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum

import trio

from tunnel import logs
from tunnel.address import Target
from tunnel.connect import Address, Connector
from tunnel.errors import (
    AuthFailed,
    DialError,
    DialTimeout,
    HandshakeRefused,
    LinkClosed,
    LinkStopped,
    RemoteProtocolError,
    TunnelError,
)
from tunnel.limits import Timeouts
from tunnel.link import Link
from tunnel.transport import SocketTransport, Transport

log = logs.get_logger(__name__)

_RESOLVE_AGAIN = 30.0  # seconds after which a name is looked at again although nothing happened
_DUPLICATE_FIRST, _DUPLICATE_GROWTH = 0.02, 1.1  # seconds; some 20 tries in the first half second


async def _plain(sock: socket.socket, host: str) -> Transport:
    return SocketTransport(sock)


OnFailure = Callable[[TunnelError, bool], None]
"""Told of each failed attempt, and whether every server has failed by now."""
Secure = Callable[[socket.socket, str], Awaitable[Transport]]
"""What a link to a host runs over, on a connected socket; raises ``LinkClosed``. Closes the socket where it fails."""
MakeLink = Callable[[Transport, Callable[[], None], Callable[[], None]], Link]
"""A link, with its ``on_linked`` and ``on_end``."""


class SyncState(Enum):
    """See the head of this file."""

    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"


class Backoff:
    """Full jitter: each delay is random between nothing and a bound that grows up to a cap.

    Attributes:
        attempt: how many delays there were since the last reset.
    """

    def __init__(self, first: float, most: float, growth: float = 2.0) -> None:
        self.attempt = 0
        self._first, self._most, self._growth = first, most, growth
        self._bound = first

    def next(self) -> float:
        """Seconds to wait now."""
        delay = random.uniform(0, self._bound)  # noqa: S311  # spreads load, protects nothing
        self.attempt += 1
        self._bound = min(self._most, self._bound * self._growth)
        return delay

    def reset(self) -> None:
        """Begin anew."""
        self.attempt = 0
        self._bound = self._first


class _Door:
    """One configured server name, and what is known of the servers behind it.

    Attributes:
        count: how many servers there are, as they say.
        servers: ids of those that were reached through it.
        leads_to: the server that each address led to last.
        busy: addresses with an attempt in progress, its back-off included.
        lost: addresses whose link was lost since.
        missing: how many links were lost, or to servers that are leaving, and not replaced since.
        failed: whether an attempt has failed.
        changed: set when there may be something to do.
        link_lost: set when a link was lost; ends every wait after a failure, whose server may be another now.
    """

    def __init__(self, name: Target, timeouts: Timeouts) -> None:
        self.name = name
        self.count = 1
        self.servers: set[str] = set()
        self.leads_to: dict[Address, str] = {}
        self.busy: set[Address] = set()
        self.lost: set[Address] = set()
        self.missing = 0
        self.failed = False
        self.changed = trio.Event()
        self.link_lost = trio.Event()
        self._timeouts = timeouts
        self._backoffs: dict[Address | None, Backoff] = {}
        self._duplicates: dict[Address, Backoff] = {}

    async def pause(self, seconds: float) -> None:
        """Wait so long, or until a link is lost."""
        with trio.move_on_after(seconds):
            await self.link_lost.wait()

    def note_loss(self, server: str) -> None:
        """The link to a server was lost."""
        self.servers.discard(server)
        for backoff in self._duplicates.values():
            backoff.reset()
        self.hurry()
        self.changed.set()

    def hurry(self) -> None:
        """End every wait after a failure; not that before a lost link is made again."""
        self.link_lost.set()
        self.link_lost = trio.Event()

    def backoff(self, address: Address | None) -> Backoff:
        """After a failure at an address; None is for resolving the name."""
        first, most = self._timeouts.backoff_first, self._timeouts.backoff_max
        return self._backoffs.setdefault(address, Backoff(first, most))

    def duplicates(self, address: Address) -> Backoff:
        """After an address led to a server that is linked already."""
        most = self._timeouts.backoff_max
        return self._duplicates.setdefault(address, Backoff(_DUPLICATE_FIRST, most, _DUPLICATE_GROWTH))


class SyncLoop:
    """Keeps one link to each server.

    Args:
        servers: where they are found.
        secure: what a link runs over; a plain socket if not given.
        make_link: a link; it is run by the loop.
        on_failure: told of failed attempts.

    Attributes:
        links: the links that are up, by server id.
        ever_linked: whether there has been one.
        state: see the head of this file.
    """

    def __init__(
        self,
        servers: Sequence[Target],
        connector: Connector,
        timeouts: Timeouts,
        make_link: MakeLink,
        on_failure: OnFailure = lambda error, all_failed: None,
        secure: Secure = _plain,
    ) -> None:
        self.links: dict[str, Link] = {}
        self.ever_linked = False
        self.state = SyncState.RUNNING
        self._connector = connector
        self._timeouts = timeouts
        self._make_link = make_link
        self._secure = secure
        self._on_failure = on_failure
        self._doors = [_Door(server, timeouts) for server in servers]
        self._at_most: int | None = None
        self._door_of: dict[Link, _Door] = {}

    def __repr__(self) -> str:
        return f"<SyncLoop {self.state.name} links={len(self.links)}>"

    async def run(self, background: trio.Nursery) -> None:
        """Keep linked until cancelled, or stopped. The links run in ``background`` and outlive this."""
        try:
            async with trio.open_nursery() as nursery:
                for door in self._doors:
                    nursery.start_soon(self._keep, door, background)
        finally:
            self._enter(SyncState.STOPPED)

    def drain(self) -> None:
        """RUNNING -> DRAINING."""
        if self.state is SyncState.RUNNING:
            self._at_most = self._staying() + sum(door.missing for door in self._doors)
            self._enter(SyncState.DRAINING)

    def undrain(self) -> None:
        """DRAINING -> RUNNING: links that are missing are made."""
        if self.state is SyncState.DRAINING:
            self._at_most = None
            self._enter(SyncState.RUNNING)
            for door in self._doors:
                door.changed.set()

    def _enter(self, state: SyncState) -> None:
        if state is not self.state:
            self.state = state
            log.info(f"sync {state.value}", links=len(self.links))

    def hurry(self) -> None:
        """What failed may work now: end every back-off."""
        for door in self._doors:
            door.hurry()

    def told_count(self, link: Link) -> None:
        """A server says how many there are."""
        count = link.server_count
        for door in self._doors:
            if _server_id(link) in door.servers and door.count != count:
                log.info("server count", server=door.name, count=count)
                door.count = count
                door.changed.set()

    def going(self, link: Link) -> None:
        """The server of a link is leaving: link elsewhere, and keep this one."""
        if not link.going:
            link.going = True
            self._door_of[link].missing += 1
            log.info("server leaving", server_id=_server_id(link), links=len(self.links))
            for door in self._doors:
                door.changed.set()

    def _staying(self) -> int:
        return sum(not link.going for link in self.links.values())

    def _stays(self, server: str | None) -> bool:
        """Whether there is a link to a server, and it is not leaving."""
        link = self.links.get(server or "")
        return link is not None and not link.going

    # -- one door

    async def _keep(self, door: _Door, background: trio.Nursery) -> None:
        async with trio.open_nursery() as attempts:
            while True:
                door.changed = trio.Event()
                try:
                    addresses = await self._connector.resolve(door.name.host, door.name.port)
                except DialError as error:
                    await self._failed(door, door.backoff(None), error)
                    continue
                door.backoff(None).reset()
                for address in addresses:
                    if address not in door.busy and self._wants(door, address):
                        door.busy.add(address)
                        attempts.start_soon(self._attempt, door, address, background)
                with trio.move_on_after(_RESOLVE_AGAIN):
                    await door.changed.wait()

    def _wants(self, door: _Door, address: Address) -> bool:
        """Whether a link through an address is wanted now."""
        if self._at_most is not None and len(self.links) >= self._at_most:
            return False
        linked = sum(map(self._stays, door.servers))
        return not self._stays(door.leads_to.get(address)) or linked < door.count

    async def _attempt(self, door: _Door, address: Address, background: trio.Nursery) -> None:
        """One try, with the wait that is due before it if a link was lost, or after it if it failed."""
        try:
            if address in door.lost:
                door.lost.discard(address)
                backoff = door.backoff(address)
                delay = backoff.next()
                log.info("linking again", server=door.name, attempt=backoff.attempt, delay=f"{delay:.2f}s")
                await trio.sleep(delay)
            await self._link(door, address, background)
        except HandshakeRefused as error:
            if error.code == "duplicate":
                self._leads_to(door, address, error.text)
                await door.pause(door.duplicates(address).next())
            elif error.code == "leaving":  # it will be another server's soon
                await door.pause(door.backoff(address).next())
            else:
                await self._failed(door, door.backoff(address), error)
        except (DialError, LinkClosed, RemoteProtocolError) as error:
            await self._failed(door, door.backoff(address), error)
        finally:
            door.busy.discard(address)
            door.changed.set()

    async def _failed(self, door: _Door, backoff: Backoff, error: TunnelError) -> None:
        delay = backoff.next()
        facts: Mapping[str, str] = {}
        if isinstance(error, AuthFailed):  # only a change of somebody's files will help
            delay, facts = delay + self._timeouts.backoff_max, error.facts
        door.failed = True
        self._on_failure(error, all(each.failed for each in self._doors))
        said = {"attempt": backoff.attempt, "delay": f"{delay:.2f}s", "cause": error}
        log.warning("link failed", server=door.name, **said, **facts)
        await door.pause(delay)

    async def _link(self, door: _Door, address: Address, background: trio.Nursery) -> None:
        seconds = self._timeouts.handshake
        with trio.move_on_after(seconds) as scope:
            sock = await self._connector.connect_to(address)
            transport = await self._secure(sock, door.name.host)
        if scope.cancelled_caught:
            raise DialTimeout(f"no connection within {seconds:g} s")
        if not self._wants(door, address):  # any more: another address led there first, or a drain began
            await transport.aclose()
            return
        link = self._make_link(
            transport, lambda: self._linked(door, address, link), lambda: self._lost(door, address, link)
        )
        await background.start(link.run)

    def _leads_to(self, door: _Door, address: Address, server: str) -> None:
        door.leads_to[address] = server
        door.servers.add(server)

    def _linked(self, door: _Door, address: Address, link: Link) -> None:
        """A link is up; nothing that its peer sends after WELCOME has been looked at yet."""
        server = _server_id(link)
        self._leads_to(door, address, server)
        door.duplicates(address).reset()
        door.missing = max(0, door.missing - 1)
        self.links[server] = link
        self._door_of[link] = door
        self.ever_linked = True
        log.info("linked", server=door.name, server_id=server, links=len(self.links))
        self.told_count(link)

    def _lost(self, door: _Door, address: Address, link: Link) -> None:
        """A link has ended, or never came up."""
        if link.peer is None or self.links.get(_server_id(link)) is not link:
            return
        del self.links[_server_id(link)]
        door.lost.add(address)
        del self._door_of[link]
        door.missing += not link.going
        if trio.current_time() - link.since >= self._timeouts.stable:
            door.backoff(address).reset()
        if not isinstance(link.why, LinkStopped) and self.state is not SyncState.STOPPED:
            say = log.info if link.going else log.warning
            say("link lost", server=door.name, server_id=_server_id(link), cause=link.why)
        for each in self._doors:
            each.note_loss(_server_id(link))


def _server_id(link: Link) -> str:
    return link.peer.instance if link.peer else ""
