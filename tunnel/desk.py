"""The operator's desk: what ``operate.py`` lets one ask and tell, answered from the parts of a server or an agent.

Rules that hold here:

- Nothing is kept here but the switch of ``switched_off``; everything else is looked up when it is asked for.
- What is told goes to the part whose business it is, which does it and logs it.
- The programs are known by their types alone, so that a process which is a server does not load the agent.

This file must not know HTTP.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import trio
from trio_util import wait_any

from tunnel import __version__, logs
from tunnel.address import Target
from tunnel.book import view_of
from tunnel.bounds import Bounds
from tunnel.credentials import Token
from tunnel.explain import explain
from tunnel.lifecycle import Phase
from tunnel.link import Link
from tunnel.operate import AgentView, DrainView, Measured, StreamView, TooLate
from tunnel.packets import DrainStatus
from tunnel.readiness import Readiness
from tunnel.tally import Traffic

if TYPE_CHECKING:
    from tunnel.agent import Agent
    from tunnel.backends import Backend
    from tunnel.server import Server

log = logs.get_logger(__name__)

Counts = dict[str, Measured | dict[tuple[str, ...], Measured]]


class ServerDesk:
    """See ``operate.OperatedServer``."""

    role = name = "server"
    version = __version__

    def __init__(self, server: Server) -> None:
        self.instance = server.identity.instance
        self.switched_off = False
        self._server = server

    @property
    def admins(self) -> Sequence[Token]:
        """What whoever changes something must show one of."""
        return self._server.secure.admins

    @property
    def readiness(self) -> Readiness:
        """A server with none but draining agents is ready all the same, and says so."""
        backends = self._server.backends
        readiness = Readiness.of(
            starting=self._server.life.phase.value is Phase.STARTING,
            draining=self._server.life.leaving,
            no_agent=not backends.serving,
            switched_off=self.switched_off,
        )
        return Readiness(True, ("fallback_only",)) if readiness.ready and not backends.active else readiness

    def drain_view(self) -> DrainView:
        """A server that drains is one that leaves."""
        life, streams = self._server.life, len(self._server.book.entries)
        return DrainView(
            state=life.phase.value.value,
            reasons=("leaving",) if life.leaving else (),
            open=streams,
            pending=life.open.value - streams,
            oldest_s=life.oldest,
            remaining_s=life.remaining if life.leaving else None,
            acked=0,
            servers=0,
        )

    def drain_self(self, text: str, seconds: float | None, *, leave: bool) -> None:
        """Leave, within the server's own budget."""
        if not leave:
            raise TooLate("a server drains by leaving, and cannot come back from that: ask it to exit")
        log.info("command", action="leave", text=text)
        self._server.life.leave()

    def undrain_self(self) -> None:
        """Nothing to take back; unless it is too late."""
        if self._server.life.leaving:
            raise TooLate("the server is leaving")

    async def news(self) -> None:
        """Of the server itself, or of one of its agents."""
        await wait_any(self._server.backends.news.wait, self._server.life.phase.wait_transition)

    def streams(self, after: int, most: int) -> list[StreamView]:
        """A page of what is open."""
        return [view_of(entry) for entry in self._server.book.page(after, most)]

    def counts(self) -> Counts:
        """Numbers for metrics."""
        life, streams, backends = self._server.life, len(self._server.book.entries), self._server.backends
        links = self._server.links
        to_agents = [link for link in links if link.peer and link.peer.role != "client"]
        states = Counter(backend.state.value for backend in backends.all())
        return {
            "open_streams": streams,
            "pending_dials": life.open.value - streams,
            "oldest_stream_seconds": life.oldest,
            "drain_cut_streams_total": life.cuts,
            "backends": {(state,): states[state] for state in ("active", "draining", "final")},
            "dials_total": dict(backends.dials),
            "dial_duration_seconds": backends.durations,
            "dial_redispatch_total": {(cause,): times for cause, times in backends.redispatched.items()},
            "dial_fallback_total": backends.fallbacks,
            "bounds_total": _of_bounds(self._server.bounds),
            **_of_links(links, to_agents, self._server.carried),
        }

    def agents(self) -> Iterator[AgentView]:
        """All that are linked."""
        return map(_agent_view, self._server.backends.all())

    def agent(self, name: str) -> list[AgentView]:
        """Those of one name."""
        return [_agent_view(backend) for backend in self._server.backends.all() if backend.name == name]

    def drain_agent(self, name: str, text: str, seconds: float = 0.0, *, leave: bool = False) -> int:
        """One command drains on all servers; see ``Backend.command``."""
        return self._command(name, "drain", text, seconds, leave=leave)

    def undrain_agent(self, name: str) -> int:
        """Have them stay after all."""
        return self._command(name, "undrain")

    def _command(self, name: str, action: str, text: str = "", seconds: float = 0.0, *, leave: bool = False) -> int:
        backends = self._server.backends.named(name)
        log.info("command", action=action, agent=name, text=text, backends=len(backends))
        for backend in backends:
            backend.command(action, text, seconds, leave=leave)
        return len(backends)

    def explain(self, target: Target, agent: str | None) -> dict[str, object]:
        """The decision, and what was considered."""
        explanation = explain(self._server.backends, target, agent)
        chosen = explanation.decision
        decision = chosen and {
            "agent": chosen.backend.name,
            "instance": chosen.backend.instance,
            "strategy": chosen.strategy,
            "key": chosen.key,
            "fallback": chosen.fallback,
        }
        considered = [asdict(each) for each in explanation.considered]
        return {"target": str(target), "agent": agent, "decision": decision, "considered": considered}


class AgentDesk:
    """See ``operate.Operated``."""

    role = "agent"
    version = __version__

    def __init__(self, agent: Agent) -> None:
        self.name = agent.config.name
        self.instance = agent.instance
        self.switched_off = False
        self._agent = agent

    @property
    def admins(self) -> Sequence[Token]:
        """What whoever changes something must show one of."""
        return self._agent.secure.admins

    @property
    def readiness(self) -> Readiness:
        """Whether dials should be sent here."""
        return Readiness.of(
            starting=self._agent.state.value.value == "starting",
            draining=self._agent.draining.draining or self._agent.life.leaving,
            no_server=not self._agent.sync.links,
            switched_off=self.switched_off,
        )

    def drain_view(self) -> DrainView:
        """As the agent tells its servers."""
        watch = self._agent.watch
        reasons = tuple(sorted(watch.exchange.reasons))
        return _drain_view(watch.status, reasons, watch.remaining if watch.limited else None)

    def drain_self(self, text: str, seconds: float | None, *, leave: bool) -> None:
        """Drain on all servers."""
        if self._agent.life.leaving:
            raise TooLate("the agent is leaving")
        log.info("command", action="drain", text=text)
        self._agent.drain(seconds=math.inf if seconds is None else seconds, leave=leave)

    def undrain_self(self) -> None:
        """Stay after all."""
        if self._agent.life.leaving:
            raise TooLate("the agent is leaving")
        log.info("command", action="undrain")
        self._agent.undrain()

    async def news(self) -> None:
        """Of the agent's own drain."""
        await self._agent.state.wait_transition()

    def streams(self, after: int, most: int) -> list[StreamView]:
        """A page of what is open."""
        return [view_of(entry) for entry in self._agent.dials.book.page(after, most)]

    def counts(self) -> Counts:
        """Numbers for metrics. Of an agent's dials none asked a backend."""
        agent, dials = self._agent, self._agent.dials
        results = {"ok": dials.served, **dials.failed}
        links = list(agent.sync.links.values())
        return {
            "open_streams": len(dials.book.entries),
            "pending_dials": dials.pending,
            "oldest_stream_seconds": agent.life.oldest,
            "drain_cut_streams_total": agent.life.cuts,
            "drain_ack_timeouts_total": agent.draining.ack_timeouts,
            "drain_duration_seconds": {(outcome,): took for outcome, took in agent.watch.drains.items()},
            "dials_total": {(result, "none"): times for result, times in results.items()},
            "bounds_total": _of_bounds(agent.bounds),
            **_of_links(links, links, agent.carried),
        }


def _of_links(links: list[Link], carrying: Iterable[Link], ended: Traffic) -> Counts:
    """What all links hold; and what those between servers and agents carry, so that nothing is counted twice."""
    traffic = ended.with_those(link.session for link in carrying)
    return {
        "links": len(links),
        "queued_bytes": sum(link.session.out.queued for link in links),
        "bytes_total": {("sent",): traffic.sent, ("received",): traffic.received},
        "frames_total": {("sent",): traffic.frames_sent, ("received",): traffic.frames_received},
    }


def _of_bounds(bounds: Bounds) -> dict[tuple[str, ...], Measured]:
    return {(bound,): times for bound, times in bounds.hits.items()}


def _drain_view(status: DrainStatus, reasons: tuple[str, ...] = (), remaining: float | None = None) -> DrainView:
    return DrainView(
        state=status.state,
        reasons=reasons,
        open=status.open,
        pending=status.pending,
        oldest_s=status.oldest_ms / 1000,
        remaining_s=remaining,
        acked=status.acked,
        servers=status.servers,
    )


def _agent_view(backend: Backend) -> AgentView:
    link, claims = backend.link, backend.claims
    return AgentView(
        name=backend.name,
        instance=backend.instance,
        state=backend.state.value,
        address=link.address,
        since_s=trio.current_time() - link.since,
        rtt_ms=None if link.liveness.rtt is None else link.liveness.rtt * 1000,
        streams=backend.streams,
        sent=link.session.sent,
        received=link.session.received,
        identifiers=tuple(map(str, claims.identifiers)),
        default_route=claims.default_route,
        priority=claims.priority,
        drain=None if backend.status is None else _drain_view(backend.status),
    )
