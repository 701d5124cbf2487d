"""How a target finds its agent now, for people: the decision, every key that matches, and why each candidate is or is
not preferred.

Rules that hold here:

- Explaining changes nothing; the decision is the backend manager's own. Its cost grows with the candidates.

This file must not know dialling, or who asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from tunnel.address import Target
from tunnel.backends import Backend, Backends, Decision
from tunnel.errors import NoBackend
from tunnel.matching import Key, spelled
from tunnel.pools import BackendState

_EXPLAINED = 100  # candidates listed per key


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


def explain(backends: Backends, target: Target, agent: str | None = None) -> Explanation:
    """Explain the decision for a target, or for one that is to go through the agents of a name."""
    try:
        decision = backends.decide(target, agent)
    except NoBackend:
        return Explanation(target, None, ())  # under a key that matches there is always somebody
    matches = backends.index.matches(target, agent)
    return Explanation(target, decision, tuple(_consider(backends, *match, decision) for match in matches))


def _consider(backends: Backends, strategy: str, key: Key, decision: Decision) -> Considered:
    bucket = backends.index.buckets[key]
    chosen = (strategy, spelled(key)) == (decision.strategy, decision.key)
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
    return Considered(strategy, spelled(key), use, candidates)


def _verdict(backend: Backend, state: BackendState, decision: Decision) -> str:
    if backend is decision.backend:
        return "picked"
    if state is BackendState.DRAINING and not decision.fallback:
        return "passed over: draining, and another is active"
    if backend.priority > decision.backend.priority:
        return f"passed over: priority {backend.priority}, and one of priority {decision.backend.priority} serves"
    return "equal: each dial takes the better of two random ones"


_USE = {  # by whether it was chosen, and whether it has an active agent, or comes after a draining one that serves
    (True, True): "used: the first that has an active agent",
    (True, False): "used: the first, and no match has an active agent",
    (False, True): "not used: an earlier match serves",
    (False, False): "not used: all its agents are draining",
}
