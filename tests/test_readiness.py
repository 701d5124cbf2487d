"""Readiness: whether new work should be sent to a server or an agent, and what speaks against it."""

from __future__ import annotations

import pytest
import trio
from house import PROMPT, Held, House, echo, ended, through
from trio.testing import wait_all_tasks_blocked

from tunnel.address import Target
from tunnel.agent import Agent
from tunnel.config import AgentConfig, ServerConfig
from tunnel.desk import AgentDesk, ServerDesk
from tunnel.lifecycle import Phase
from tunnel.readiness import Readiness
from tunnel.server import Server


def test_nothing_against_it_is_ready() -> None:
    assert Readiness.of(starting=False, draining=False) == Readiness(True, ())


def test_each_word_that_holds_is_a_reason() -> None:
    readiness = Readiness.of(starting=True, draining=False, no_agent=True)
    assert readiness == Readiness(False, ("starting", "no_agent"))


# -- a server


def test_a_server_that_has_not_started_is_not_ready() -> None:
    assert ServerDesk(Server(ServerConfig())).readiness == Readiness(False, ("starting", "no_agent"))


async def test_a_server_whose_agents_all_drain_is_ready_with_a_note(house: House) -> None:
    desk = ServerDesk(await house.serve())
    for name in ("one", "two"):
        await house.agent(name)
        desk.drain_agent(name, "for the test")
    assert desk.readiness == Readiness(True, ("fallback_only",))
    await house.agent("three")
    assert desk.readiness == Readiness(True, ())


async def test_a_server_whose_agents_all_drain_is_not_ready_if_they_may_not_serve(house: House) -> None:
    desk = ServerDesk(await house.serve(drain_fallback=False))
    await house.agent()
    assert desk.readiness.ready
    desk.drain_agent("one", "for the test")
    assert desk.readiness == Readiness(False, ("no_agent",))


@pytest.mark.parametrize(
    ("lame_duck", "phase", "reasons"),
    [(10.0, Phase.LAME_DUCK, ("draining",)), (0.0, Phase.DRAINING, ("draining",))],
)
async def test_a_server_that_is_leaving_is_not_ready(
    house: House, monkeypatch: pytest.MonkeyPatch, lame_duck: float, phase: Phase, reasons: tuple[str, ...]
) -> None:
    held = Held(monkeypatch)
    server = await house.serve(lame_duck=lame_duck)
    desk = ServerDesk(server)
    await house.agent()
    service = await house.service(echo)
    await house.ask(through(service.target))  # so that it does not end
    await held.arrived.wait_value(1)
    server.life.leave()
    assert desk.readiness == Readiness(False, reasons)
    await server.life.phase.wait_value(phase)
    assert desk.readiness == Readiness(False, reasons)


async def test_a_server_is_not_ready_before_it_refuses_anybody(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await house.serve()
    await house.agent()
    seen: list[bool] = []
    desk, announce = ServerDesk(server), server.announce
    monkeypatch.setattr(server, "announce", lambda: (seen.append(desk.readiness.ready), announce()))
    server.life.leave()
    await ended(server)
    assert seen == [False]


# -- an agent


def test_an_agent_that_has_not_started_is_not_ready() -> None:
    agent = Agent(AgentConfig((Target("server", 7400),), "one"))
    assert AgentDesk(agent).readiness == Readiness(False, ("starting", "no_server"))


async def test_an_agent_without_a_server_is_not_ready(house: House) -> None:
    agent = Agent(AgentConfig((house.closed_port(),), "one", timeouts=PROMPT))
    await house.nursery.start(agent.run)
    assert AgentDesk(agent).readiness == Readiness(False, ("no_server",))


async def test_an_agent_that_drains_is_not_ready_until_that_is_undone(house: House) -> None:
    await house.serve()
    agent = await house.agent()
    desk = AgentDesk(agent)
    agent.drain()
    assert desk.readiness == Readiness(False, ("draining",))
    await agent.draining.wait_acked()
    await wait_all_tasks_blocked()
    assert desk.readiness == Readiness(False, ("draining",))
    agent.undrain()
    assert desk.readiness == Readiness(True, ())


async def test_an_agent_that_leaves_is_not_ready_from_the_first_moment(house: House) -> None:
    await house.serve()
    agent = await house.agent()
    agent.life.spawn(trio.sleep_forever)
    desk = AgentDesk(agent)
    agent.life.leave()
    assert desk.readiness == Readiness(False, ("draining",))
    await agent.life.phase.wait_value(Phase.DRAINING)
    assert desk.readiness == Readiness(False, ("draining",))
