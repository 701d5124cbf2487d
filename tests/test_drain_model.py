"""Why draining is said twice and acknowledged twice: the exchange in small, in every order in which it can happen.

One server, one or two agents, a FIFO each way between the server and each agent, and two dials. A step is: an agent
does something of its own accord, somebody takes the next message, or the server gets a dial. All orders are tried.
What decides is real: ``Backends`` and ``Backend`` choose, mark and acknowledge, ``AgentDrain`` says and counts; here
are only the links, when an agent moves on (``Variant``), and the second try of a dial, which waits in ``Backends.dial``.

A dial is **lost** if, when nothing can happen any more,

- it has no answer; or
- its answer is that the link was lost: its agent left on purpose, and said nothing to it; or
- it was refused although the server had seen its agent as ACTIVE when it chose it, so nobody had been warned; or
- it was refused although an agent that was not asked was not FINAL.

So a dial that was sent to the last agent, known to be draining, and was refused because that had said FINAL by then,
is not lost: it has its answer at once, and nobody could have served it.
Of two active agents the first is preferred: it is the one that leaves, and the other way round nothing is at stake.
"""

from __future__ import annotations

import logging
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import pytest

from tunnel.address import Target
from tunnel.backends import Backend, Backends
from tunnel.config import Claims
from tunnel.drain import AgentDrain, DrainPhase
from tunnel.errors import NoBackend
from tunnel.frames import Drain, DrainAck, Packet
from tunnel.handshake import Identity
from tunnel.link import Link
from tunnel.pools import BackendState

TARGET = Target("db.internal", 5432)
SERVED, REFUSED, LINK_LOST = "served", "refused", "link lost"


class Variant(Enum):
    """How an agent leaves. In all of them it waits for what it has begun to serve."""

    NO_ACK = "says so, refuses what comes from then on, and goes"
    ONE_ACK = "says so, serves until that is acknowledged, and goes"
    TWO_ACKS = "says so, serves until that is acknowledged; says final, refuses until that is; and goes"


class End:
    """One end of a link, as ``Backend`` and ``AgentDrain`` know it; ``out`` is on its way to the other end."""

    def __init__(self, peer: Identity | None = None) -> None:
        self.peer, self.session, self.streams, self.why = peer, self, 0, "gone"
        self.out: deque[Packet | tuple[str, int]] = deque()

    def send_control(self, packet: Packet | tuple[str, int]) -> None:
        self.out.append(packet)

    def flush(self) -> None: ...


class Agent:
    """An agent that may leave at any time, if ``leaves``, and the server's backend for it."""

    def __init__(self, number: int, backends: Backends, leaves: bool) -> None:
        self.leaves, self.gone = leaves, False
        self.serving: set[int] = set()
        self.end = End()
        self.drain = AgentDrain(self.links, self.remaining)
        self.backend = Backend(backends)
        identity = Identity("agent", f"edge-{number}", f"{number:032x}", claims=Claims(priority=number))
        self.backend.link = cast(Link, End(identity))
        self.backend.on_linked()

    def links(self) -> list[Link]:
        return [cast(Link, self.end)]

    def remaining(self) -> tuple[float, int]:
        return 1.0, len(self.serving)

    @property
    def to_server(self) -> deque[Any]:
        return self.end.out

    @property
    def to_agent(self) -> deque[Any]:
        return cast(End, self.backend.link).out


@dataclass
class Dial:
    """A dial: the states in which it found its agents, by their place; and what became of it."""

    asked: dict[int, BackendState] = field(default_factory=dict)
    answer: str | None = None
    lost: bool = False


class World:
    def __init__(self, variant: Variant, agents: str, second_try: bool) -> None:
        self.variant, self.second_try = variant, second_try
        self.backends = Backends()
        self.agents = [Agent(number, self.backends, word == "leaves") for number, word in enumerate(agents.split())]
        self.dials = [Dial(), Dial()]

    def key(self) -> str:
        """Equal for worlds that have the same future, and the same dials lost."""
        agents = [
            (one.drain, one.backend.state, one.gone, sorted(one.serving), list(one.to_server), list(one.to_agent))
            for one in self.agents
        ]
        return repr((agents, self.dials))

    # -- what can happen

    def steps(self) -> list[tuple[str, int]]:
        found = [("dial", number) for number, dial in enumerate(self.dials) if not dial.asked and not dial.answer]
        for number, agent in enumerate(self.agents):
            if agent.to_server:
                found.append(("server takes from", number))
            if agent.gone:
                continue
            if agent.to_agent:
                found.append(("agent takes", number))
            if agent.serving:
                found.append(("answer", number))
            if agent.leaves and self.moves_on(agent):
                found.append(("move on", number))
        return found

    def moves_on(self, agent: Agent) -> bool:
        phase, acked = agent.drain.phase, not agent.drain.unacked
        if phase is DrainPhase.ACTIVE:
            return True
        return not agent.serving and (acked or self.variant is Variant.NO_ACK)

    def step(self, what: str, number: int) -> None:
        if what == "dial":
            return self.choose(number)
        agent = self.agents[number]
        if what == "move on":
            self.move_on(agent)
        elif what == "answer":
            agent.to_server.append((SERVED, agent.serving.pop()))
        elif what == "agent takes":
            self.agent_takes(agent, agent.to_agent.popleft())
        else:
            self.server_takes(number, agent, agent.to_server.popleft())
        return None

    # -- an agent

    def move_on(self, agent: Agent) -> None:
        if agent.drain.phase is DrainPhase.ACTIVE:
            agent.drain.drain("signal")
        elif agent.drain.phase is DrainPhase.SOFT and self.variant is Variant.TWO_ACKS:
            agent.drain.final()
        else:
            agent.gone = True
            agent.to_server.append(("gone", 0))

    def agent_takes(self, agent: Agent, message: Packet | tuple[str, int]) -> None:
        if isinstance(message, DrainAck):
            agent.drain.acked(cast(Link, agent.end), message)
        elif isinstance(message, tuple):
            refuses_from = DrainPhase.SOFT if self.variant is Variant.NO_ACK else DrainPhase.FINAL
            if agent.drain.phase is refuses_from:
                agent.to_server.append((REFUSED, message[1]))
            else:
                agent.serving.add(message[1])

    # -- the server

    def server_takes(self, number: int, agent: Agent, message: Drain | tuple[str, int]) -> None:
        if isinstance(message, Drain):
            agent.backend.on_control(message)
        elif message[0] != "gone":
            self.answered(message[1], message[0])
        else:
            agent.backend.on_end()
            for which, dial in enumerate(self.dials):
                if dial.answer is None and list(dial.asked)[-1:] == [number]:
                    self.answered(which, LINK_LOST)

    def answered(self, number: int, answer: str) -> None:
        """What an agent said of a dial, or the end of its link did."""
        dial = self.dials[number]
        if answer == SERVED:
            dial.answer = SERVED
        elif len(dial.asked) == 1 and self.second_try:
            self.choose(number, answer)
        else:
            self.give_up(dial, answer)

    def choose(self, number: int, before: str = REFUSED) -> None:
        dial = self.dials[number]
        besides = self.agents[next(iter(dial.asked))].backend.instance if dial.asked else None
        try:
            backend = self.backends.decide(TARGET, besides=besides).backend
        except NoBackend:
            self.give_up(dial, before)
            return
        place = [agent.backend for agent in self.agents].index(backend)
        dial.asked[place] = backend.state
        self.agents[place].to_agent.append(("dial", number))

    def give_up(self, dial: Dial, answer: str) -> None:
        others = [agent.backend.state for place, agent in enumerate(self.agents) if place not in dial.asked]
        dial.answer = answer
        dial.lost = (
            answer == LINK_LOST
            or BackendState.ACTIVE in dial.asked.values()
            or not {BackendState.ACTIVE, BackendState.DRAINING}.isdisjoint(others)
        )


def ends(start: World) -> list[World]:
    """Every world in which nothing can happen any more."""
    found, seen, unvisited = [], {start.key()}, [start]
    while unvisited:
        world = unvisited.pop()
        steps = world.steps()
        if not steps:
            found.append(world)
        for step in steps:
            following = deepcopy(world)
            following.step(*step)
            if following.key() not in seen:
                seen.add(following.key())
                unvisited.append(following)
    return found


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "tunnel.backends")  # it warns of each world in which the last agent drains


@pytest.mark.parametrize(
    ("variant", "agents", "second_try", "loses"),
    [
        (Variant.NO_ACK, "leaves", True, True),
        (Variant.NO_ACK, "leaves stays", False, True),
        (Variant.NO_ACK, "leaves stays", True, False),  # the second try hides it, while there is somebody for it
        (Variant.ONE_ACK, "leaves stays", False, False),
        (Variant.ONE_ACK, "leaves", True, True),
        (Variant.ONE_ACK, "leaves leaves", True, True),
        (Variant.TWO_ACKS, "leaves stays", False, False),
        (Variant.TWO_ACKS, "leaves", False, False),
        (Variant.TWO_ACKS, "leaves leaves", False, True),  # the first is final while the second still serves
        (Variant.TWO_ACKS, "leaves leaves", True, False),
    ],
)
def test_which_ways_of_leaving_lose_dials(variant: Variant, agents: str, second_try: bool, loses: bool) -> None:
    found = ends(World(variant, agents, second_try))
    lost = [world.dials for world in found if any(dial.lost or not dial.answer for dial in world.dials)]
    assert bool(lost) is loses, lost[:1]


@pytest.mark.parametrize("answers", [{SERVED}, {SERVED, REFUSED}, {REFUSED}])
def test_dials_meet_the_last_agent_before_and_after_it_is_final(answers: set[str]) -> None:
    found = ends(World(Variant.TWO_ACKS, "leaves", True))
    assert any({dial.answer for dial in world.dials if dial.asked} == answers for world in found)


def test_an_agent_that_leaves_and_the_server_agree_in_the_end() -> None:
    for world in ends(World(Variant.TWO_ACKS, "leaves stays", True)):
        leaving, staying = world.agents
        assert (leaving.gone, leaving.backend.state) == (True, BackendState.GONE)
        assert (staying.gone, staying.backend.state) == (False, BackendState.ACTIVE)
