"""The commands that operate a program, against an admin API that says what each test wants."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result
from stub_admin import StubAdmin, refusal, stub_admin

from tunnel import cli, follow, operator_cli

Type = Callable[..., Result]
AGENTS, EDGE, SELF = "/api/v1/agents", "/api/v1/agents/edge/drain", "/api/v1/drain"


@pytest.fixture
def stub() -> Iterator[StubAdmin]:
    with stub_admin() as stub:
        yield stub


@pytest.fixture
def type_(stub: StubAdmin, monkeypatch: pytest.MonkeyPatch) -> Type:
    """Types a line, split at its spaces, at the stub; nothing waits for anything but answers."""
    monkeypatch.setattr(operator_cli, "_RETRY", 0)
    return lambda line, **env: CliRunner().invoke(cli.program, [*line.split(), "--admin", stub.url], env=env)


def drained(state: str, open_: int = 0, pending: int = 0, oldest: float = 0.0) -> dict[str, Any]:
    return {"state": state, "open": open_, "pending": pending, "oldest_s": oldest}


def agent(state: str = "draining", drain: dict[str, Any] | None = None, **facts: object) -> dict[str, Any]:
    view = {
        "name": "edge",
        "instance": "1f3c",
        "state": state,
        "since_s": 187.0,
        "rtt_ms": 0.84,
        "streams": 3,
        "sent": 1536,
        "received": 3 * 1024**3,
        "drain": drain,
    }
    return view | facts


def answer(*agents: dict[str, Any], rev: str = "7") -> tuple[int, dict[str, Any]]:
    return 200, {"name": "edge", "rev": rev, "agents": list(agents), "told": len(agents)}


def itself(state: str, role: str = "agent", instance: str = "1f3c", left: int = 0) -> tuple[int, dict[str, Any]]:
    reasons = [] if state == "ready" else ["admin"]
    who = {"role": role, "name": "server" if role == "server" else "edge", "instance": instance}
    return 200, {**who, **drained(state, left), "reasons": reasons, "acked": 1, "servers": 2, "rev": state}


BUSY, IDLE = agent(drain=drained("draining", 2, 1, 12.0)), agent(drain=drained("drained"))
NOBODY = refusal(404, "not_found", "no agent of that name is linked")


# -- looking


def test_status_shows_a_server_and_its_agents(stub: StubAdmin, type_: Type) -> None:
    stub.says("GET", SELF, itself("ready", "server", left=4))
    stub.says("GET", "/api/v1/ready", (200, {"ready": True, "reasons": ["fallback_only"]}))
    stub.says(
        "GET", AGENTS, (200, {"agents": [agent("active"), agent(name="b", rtt_ms=None, drain=drained("drained"))]})
    )
    assert type_("status").stdout.splitlines() == [
        f"server at {stub.url}, instance 1f3c",
        "ready: ready for new work (fallback_only)",
        "4 open, 0 pending, oldest 0.0s",
        "",
        "AGENT  STATE    STREAMS    SENT  RECEIVED    RTT  SINCE",
        "edge   active         3  1.5KiB    3.0GiB  0.8ms  3m07s",
        "b      drained        3  1.5KiB    3.0GiB      -  3m07s",
    ]


def test_status_shows_an_agent_which_has_no_agents(stub: StubAdmin, type_: Type) -> None:
    stub.says("GET", SELF, itself("draining", left=1))
    stub.says("GET", "/api/v1/ready", (200, {"ready": False, "reasons": ["draining"]}))
    assert type_("status").stdout.splitlines() == [
        f"agent edge at {stub.url}, instance 1f3c",
        "draining: not ready for new work (draining)",
        "1 open, 0 pending, oldest 0.0s",
        "links to servers: 2",
    ]


def test_status_is_told_to_programs_as_well(stub: StubAdmin, type_: Type) -> None:
    stub.says("GET", SELF, itself("ready", "server"))
    stub.says("GET", "/api/v1/ready", (200, {"ready": True, "reasons": []}))
    stub.says("GET", AGENTS, (200, {"agents": [agent("active")]}))
    told = {"drain": itself("ready", "server")[1], "ready": {"ready": True, "reasons": []}, "agents": [agent("active")]}
    assert json.loads(type_("status --json").stdout) == told


def test_a_watch_goes_on_when_the_program_goes_away_and_comes_back(
    stub: StubAdmin, type_: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.says("GET", SELF, itself("ready"), (200, "<html>"), itself("drained"))
    stub.says("GET", "/api/v1/ready", (200, {"ready": True, "reasons": []}))
    naps = iter([None, None, KeyboardInterrupt()])

    def nap(_seconds: float) -> None:
        if wakes := next(naps):
            raise wakes

    monkeypatch.setattr("time.sleep", nap)
    result = type_("status --watch")
    assert result.exit_code == 0
    shown = [line.partition(":")[0] for line in result.stdout.splitlines()]
    head, tail = "agent edge at http", ["0 open, 0 pending, oldest 0.0s", "links to servers"]
    ready, drained = [head, "ready", *tail], [head, "drained", *tail]
    assert shown == [*ready, "no answer from http", *ready, *drained]


def test_agents_are_listed(stub: StubAdmin, type_: Type) -> None:
    stub.says("GET", AGENTS, (200, {"agents": [agent("final", streams=0)]}))
    assert type_("agents").stdout.splitlines() == [
        "AGENT  STATE  STREAMS    SENT  RECEIVED    RTT  SINCE",
        "edge   final        0  1.5KiB    3.0GiB  0.8ms  3m07s",
    ]


def test_no_agents_is_said_in_words(stub: StubAdmin, type_: Type) -> None:
    stub.says("GET", AGENTS, (200, {"agents": []}))
    assert type_("agents").stdout == "no agent is linked\n"


def test_a_name_cannot_write_to_the_terminal(stub: StubAdmin, type_: Type) -> None:
    stub.says("GET", AGENTS, (200, {"agents": [agent("active", name="\x1b[2J\nx")]}))
    assert r"\x1b[2J\nx" in type_("agents").stdout


def candidate(name: str, verdict: str) -> dict[str, Any]:
    return {"agent": name, "instance": "0123456789", "state": "active", "priority": 0, "streams": 2, "verdict": verdict}


def test_a_decision_is_explained_with_every_candidate(stub: StubAdmin, type_: Type) -> None:
    decision = {"agent": "edge", "instance": "0123456789", "strategy": "destHost", "key": "host=db", "fallback": False}
    matches = [
        {"strategy": "destHost", "key": "host=db", "candidates": [candidate("edge", "picked")]},
        {"strategy": "default", "key": "any", "candidates": [candidate("b", "not used: an earlier match serves")]},
    ]
    explained = {"target": "db:5432", "agent": None, "decision": decision, "considered": matches}
    stub.says("GET", "/api/v1/explain", (200, explained))
    assert type_("explain DB:5432").stdout.splitlines() == [
        "db:5432: edge (instance 01234567), by destHost, host=db",
        "",
        "STRATEGY  KEY      AGENT  INSTANCE  STATE   PRIORITY  STREAMS  VERDICT",
        "destHost  host=db  edge   01234567  active         0        2  picked",
        "default   any      b      01234567  active         0        2  not used: an earlier match serves",
    ]
    assert stub.asked[0].query == {"target": "db:5432"}


def test_that_nobody_would_serve_is_explained(stub: StubAdmin, type_: Type) -> None:
    explained = {"target": "db:5432", "agent": "edge", "decision": None, "considered": []}
    stub.says("GET", "/api/v1/explain", (200, explained))
    result = type_("explain db:5432@edge")
    assert (result.exit_code, result.stdout) == (0, "db:5432@edge: nobody; no agent that is linked matches\n")
    assert stub.asked[0].query == {"target": "db:5432", "agent": "edge"}


# -- draining


def test_a_drain_is_told_with_reason_and_exit(stub: StubAdmin, type_: Type) -> None:
    stub.says("PUT", EDGE, answer(BUSY))
    result = type_("drain edge --reason rollout --exit")
    assert (result.exit_code, result.stdout) == (0, "edge: told to drain\n")
    assert stub.asked[0].body == {"reason": "rollout", "exit": True}


def test_any_name_is_one_part_of_the_path(stub: StubAdmin, type_: Type) -> None:
    type_("drain a/../b?c")
    assert stub.asked[0].path == "/api/v1/agents/a%2F..%2Fb%3Fc/drain"


def test_waiting_says_each_change_once_and_ends_when_the_agent_says_drained(stub: StubAdmin, type_: Type) -> None:
    stub.says("PUT", EDGE, answer(agent(drain=None), rev="1"))
    older = agent(drain=drained("draining", 2, 1, 13.0))
    stub.says("GET", EDGE, answer(BUSY, rev="2"), answer(older, rev="2"), answer(IDLE, rev="3"))
    result = type_("drain edge --wait")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "edge: unknown: 3 open, 0 pending, oldest 0.0s",
        "edge: draining: 2 open, 1 pending, oldest 12.0s",
        "edge: drained",
    ]
    assert [asked.query.get("since") for asked in stub.asked] == [None, None, "2", "2"]


def test_waiting_is_told_to_programs_as_well(stub: StubAdmin, type_: Type) -> None:
    stub.says("PUT", EDGE, answer(BUSY))
    stub.says("GET", EDGE, answer(IDLE))
    lines = [json.loads(line) for line in type_("drain edge --wait --json").stdout.splitlines()]
    assert [(line["state"], line.get("outcome")) for line in lines] == [("draining", None), ("drained", "drained")]


def test_an_agent_that_is_drained_already_is_not_waited_for(stub: StubAdmin, type_: Type) -> None:
    stub.says("PUT", EDGE, answer(IDLE))
    assert type_("drain edge --wait").exit_code == 0
    assert len(stub.asked) == 1


def test_waiting_ends_with_3_when_the_time_is_over(stub: StubAdmin, type_: Type) -> None:
    stub.says("PUT", EDGE, answer(BUSY))
    stub.says("GET", EDGE, answer(BUSY))
    result = type_("drain edge --wait --timeout 20ms")
    assert result.exit_code == 3
    assert result.stdout.splitlines()[-1].endswith("and the drain goes on; draining: 2 open, 1 pending")


def test_no_time_is_one_look(stub: StubAdmin, type_: Type) -> None:
    stub.says("PUT", EDGE, answer(BUSY))
    assert type_("drain edge --wait --timeout 0s").exit_code == 3


def test_waiting_ends_with_4_when_somebody_else_undrained_it(stub: StubAdmin, type_: Type) -> None:
    stub.says("PUT", EDGE, answer(BUSY))
    stub.says("GET", EDGE, answer(agent("active")))
    result = type_("drain edge --wait")
    assert result.exit_code == 4
    assert "somebody else took the drain back" in result.stdout


@pytest.mark.parametrize("command", ["drain edge", "drain edge --wait", "undrain edge"])
def test_no_such_agent_ends_with_5(stub: StubAdmin, type_: Type, command: str) -> None:
    stub.says("PUT", EDGE, NOBODY)
    stub.says("DELETE", EDGE, NOBODY)
    result = type_(command)
    assert (result.exit_code, result.stderr) == (5, "Error: not_found: no agent of that name is linked\n")


def test_waiting_ends_with_6_when_the_agent_went_away(
    stub: StubAdmin, type_: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "PATIENCE", 0.0)
    stub.says("PUT", EDGE, answer(BUSY))
    stub.says("GET", EDGE, NOBODY)
    result = type_("drain edge --wait")
    assert result.exit_code == 6
    assert result.stdout.splitlines()[-1] == "edge: went away before it was drained, with 3 open"


def test_an_agent_that_goes_away_after_it_said_drained_is_drained(stub: StubAdmin, type_: Type) -> None:
    leaving = agent(drain=drained("stopping"))
    stub.says("PUT", EDGE, answer(BUSY))
    stub.says("GET", EDGE, answer(leaving), NOBODY)
    assert type_("drain edge --wait --exit").exit_code == 0


@pytest.mark.parametrize(
    "blind", [(200, "<html>"), (200, {}), refusal(503, "busy", "later"), (200, {"rev": "1", "agents": [{}]})]
)
def test_what_cannot_be_seen_is_unknown_and_never_an_end(stub: StubAdmin, type_: Type, blind: tuple[int, Any]) -> None:
    stub.says("PUT", EDGE, answer(BUSY))
    stub.says("GET", EDGE, blind, answer(IDLE))
    result = type_("drain edge --wait")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].startswith("edge: unknown: ")


def test_a_server_that_stays_away_is_a_time_out_that_says_unknown(stub: StubAdmin, type_: Type) -> None:
    stub.says("PUT", EDGE, answer(IDLE | {"drain": None}))
    stub.says("GET", EDGE, (200, "<html>"))
    result = type_("drain edge --wait --timeout 20ms")
    assert result.exit_code == 3
    assert "the drain goes on; unknown: no answer from http://" in result.stdout.splitlines()[-1]


def test_ctrl_c_ends_the_waiting_and_says_that_the_drain_goes_on(stub: StubAdmin, type_: Type) -> None:
    def ctrl_c() -> tuple[int, object]:
        import signal

        signal.raise_signal(signal.SIGINT)
        return answer(BUSY)

    stub.says("PUT", EDGE, answer(BUSY))
    stub.says("GET", EDGE, ctrl_c)
    result = type_("drain edge --wait")
    assert result.exit_code == 130
    assert result.stderr == "stopped watching; the drain of edge goes on; tunnel undrain edge takes it back\n"
    assert [asked.method for asked in stub.asked][:2] == ["PUT", "GET"]
    assert "DELETE" not in [asked.method for asked in stub.asked]


def test_a_program_is_told_to_drain_itself(stub: StubAdmin, type_: Type) -> None:
    stub.says("PUT", SELF, itself("draining", left=1))
    stub.says("GET", SELF, itself("draining", left=1), itself("drained"))
    assert type_("drain --self --wait").exit_code == 0


def test_a_program_that_was_undrained_itself_ends_with_4(stub: StubAdmin, type_: Type) -> None:
    stub.says("PUT", SELF, itself("draining", left=1))
    stub.says("GET", SELF, itself("ready", left=1))
    assert type_("drain --self --wait").exit_code == 4


@pytest.mark.parametrize(("left", "code"), [(0, 0), (2, 6)])
def test_a_server_that_has_left_had_something_open_or_not(
    type_: Type, stub: StubAdmin, monkeypatch: pytest.MonkeyPatch, left: int, code: int
) -> None:
    stub.says("PUT", SELF, itself("draining", "server", left=2))
    stub.says("GET", SELF, itself("draining", "server", left=left), itself("ready", "server", instance="another"))
    assert type_("drain --self --wait --exit").exit_code == code


def test_a_server_that_does_not_drain_without_leaving_says_so(stub: StubAdmin, type_: Type) -> None:
    stub.says("PUT", SELF, refusal(409, "too_late", "ask it to exit"))
    result = type_("drain --self")
    assert (result.exit_code, result.stderr) == (1, "Error: too_late: ask it to exit\n")


def test_an_undrain_is_told(stub: StubAdmin, type_: Type) -> None:
    stub.says("DELETE", EDGE, answer(BUSY, IDLE))
    result = type_("undrain edge")
    assert (result.exit_code, result.stdout) == (0, "edge: told to stay (2 processes)\n")


def test_an_undrain_that_comes_too_late_says_so(stub: StubAdmin, type_: Type) -> None:
    stub.says("DELETE", EDGE, refusal(409, "too_late", "agent edge is leaving"))
    result = type_("undrain edge")
    assert (result.exit_code, result.stderr) == (1, "Error: too_late: agent edge is leaving\n")


# -- what all of them do


COMMANDS = ["status", "agents", "drain edge", "drain --self --wait", "undrain edge", "explain db:5432"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_program_that_cannot_be_reached_is_one_line_and_exit_69(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    result = CliRunner().invoke(cli.program, [*command.split(), "--admin", address])
    assert (result.exit_code, result.stdout) == (69, "")
    assert result.stderr == f"Error: no answer from http://{address}: Connection refused\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_error_is_told_with_its_code_and_exit_1(stub: StubAdmin, type_: Type, command: str) -> None:
    for method in ("GET", "PUT", "DELETE"):
        for path in (SELF, EDGE, AGENTS, "/api/v1/explain", "/api/v1/ready"):
            stub.says(method, path, refusal(401, "unauthorized", "the token is \x1b wrong"))
    result = type_(command)
    assert (result.exit_code, result.stderr) == (1, "Error: unauthorized: the token is \\x1b wrong\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_answer_of_another_kind_is_no_answer(stub: StubAdmin, type_: Type, command: str) -> None:
    for method in ("GET", "PUT", "DELETE"):
        for path in (SELF, EDGE, AGENTS, "/api/v1/explain", "/api/v1/ready"):
            stub.says(method, path, (200, {"hello": "world"}))
    result = type_(command)
    assert result.exit_code == 69
    assert "an answer without" in result.stderr


def test_rich_is_not_loaded_where_nobody_looks(stub: StubAdmin) -> None:
    stub.says("GET", AGENTS, (200, {"agents": [agent("active")]}))
    script = (
        "import sys; from tunnel import cli\n"
        "try: cli.program(['agents', '--admin', sys.argv[1]])\n"
        "except SystemExit: print({'rich', 'trio'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script, stub.url], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
