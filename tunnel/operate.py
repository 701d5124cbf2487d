"""What a running program can be asked and told by its operator: plain values, and the protocol that both programs keep.

Rules that hold here:

- A view is a copy: it does not change, and asking for it changes nothing.
- Times are seconds, sizes bytes. Fields are what the API calls them.
- Whatever is told is idempotent, and logged with its reason by whoever obeys.

This file must not know HTTP, or how any of it is found out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from tunnel.address import Target
from tunnel.credentials import Token
from tunnel.errors import TunnelError
from tunnel.readiness import Readiness
from tunnel.tally import Histogram

Measured = float | Histogram
"""A number as it is now, or a distribution of many."""


@dataclass(frozen=True, slots=True)
class DrainView:
    """How far a drain is. ``acked`` of ``servers`` know of it; ``remaining_s`` is None where there is no end."""

    state: str
    reasons: tuple[str, ...]
    open: int
    pending: int
    oldest_s: float
    remaining_s: float | None
    acked: int
    servers: int


@dataclass(frozen=True, slots=True)
class AgentView:
    """One backend of a server.

    Attributes:
        state: ``active``, ``draining`` or ``final``.
        address: from where it is linked.
        since_s: for how long it is linked.
        rtt_ms: the link's round trip, None before it was measured.
        sent, received: payload bytes to and from the agent, over all streams of the link.
        drain: what the agent said last of its drain; None if it does not drain, or has not said yet.
    """

    name: str
    instance: str
    state: str
    address: str
    since_s: float
    rtt_ms: float | None
    streams: int
    sent: int
    received: int
    identifiers: tuple[str, ...]
    default_route: bool
    priority: int
    drain: DrainView | None


@dataclass(frozen=True, slots=True)
class StreamView:
    """One open stream. ``sent``: bytes towards the target as the server sees it; ``number`` grows with each."""

    number: int
    use: str
    target: str
    agent: str
    state: str
    age_s: float
    sent: int
    received: int


class TooLate(TunnelError):
    """What was asked for cannot be done any more; the text says why."""


class Operated(Protocol):
    """A server or an agent, to its operator.

    Attributes:
        role: ``server`` or ``agent``.
        name: the agent's, or ``server``.
        instance: the process.
        version: of this package.
        switched_off: an operator wants no new work sent here, without a drain.
    """

    role: str
    name: str
    instance: str
    version: str
    switched_off: bool

    @property
    def admins(self) -> Sequence[Token]:
        """What whoever changes something must show one of; empty if nobody has to on this machine."""

    @property
    def readiness(self) -> Readiness:
        """Whether new work should be sent here."""

    def drain_view(self) -> DrainView:
        """How far this program's own drain is."""

    def drain_self(self, text: str, seconds: float | None, *, leave: bool) -> None:
        """Drain; with ``leave``, exit when drained or after so many seconds.

        Raises:
            TooLate: it is leaving for good, or (a server) cannot drain without leaving.
        """

    def undrain_self(self) -> None:
        """Take back what ``drain_self`` did.

        Raises:
            TooLate: it is leaving for good.
        """

    async def news(self) -> None:
        """Return when something about a drain has changed. What changes often, as what is open does, is no news."""

    def streams(self, after: int, most: int) -> list[StreamView]:
        """At most so many open streams with a greater number, oldest first."""

    def counts(self) -> Mapping[str, Measured | Mapping[tuple[str, ...], Measured]]:
        """Numbers for metrics, by the metric's name without its prefix, and by its labels' values where it has labels.

        A name that ends in ``_total`` only grows. See ``metrics.FAMILIES`` for all of them.
        """


class OperatedServer(Operated, Protocol):
    """What only a server can be asked and told."""

    def agents(self) -> Iterable[AgentView]:
        """All that are linked, in the order in which they linked."""

    def agent(self, name: str) -> list[AgentView]:
        """Those of one name."""

    def drain_agent(self, name: str, text: str, seconds: float = 0.0, *, leave: bool = False) -> int:
        """Have all agents of a name drain on all their servers; how many were told.

        ``seconds`` is the time they get, 0 for no end; with ``leave`` they exit then, or when they are drained.
        """

    def undrain_agent(self, name: str) -> int:
        """Have them stay after all; how many were told."""

    def explain(self, target: Target, agent: str | None) -> dict[str, object]:
        """How the target finds its agent now, as plain values."""


def is_server(operated: Operated) -> TypeGuard[OperatedServer]:
    """Whether it can be asked and told what only a server can."""
    return operated.role == "server"
