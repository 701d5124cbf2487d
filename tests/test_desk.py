"""The operator's desk, at a whole tunnel in one process."""

from __future__ import annotations

import logging

import pytest
from house import PROMPT, Held, House, descriptors, echo, ended, talks, through
from trio.testing import wait_all_tasks_blocked

from tunnel.address import Target
from tunnel.desk import AgentDesk, ServerDesk
from tunnel.lifecycle import Phase
from tunnel.operate import Operated, OperatedServer, TooLate, is_server
from tunnel.readiness import Readiness
from tunnel.watch import AgentState


async def test_both_desks_are_what_an_operator_expects(house: House) -> None:
    server: OperatedServer = ServerDesk(await house.serve())
    agent: Operated = AgentDesk(await house.agent("edge-7"))
    assert is_server(server)
    assert not is_server(agent)
    assert (server.role, server.name, server.instance) == ("server", "server", house.server.identity.instance)
    assert (agent.role, agent.name) == ("agent", "edge-7")


# -- readiness


async def test_a_server_is_ready_while_an_agent_is_active(house: House) -> None:
    desk = ServerDesk(await house.serve())
    assert desk.readiness == Readiness(False, ("no_agent",))
    agent = await house.agent()
    assert desk.readiness == Readiness(True, ())
    house.kill(agent)
    await wait_all_tasks_blocked()
    assert desk.readiness == Readiness(False, ("no_agent",))


async def test_a_server_that_denies_fallback_is_not_ready_with_draining_agents(house: House) -> None:
    desk = ServerDesk(await house.serve(drain_fallback=False))
    agent = await house.agent()
    agent.drain()
    await agent.state.wait_value(AgentState.DRAINED)
    assert desk.readiness == Readiness(False, ("no_agent",))


async def test_an_agent_is_ready_while_it_is_linked_and_stays(house: House) -> None:
    await house.serve()
    agent = await house.agent()
    desk = AgentDesk(agent)
    assert desk.readiness == Readiness(True, ())
    agent.drain()
    assert desk.readiness == Readiness(False, ("draining",))
    agent.undrain()
    assert desk.readiness == Readiness(True, ())
    house.server.life.leave()
    await ended(house.server)
    await wait_all_tasks_blocked()
    assert desk.readiness == Readiness(False, ("no_server",))


async def test_a_program_is_not_ready_from_the_moment_it_is_told_to_leave(house: House) -> None:
    server = await house.serve()
    agent = await house.agent()
    for program, desk in ((agent, AgentDesk(agent)), (server, ServerDesk(server))):
        program.life.leave()
        assert "draining" in desk.readiness.reasons


# -- drains


async def test_what_is_pending_is_not_open(house: House, held: Held) -> None:
    await house.serve()
    agent = await house.agent()
    service = await house.service(echo)
    assert await talks(await house.connect(service.target))
    await house.ask(through(service.target))
    await held.arrived.wait_value(1)
    for view in (ServerDesk(house.server).drain_view(), AgentDesk(agent).drain_view()):
        assert (view.open, view.pending) == (1, 1)
        assert view.oldest_s > 0
    held.open.set()


async def test_an_agent_with_a_pending_dial_is_not_drained(house: House, held: Held) -> None:
    await house.serve()
    agent = await house.agent()
    service = await house.service(echo)
    stream = await house.ask(through(service.target))
    await held.arrived.wait_value(1)
    AgentDesk(agent).drain_self("", None, leave=False)
    await wait_all_tasks_blocked()
    assert AgentDesk(agent).drain_view().state == "draining"
    held.open.set()
    await stream.receive_some()
    await stream.aclose()
    await agent.state.wait_value(AgentState.DRAINED)


async def test_a_drain_with_a_deadline_ends_the_agent_then(house: House) -> None:
    await house.serve()
    agent = await house.agent()
    service = await house.service(echo)
    assert await talks(await house.connect(service.target))
    desk = AgentDesk(agent)
    desk.drain_self("", 0.05, leave=True)
    assert 0 < (desk.drain_view().remaining_s or 0) <= 0.05
    await agent.life.phase.wait_value(lambda phase: phase is not Phase.READY)
    assert agent.life.leaving


async def test_who_leaves_cannot_be_told_otherwise(house: House) -> None:
    server = await house.serve()
    agent = await house.agent()
    agent.life.leave()
    server.life.leave()
    with pytest.raises(TooLate, match="the agent is leaving"):
        AgentDesk(agent).undrain_self()
    with pytest.raises(TooLate, match="the agent is leaving"):
        AgentDesk(agent).drain_self("", None, leave=False)
    with pytest.raises(TooLate, match="the server is leaving"):
        ServerDesk(server).undrain_self()


async def test_a_server_that_leaves_says_how_much_time_is_left(house: House) -> None:
    server = await house.serve(lame_duck=5.0)
    desk = ServerDesk(server)
    assert desk.drain_view().remaining_s is None
    desk.drain_self("", None, leave=True)
    assert 0 < (desk.drain_view().remaining_s or 0) <= PROMPT.shutdown


async def test_an_undrained_agent_is_in_the_pool_again_on_all_its_servers(house: House) -> None:
    first, second = await house.serve(), await house.serve()
    both = tuple(Target(at.host, at.port) for at in (server.addresses["links"][0] for server in (first, second)))
    agent = await house.agent("one", servers=both)
    desk = ServerDesk(first)
    await wait_all_tasks_blocked(0.05)
    assert desk.drain_agent("one", "") == 1
    await agent.state.wait_value(AgentState.DRAINED)
    assert (first.backends.active, second.backends.active) == (0, 0)
    assert desk.undrain_agent("one") == 1
    await agent.state.wait_value(AgentState.READY)
    await wait_all_tasks_blocked(0.01)
    assert (first.backends.active, second.backends.active) == (1, 1)
    assert len(agent.sync.links) == 2


async def test_a_command_is_logged_with_its_reason(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await house.serve()
    await house.agent("one")
    ServerDesk(house.server).drain_agent("one", "roll it")
    assert 'command action=drain agent=one text="roll it" backends=1' in [
        record.getMessage() for record in caplog.records
    ]


async def test_looking_changes_nothing_and_opens_nothing(house: House) -> None:
    await house.serve()
    agent = await house.agent("one")
    desks = (ServerDesk(house.server), AgentDesk(agent))
    before = descriptors()
    for desk in desks:
        desk.counts()
        desk.drain_view()
        desk.streams(0, 10)
    server = desks[0]
    assert [view.name for view in server.agents()] == ["one"]
    assert server.agent("two") == []
    server.explain(Target("a", 1), None)
    assert (agent.state.value, descriptors()) == (AgentState.READY, before)
