"""What SIGQUIT has a program write: what the admin interface shows, and where its tasks wait."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
from house import House, Service, echo, open_house
from trio.testing import wait_all_tasks_blocked

from tunnel.desk import AgentDesk, ServerDesk
from tunnel.dump import dump


@pytest.fixture(autouse=True)
def shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tunnel.dump")


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with open_house() as house:
        yield house


@pytest.fixture
async def echoes(house: House) -> Service:
    return await house.service(echo)


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, object]]:
    lines = [record.msg for record in caplog.records if record.name == "tunnel.dump"]
    return [line for line in lines if line["event"] == event]  # type: ignore[index, misc]


async def test_a_server_shows_its_agents_and_streams(
    house: House, echoes: Service, caplog: pytest.LogCaptureFixture
) -> None:
    server = await house.serve()
    await house.agent("edge")
    await house.connect(echoes.target)
    dump(server.life, ServerDesk(server))
    (state,) = said(caplog, "state")
    assert (state["phase"], state["open"]) == ("ready", 1)
    (agent,) = said(caplog, "state agent")
    assert (agent["name"], agent["state"], agent["streams"]) == ("edge", "active", 1)
    (stream,) = said(caplog, "state stream")
    assert (stream["use"], stream["target"], stream["agent"]) == ("connect", str(echoes.target), "edge")


async def test_an_agent_shows_its_streams(house: House, echoes: Service, caplog: pytest.LogCaptureFixture) -> None:
    await house.serve()
    agent = await house.agent()
    await house.connect(echoes.target)
    dump(agent.life, AgentDesk(agent))
    (stream,) = said(caplog, "state stream")
    assert (stream["use"], stream["target"]) == ("dial", str(echoes.target))
    assert said(caplog, "state agent") == []


async def test_a_program_that_nobody_operates_shows_its_state(house: House, caplog: pytest.LogCaptureFixture) -> None:
    server = await house.serve()
    dump(server.life, None)
    assert len(said(caplog, "state")) == 1
    assert said(caplog, "state stream") == []


async def test_tasks_that_wait_at_the_same_place_are_one_line(
    house: House, echoes: Service, caplog: pytest.LogCaptureFixture
) -> None:
    server = await house.serve()
    await house.agent()
    for _ in range(3):
        await house.connect(echoes.target)
    await wait_all_tasks_blocked()
    dump(server.life, None)
    lines = said(caplog, "state tasks")
    connections = [line for line in lines if str(line["task"]).endswith("Lifecycle._connection")]
    assert sum(int(str(line["count"])) for line in connections) == 6  # here and in the agent, which is in this process
    wheres = [str(line["where"]).split(" ") for line in connections]
    assert {where[-2].partition(":")[0] for where in wheres} == {"relay.py"}
