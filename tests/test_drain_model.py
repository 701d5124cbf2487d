"""Why draining is said twice and acknowledged twice: the exchange in small, in every order in which it can happen.

One server, one or two agents, a FIFO each way between the server and each agent, and two dials. A step is: an agent
does something of its own accord, somebody takes the next message, or the server gets a dial. All orders are tried.
What decides is real: ``Backends`` and ``Backend`` choose, mark and acknowledge, ``AgentDrain`` says and counts. Only
the links are here, when an agent moves on (``Variant``), and the second try of a dial (which ``Backends.dial`` makes).

A dial is **lost** if, when nothing can happen any more,

- it has no answer; or
- its answer is that the link was lost: its agent left on purpose, and said nothing to it; or
- it was refused although its agent was ACTIVE to the server when it was chosen, so nobody had been warned; or
- it was refused although an agent that was not asked was not FINAL.

So a dial is not lost that went to the last agent while that was known to be draining, and was refused because it had
said FINAL by then: it has its answer at once, and nobody could have served it.
Of two active agents the one that leaves first is preferred, which is the worst case.
"""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import pytest

from tunnel.address import Target
from tunnel.backends import Backend, Backends
from tunnel.config import Claims
from tunnel.drain import AgentDrain, DrainPhase
from tunnel.errors import NoBackend
from tunnel.identity import Identity
from tunnel.link import Link
from tunnel.packets import Drain, DrainAck, Packet
from tunnel.pools import BackendState

SERVED, REFUSED, LINK_LOST = "served", "refused", "link lost"

Message = Packet | tuple[str, int]


class Variant(Enum):
    """How an agent leaves. In all of them it first answers what it has begun to serve."""

    NO_ACK = "says so, refuses what comes from then on, and goes"
    ONE_ACK = "says so, serves until that is acknowledged, and goes"
    TWO_ACKS = "says so, serves until that is acknowledged; says final, refuses until that is; and goes"


class End:
    """One end of a link, as ``Backend`` and ``AgentDrain`` know it; ``out`` is on its way to the other end."""

    def __init__(self, peer: Identity | None = None) -> None:
        self.peer, self.session, self.streams, self.why = peer, self, 0, "gone"
        self.out: deque[Message] = deque()

    def send_control(self, packet: Message) -> None:
        self.out.append(packet)

    def flush(self) -> None: ...


class Agent:
    """An agent, and the server's backend for it."""

    def __init__(self, place: int, backends: Backends) -> None:
        self.gone = False
        self.serving: set[int] = set()
        self.near = End(Identity("agent", f"edge-{place}", f"{place:032x}", claims=Claims(priority=place)))
        self.far = End()
        self.drain = AgentDrain(self.links, self.remaining)
        self.backend = Backend(backends)
        self.backend.link = cast(Link, self.near)
        self.backend.on_linked()

    def links(self) -> list[Link]:
        return [cast(Link, self.far)]

    def remaining(self) -> tuple[float, int]:
        return 1.0, len(self.serving)


@dataclass
class Dial:
    """What became of a dial; ``asked`` are the agents by their place, and the states they had to the server."""

    asked: dict[int, BackendState] = field(default_factory=dict)
    answer: str | None = None
    lost: bool = True


class World:
    """Everything at one moment. The first ``leaving`` of the agents may leave, at any time."""

    def __init__(self, variant: Variant, agents: int, leaving: int, tries: int, dials: int = 2) -> None:
        self.variant, self.leaving, self.tries = variant, leaving, tries
        self.backends = Backends()
        self.agents = [Agent(place, self.backends) for place in range(agents)]
        self.dials = [Dial() for _ in range(dials)]

    def key(self) -> str:
        """Equal for worlds that are alike, and so are all that can follow."""
        agents = [
            (one.drain, one.backend.state, one.gone, sorted(one.serving), one.near.out, one.far.out)
            for one in self.agents
        ]
        return repr((agents, self.dials))

    def steps(self) -> Iterator[tuple[Any, ...]]:
        """What can happen next: a method's name, and its arguments."""
        fresh = [number for number, dial in enumerate(self.dials) if not dial.asked and not dial.answer]
        if fresh:
            yield "choose", fresh[0]
        for place, agent in enumerate(self.agents):
            if agent.far.out:
                yield "server_takes", place
            if agent.near.out and not agent.gone:
                yield "agent_takes", place
            if agent.serving:
                yield "serve", place
            elif place < self.leaving and not agent.gone and self._may_move_on(agent.drain):
                yield "move_on", place

    def _may_move_on(self, drain: AgentDrain) -> bool:
        return not drain.draining or not drain.unacked or self.variant is Variant.NO_ACK

    # -- an agent

    def move_on(self, place: int) -> None:
        agent = self.agents[place]
        if not agent.drain.draining:
            agent.drain.drain("signal")
        elif agent.drain.phase is DrainPhase.SOFT and self.variant is Variant.TWO_ACKS:
            agent.drain.final()
        else:
            agent.gone = True
            agent.far.send_control(("gone", 0))

    def agent_takes(self, place: int) -> None:
        agent = self.agents[place]
        message = agent.near.out.popleft()
        if isinstance(message, DrainAck):
            agent.drain.acked(cast(Link, agent.far), message)
        elif isinstance(message, tuple):
            last = DrainPhase.SOFT if self.variant is Variant.NO_ACK else DrainPhase.FINAL
            if agent.drain.phase is last:
                agent.far.send_control((REFUSED, message[1]))
            else:
                agent.serving.add(message[1])

    def serve(self, place: int) -> None:
        agent = self.agents[place]
        agent.far.send_control((SERVED, agent.serving.pop()))

    # -- the server

    def server_takes(self, place: int) -> None:
        agent = self.agents[place]
        message = agent.far.out.popleft()
        if isinstance(message, Drain):
            agent.backend.on_control(message)
        elif isinstance(message, tuple) and message[0] != "gone":
            self._answered(message[1], message[0])
        else:
            agent.backend.on_end()
            for number, dial in enumerate(self.dials):
                if dial.answer is None and [*dial.asked][-1:] == [place]:
                    self._answered(number, LINK_LOST)

    def _answered(self, number: int, answer: str) -> None:
        """By an agent, or by the end of its link."""
        dial = self.dials[number]
        if answer == SERVED:
            dial.answer, dial.lost = SERVED, False
        elif len(dial.asked) < self.tries:
            self.choose(number, answer)
        else:
            self._give_up(dial, answer)

    def choose(self, number: int, before: str = REFUSED) -> None:
        dial = self.dials[number]
        besides = next((self.agents[place].backend.instance for place in dial.asked), None)
        try:
            backend = self.backends.decide(Target("db.internal", 5432), besides=besides).backend
        except NoBackend:
            self._give_up(dial, before)
        else:
            place = next(place for place, agent in enumerate(self.agents) if agent.backend is backend)
            dial.asked[place] = backend.state
            self.agents[place].near.send_control(("dial", number))

    def _give_up(self, dial: Dial, answer: str) -> None:
        others = {agent.backend.state for place, agent in enumerate(self.agents) if place not in dial.asked}
        warned = BackendState.ACTIVE not in dial.asked.values()
        dial.answer = answer
        dial.lost = answer == LINK_LOST or not warned or bool(others & {BackendState.ACTIVE, BackendState.DRAINING})


def ends(start: World) -> Iterator[World]:
    """Every world in which nothing can happen any more."""
    seen, unvisited = {start.key()}, [start]
    while unvisited:
        world = unvisited.pop()
        steps = list(world.steps())
        if not steps:
            yield world
        frozen = pickle.dumps(world)  # copies much faster than ``deepcopy`` does
        for method, *args in steps:
            following = pickle.loads(frozen)
            getattr(following, method)(*args)
            if following.key() not in seen:
                seen.add(following.key())
                unvisited.append(following)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "tunnel.backends")  # it warns in each world in which the last agent drains


@pytest.mark.parametrize(
    ("variant", "agents", "leaving", "tries", "loses"),
    [
        (Variant.NO_ACK, 1, 1, 2, True),
        (Variant.NO_ACK, 2, 1, 1, True),
        (Variant.NO_ACK, 2, 1, 2, False),  # the second try makes good for it, while there is somebody else
        (Variant.ONE_ACK, 2, 1, 1, False),
        (Variant.ONE_ACK, 1, 1, 2, True),
        (Variant.TWO_ACKS, 2, 1, 1, False),
        (Variant.TWO_ACKS, 1, 1, 1, False),
    ],
)
def test_which_ways_of_leaving_lose_dials(variant: Variant, agents: int, leaving: int, tries: int, loses: bool) -> None:
    lost = [world.dials for world in ends(World(variant, agents, leaving, tries)) if any(d.lost for d in world.dials)]
    assert bool(lost) is loses, lost[:1]


@pytest.mark.parametrize(("tries", "loses"), [(1, True), (2, False)])
def test_when_all_agents_leave_it_takes_two_tries_to_find_the_last(tries: int, loses: bool) -> None:
    found = ends(World(Variant.TWO_ACKS, 2, 2, tries, dials=1))
    assert any(world.dials[0].lost for world in found) is loses


@pytest.mark.parametrize("answers", [{SERVED}, {SERVED, REFUSED}, {REFUSED}])
def test_dials_reach_the_last_agent_before_and_after_it_says_final(answers: set[str]) -> None:
    found = ends(World(Variant.TWO_ACKS, 1, 1, 2))
    assert any(
        all(dial.asked for dial in world.dials) and {d.answer for d in world.dials} == answers for world in found
    )


def test_agents_and_the_server_agree_in_the_end() -> None:
    for world in ends(World(Variant.TWO_ACKS, 2, 1, 2)):
        assert [one.backend.state for one in world.agents] == [BackendState.GONE, BackendState.ACTIVE]
        assert [one.gone for one in world.agents] == [True, False]
