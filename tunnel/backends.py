"""The backend manager: which agents are linked, which of them should serve a dial, and dialling through it.

    ACTIVE --mark (DRAIN, or ``draining`` in HELLO)--> DRAINING --DRAIN(final)--> FINAL --link ended--> GONE
       ^----------------unmark (UNDRAIN)------------------+       ACTIVE, DRAINING --link ended--> GONE

Rules that hold here:

- Two passes: ACTIVE backends over all strategies in order, then DRAINING ones over all strategies in order. FINAL ones
  are in no pool. Who matches a target is ``matching.py``'s, one of them is chosen in ``pools.py``.
- Nothing here scans backends to serve a dial.
- Between a pick and the registration of its dial on the link there is no await: one thread is the only lock.
- A dial whose link is lost, or whose agent is leaving or has too many, before the answer goes once to another instance,
  within the first deadline. No byte of the client has moved by then.

This file must not know front-ends, sockets, or how an agent came to be linked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import trio

from tunnel import logs
from tunnel.address import Target
from tunnel.config import STRATEGIES, Claims
from tunnel.errors import DialError, DialTimeout, LinkLost, NoBackend, RefusedDraining, TooMany
from tunnel.identity import Identity
from tunnel.link import Link
from tunnel.matching import Index, Key, keys_of, spelled
from tunnel.packets import Drain, DrainAck, DrainCmd, DrainStatus, Packet, Undrain, UndrainAck, milliseconds
from tunnel.pools import BackendState
from tunnel.stream import TunnelStream
from tunnel.tally import Histogram

log = logs.get_logger(__name__)

_POOLED = (BackendState.ACTIVE, BackendState.DRAINING)


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


class Decision(NamedTuple):
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


class Backends:
    """All linked agents of a server.

    Args:
        strategies: in the order tried; see ``docs/strategies.md``.
        fallback: whether draining backends serve what no active one can.

    Attributes:
        index: who matches what.
        fallbacks: dials that went to a draining backend because nothing else matched.
        redispatched: dials that went to a second backend, by the code of what happened at the first.
        dials: all that ended, by code (``ok``, or an error's) and the state of the backend asked last, or ``none``.
        durations: how long they took.
        news: set when an agent came, went, or said something of its drain; replaced by a new event then.
    """

    def __init__(self, strategies: tuple[str, ...] = STRATEGIES, *, fallback: bool = True) -> None:
        self.index: Index[Backend] = Index(strategies)
        self._passes = _POOLED if fallback else (BackendState.ACTIVE,)
        self.fallbacks = 0
        self.redispatched: Counter[str] = Counter()
        self.dials: Counter[tuple[str, str]] = Counter()
        self.durations = Histogram(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10)
        self.news = trio.Event()
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
        backend.keys = keys_of(backend.name, backend.claims)
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
        if old in _POOLED:
            self.index.remove(backend, backend.keys, old)
        if state in _POOLED:
            self.index.add(backend, backend.keys, state)

    def tell_news(self) -> None:
        """Wake whoever waits for ``news``."""
        self.news.set()
        self.news = trio.Event()

    # -- choosing

    def decide(self, target: Target, agent: str | None = None, besides: str | None = None) -> Decision:
        """Who should serve a dial now: of all, or of those named ``agent``; not of the instance ``besides``.

        Raises:
            NoBackend: nobody matches.
        """
        for state in self._passes:
            for strategy, key in self.index.matches(target, agent):
                backend = self.index.buckets[key].pick(state, besides)
                if backend is not None:
                    return Decision(backend, strategy, spelled(key), state is BackendState.DRAINING)
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
            stream, backend = await self._dial(target, began, seconds, agent, window)
            code, asked = "ok", backend.state.value
        except DialError as error:
            code, asked = error.code, error.state
            raise
        finally:
            self.dials[code, asked] += 1
            self.durations.observe(trio.current_time() - began)
        return stream

    async def _dial(
        self, target: Target, began: float, seconds: float, agent: str | None, window: int | None
    ) -> tuple[TunnelStream, Backend]:
        decision = self.decide(target, agent)
        try:
            return await self._dial_through(decision, target, seconds, seconds, window), decision.backend
        except (LinkLost, RefusedDraining, TooMany) as error:
            first = error
        decision = self._decide_again(decision, target, agent, first)
        self.redispatched[first.code] += 1
        log.debug("dial goes to another", target=target, agent=decision.backend.name, cause=first.code)
        left = began + seconds - trio.current_time()
        return await self._dial_through(decision, target, left, seconds, window), decision.backend

    def _decide_again(self, tried: Decision, target: Target, agent: str | None, error: DialError) -> Decision:
        try:
            return self.decide(target, agent, besides=tried.backend.instance)
        except NoBackend:
            if isinstance(error, TooMany):  # the only one is there all the same
                raise error from None
            raise

    async def _dial_through(
        self, decision: Decision, target: Target, left: float, seconds: float, window: int | None
    ) -> TunnelStream:
        agent = decision.backend.name
        if decision.fallback:
            self._note_fallback(decision.backend, target)
        try:
            stream = await decision.backend.link.dial(target.host, target.port, seconds=left, window=window)
        except DialError as error:
            _asked(error, decision.backend)
            raise
        except trio.TooSlowError:
            raise _asked(DialTimeout(f"{target}: no answer within {seconds:g} s"), decision.backend) from None
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
        return self.index.named(agent)


def _asked(error: DialError, backend: Backend) -> DialError:
    """The same error, which says who was asked."""
    error.agent, error.state = backend.name, backend.state.value
    return error
