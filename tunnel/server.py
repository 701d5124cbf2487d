"""The server: owns the listeners, the links and the front-ends, and starts and ends them in order.

    STARTING --> READY --leave()--> LAME_DUCK --> DRAINING --> CUT --> CLOSING --> EXIT        (see ``lifecycle.py``)

Rules that hold here:

- A server that is leaving says GOAWAY(soft) to agents and clients, spread over a quarter of the lame duck: they link
  elsewhere, and keep what they have here. After GOAWAY(final) nothing new is served.
- Front-end listeners are in ``accepting``, their connections are ``connections``, and the link listener and the links
  are in ``background``: streams can finish while nothing new comes in.
- Every address that was really bound is said, in the log and in ``addresses``.
- A link that fails takes nothing with it but its own streams.

This file must not know the command line, or agents' insides.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from functools import partial

import trio

from tunnel import logs
from tunnel.address import ListenAddress, Target
from tunnel.backends import Backend, Backends
from tunnel.book import Book
from tunnel.bounds import Bounds, Seat
from tunnel.bridge import Bridge
from tunnel.config import ServerConfig
from tunnel.credentials import Token, Tokens
from tunnel.errors import (
    CUT,
    AuthFailed,
    ConfigError,
    HandshakeRefused,
    LinkClosed,
    RefusedDraining,
    RemoteProtocolError,
    TooMany,
    first_of,
)
from tunnel.frontends import ClientLinks, FrontEnds
from tunnel.handshake import AcceptingHandshake, welcome
from tunnel.identity import Identity
from tunnel.lifecycle import Lifecycle, Phase, Slices
from tunnel.link import Link
from tunnel.listen import Handler, Spawn, accept, admitted, bind, bound_address
from tunnel.outflow import Outflow, all_sent, all_taken
from tunnel.packets import DialReq, GoAway, GoAwayAck, Packet, milliseconds
from tunnel.relay import Switchboard
from tunnel.reload import Reloaded
from tunnel.secure import Accepting
from tunnel.stream import TunnelStream
from tunnel.tally import Traffic
from tunnel.users import Users, read_users

log = logs.get_logger(__name__)

_FINAL_ACK = 1.0  # seconds that links have for acknowledging GOAWAY(final)
_REAP = 60.0  # seconds without a byte after which a half-closed stream does not hold up leaving


def _follow_users(path: str) -> Reloaded[Users]:
    return Reloaded((path,), lambda: read_users(path))


class Server:
    """One server.

    Attributes:
        backends: the agents that are linked.
        server_count: how many servers there are in all; see ``set_server_count``.
        life: where it is between start and exit.
        bounds: what others can make it hold, and how often that was too much.
        secure: whom it takes, and what it shows.
        book: the streams that are open.
        carried: what links to agents have carried that are not there any more.
        addresses: what is really listened on, by use: ``links``, ``connect``, ``forward``; in the order configured.
    """

    slices = Slices(final=_FINAL_ACK, cut=3.0, close=1.0)

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.identity = Identity("server", "server", body_limit=config.limits.body)
        self.backends = Backends(config.strategies, fallback=config.drain_fallback)
        self.lame_duck = config.lame_duck
        self.server_count = config.server_count
        self.life = Lifecycle(self, config.timeouts.shutdown)
        self.addresses: dict[str, list[ListenAddress]] = {"links": [], "connect": [], "forward": []}
        self.bounds = Bounds(config.limits, trio.current_time)
        self._board = Switchboard()
        self._refusals = logs.Seldom(trio.current_time)
        self._bridge = Bridge(config.limits.window)
        self.book = Book()
        self.carried = Traffic()
        self.secure = Accepting(config.token_file, config.tls, self._tokens_changed)
        self._users = _follow_users(config.connect_auth) if config.connect_auth else None
        if self._users:
            self.secure.followed.append(self._users)
        self._clients = ClientLinks(self.backends, self._bridge, self.book, config.dial_timeout, config.limits.window)
        self._links: dict[Link, AcceptingHandshake] = {}
        self._told: set[Link] = set()  # those that were told GOAWAY(soft)
        self._unacked: dict[Link, trio.Event] = {}  # those that owe an ack of GOAWAY(final)

    def __repr__(self) -> str:
        return f"<Server {self.life!r} {self.backends!r} links={len(self._links)}>"

    async def run(self, *, task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED) -> int:
        """Serve until ``life.leave()`` is called; the exit code. Cancelling ends everything at once.

        ``task_status.started(self)`` is called when everything listens.

        Raises:
            BindError: in an exception group, if an address cannot be listened on.
        """
        async with trio.open_nursery() as nursery:
            await nursery.start(self.life.run)
            task_status.started(self)
        return self.life.exit_code

    # -- the steps of its life

    async def start(self, life: Lifecycle) -> None:
        """See ``lifecycle.Program``."""
        life.background.start_soon(self.secure.run)
        takes_user = self._takes_user if self._users else None
        front_ends = FrontEnds(self._dial, self._board, self.book, self.bounds, self.config.timeouts, takes_user)
        spawn_link = admitted(self.bounds.handshakes, self._spawn_link)
        for listener in await self._listen("links", self.config.listen):
            life.background.start_soon(accept, listener, self._link, spawn_link)
        if self.config.connect is not None:
            spawn = admitted(self.bounds.heads, life.spawn)
            await self._open("connect", self.config.connect, front_ends.connect, spawn)
        for forward in self.config.forwards:
            await self._open("forward", forward.listen, front_ends.forward(forward), life.spawn, target=forward.target)

    def _takes_user(self, shown: str) -> bool:
        """Whether the credentials of somebody who uses CONNECT are taken."""
        return self._users is None or self._users.value.takes(shown)

    async def _dial(self, target: Target, agent: str | None) -> TunnelStream:
        return await self.backends.dial(target, self.config.dial_timeout, agent)

    async def _open(self, use: str, address: ListenAddress, handler: Handler, spawn: Spawn, **facts: object) -> None:
        for listener in await self._listen(use, address, **facts):
            self.life.accepting.start_soon(accept, listener, handler, spawn)

    async def _listen(self, use: str, address: ListenAddress, **facts: object) -> list[socket.socket]:
        listeners = await bind(address)
        for listener in listeners:
            self.addresses[use].append(bound_address(listener))
            log.info("listening", use=use, address=bound_address(listener), **facts)
        return listeners

    def announce(self) -> None:
        """See ``lifecycle.Program``."""
        self.life.background.start_soon(self._say_go_away, self.lame_duck / 4)
        self.life.background.start_soon(self._reap)

    async def _say_go_away(self, seconds: float) -> None:
        links = self.links
        for link in links:
            self._tell_go_away(link)
            await trio.sleep(seconds / len(links))

    def _tell_go_away(self, link: Link) -> None:
        if link not in self._told and link in self._links:
            self._told.add(link)
            link.session.send_control(GoAway("soft", milliseconds(self.life.remaining)))
            link.flush()

    async def _reap(self) -> None:
        while True:
            self._board.reap()
            self._bridge.reap()
            await trio.sleep(_REAP)

    async def soft(self) -> None:
        """See ``lifecycle.Program``. Links are told from ``announce`` on, and need not answer."""
        for link in self.links:
            self._tell_go_away(link)

    @property
    def unsent(self) -> bool:
        """See ``lifecycle.Program``."""
        return not all_taken(self._ways())

    async def settle(self) -> None:
        """See ``lifecycle.Program``."""
        await all_sent(self._ways)

    def _ways(self) -> Iterator[Outflow]:
        return (link.outflow for link in self._links)

    async def final(self) -> None:
        """See ``lifecycle.Program``."""
        self._unacked = {link: trio.Event() for link in self.links}
        for link in list(self._unacked):  # telling one may find it broken
            link.session.send_control(GoAway("final", milliseconds(self.life.remaining)))
            link.flush()
        with trio.move_on_after(_FINAL_ACK):
            while self._unacked:
                await next(iter(self._unacked.values())).wait()

    async def cut(self, seconds: float) -> None:
        """See ``lifecycle.Program``."""
        text = "the server is leaving, and the time is over"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._board.cut, CUT, text, seconds)
            nursery.start_soon(self._bridge.cut, CUT, text, seconds)

    async def close(self, seconds: float) -> None:
        """See ``lifecycle.Program``."""
        async with trio.open_nursery() as nursery:
            for link in self._links:
                nursery.start_soon(partial(link.close, "leaving", "the server is leaving", seconds=seconds))

    def tally(self) -> dict[str, int]:
        """See ``lifecycle.Program``."""
        return {"redispatched": self.backends.redispatched.total(), "fallback": self.backends.fallbacks}

    # -- links

    @property
    def links(self) -> list[Link]:
        """All whose peer is known, of agents and of clients."""
        return [link for link in self._links if link.peer is not None]

    def _spawn_link(self, handler: Handler, sock: socket.socket, seat: Seat) -> bool:
        self.life.background.start_soon(handler, sock, seat)
        return True

    def _tokens_changed(self, tokens: Tokens) -> None:
        """Whoever proved what is not taken any more loses the link."""
        for link, handshake in self._links.items():
            if link.peer is not None and not handshake.still_valid(tokens):
                log.warning("token gone", peer=link.peer.name, address=link.address, **handshake.facts)
                text = "the token is not taken any more"
                self.life.background.start_soon(link.close, AuthFailed.code, text)

    def set_server_count(self, count: int) -> None:
        """How many servers there are in all has changed: tell every agent that is linked, and those that come.

        Raises:
            ConfigError: fewer than one.
        """
        if count < 1:
            raise ConfigError(f"{count} is not a number of servers; taken: 1 or more")
        self.server_count = count
        for link, handshake in self._links.items():
            handshake.servers = count
            if link.peer is not None:
                link.session.send_control(welcome(self.identity, count))
                link.flush()

    def _admit(self, peer: Identity, token: Token | None) -> None:
        """Whether this peer may link; before anything about it is kept."""
        if self.life.leaving:
            raise HandshakeRefused("leaving", "the server is leaving")
        backend = self.backends.of_instance(peer.instance)
        if backend and token and not self._same(backend, peer, token):
            raise AuthFailed("this instance is linked under another name or token", token.facts)
        if self.identity.instance in peer.linked or self._crossed(backend):
            raise HandshakeRefused("duplicate", self.identity.instance)

    def _same(self, backend: Backend, peer: Identity, token: Token) -> bool:
        """Whether a peer may be the process behind a backend: an instance is no secret, and its link would be lost."""
        proved = self._links[backend.link].token
        return proved is not None and proved.id == token.id and backend.name == peer.name

    def _crossed(self, backend: Backend | None) -> bool:
        """Whether the agent has a link that it may not have known of when it said HELLO: through another address."""
        return backend is not None and trio.current_time() - backend.link.since < self.config.timeouts.handshake

    async def _link(self, sock: socket.socket, seat: Seat) -> None:
        """One link, from its accepted socket to its end; the seat is among those that are not linked yet."""
        source = str(seat.source)
        try:
            with seat:
                await self._run_link(sock, seat, source)
        except* HandshakeRefused as group:
            self._log_refused(source, first_of(group))
        except* (LinkClosed, RemoteProtocolError) as group:
            self._log_refused(source, first_of(group))
        except* Exception:
            log.exception("fault in a link")

    def _log_refused(self, source: str, error: BaseException) -> None:
        """Strangers may come as often as they like: the log has a line a minute for each source and credential."""
        if isinstance(error, HandshakeRefused) and not isinstance(error, AuthFailed):
            log.debug("link refused", address=source, cause=error)
            return
        facts: Mapping[str, str] = error.facts if isinstance(error, AuthFailed) else {}
        if times := self._refusals.times((source, type(error), facts.get("token"))):
            # also whoever only looks whether the port is open
            say = log.info if isinstance(error, LinkClosed) else log.warning
            say("link refused", address=source, times=times, cause=error, **facts)

    async def _run_link(self, sock: socket.socket, seat: Seat, source: str) -> None:
        with trio.move_on_after(self.config.timeouts.handshake) as scope:
            transport = await self.secure.transport(sock)
        if scope.cancelled_caught:
            self.bounds.hit("handshake_time", source=source)
            raise LinkClosed("TLS: the handshake took too long")
        backend = Backend(self.backends)
        handshake = AcceptingHandshake(
            self.identity, self.server_count, self._admit, self.secure.tokens, transport.binding
        )
        link = backend.link = Link(
            transport,
            handshake,
            limits=self.config.limits,
            timeouts=self.config.timeouts,
            on_dial=partial(self._dialled, handshake),
            on_control=lambda packet: self._control(backend, packet),
            on_linked=lambda: self._linked(backend, seat),
            on_end=lambda: self._ended(backend),
            bounds=self.bounds,
        )
        self._links[link] = handshake
        try:
            await link.run()
        finally:
            del self._links[link]
            self._told.discard(link)
            if link.peer is not None and link.peer.role != "client":
                self.carried.add(link.session)

    def _linked(self, backend: Backend, seat: Seat) -> None:
        """Who linked is known. A client's link serves no dials, and so never becomes a backend."""
        seat.leave()
        peer = backend.link.peer
        if peer is not None and peer.role == "client":
            log.debug("client linked", client=peer.name, instance=peer.instance)
        else:
            backend.on_linked()

    def _control(self, backend: Backend, packet: Packet) -> None:
        if not isinstance(packet, GoAwayAck):
            backend.on_control(packet)
        elif packet.phase == "final":
            self._acked(backend.link)

    def _acked(self, link: Link) -> None:
        acked = self._unacked.pop(link, None)
        if acked is not None:
            acked.set()

    def _ended(self, backend: Backend) -> None:
        backend.on_end()
        self._acked(backend.link)

    def _dialled(self, handshake: AcceptingHandshake, stream: TunnelStream, request: DialReq) -> None:
        """A client asks for a stream. After the lame duck nothing new is taken, as by the other front-ends."""
        try:
            place = self.bounds.admit(stream.core.session)
        except TooMany as error:
            stream.refuse(error)
            return
        late = self.life.phase.value is Phase.DRAINING
        if late or not self.life.spawn(self._clients.serve, stream, request, place, handshake.token):
            place.leave()
            stream.refuse(RefusedDraining("the server is leaving"))
