"""The operator's HTTP interface: what the paths answer, who may ask and what is said of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import trio
from house import PROMPT, House, echo, ended, talks
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import MockClock, wait_all_tasks_blocked

from tunnel.address import Identifier, Target
from tunnel.admin.app import admin_site, health_site
from tunnel.admin.gate import is_here
from tunnel.admin.heart import Heart
from tunnel.admin.openapi import document
from tunnel.admin.site import Site
from tunnel.agent import Agent
from tunnel.config import Claims
from tunnel.credentials import Token
from tunnel.desk import AgentDesk, ServerDesk
from tunnel.operate import DrainView, Operated
from tunnel.packets import DrainStatus
from tunnel.server import Server
from tunnel.watch import AgentState


def client(site: Site) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=site), base_url="http://127.0.0.1:7402", timeout=None)


def site_of(operated: Operated, **options: Any) -> Site:
    return admin_site(operated, Heart(), trio.Event(), **{"guarded": True, "local": True, **options})


class Guarded(ServerDesk):
    """A desk at which changes need a token."""

    admins = (Token("ops", "admin", b"secret", "tokens.toml"), Token("more", "admin", b"another", "tokens.toml"))


def of_server(house: House, server: Server | None = None) -> httpx.AsyncClient:
    """Asks the server's admin interface, or that of another one."""
    return client(site_of(ServerDesk(server or house.server)))


def of_agent(agent: Agent) -> httpx.AsyncClient:
    return client(site_of(AgentDesk(agent)))


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def text_of(response: httpx.Response) -> str:
    text: str = response.json()["error"]["text"]
    return text


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this package logged."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("tunnel.")]


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # nothing else says that it has become so
        await trio.sleep(0.01)


async def drained(agent: Agent) -> None:
    await agent.state.wait_value(AgentState.DRAINED)


# -- health


class TestHealth:
    @pytest.mark.parametrize("path", ["/livez", "/healthz"])
    async def test_a_program_that_leaves_is_alive(self, house: House, path: str) -> None:
        server = await house.serve(lame_duck=10.0)
        server.life.leave()
        response = await of_server(house).get(path)
        assert (response.status_code, response.json()) == (200, {"alive": True})

    async def test_a_loop_that_stood_still_is_not_alive(self, house: House) -> None:
        heart = Heart()
        heart.beat -= 10.5
        response = await client(health_site(ServerDesk(await house.serve()), heart)).get("/livez")
        assert (response.status_code, response.json()) == (503, {"alive": False})

    async def test_a_heart_beats_each_second(self, autojump_clock: MockClock) -> None:
        heart = Heart()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(heart.run)
            await trio.sleep(60)
            assert heart.alive
            nursery.cancel_scope.cancel()
        await trio.sleep(11)
        assert not heart.alive

    async def test_a_server_without_agents_is_not_ready(self, house: House) -> None:
        await house.serve()
        response = await of_server(house).get("/readyz")
        assert response.status_code == 503
        assert response.json() == {
            "ready": False,
            "reasons": ["no_agent"],
            "open": 0,
            "pending": 0,
            "remaining_s": None,
        }

    async def test_a_server_with_draining_agents_alone_is_ready_and_says_so(self, house: House) -> None:
        await house.serve()
        agent = await house.agent()
        agent.drain()
        await drained(agent)
        response = await of_server(house).get("/readyz")
        assert (response.status_code, response.json()["reasons"]) == (200, ["fallback_only"])

    async def test_readiness_ends_before_the_first_refused_connect(self, house: House) -> None:
        server = await house.serve(lame_duck=10.0)
        await house.agent()
        service = await house.service(echo)
        ask = of_server(house)
        assert (await ask.get("/readyz")).status_code == 200
        server.life.leave()
        response = await ask.get("/readyz")
        assert (response.status_code, response.json()["reasons"]) == (503, ["draining"])
        assert 0 < response.json()["remaining_s"] <= PROMPT.shutdown
        assert await talks(await house.connect(service.target))
        assert (await ask.get("/livez")).status_code == 200

    async def test_a_probe_may_look_past_a_drain(self, house: House) -> None:
        await house.serve()
        agent = await house.agent()
        agent.drain()
        ask = of_agent(agent)
        assert (await ask.get("/readyz")).json()["reasons"] == ["draining"]
        response = await ask.get("/readyz?exclude=drain")
        assert (response.status_code, response.json()["reasons"]) == (200, [])

    async def test_what_else_speaks_against_it_is_not_looked_past(self, house: House) -> None:
        await house.serve()
        agent = await house.agent()
        agent.drain()
        desk = AgentDesk(agent)
        desk.switched_off = True
        response = await client(site_of(desk)).get("/readyz?exclude=drain")
        assert (response.status_code, response.json()["reasons"]) == (503, ["switched_off"])

    async def test_an_unknown_exclusion_is_refused(self, house: House) -> None:
        await house.serve()
        assert error_of(await of_server(house).get("/readyz?exclude=drian")) == (400, "bad_request")

    async def test_verbose_says_who_answers(self, house: House) -> None:
        await house.serve()
        agent = await house.agent("edge-7")
        said = (await of_agent(agent).get("/readyz?verbose")).json()
        assert (said["role"], said["name"], said["instance"]) == ("agent", "edge-7", agent.instance)
        assert said["state"] == "ready"

    async def test_the_health_listener_has_nothing_else(self, house: House) -> None:
        ask = client(health_site(ServerDesk(await house.serve()), Heart()))
        assert [(await ask.get(path)).status_code for path in ("/livez", "/healthz", "/readyz")] == [200, 200, 503]
        for path in ("/metrics", "/api/v1/drain", "/", "/openapi.json"):
            assert error_of(await ask.get(path)) == (404, "not_found")


# -- the program's own drain


class TestDrain:
    async def test_an_agent_drains_and_comes_back(self, house: House) -> None:
        await house.serve()
        agent = await house.agent("edge-7")
        ask = of_agent(agent)
        response = await ask.put("/api/v1/drain", json={"reason": "upgrade", "deadline_s": 60})
        assert (response.status_code, response.json()["reasons"]) == (202, ["admin"])
        await drained(agent)
        said = (await ask.get("/api/v1/drain")).json()
        rev = said.pop("rev")
        assert 0 < said.pop("remaining_s") <= 60
        assert said == {
            "role": "agent",
            "name": "edge-7",
            "instance": agent.instance,
            "state": "drained",
            "reasons": ["admin"],
            "open": 0,
            "pending": 0,
            "oldest_s": 0.0,
            "acked": 1,
            "servers": 1,
        }
        response = await ask.delete("/api/v1/drain")
        assert response.status_code == 200
        assert (response.json()["state"], response.json()["reasons"]) == ("ready", [])
        assert response.json()["rev"] != rev

    async def test_a_drain_without_an_end_has_no_rest(self, house: House) -> None:
        await house.serve()
        response = await of_agent(await house.agent()).put("/api/v1/drain")
        assert (response.status_code, response.json()["remaining_s"]) == (202, None)

    async def test_draining_twice_is_draining(self, house: House) -> None:
        await house.serve()
        ask = of_agent(await house.agent())
        assert [(await ask.put("/api/v1/drain", json={})).status_code for _ in range(2)] == [202, 202]

    async def test_undraining_what_does_not_drain_is_fine(self, house: House) -> None:
        await house.serve()
        assert (await of_agent(await house.agent()).delete("/api/v1/drain")).status_code == 200

    async def test_an_agent_that_is_asked_to_exit_does(self, house: House) -> None:
        await house.serve()
        agent = await house.agent()
        assert (await of_agent(agent).put("/api/v1/drain", json={"exit": True})).status_code == 202
        assert await ended(agent) == 0

    async def test_a_leaving_agent_is_too_late_to_ask(self, house: House) -> None:
        await house.serve()
        agent = await house.agent()
        agent.life.leave()
        ask = of_agent(agent)
        assert error_of(await ask.put("/api/v1/drain")) == (409, "too_late")
        assert error_of(await ask.delete("/api/v1/drain")) == (409, "too_late")

    async def test_a_server_drains_by_leaving_alone(self, house: House) -> None:
        server = await house.serve(lame_duck=10.0)
        ask = of_server(house)
        assert error_of(await ask.put("/api/v1/drain")) == (409, "too_late")
        assert not server.life.leaving
        response = await ask.put("/api/v1/drain", json={"exit": True})
        assert (response.status_code, response.json()["reasons"]) == (202, ["leaving"])
        assert 0 < response.json()["remaining_s"] <= PROMPT.shutdown
        assert server.life.leaving
        assert error_of(await ask.delete("/api/v1/drain")) == (409, "too_late")

    async def test_a_server_takes_no_other_deadline_than_its_own(self, house: House) -> None:
        server = await house.serve()
        response = await of_server(house).put("/api/v1/drain", json={"exit": True, "deadline_s": 5})
        assert error_of(response) == (400, "bad_request")
        assert "--shutdown-budget" in text_of(response)
        assert not server.life.leaving

    async def test_who_asked_and_why_is_in_the_log(self, house: House, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        await house.serve()
        await of_agent(await house.agent()).put("/api/v1/drain", json={"reason": "disk is full"})
        (asked,) = [event for event in said(caplog) if event.startswith("asked ")]
        assert asked == 'asked change=drain by=127.0.0.1:123 reason="disk is full" exit=false'

    async def test_asking_changes_nothing_and_is_no_news(self, house: House, caplog: pytest.LogCaptureFixture) -> None:
        await house.serve()
        agent = await house.agent()
        ask = of_agent(agent)
        before = (await ask.get("/api/v1/drain")).json()
        caplog.clear()
        caplog.set_level(logging.INFO)
        for path in ("/api/v1/drain", "/api/v1/ready", "/readyz", "/metrics", "/api/v1/streams", "/openapi.json"):
            await ask.get(path)
        assert (await ask.get("/api/v1/drain")).json() == before
        assert said(caplog) == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"reasn": "x"}', ["'reasn'", "reason, deadline_s, exit"]),
        (b'{"reason": 5}', ["reason: 5", "text"]),
        (b'{"reason": "a\\nb"}', ["reason", "printable"]),
        (b'{"reason": "\\ud800"}', ["reason", "printable"]),
        (b'{"reason": "%s"}' % (b"x" * 257), ["reason", "256"]),
        (b'{"reason": ["x"]}', ["reason: list", "text"]),
        (b'{"deadline_s": "5s"}', ["deadline_s: '5s'", "number of seconds"]),
        (b'{"deadline_s": true}', ["deadline_s: True", "number of seconds"]),
        (b'{"deadline_s": 0}', ["deadline_s: 0", "0.001"]),
        (b'{"deadline_s": -1}', ["deadline_s: -1", "0.001"]),
        (b'{"deadline_s": 4000001}', ["deadline_s", "4000000"]),
        (b'{"deadline_s": 1e999}', ["deadline_s: inf", "4000000"]),
        (b'{"deadline_s": 1%s}' % (b"0" * 400), ["deadline_s", "4000000"]),
        (b'{"deadline_s": NaN}', ["not JSON"]),
        (b'{"exit": "yes"}', ["exit: 'yes'", "true or false"]),
        (b'{"exit": 1}', ["exit: 1", "true or false"]),
        (b"[]", ["not a JSON object"]),
        (b"null", ["not a JSON object"]),
        (b"{", ["not JSON"]),
        (b"\xff", ["not JSON"]),
        (b"[" * 60_000, ["not JSON"]),
        (b"1" * 60_000, ["not JSON"]),
    ],
)
async def test_a_body_that_is_not_taken_is_named_and_changes_nothing(
    house: House, body: bytes, words: list[str]
) -> None:
    await house.serve()
    agent = await house.agent()
    response = await of_agent(agent).put("/api/v1/drain", content=body)
    assert error_of(response) == (400, "bad_request")
    assert all(word in text_of(response) for word in words), text_of(response)
    assert agent.state.value is AgentState.READY


async def test_null_is_the_same_as_nothing(house: House) -> None:
    await house.serve()
    body = {"reason": None, "deadline_s": None, "exit": None}
    assert (await of_agent(await house.agent()).put("/api/v1/drain", json=body)).status_code == 202


async def test_a_body_that_is_too_long_is_refused(house: House) -> None:
    await house.serve()
    agent = await house.agent()
    response = await of_agent(agent).put("/api/v1/drain", content=b'{"reason": ""}' + b" " * 65536)
    assert error_of(response) == (413, "too_large")
    assert agent.state.value is AgentState.READY


# -- long polls


class Still:
    """A program in which nothing happens but what a test does."""

    role = name = "agent"
    instance = "i"
    version = "0"
    switched_off = False

    def __init__(self) -> None:
        self.drain = SimpleNamespace(state="ready", open=0, oldest_s=0.0)

    async def news(self) -> None:
        await trio.sleep_forever()

    def drain_view(self) -> Any:
        return DrainView(self.drain.state, (), self.drain.open, 0, self.drain.oldest_s, None, 0, 0)


class TestLongPoll:
    @pytest.fixture
    def still(self) -> Still:
        return Still()

    async def _waited(self, still: Still, query: str, closing: trio.Event | None = None) -> tuple[float, Any]:
        closing = trio.Event() if closing is None else closing
        site = admin_site(still, Heart(), closing, guarded=False, local=True)  # type: ignore[arg-type]
        began = trio.current_time()
        response = await client(site).get(f"/api/v1/drain?{query}")
        return trio.current_time() - began, response

    async def _rev(self, still: Still) -> str:
        _, response = await self._waited(still, "")
        assert response.headers["etag"] == f'"{response.json()["rev"]}"'
        rev: str = response.json()["rev"]
        return rev

    async def test_without_a_rev_it_answers_at_once(self, autojump_clock: MockClock, still: Still) -> None:
        took, response = await self._waited(still, "wait=30s")
        assert (took, response.status_code) == (0, 200)

    async def test_with_an_old_rev_it_answers_at_once(self, autojump_clock: MockClock, still: Still) -> None:
        took, _ = await self._waited(still, "wait=30s&since=old")
        assert took == 0

    async def test_with_nothing_new_it_answers_when_the_time_is_over(
        self, autojump_clock: MockClock, still: Still
    ) -> None:
        rev = await self._rev(still)
        took, response = await self._waited(still, f"wait=30s&since={rev}")
        assert took == pytest.approx(30)
        assert response.json()["rev"] == rev

    async def test_it_answers_with_the_news(self, autojump_clock: MockClock, still: Still) -> None:
        rev = await self._rev(still)
        async with trio.open_nursery() as nursery:

            async def later() -> None:
                await trio.sleep(7)
                still.drain.state = "drained"

            nursery.start_soon(later)
            took, response = await self._waited(still, f"wait=60s&since={rev}")
        assert 7 <= took <= 7.5
        assert response.json()["state"] == "drained"
        assert response.json()["rev"] != rev

    async def test_it_ends_when_the_listener_does(self, autojump_clock: MockClock, still: Still) -> None:
        rev, closing = await self._rev(still), trio.Event()
        async with trio.open_nursery() as nursery:

            async def later() -> None:
                await trio.sleep(7)
                closing.set()

            nursery.start_soon(later)
            took, response = await self._waited(still, f"wait=60s&since={rev}", closing)
        assert (took, response.status_code) == (7, 200)

    @pytest.mark.parametrize("wait", ["61s", "2m", "30", "-1s", "soon", ""])
    async def test_a_time_that_is_not_taken_is_named(self, autojump_clock: MockClock, still: Still, wait: str) -> None:
        _, response = await self._waited(still, f"wait={wait}")
        assert error_of(response) == (400, "bad_request")
        assert text_of(response).startswith("wait: ")

    async def test_time_alone_is_no_news(self, autojump_clock: MockClock, still: Still) -> None:
        rev = await self._rev(still)
        still.drain.oldest_s = 5.0
        took, _ = await self._waited(still, f"wait=1s&since={rev}")
        assert took == pytest.approx(1)

    @pytest.mark.parametrize("what", ["open", "state"])
    async def test_what_changes_is_news(self, autojump_clock: MockClock, still: Still, what: str) -> None:
        rev = await self._rev(still)
        setattr(still.drain, what, 1 if what == "open" else "draining")
        took, _ = await self._waited(still, f"wait=1s&since={rev}")
        assert took == 0


# -- the switch


class TestSwitch:
    async def test_switched_off_is_not_ready_and_no_drain(self, house: House) -> None:
        await house.serve()
        agent = await house.agent()
        desk = AgentDesk(agent)
        ask = client(site_of(desk))
        for _ in range(2):  # it is no toggle
            response = await ask.put("/api/v1/ready", json={"ready": False})
            assert (response.status_code, response.json()["reasons"]) == (200, ["switched_off"])
        assert (await ask.get("/readyz")).status_code == 503
        assert (await ask.get("/api/v1/ready")).status_code == 200
        assert agent.state.value is AgentState.READY
        assert house.server.backends.active == 1
        for _ in range(2):
            assert (await ask.put("/api/v1/ready", json={"ready": True})).json()["ready"]
        assert (await ask.get("/readyz")).status_code == 200

    @pytest.mark.parametrize("body", [{}, {"ready": None}, {"ready": "no"}, {"ready": 0}, {"read": True}])
    async def test_it_has_to_be_said_which_way(self, house: House, body: dict[str, object]) -> None:
        await house.serve()
        assert error_of(await of_server(house).put("/api/v1/ready", json=body)) == (400, "bad_request")


# -- a server's agents


class TestAgents:
    async def test_those_that_are_linked_are_listed(self, house: House) -> None:
        await house.serve()
        claims = Claims((Identifier.parse("suffix=.svc.local"),), default_route=True, priority=3)
        one, two = await house.agent("one", claims=claims), await house.agent("two")
        service = await house.service(echo)
        assert await talks(await house.connect(service.target, "Tunnel-Agent: one"))
        said = (await of_server(house).get("/api/v1/agents")).json()["agents"]
        assert [agent["name"] for agent in said] == ["one", "two"]
        assert [agent["instance"] for agent in said] == [one.instance, two.instance]
        first = said[0]
        assert first.pop("since_s") > 0
        assert first.pop("address").startswith("127.0.0.1:")
        assert first == {
            "name": "one",
            "instance": one.instance,
            "state": "active",
            "rtt_ms": None,
            "streams": 1,
            "sent": 5,
            "received": 5,
            "identifiers": ["suffix=.svc.local"],
            "default_route": True,
            "priority": 3,
            "drain": None,
        }

    async def test_one_name_may_be_several(self, house: House) -> None:
        await house.serve()
        for name in ("one", "one", "two"):
            await house.agent(name)
        said = (await of_server(house).get("/api/v1/agents/one")).json()
        assert (said["name"], [agent["name"] for agent in said["agents"]]) == ("one", ["one", "one"])

    @pytest.mark.parametrize("name", ["Zürich", "a/b", "a/drain", "...", "%", "a%2Fb", "?#&", "{name}", "漢字"])
    async def test_a_name_may_be_any(self, house: House, name: str) -> None:
        await house.serve()
        agent = await house.agent(name)
        ask, path = of_server(house), f"/api/v1/agents/{encoded(name)}"
        assert [each["name"] for each in (await ask.get(path)).json()["agents"]] == [name]
        assert (await ask.put(f"{path}/drain")).json()["told"] == 1
        await drained(agent)

    @pytest.mark.parametrize("name", ["%20", "%2E", "%2E%2E", "a%0Ab", "%1B[2J", "x" * 129, "%FF", "%E2%80%AE"])
    @pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
    async def test_what_is_no_name_is_refused(self, house: House, method: str, name: str) -> None:
        await house.serve()
        response = await of_server(house).request(method, f"/api/v1/agents/{name}/drain")
        assert error_of(response) == (400, "bad_request")

    @pytest.mark.parametrize(
        ("method", "path"),
        [("GET", ""), ("GET", "/drain"), ("PUT", "/drain"), ("DELETE", "/drain")],
    )
    async def test_one_that_is_not_linked_is_not_found(self, house: House, method: str, path: str) -> None:
        await house.serve()
        response = await of_server(house).request(method, f"/api/v1/agents/nobody{path}")
        assert error_of(response) == (404, "not_found")
        assert "nobody" in text_of(response)

    async def test_a_drain_and_its_end_reach_the_agent(self, house: House) -> None:
        await house.serve()
        agent = await house.agent("one")
        ask = of_server(house)
        response = await ask.put("/api/v1/agents/one/drain", json={"reason": "upgrade", "deadline_s": 60})
        assert response.status_code == 202
        assert (response.json()["name"], response.json()["told"]) == ("one", 1)
        assert response.json()["agents"][0]["state"] == "draining"
        await drained(agent)
        assert 0 < agent.watch.remaining <= 60
        assert (await until_drained(ask, "one"))["drain"]["acked"] == 1
        response = await ask.delete("/api/v1/agents/one/drain")
        assert (response.status_code, response.json()["told"]) == (200, 1)
        await agent.state.wait_value(AgentState.READY)
        await wait_all_tasks_blocked()
        assert house.server.backends.active == 1

    async def test_what_an_agent_says_of_its_drain_is_news_at_once(
        self, house: House, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tunnel.admin.app._GLANCE", 1000.0)
        await house.serve()
        agent = await house.agent("one")
        ask = of_server(house)
        await ask.put("/api/v1/agents/one/drain")
        with trio.fail_after(10):
            await until_drained(ask, "one")
        rev = (await ask.get("/api/v1/agents/one/drain")).json()["rev"]
        response: list[httpx.Response] = []
        async with trio.open_nursery() as nursery:

            async def poll() -> None:
                response.append(await ask.get(f"/api/v1/agents/one/drain?wait=60s&since={rev}"))

            nursery.start_soon(poll)
            await wait_all_tasks_blocked()
            (backend,) = house.server.backends.all()
            backend.on_control(DrainStatus("draining", 7, 0, 0, 1, 1))
        assert response[0].json()["agents"][0]["drain"]["open"] == 7
        assert agent.state.value is AgentState.DRAINED

    async def test_a_drain_without_a_deadline_has_none(self, house: House) -> None:
        await house.serve()
        agent = await house.agent("one")
        await of_server(house).put("/api/v1/agents/one/drain")
        await drained(agent)
        assert not agent.watch.limited

    async def test_the_shortest_deadline_is_one(self, house: House) -> None:
        await house.serve()
        agent = await house.agent("one")
        await of_server(house).put("/api/v1/agents/one/drain", json={"deadline_s": 0.001})
        await drained(agent)
        assert agent.watch.limited

    async def test_one_that_has_drained_for_good_is_too_late_to_tell(
        self, house: House, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await house.serve()
        await house.agent("one")
        (backend,) = house.server.backends.all()
        house.server.backends.mark(backend)
        house.server.backends.mark(backend, final=True)
        ask = of_server(house)
        for method in ("PUT", "DELETE"):
            assert error_of(await ask.request(method, "/api/v1/agents/one/drain")) == (409, "too_late")

    async def test_a_long_poll_ends_when_the_agent_goes(self, house: House) -> None:
        await house.serve()
        agent = await house.agent("one")
        ask = of_server(house)
        rev = (await ask.get("/api/v1/agents/one/drain")).json()["rev"]
        response: list[httpx.Response] = []
        async with trio.open_nursery() as nursery:

            async def poll() -> None:
                response.append(await ask.get(f"/api/v1/agents/one/drain?wait=60s&since={rev}"))

            nursery.start_soon(poll)
            await wait_all_tasks_blocked()
            house.kill(agent)
        assert error_of(response[0]) == (404, "not_found")

    @pytest.mark.parametrize("path", ["/agents", "/agents/one", "/agents/one/drain", "/explain?target=a:1"])
    async def test_an_agent_knows_none_and_says_so(self, house: House, path: str) -> None:
        await house.serve()
        response = await of_agent(await house.agent("one")).get(f"/api/v1{path}")
        assert error_of(response) == (404, "not_found")
        assert "this is an agent" in text_of(response)


def encoded(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="").replace(".", "%2E")


async def until_drained(ask: httpx.AsyncClient, name: str) -> dict[str, Any]:
    """By long polls, as an operator would."""
    rev = ""
    while True:
        said = (await ask.get(f"/api/v1/agents/{name}/drain?wait=10s&since={rev}")).json()
        rev, (agent,) = said["rev"], said["agents"]
        if agent["drain"] and agent["drain"]["state"] == "drained":
            drained: dict[str, Any] = agent
            return drained


async def test_an_agent_switched_to_draining_at_one_server_is_stopped_without_a_loss(house: House) -> None:
    """It drains at both its servers; what runs finishes, what is new goes elsewhere, and the metric says when."""
    first, second = await house.serve(server_count=1), await house.serve(server_count=1)
    both = tuple(Target(at.host, at.port) for at in (server.addresses["links"][0] for server in (first, second)))
    old = await house.agent("old", servers=both)
    await until(lambda: len(old.sync.links) == 2)
    service = await house.service(echo)
    running = []
    for house.server in (first, second):
        running.append(await house.connect(service.target))
        assert await talks(running[-1])
    await house.agent("new", servers=both)
    await until(lambda: first.backends.active + second.backends.active == 4)

    assert (await of_server(house, first).put("/api/v1/agents/old/drain", json={"reason": "roll"})).status_code == 202
    await until(lambda: second.backends.active == 1)
    metrics = of_agent(old)
    assert await drain_state(metrics) == 1
    for house.server in (first, second):
        for _ in range(10):
            assert await talks(await house.connect(service.target))
    assert old.dials.served == 2
    for stream in running:
        assert await talks(stream, b"still here")
        await stream.aclose()
    while await drain_state(metrics) != 2:  # noqa: ASYNC110  # what a scraper would do
        await trio.sleep(0.01)

    old.life.leave()
    assert await ended(old) == 0
    assert (old.life.cuts, old.dials.failed["refused_draining"]) == (0, 0)
    for house.server in (first, second):
        assert {code for code, _ in house.server.backends.dials} == {"ok"}
        assert house.server.backends.fallbacks == 0


async def drain_state(ask: httpx.AsyncClient) -> float:
    text = (await ask.get("/metrics")).text
    (family,) = [each for each in text_string_to_metric_families(text) if each.name == "tunnel_drain_state"]
    (own,) = [sample.value for sample in family.samples if not sample.labels]
    return float(own)


# -- looking


class TestStreams:
    async def test_they_come_in_pages(self, house: House) -> None:
        await house.serve()
        await house.agent("one")
        service = await house.service(echo)
        for _ in range(5):
            assert await talks(await house.connect(service.target))
        ask = of_server(house)
        seen: list[int] = []
        after: int | None = 0
        while after is not None:
            page = (await ask.get(f"/api/v1/streams?limit=2&after={after}")).json()
            assert len(page["streams"]) <= 2
            assert page["open"] == 5
            seen += [stream["number"] for stream in page["streams"]]
            after = page["next"]
        assert seen == [1, 2, 3, 4, 5]

    async def test_one_says_where_it_leads(self, house: House) -> None:
        await house.serve()
        await house.agent("one")
        service = await house.service(echo)
        assert await talks(await house.connect(service.target))
        page = (await of_server(house).get("/api/v1/streams")).json()
        (stream,) = page["streams"]
        assert stream.pop("age_s") > 0
        assert stream == {
            "number": 1,
            "use": "connect",
            "target": str(service.target),
            "agent": "one",
            "state": "open",
            "sent": 5,
            "received": 5,
        }
        assert page["next"] is None

    @pytest.mark.parametrize(
        "query", ["limit=0", "limit=1001", "limit=x", "limit=", "after=-1", "after=1e3", "after=٣"]
    )
    async def test_a_page_that_is_none_is_refused(self, house: House, query: str) -> None:
        await house.serve()
        response = await of_server(house).get(f"/api/v1/streams?{query}")
        assert error_of(response) == (400, "bad_request")
        assert text_of(response).startswith(query.partition("=")[0])


class TestExplain:
    async def test_a_decision_has_its_reasons(self, house: House) -> None:
        await house.serve()
        await house.agent("one")
        said = (await of_server(house).get("/api/v1/explain?target=DB.internal:5432")).json()
        assert said["target"] == "db.internal:5432"
        assert (said["decision"]["agent"], said["decision"]["strategy"]) == ("one", "default")
        assert said["considered"][0]["candidates"][0]["verdict"] == "picked"

    async def test_nobody_is_a_decision_too(self, house: House) -> None:
        await house.serve()
        await house.agent("one")
        said = (await of_server(house).get("/api/v1/explain?target=a:1&agent=two")).json()
        assert (said["agent"], said["decision"], said["considered"]) == ("two", None, [])

    @pytest.mark.parametrize(
        "query", ["", "target=", "target=a", "target=a:0", "target=a:1&agent=", "target=a:1&agent=b%20c"]
    )
    async def test_what_is_no_target_or_no_name_is_refused(self, house: House, query: str) -> None:
        await house.serve()
        assert error_of(await of_server(house).get(f"/api/v1/explain?{query}")) == (400, "bad_request")

    async def test_a_target_that_is_missing_is_named(self, house: House) -> None:
        await house.serve()
        assert text_of(await of_server(house).get("/api/v1/explain")) == "target is missing; taken: HOST:PORT"


class TestPage:
    async def test_nothing_but_its_own_scripts_may_run(self, house: House) -> None:
        await house.serve()
        ask = of_server(house)
        one, other = await ask.get("/"), await ask.get("/")
        assert one.headers["content-type"] == "text/html; charset=utf-8"
        policies = [
            dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
            for page in (one, other)
        ]
        assert policies[0]["default-src"] == "'none'"
        assert policies[0]["connect-src"] == "'self'"
        assert policies[0]["script-src"] != policies[1]["script-src"]
        nonce = policies[0]["script-src"].removeprefix("'nonce-").removesuffix("'")
        assert one.text.count(f' nonce="{nonce}">') == one.text.count("</script>") + one.text.count("</style>") == 2
        assert "{nonce}" not in one.text

    async def test_it_asks_nobody_else(self, house: House) -> None:
        await house.serve()
        text = (await of_server(house).get("/")).text.replace("http://www.w3.org/2000/svg", "")
        assert "//" not in text.replace("// ", "").replace("://", "//") or "http" not in text


# -- who may ask


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:7402", True),
        ("[::1]:7402", True),
        ("[::1]", True),
        ("192.0.2.1:1", True),
        ("localhost", True),
        ("LOCALHOST:7402", True),
        ("evil.example", False),
        ("evil.example:7402", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("a@127.0.0.1", False),
        ("::1", False),
        ("", False),
        ("127.0.0.1:7402:1", False),
    ],
)
def test_only_addresses_and_localhost_are_names_of_this_place(host: str, here: bool) -> None:
    assert is_here(host) is here


class TestGate:
    async def test_a_browser_that_was_led_here_is_turned_away(self, house: House) -> None:
        await house.serve()
        for path in ("/", "/api/v1/drain", "/livez", "/nowhere"):
            response = await of_server(house).get(path, headers={"host": "evil.example"})
            assert error_of(response) == (421, "misdirected")

    async def test_where_others_can_reach_it_names_are_fine(self, house: House) -> None:
        site = site_of(ServerDesk(await house.serve()), guarded=False)
        assert (await client(site).get("/livez", headers={"host": "tunnel.example"})).status_code == 200

    @pytest.mark.parametrize(
        ("header", "status"),
        [
            (None, 401),
            ("Bearer wrong", 401),
            ("Bearer", 401),
            ("Bearer ", 401),
            ("secret", 401),
            ("Basic secret", 401),
            ("Bearer secret", 200),
            ("bearer  secret", 200),
            ("Bearer sécret".encode("latin-1"), 401),
        ],
    )
    async def test_a_change_needs_the_token(self, house: House, header: str | bytes | None, status: int) -> None:
        desk = Guarded(await house.serve())
        ask = client(site_of(desk))
        headers: Any = {} if header is None else {"authorization": header}
        response = await ask.put("/api/v1/ready", json={"ready": False}, headers=headers)
        assert response.status_code == status
        assert desk.switched_off is (status == 200)
        if status == 401:
            assert response.headers["www-authenticate"] == "Bearer"
            assert error_of(response) == (401, "unauthorized")
            assert "secret" not in response.text

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("PUT", "/api/v1/drain"),
            ("DELETE", "/api/v1/drain"),
            ("PUT", "/api/v1/ready"),
            ("PUT", "/api/v1/agents/one/drain"),
            ("DELETE", "/api/v1/agents/one/drain"),
        ],
    )
    async def test_every_change_needs_it(self, house: House, method: str, path: str) -> None:
        ask = client(site_of(Guarded(await house.serve())))
        assert error_of(await ask.request(method, path)) == (401, "unauthorized")

    async def test_looking_needs_no_token(self, house: House) -> None:
        ask = client(site_of(Guarded(await house.serve())))
        for path in ("/livez", "/metrics", "/api/v1/drain", "/api/v1/agents", "/api/v1/streams", "/"):
            assert (await ask.get(path)).status_code == 200


class TestMethods:
    @pytest.mark.parametrize(
        ("path", "allow"),
        [
            ("/livez", "GET, HEAD, OPTIONS"),
            ("/api/v1/drain", "GET, PUT, DELETE, HEAD, OPTIONS"),
            ("/api/v1/ready", "GET, PUT, HEAD, OPTIONS"),
            ("/api/v1/agents/one/drain", "GET, PUT, DELETE, HEAD, OPTIONS"),
        ],
    )
    async def test_a_method_without_a_meaning_is_answered_with_those_that_have_one(
        self, house: House, path: str, allow: str
    ) -> None:
        await house.serve()
        ask = of_server(house)
        response = await ask.post(path)
        assert error_of(response) == (405, "method_not_allowed")
        assert response.headers["allow"] == allow
        response = await ask.options(path)
        assert (response.status_code, response.headers["allow"], response.content) == (204, allow, b"")

    async def test_nobody_is_allowed_in_from_another_origin(self, house: House) -> None:
        await house.serve()
        headers = {"origin": "http://evil.example", "access-control-request-method": "PUT"}
        response = await of_server(house).options("/api/v1/drain", headers=headers)
        assert [name for name in response.headers if name.startswith("access-control")] == []

    async def test_a_fault_is_logged_and_not_shown(
        self, house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        await house.serve()
        monkeypatch.setattr(ServerDesk, "streams", lambda *_: 1 / 0)
        response = await of_server(house).get("/api/v1/streams")
        assert error_of(response) == (500, "internal")
        assert "ZeroDivision" not in response.text
        assert said(caplog) == ['"fault in the admin interface" path=/api/v1/streams']
        caplog.clear()  # it is the only one


# -- the document


@pytest.mark.parametrize("role", ["server", "agent"])
async def test_the_document_has_every_path_and_method_and_no_others(house: House, role: str) -> None:
    await house.serve()
    desk: Operated = ServerDesk(house.server) if role == "server" else AgentDesk(await house.agent())
    site = site_of(desk)
    said = {
        (path, method)
        for path, methods in document(role, "0")["paths"].items()
        for method in methods
        if method != "parameters"
    }
    routes: Any = site._router.routes
    served = {(route.path, method.lower()) for route in routes for method in route.app._handlers}
    elsewhere = {
        (path, method) for path, method in served if role == "agent" and ("/agents" in path or "/explain" in path)
    }
    assert said == served - elsewhere
    assert (await client(site).get("/openapi.json")).json() == document(role, desk.version)
