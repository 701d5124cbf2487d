"""The operator's desk: what ``operate.py`` lets one ask and tell, answered from the parts of a server or an agent.

Rules that hold here:

- Nothing is kept here but the switch of ``switched_off``; everything else is looked up when it is asked for.
- What is told goes to the part whose business it is, which does it and logs it.

This file must not know HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict

import trio

from tunnel import logs
from tunnel.address import Target
from tunnel.agent import Agent, AgentState
from tunnel.backends import Backend
from tunnel.book import view_of
from tunnel.frames import DrainStatus
from tunnel.lifecycle import Phase
from tunnel.operate import AgentView, DrainView, StreamView, TooLate
from tunnel.readiness import Readiness
from tunnel.server import Server

log = logs.get_logger(__name__)


class ServerDesk:
    """See ``operate.OperatedServer``."""

    role = name = "server"

    def __init__(self, server: Server) -> None:
        self.instance = server.identity.instance
        self.switched_off = False
        self._server = server

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

    def undrain_self(self, text: str) -> None:
        """Nothing to take back; unless it is too late."""
        if self._server.life.leaving:
            raise TooLate("the server is leaving")

    def streams(self, after: int, most: int) -> list[StreamView]:
        """A page of what is open."""
        return [view_of(entry) for entry in self._server.book.page(after, most)]

    def counts(self) -> dict[str, float]:
        """Numbers for metrics."""
        life, streams, backends = self._server.life, len(self._server.book.entries), self._server.backends
        return {
            "open_streams": streams,
            "pending_dials": life.open.value - streams,
            "oldest_stream_seconds": life.oldest,
            "drain_cut_streams_total": life.cuts,
            "dial_fallback_total": backends.fallbacks,
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

    def undrain_agent(self, name: str, text: str) -> int:
        """Have them stay after all."""
        return self._command(name, "undrain", text)

    def _command(self, name: str, action: str, text: str, seconds: float = 0.0, *, leave: bool = False) -> int:
        backends = self._server.backends.named(name)
        log.info("command", action=action, agent=name, text=text, backends=len(backends))
        for backend in backends:
            backend.command(action, text, seconds, leave=leave)
        return len(backends)

    def explain(self, target: Target, agent: str | None) -> dict[str, object]:
        """The decision, and what was considered."""
        explanation = self._server.backends.explain(target, agent)
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

    def __init__(self, agent: Agent) -> None:
        self.name = agent.config.name
        self.instance = agent.instance
        self.switched_off = False
        self._agent = agent

    @property
    def readiness(self) -> Readiness:
        """Whether dials should be sent here."""
        return Readiness.of(
            starting=self._agent.state.value is AgentState.STARTING,
            draining=self._agent.draining.draining or self._agent.life.leaving,
            no_server=not self._agent.sync.links,
            switched_off=self.switched_off,
        )

    def drain_view(self) -> DrainView:
        """As the agent tells its servers."""
        agent = self._agent
        reasons = tuple(sorted(agent.draining.reasons))
        return _drain_view(agent.status, reasons, agent.remaining if agent.limited else None)

    def drain_self(self, text: str, seconds: float | None, *, leave: bool) -> None:
        """Drain on all servers."""
        if self._agent.life.leaving:
            raise TooLate("the agent is leaving")
        log.info("command", action="drain", text=text)
        self._agent.drain(seconds=math.inf if seconds is None else seconds, leave=leave)

    def undrain_self(self, text: str) -> None:
        """Stay after all."""
        if self._agent.life.leaving:
            raise TooLate("the agent is leaving")
        log.info("command", action="undrain", text=text)
        self._agent.undrain()

    def streams(self, after: int, most: int) -> list[StreamView]:
        """A page of what is open."""
        return [view_of(entry) for entry in self._agent.dials.book.page(after, most)]

    def counts(self) -> dict[str, float]:
        """Numbers for metrics."""
        agent = self._agent
        return {
            "open_streams": len(agent.dials.book.entries),
            "pending_dials": agent.dials.pending,
            "oldest_stream_seconds": agent.life.oldest,
            "drain_cut_streams_total": agent.life.cuts,
            "drain_ack_timeouts_total": agent.draining.ack_timeouts,
            "dials_served_total": agent.dials.served,
        }


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
        rtt_ms=None if link.rtt is None else link.rtt * 1000,
        streams=backend.streams,
        sent=link.session.sent,
        received=link.session.received,
        identifiers=tuple(map(str, claims.identifiers)),
        default_route=claims.default_route,
        priority=claims.priority,
        drain=None if backend.status is None else _drain_view(backend.status),
    )
