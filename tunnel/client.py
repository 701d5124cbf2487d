"""The client: dials targets through a server, many streams over one link.

    NO LINK --dial--> LINKING, servers in order --the first that takes us--> LINKED --link ended--> NO LINK
       ^--------------- none does: NoServer --+                                      |
                                              +------------- GOAWAY: link elsewhere -+

Rules that hold here:

- There is a link when one is needed: the first dial makes it, and so does the first after it was lost. Dials that
  come meanwhile wait for the same attempt.
- A dial whose link is lost before the answer goes once over a new one, within its deadline. No byte has moved by then.
- A server that is leaving keeps the streams it has. New dials go over a new link as soon as there is one.
- What was sent on a stream, and closed, is on its way when the client ends; streams that are still open are reset.
- The link has a task of its own, outside the caller's scopes: what fails in the body of ``open_client`` arrives as it
  was raised, and closing a stream still works while a cancellation unwinds.

This file must not know what the streams are for, or a server's insides.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import trio

from tunnel import logs
from tunnel.address import Target
from tunnel.certificates import ClientTls
from tunnel.config import ClientConfig, parse_agent_name
from tunnel.connect import Connector
from tunnel.errors import (
    AuthFailed,
    ConfigError,
    DialTimeout,
    LinkLost,
    LinkStopped,
    NoServer,
    RefusedDraining,
    TunnelError,
)
from tunnel.handshake import DiallingHandshake
from tunnel.identity import Identity, new_instance
from tunnel.limits import Limits, Timeouts
from tunnel.link import Link
from tunnel.outflow import Outflow, all_sent, all_taken
from tunnel.packets import GoAway, GoAwayAck, Packet
from tunnel.secure import Dialling
from tunnel.stream import TunnelStream

log = logs.get_logger(__name__)

_PATIENCE = 3.0  # seconds that a server gets while there is another one to try
_AGAIN = 0.5  # seconds between two looks for another server, when the one that is linked is leaving
_GOODBYE = 1.0  # seconds that the last words to servers may take


class _Attempt:
    """One way through the list of servers. Many dials may wait for it."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.link: Link | None = None
        self.cause = "the client was closed"  # unless something else ends it


class Client:
    """A client of one or more servers. Made by ``open_client``, or run as a task: ``await nursery.start(client.run)``.

    Attributes:
        config: what it was made with.
        link: the link that new dials go over, or the last such.
        secure: what it shows to servers, and what it takes them for.

    Raises:
        ConfigError: a file of tokens or certificates is not taken.
    """

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.link: Link | None = None
        self._links: set[Link] = set()  # all that are up: servers that are leaving keep theirs
        self._connector = Connector()
        self.secure = Dialling("client", config.token_file, config.tls)
        self._instance = new_instance()
        self._attempt: _Attempt | None = None
        self._running = trio.Event()
        self._ended = trio.Event()
        self._closed = False
        self._nursery: trio.Nursery

    def __repr__(self) -> str:
        state = "closed" if self._closed else "linking" if self._attempt else repr(self.link)
        return f"<Client {self.config.name} {state}>"

    async def run(self, *, task_status: trio.TaskStatus[Client] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the link until ``aclose`` is called; ``task_status.started(self)`` as soon as ``dial`` can be."""
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self.secure.run)
                self._running.set()
                task_status.started(self)
                await trio.sleep_forever()
        finally:
            self._closed = True
            self._ended.set()

    async def aclose(self) -> None:
        """Leave, and end ``run``. What was sent goes first, within the shutdown time; if cancelled, within a second."""
        self._closed = True
        try:
            with trio.move_on_after(self.config.timeouts.shutdown):
                await self.settle()
        finally:
            with trio.move_on_after(_GOODBYE, shield=True):
                await self.settle()
            with trio.move_on_after(4 * _GOODBYE, shield=True):  # more than goodbyes and the links' ends take
                await self.leave()
                await self._running.wait()
                self._nursery.cancel_scope.cancel()
                await self._ended.wait()

    @property
    def unsent(self) -> bool:
        """Whether something is queued that did not go yet."""
        return not all_taken(self._ways())

    async def settle(self) -> None:
        """Wait until that is not so."""
        await all_sent(self._ways)

    def _ways(self) -> Iterator[Outflow]:
        return (link.outflow for link in self._links)

    async def leave(self, seconds: float = _GOODBYE) -> None:
        """Say goodbye, within so many seconds; nothing can be dialled any more.

        Streams that are open are reset, but for those that have sent EOF: what they sent is delivered.
        """
        self._closed = True
        async with trio.open_nursery() as nursery:
            for link in self._links:
                nursery.start_soon(partial(link.close, "leaving", "the client is leaving", seconds=seconds))

    # -- dialling

    async def dial(
        self,
        host: str,
        port: int,
        *,
        agent: str | None = None,
        timeout: float = 10.0,  # noqa: ASYNC109  # it is told to the server and the agent
    ) -> TunnelStream:
        """A stream to ``host:port``, as an agent reaches it: of all agents, or of those named ``agent``.

        ``timeout`` is in seconds, for everything up to the answer; the server has a limit of its own (10 s). If
        cancelled, the server and the agent are told, and no stream is left.

        Raises:
            NoServer: no server could be linked to.
            NoBackend: no agent is linked to the server that could serve the target.
            Refused, Unreachable, DnsError, Denied: the agent could not, or may not, reach the target.
            DialTimeout: there was no answer in time.
            TooMany: the server or the agent has as many streams or dials as it takes.
            LinkLost, RefusedDraining: a link was lost on the way, or somebody on it is leaving; dial again.
            DialProtocolError: the answer made no sense.
            ConfigError: the host, port, agent or timeout is not one; nothing was sent.
            trio.ClosedResourceError: the client was closed.
        """
        target = Target(host, port)
        options = {} if agent is None else {"agent": parse_agent_name(agent)}
        if not 0 < timeout < math.inf:
            raise ConfigError(f"{timeout!r} is not a time-out; taken: seconds, more than 0")
        try:
            with trio.fail_after(timeout) as scope:
                return await self._dial(target, scope.deadline, options)
        except trio.TooSlowError:
            raise DialTimeout(f"{target}: no answer within {timeout:g} s") from None

    async def _dial(self, target: Target, deadline: float, options: dict[str, Any]) -> TunnelStream:
        link = await self.connect()
        try:
            return await _dial_over(link, target, deadline, options)
        except (LinkLost, RefusedDraining) as error:
            if link.why is None and not link.going:  # it is the server that says so, of an agent
                raise
            log.debug("dial goes over a new link", target=target, cause=error)
        return await _dial_over(await self.connect(besides=link), target, deadline, options)

    # -- the link

    async def connect(self, besides: Link | None = None) -> Link:
        """The link that is up, or a new one: what ``dial`` does first. If cancelled, the attempt goes on.

        ``besides`` is one that is of no use any more.

        Raises:
            NoServer: no server could be linked to.
            trio.ClosedResourceError: the client was closed.
        """
        if self._closed:
            raise trio.ClosedResourceError("this client was closed")
        await self._running.wait()
        if self.link is not None and self.link.why is None and self.link is not besides:
            return self.link
        if self._attempt is None:
            self._attempt = _Attempt()
            self._nursery.start_soon(self._try_servers, self._attempt)
        attempt = self._attempt
        await attempt.over.wait()
        if attempt.link is None:
            raise NoServer(attempt.cause)
        return attempt.link

    async def _try_servers(self, attempt: _Attempt) -> None:
        causes = []
        try:
            for server in self.config.servers:
                try:
                    self.link = attempt.link = await self._link_to(server)
                    return
                except TunnelError as error:
                    causes.append(f"{server}: {error}")
                    if isinstance(error, AuthFailed):
                        log.warning("link failed", server=server, cause=error, **error.facts)
                    else:
                        log.debug("link failed", server=server, cause=error)
            attempt.cause = "; ".join(causes)
        except Exception as error:  # a fault of ours
            log.exception("fault in a client")
            attempt.cause = f"internal fault: {error!r}"
        finally:
            self._attempt = None
            attempt.over.set()

    async def _link_to(self, server: Target) -> Link:
        is_last = server == self.config.servers[-1]
        seconds = self.config.timeouts.handshake if is_last else min(_PATIENCE, self.config.timeouts.handshake)
        with trio.move_on_after(seconds):
            sock = await self._connector.connect(server.host, server.port)
            transport = await self.secure.transport(sock, server.host)
            link = Link(
                transport,
                DiallingHandshake(self._identity(), self.secure.token, transport.binding),
                limits=self.config.limits,
                timeouts=self.config.timeouts,
                on_control=lambda packet: self._control(server, link, packet),
                on_end=lambda: self._lost(server, link),
            )
            await self._nursery.start(link.run)
            if link.why is None:
                self._links.add(link)
            log.info("linked", server=server)
            return link
        raise DialTimeout(f"no link within {seconds:g} s")

    def _identity(self) -> Identity:
        return Identity("client", self.config.name, self._instance, body_limit=self.config.limits.body)

    def _control(self, server: Target, link: Link, packet: Packet) -> None:
        if isinstance(packet, GoAway):
            link.session.send_control(GoAwayAck(packet.phase))
            if not link.going:
                link.going = True
                log.info("server leaving", server=server)
                self._nursery.start_soon(self._move_from, link)

    async def _move_from(self, link: Link) -> None:
        """Have new dials go elsewhere as soon as possible, if there will be any; the old link ends with its streams."""
        while link.why is None and self.link is link and not self._closed:
            try:
                await self.connect(besides=link)
            except NoServer:
                await trio.sleep(_AGAIN)
        await link.open_streams.wait_value(0)
        await link.close("leaving", "the client has linked elsewhere")

    def _lost(self, server: Target, link: Link) -> None:
        self._links.discard(link)
        if link.peer is not None and not isinstance(link.why, LinkStopped):
            log.info("link lost", server=server, cause=link.why)


async def _dial_over(link: Link, target: Target, deadline: float, options: dict[str, Any]) -> TunnelStream:
    seconds = deadline - trio.current_time()
    return await link.dial(target.host, target.port, seconds=seconds, options=options)


@asynccontextmanager
async def running(config: ClientConfig) -> AsyncIterator[Client]:
    """An async context manager that yields a client; leaving the block ends it, see ``Client.aclose``."""
    client = Client(config)
    trio.lowlevel.spawn_system_task(client.run)
    try:
        yield client
    finally:
        await client.aclose()


@asynccontextmanager
async def open_client(
    *servers: str,
    token_file: str | None = None,
    tls: ClientTls | None = None,
    limits: Limits | None = None,
    timeouts: Timeouts | None = None,
) -> AsyncIterator[Client]:
    """An async context manager that yields a ``Client`` of the servers, each ``HOST:PORT``, in the order tried.

    The first dial makes the link, and says if none can be made. Leaving the block ends it, see ``Client.aclose``.
    For ``token_file`` and ``tls`` see ``ClientConfig``.

    Raises:
        ConfigError: a server is not of that form, or there is none; or a file is not taken.
    """
    addresses = tuple(map(Target.parse, servers))
    given = ClientConfig(addresses, token_file=token_file, tls=tls)
    config = replace(given, limits=limits or given.limits, timeouts=timeouts or given.timeouts)
    async with running(config) as client:
        yield client


@asynccontextmanager
async def dial(
    server: str,
    host: str,
    port: int,
    *,
    agent: str | None = None,
    timeout: float = 10.0,  # noqa: ASYNC109  # as in Client.dial
    token_file: str | None = None,
    tls: ClientTls | None = None,
) -> AsyncIterator[TunnelStream]:
    """An async context manager that yields one stream to ``host:port``, over a link of its own, and closes both.

    Raises: what ``open_client`` and ``Client.dial`` raise.
    """
    given = open_client(server, token_file=token_file, tls=tls)
    async with given as client, await client.dial(host, port, agent=agent, timeout=timeout) as stream:
        yield stream
