"""The backend manager: which agents are linked, which of them should serve a dial, and dialling through it.

    ACTIVE --mark (DRAIN, or ``draining`` in HELLO)--> DRAINING --DRAIN(final)--> FINAL --link ended--> GONE
       ^----------------unmark (UNDRAIN)------------------+       ACTIVE, DRAINING --link ended--> GONE

Rules that hold here:

- Two passes: ACTIVE backends over all strategies in order, then DRAINING ones over all strategies in order. FINAL ones
  are in no pool. Within ``destHost``: the exact host, then the longest suffix, then the longest CIDR.
- Nothing here scans backends to serve a dial. What a pick costs depends on the labels of a name and on how many
  different CIDR lengths are claimed, not on how many agents there are.
- Between a pick and the registration of its dial on the link there is no await: one thread is the only lock.
- A dial whose link is lost, or whose agent is leaving or has too many, before the answer goes once to another instance,
  within the first deadline. No byte of the client has moved by then.

This file must not know front-ends, sockets, or how an agent came to be linked.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import trio

from tunnel import logs
from tunnel.address import Identifier, Target, host_kind
from tunnel.config import STRATEGIES, Claims
from tunnel.errors import DialError, DialTimeout, LinkLost, NoBackend, RefusedDraining, TooMany
from tunnel.frames import Drain, DrainAck, DrainCmd, DrainStatus, Packet, Undrain, UndrainAck, milliseconds
from tunnel.identity import Identity
from tunnel.link import Link
from tunnel.pools import BackendState, Bucket
from tunnel.stream import TunnelStream
from tunnel.tally import Histogram

log = logs.get_logger(__name__)

Key = tuple[str, str | int, int]
"""What buckets go by: a kind, a value, and for networks (``cidr4``, ``cidr6``) the length of the prefix."""

_ANY: Key = ("any", "", 0)
_DEFAULT_ROUTE: Key = ("default-route", "", 0)
_EXPLAINED = 100  # candidates listed per key in an explanation


class Backend:
    """One agent link, as the backend manager sees it.

    Attributes:
        link: set by whoever makes the link, before it runs.
        state: see the head of this file.
        status: how far its drain is, as the agent said last.
    """

    __slots__ = ("_drain_seq", "keys", "link", "manager", "said_fallback", "state", "status")

    link: Link

    def __init__(self, manager: Backends) -> None:
        self.manager = manager
        self.state = BackendState.GONE
        self.keys: tuple[Key, ...] = ()
        self.status: DrainStatus | None = None
        self.said_fallback = False  # in the log, during this drain
        self._drain_seq = 0

    def __repr__(self) -> str:
        return f"<Backend {self.name} {self.instance[:8]} {self.state.name} streams={self.streams}>"

    @property
    def _peer(self) -> Identity:
        peer = self.link.peer
        assert peer is not None, "a backend is used when its link is up"  # noqa: S101
        return peer

    @property
    def name(self) -> str:
        """What the agent calls itself."""
        return self._peer.name

    @property
    def instance(self) -> str:
        """The agent's process."""
        return self._peer.instance

    @property
    def claims(self) -> Claims:
        """What the agent says it can serve."""
        return self._peer.claims

    @property
    def priority(self) -> int:
        """The agent's tier."""
        return self._peer.claims.priority

    @property
    def draining(self) -> bool:
        """Whether the agent said so when it linked."""
        return self._peer.draining

    @property
    def streams(self) -> int:
        """Streams open or being dialled."""
        return self.link.session.streams

    def on_linked(self) -> None:
        """The link is up."""
        self.manager.add(self)

    def on_end(self) -> None:
        """The link has ended."""
        self.manager.remove(self)

    def on_control(self, packet: Packet) -> None:
        """A packet about the link. DRAIN and UNDRAIN are done and acknowledged in one step."""
        match packet:
            case Drain():
                if self._is_news(packet.seq):
                    self.manager.mark(self, final=packet.phase == "final")
                self.link.session.send_control(DrainAck(packet.seq, packet.phase))
            case Undrain():
                if self._is_news(packet.seq):
                    self.manager.unmark(self)
                self.link.session.send_control(UndrainAck(packet.seq))
            case DrainStatus():
                self.status = packet
                self.manager.tell_news()

    def _is_news(self, seq: int) -> bool:
        """Whether it was said after all that was heard before."""
        newer = seq > self._drain_seq
        self._drain_seq = max(seq, self._drain_seq)
        return newer

    def command(self, action: str, text: str, seconds: float = 0.0, *, leave: bool = False) -> None:
        """Have the agent ``drain`` or ``undrain`` itself on all its servers; a drain is marked here at once.

        ``seconds`` is the time it gets, 0 for no end; with ``leave`` it exits then, or when it is drained.
        """
        if action == "drain":
            self.manager.mark(self)
        command = DrainCmd(self.instance, action, text, milliseconds(seconds), int(leave))
        self.link.session.send_control(command)
        self.link.flush()


@dataclass(frozen=True, slots=True)
class Decision:
    """Who serves a dial, and why.

    Attributes:
        strategy: which matched, or ``agent`` where the agent was asked for by name.
        key: what of the agent's claims matched.
        fallback: it is a draining one, since no active one matched anything.
    """

    backend: Backend
    strategy: str
    key: str
    fallback: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend under a key that matched, and what became of it: ``verdict`` is for people."""

    agent: str
    instance: str
    state: str
    priority: int
    streams: int
    verdict: str


@dataclass(frozen=True, slots=True)
class Considered:
    """One key that matched, in the order of preference; at most 100 of its candidates are listed."""

    strategy: str
    key: str
    verdict: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a target finds its agent now; ``decision`` is None where nothing matches."""

    target: Target
    decision: Decision | None
    considered: tuple[Considered, ...]


class Backends:
    """All linked agents of a server.

    Args:
        strategies: in the order tried; see ``docs/strategies.md``.
        fallback: whether draining backends serve what no active one can.

    Attributes:
        fallbacks: dials that went to a draining backend because nothing else matched.
        redispatched: dials that went to a second backend, by the code of what happened at the first.
        dials: all that ended, by code (``ok``, or an error's) and the state of the backend asked last, or ``none``.
        durations: how long they took.
        news: set when an agent came, went, or said something of its drain; replaced by a new event then.
    """

    def __init__(self, strategies: tuple[str, ...] = STRATEGIES, *, fallback: bool = True) -> None:
        self.strategies = strategies
        self._passes = _POOLED if fallback else (BackendState.ACTIVE,)
        self.fallbacks = 0
        self.redispatched: Counter[str] = Counter()
        self.dials: Counter[tuple[str, str]] = Counter()
        self.durations = Histogram(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10)
        self.news = trio.Event()
        self._buckets: dict[Key, Bucket[Backend]] = {}
        self._prefixes: dict[str, Counter[int]] = {"cidr4": Counter(), "cidr6": Counter()}
        self._suffixes = 0
        self._states: Counter[BackendState] = Counter()
        self._instances: dict[str, Backend] = {}

    def __repr__(self) -> str:
        return f"<Backends active={self.active} draining={self._states[BackendState.DRAINING]}>"

    def __len__(self) -> int:
        return self._states.total()

    @property
    def active(self) -> int:
        """How many backends are ACTIVE."""
        return self._states[BackendState.ACTIVE]

    @property
    def serving(self) -> int:
        """How many backends may be picked, be it as a fallback."""
        return sum(self._states[state] for state in self._passes)

    # -- membership

    def add(self, backend: Backend) -> None:
        """A link is up. One whose agent says that it is draining is never ACTIVE, not for one pick.

        An agent that links anew while an older link of the same process is here knows of no such link: it is dropped.
        """
        stale = self._instances.get(backend.instance)
        self._instances[backend.instance] = backend
        if stale is not None:
            stale.link.drop("the agent linked anew")
        draining = backend.draining
        backend.keys = tuple(_keys_of(backend))
        self._enter(backend, BackendState.DRAINING if draining else BackendState.ACTIVE)
        log.info("agent linked", agent=backend.name, instance=backend.instance, agents=len(self), draining=draining)

    def all(self) -> Iterator[Backend]:
        """All that are linked, in the order in which they linked."""
        return iter(list(self._instances.values()))

    def of_instance(self, instance: str) -> Backend | None:
        """The backend of an agent's process."""
        return self._instances.get(instance)

    def remove(self, backend: Backend) -> None:
        """Its link has ended. No effect on one that is GONE."""
        if backend.state is BackendState.GONE:
            return
        was_active = backend.state is BackendState.ACTIVE
        self._enter(backend, BackendState.GONE)
        if self._instances.get(backend.instance) is backend:
            del self._instances[backend.instance]
        cause = backend.link.why
        log.info("agent gone", agent=backend.name, instance=backend.instance, agents=len(self), cause=cause)
        if was_active:
            self._warn_if_fallback_only()

    def mark(self, backend: Backend, *, final: bool = False) -> None:
        """Avoid it: ACTIVE -> DRAINING; or, ``final``, use it no more. No way back from FINAL or GONE."""
        wanted = BackendState.FINAL if final else BackendState.DRAINING
        if backend.state is BackendState.ACTIVE or (final and backend.state is BackendState.DRAINING):
            was_active = backend.state is BackendState.ACTIVE
            self._enter(backend, wanted)
            if was_active:
                log.info("backend draining", agent=backend.name, instance=backend.instance, left_active=self.active)
                self._warn_if_fallback_only()

    def _warn_if_fallback_only(self) -> None:
        draining = self._states[BackendState.DRAINING]
        if draining and not self.active:
            log.warning("no active backend left", draining=draining)

    def unmark(self, backend: Backend) -> None:
        """DRAINING -> ACTIVE. No effect in any other state."""
        if backend.state is BackendState.DRAINING:
            self._enter(backend, BackendState.ACTIVE)
            backend.status, backend.said_fallback = None, False
            log.info("backend active", agent=backend.name, instance=backend.instance)

    def _enter(self, backend: Backend, state: BackendState) -> None:
        """Move between states, and so between pools."""
        old, backend.state = backend.state, state
        if old is not BackendState.GONE:
            self._states[old] -= 1
        if state is not BackendState.GONE:
            self._states[state] += 1
        self.tell_news()
        for key in backend.keys:
            if old in _POOLED:
                self._leave_bucket(key, backend, old)
            if state in _POOLED:
                self._enter_bucket(key, backend, state)

    def tell_news(self) -> None:
        """Wake whoever waits for ``news``."""
        self.news.set()
        self.news = trio.Event()

    def _enter_bucket(self, key: Key, backend: Backend, state: BackendState) -> None:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket()
            self._count(key, 1)
        bucket.add(backend, state)

    def _leave_bucket(self, key: Key, backend: Backend, state: BackendState) -> None:
        bucket = self._buckets[key]
        bucket.remove(backend, state)
        if not bucket:
            del self._buckets[key]
            self._count(key, -1)

    def _count(self, key: Key, change: int) -> None:
        """Know which suffixes and prefix lengths are worth looking for."""
        kind, _, bits = key
        if kind == "suffix":
            self._suffixes += change
        elif kind in self._prefixes:
            self._prefixes[kind][bits] += change
            self._prefixes[kind] = +self._prefixes[kind]  # without what fell to zero

    # -- choosing

    def decide(self, target: Target, agent: str | None = None, besides: str | None = None) -> Decision:
        """Who should serve a dial now: of all, or of those named ``agent``; not of the instance ``besides``.

        Raises:
            NoBackend: nobody matches.
        """
        for state in self._passes:
            for strategy, key in self._matches(target, agent):
                backend = self._buckets[key].pick(state, besides)
                if backend is not None:
                    return Decision(backend, strategy, _spelled(key), state is BackendState.DRAINING)
        raise NoBackend(self._why_none(target, agent, besides))

    def _why_none(self, target: Target, agent: str | None, besides: str | None) -> str:
        if not len(self):
            return "no agent is linked"
        other = "agent" if besides is None else "other agent"
        if self._states[BackendState.DRAINING] and BackendState.DRAINING not in self._passes:
            other += " that is not draining"
        if agent is not None:
            return f"no {other} named {agent} can take it now"
        return f"no {other} matches {target}"

    def _matches(self, target: Target, agent: str | None) -> Iterator[tuple[str, Key]]:
        """Strategies and keys under which somebody is, most preferred first."""
        buckets = self._buckets
        if agent is not None:
            if ("agent", agent, 0) in buckets:
                yield "agent", ("agent", agent, 0)
            return
        for strategy in self.strategies:
            for key in _KEYS_FOR[strategy](self, target.host):
                if key in buckets:
                    yield strategy, key

    def _host_keys(self, host: str) -> Iterator[Key]:
        kind = host_kind(host)
        yield kind, host, 0
        if kind == "host":
            yield from self._suffix_keys(host)
        else:
            yield from self._cidr_keys(host)

    def _cidr_keys(self, host: str) -> Iterator[Key]:
        kind, width = _family(":" in host)
        if self._prefixes[kind]:
            number = int(ipaddress.ip_address(host))
            for bits in sorted(self._prefixes[kind], reverse=True):
                yield kind, number >> (width - bits), bits

    def _suffix_keys(self, host: str) -> Iterator[Key]:
        dot = host.find(".") if self._suffixes else -1
        while dot >= 0:
            yield "suffix", host[dot:], 0
            dot = host.find(".", dot + 1)

    def _default_route_keys(self, _host: str) -> Iterator[Key]:
        yield _DEFAULT_ROUTE

    def _any_keys(self, _host: str) -> Iterator[Key]:
        yield _ANY

    def explain(self, target: Target, agent: str | None = None) -> Explanation:
        """The decision for a target, with every key that matches and why each candidate is or is not preferred.

        Changes nothing. Unlike a pick, its cost grows with the candidates.
        """
        try:
            decision = self.decide(target, agent)
        except NoBackend:
            return Explanation(target, None, ())  # under a key that matches there is always somebody
        considered = tuple(self._consider(strategy, key, decision) for strategy, key in self._matches(target, agent))
        return Explanation(target, decision, considered)

    def _consider(self, strategy: str, key: Key, decision: Decision) -> Considered:
        bucket = self._buckets[key]
        chosen = (strategy, _spelled(key)) == (decision.strategy, decision.key)
        an_active = bucket.pick(BackendState.ACTIVE) is not None
        use = _USE[chosen, an_active or (decision.fallback and not chosen)]
        candidates = tuple(
            Candidate(
                backend.name,
                backend.instance,
                state.value,
                backend.priority,
                backend.streams,
                _verdict(backend, state, decision) if chosen else use,
            )
            for backend, state in islice(bucket.members(), _EXPLAINED)
        )
        return Considered(strategy, _spelled(key), use, candidates)

    # -- dialling

    async def dial(
        self, target: Target, seconds: float, agent: str | None = None, window: int | None = None
    ) -> TunnelStream:
        """A stream to ``target`` through the backend that should serve it, within ``seconds``.

        ``window``: bytes that may come unasked, if not what the link's limits say.
        If cancelled, the agent is told, and no stream is left.

        Raises:
            DialError: ``NoBackend``, ``DialTimeout``, ``LinkLost``, or what the agent answered.
        """
        began = trio.current_time()
        code, asked = "cancelled", "none"
        try:
            stream, backend = await self._dial(target, seconds, agent, window)
            code, asked = "ok", backend.state.value
        except DialError as error:
            code, asked = error.code, error.state
            raise
        finally:
            self.dials[code, asked] += 1
            self.durations.observe(trio.current_time() - began)
        return stream

    async def _dial(
        self, target: Target, seconds: float, agent: str | None, window: int | None
    ) -> tuple[TunnelStream, Backend]:
        deadline = trio.current_time() + seconds
        with trio.CancelScope(deadline=deadline):
            decision = self.decide(target, agent)
            try:
                return await self._dial_through(decision, target, seconds, window), decision.backend
            except (LinkLost, RefusedDraining, TooMany) as error:
                first = error
            decision = self._decide_again(decision, target, agent, first)
            self.redispatched[first.code] += 1
            log.debug("dial goes to another", target=target, agent=decision.backend.name, cause=first.code)
            left = deadline - trio.current_time()
            return await self._dial_through(decision, target, left, window), decision.backend
        raise DialTimeout(f"{target}: no answer within {seconds:g} s")

    def _decide_again(self, tried: Decision, target: Target, agent: str | None, error: DialError) -> Decision:
        try:
            return self.decide(target, agent, besides=tried.backend.instance)
        except NoBackend:
            if isinstance(error, TooMany):  # the only one is there all the same
                raise error from None
            raise

    async def _dial_through(
        self, decision: Decision, target: Target, seconds: float, window: int | None
    ) -> TunnelStream:
        agent = decision.backend.name
        if decision.fallback:
            self._note_fallback(decision.backend, target)
        ms = max(1, milliseconds(seconds))
        try:
            stream = await decision.backend.link.dial(target.host, target.port, ms=ms, window=window)
        except DialError as error:
            error.agent, error.state = agent, decision.backend.state.value
            raise
        stream.via = agent
        log.debug("dialled", target=target, agent=agent, strategy=decision.strategy, key=decision.key)
        return stream

    def _note_fallback(self, backend: Backend, target: Target) -> None:
        self.fallbacks += 1
        if not backend.said_fallback:
            backend.said_fallback = True
            log.info("fallback to a draining agent", agent=backend.name, instance=backend.instance, target=target)

    def named(self, agent: str) -> list[Backend]:
        """All backends of one name, whatever their state; FINAL ones are not among them."""
        bucket = self._buckets.get(("agent", agent, 0))
        return [] if bucket is None else [backend for backend, _ in bucket.members()]


_USE = {  # by whether it was chosen, and whether it has an active agent, or comes after a draining one that serves
    (True, True): "used: the first that has an active agent",
    (True, False): "used: the first, and no match has an active agent",
    (False, True): "not used: an earlier match serves",
    (False, False): "not used: all its agents are draining",
}
_POOLED = (BackendState.ACTIVE, BackendState.DRAINING)
_KEYS_FOR = {
    "destHost": Backends._host_keys,
    "defaultRoute": Backends._default_route_keys,
    "default": Backends._any_keys,
}


def _keys_of(backend: Backend) -> Iterator[Key]:
    yield _ANY
    yield "agent", backend.name, 0
    if backend.claims.default_route:
        yield _DEFAULT_ROUTE
    for identifier in backend.claims.identifiers:
        yield _key_of(identifier)


def _key_of(identifier: Identifier) -> Key:
    if identifier.kind != "cidr":
        return identifier.kind, identifier.value, 0
    network = identifier.network
    kind, width = _family(network.version == 6)
    return kind, int(network.network_address) >> (width - network.prefixlen), network.prefixlen


def _family(is_v6: bool) -> tuple[str, int]:
    return ("cidr6", 128) if is_v6 else ("cidr4", 32)


def _spelled(key: Key) -> str:
    """The key as an identifier would be written."""
    kind, value, bits = key
    if isinstance(value, str):
        return f"{kind}={value}" if value else kind
    address = value << (_family(kind == "cidr6")[1] - bits)
    return f"cidr={ipaddress.IPv6Address(address) if kind == 'cidr6' else ipaddress.IPv4Address(address)}/{bits}"


def _verdict(backend: Backend, state: BackendState, decision: Decision) -> str:
    if backend is decision.backend:
        return "picked"
    if state is BackendState.DRAINING and not decision.fallback:
        return "passed over: draining, and another is active"
    if backend.priority > decision.backend.priority:
        return f"passed over: priority {backend.priority}, and one of priority {decision.backend.priority} serves"
    return "equal: each dial takes the better of two random ones"
