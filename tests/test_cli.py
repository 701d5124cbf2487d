"""The command line: what people type, and what the programs are started with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Programs, Type, agent, server, stand_in, started, typist

import tunnel
from tunnel.address import Identifier, ListenAddress, Target
from tunnel.certificates import ServerTls
from tunnel.config import AgentConfig, Claims, ClientConfig, Forward, ServerConfig


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    return stand_in(monkeypatch)


@pytest.fixture
def type_(monkeypatch: pytest.MonkeyPatch) -> Iterator[Type]:
    with typist(monkeypatch) as type_:
        yield type_


def test_a_server_starts_with_the_defaults(programs: Programs, type_: Type) -> None:
    assert server(programs, type_("server")) == ServerConfig()


def test_a_server_takes_its_flags(programs: Programs, type_: Type) -> None:
    line = "server --listen 127.0.0.1:0 --connect [::1]:2 --forward 3=a:3 --forward 4=b:4 --dial-timeout 500ms"
    assert server(programs, type_(line)) == ServerConfig(
        listen=ListenAddress("127.0.0.1", 0),
        connect=ListenAddress("::1", 2),
        forwards=(Forward.parse("3=a:3"), Forward.parse("4=b:4")),
        dial_timeout=0.5,
    )


def test_connect_off_is_no_front_end(programs: Programs, type_: Type) -> None:
    assert server(programs, type_("server --connect off")).connect is None


def test_an_agent_is_called_like_its_host_unless_named(programs: Programs, type_: Type) -> None:
    config = agent(programs, type_("agent --server tunnel.example:7400"))
    assert config == AgentConfig((Target("tunnel.example", 7400),), os.uname().nodename)


def test_an_agent_takes_its_name(programs: Programs, type_: Type) -> None:
    assert agent(programs, type_("agent --server a:1 --name edge-7")).name == "edge-7"


def test_an_agent_takes_several_servers(programs: Programs, type_: Type) -> None:
    assert agent(programs, type_("agent --server a:1 --server [::1]:2")).servers == (Target("a", 1), Target("::1", 2))


def test_an_agent_takes_what_it_claims(programs: Programs, type_: Type) -> None:
    line = "agent --server a:1 --identifier host=DB.internal --identifier cidr=10.1.0.0/16 --default-route --priority 7"
    assert agent(programs, type_(line)).claims == Claims(
        (Identifier("host", "db.internal"), Identifier("cidr", "10.1.0.0/16")), default_route=True, priority=7
    )


def test_an_agent_claims_nothing_unless_told(programs: Programs, type_: Type) -> None:
    assert agent(programs, type_("agent --server a:1")).claims == Claims()


def test_an_agents_flags_are_variables_too(programs: Programs, type_: Type) -> None:
    result = type_(
        "agent",
        TUNNEL_AGENT_SERVER="a:1 b:2",
        TUNNEL_AGENT_NAME="edge-7",
        TUNNEL_AGENT_IDENTIFIER="host=db suffix=.svc.local",
        TUNNEL_AGENT_DEFAULT_ROUTE="true",
        TUNNEL_AGENT_PRIORITY="1",
    )
    assert agent(programs, result) == AgentConfig(
        (Target("a", 1), Target("b", 2)),
        "edge-7",
        Claims((Identifier("host", "db"), Identifier("suffix", ".svc.local")), default_route=True, priority=1),
    )


def test_every_key_of_an_agents_file_is_a_flag(programs: Programs, type_: Type, tmp_path: Path) -> None:
    file = tmp_path / "tunnel.toml"
    file.write_text(
        '[agent]\nserver = ["a:1", "b:2"]\nname = "edge-7"\nidentifier = ["host=db", "suffix=.svc.local"]\n'
        "default-route = true\npriority = 1\n"
    )
    assert agent(programs, type_(f"--config {file} agent")) == AgentConfig(
        (Target("a", 1), Target("b", 2)),
        "edge-7",
        Claims((Identifier("host", "db"), Identifier("suffix", ".svc.local")), default_route=True, priority=1),
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('server = "a:1"', ["agent.server", "'a:1'", "a list of texts"]),
        ('identifier = "host=db"', ["agent.identifier", "'host=db'", "a list of texts"]),
        ('identifier = ["db"]', ["--identifier", "'db'", "host=..."]),
        ('priority = "1"', ["agent.priority", "'1'", "a whole number"]),
    ],
)
def test_a_bad_value_in_an_agents_file_ends_in_exit_2(type_: Type, tmp_path: Path, line: str, words: list[str]) -> None:
    file = tmp_path / "tunnel.toml"
    file.write_text(f"[agent]\n{line}\n")
    result = type_(f"--config {file} agent --name edge-7" + ("" if line.startswith("server") else " --server a:1"))
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words), result.stderr


def test_claims_that_are_too_long_together_end_in_exit_2(programs: Programs, type_: Type) -> None:
    identifiers = " ".join(f"--identifier host=database-{number}.internal.example" for number in range(100))
    result = type_(f"agent --server a:1 {identifiers}")
    assert result.exit_code == 2
    assert "100 identifiers are longer than 2048 bytes together" in result.stderr
    assert programs.started == []


def test_a_server_takes_its_strategies_and_how_many_servers_there_are(programs: Programs, type_: Type) -> None:
    config = server(programs, type_("server --strategy default,destHost --server-count 3"))
    assert (config.strategies, config.server_count) == (("default", "destHost"), 3)


def test_strategies_and_server_count_may_come_from_a_file(programs: Programs, type_: Type, tmp_path: Path) -> None:
    file = tmp_path / "tunnel.toml"
    file.write_text('[server]\nstrategy = "defaultRoute"\nserver-count = 3\n')
    config = server(programs, type_(f"--config {file} server"))
    assert (config.strategies, config.server_count) == (("defaultRoute",), 3)


def test_a_server_takes_its_certificate(programs: Programs, type_: Type) -> None:
    config = server(programs, type_("server --tls-cert c --tls-key k --tls-client-ca a"))
    assert config.tls == ServerTls("c", "k", "a")


@pytest.mark.parametrize("flag", ["--tls-cert c", "--tls-key k", "--tls-client-ca a"])
def test_half_a_certificate_is_none(programs: Programs, type_: Type, flag: str) -> None:
    result = type_(f"server {flag}")
    assert (result.exit_code, programs.started) == (2, [])
    assert "--tls-cert and --tls-key go together" in result.stderr


def test_a_forward_may_name_its_agent(programs: Programs, type_: Type) -> None:
    (forward,) = server(programs, type_("server --forward 5432=db:5432@edge-7")).forwards
    assert forward == Forward(ListenAddress("127.0.0.1", 5432), Target("db", 5432), "edge-7")


def test_the_demo_starts(programs: Programs, type_: Type) -> None:
    assert started(programs, type_("demo")) is None


def test_a_forwarder_takes_its_forwards_and_servers(programs: Programs, type_: Type) -> None:
    assert type_("forward 3=a:3 127.0.0.1:0=b:4@edge-7 --server c:1 --server [::1]:2").exit_code == 0
    servers = Target("c", 1), Target("::1", 2)
    assert programs.started == [
        ClientConfig(servers),
        (Forward.parse("3=a:3"), Forward.parse("127.0.0.1:0=b:4@edge-7")),
    ]


def test_a_forwarders_flags_are_variables_too(programs: Programs, type_: Type) -> None:
    result = type_(
        "forward 0.0.0.0:3=a:3",
        TUNNEL_FORWARD_SERVER="c:1 d:2",
        TUNNEL_FORWARD_INSECURE="true",
        TUNNEL_FORWARD_LOG_LEVEL="error",
    )
    assert (result.exit_code, result.stderr) == (0, "")
    assert programs.started[0] == ClientConfig((Target("c", 1), Target("d", 2)))


def test_every_key_of_a_forwarders_file_is_a_flag(programs: Programs, type_: Type, tmp_path: Path) -> None:
    file = tmp_path / "tunnel.toml"
    file.write_text('[forward]\nserver = ["c:1"]\ninsecure = true\nlog-level = "error"\nlog-format = "json"\n')
    result = type_(f"--config {file} forward 0.0.0.0:3=a:3")
    assert (result.exit_code, result.stderr) == (0, "")
    assert programs.started[0] == ClientConfig((Target("c", 1),))


def test_a_forwarder_that_others_can_reach_starts_with_a_warning(programs: Programs, type_: Type) -> None:
    result = type_("forward --insecure 0.0.0.0:3=a:3 4=b:4 --server c:1")
    line = json.loads(result.stderr)
    assert (line["level"], line["event"], line["exposed"]) == ("warning", "insecure", "0.0.0.0:3=a:3")
    assert len(programs.started) == 2


@pytest.mark.parametrize(("text", "agent"), [("a:3", None), ("a:3@edge-7", "edge-7")])
def test_connect_takes_a_target_and_servers(programs: Programs, type_: Type, text: str, agent: str | None) -> None:
    assert type_(f"connect {text} --server c:1 --server [::1]:2").exit_code == 0
    assert programs.started == [ClientConfig((Target("c", 1), Target("::1", 2))), Target("a", 3), agent]


def test_connects_servers_may_come_from_a_variable_or_a_file(programs: Programs, type_: Type, tmp_path: Path) -> None:
    file = tmp_path / "tunnel.toml"
    file.write_text('[connect]\nserver = ["d:2"]\n')
    assert type_("connect a:3", TUNNEL_CONNECT_SERVER="c:1").exit_code == 0
    assert type_(f"--config {file} connect a:3").exit_code == 0
    servers = [ClientConfig((Target("c", 1),)), ClientConfig((Target("d", 2),))]
    assert [programs.started[0], programs.started[3]] == servers


@pytest.mark.parametrize(
    "line", ["server", "agent --server a:1", "forward 3=a:3 --server a:1", "connect a:3 --server a:1", "demo"]
)
def test_the_programs_exit_code_is_passed_on(programs: Programs, type_: Type, line: str) -> None:
    programs.end = 3
    assert type_(line).exit_code == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("server --dial-timeout ten", ["--dial-timeout", "'ten'", "500ms, 30s, 5m or 1h"]),
        ("server --dial-timeout -5s", ["--dial-timeout", "'-5s'", "500ms, 30s, 5m or 1h"]),
        ("server --listen nowhere", ["--listen", "'nowhere'", "HOST:PORT"]),
        ("server --connect on", ["--connect", "'on'", "HOST:PORT"]),
        ("server --forward 5432", ["--forward", "'5432'", "LISTEN=TARGET"]),
        ("server --log-level loud", ["--log-level", "'loud'", "'warning'"]),
        ("agent --server a:0", ["--server", "'a:0'", "1 to 65535"]),
        ("agent --server a:1 --name \x1b", ["--name", "'\\x1b'", "printable"]),
        ("agent --server a:1 --server a:0", ["--server", "'a:0'", "1 to 65535"]),
        ("agent --server a:1 --identifier db", ["--identifier", "'db'", "host=..."]),
        ("agent --server a:1 --identifier cidr=10.0.0.1/8", ["--identifier", "host bits", "cidr=10.1.0.0/16"]),
        ("agent --server a:1 --priority 100", ["--priority", "100", "0<=x<=99"]),
        ("agent --server a:1 --priority first", ["--priority", "'first'", "integer"]),
        ("server --strategy destHost,nearest", ["--strategy", "'destHost,nearest'", "destHost,defaultRoute,default"]),
        ("server --strategy default,default", ["--strategy", "'default,default'", "at most once"]),
        ("server --server-count 0", ["--server-count", "0", "x>=1"]),
        ("server --forward 5432=a:1@", ["--forward", "''", "agent name"]),
        ("agent", ["Missing option", "--server"]),
        ("forward 5432 --server a:1", ["LISTEN=TARGET[@AGENT]...", "'5432'", "5432=db.internal:5432"]),
        ("forward 3=a:3 4=b --server a:1", ["'b'", "HOST:PORT"]),
        ("forward 3=a:3", ["Missing option", "--server"]),
        ("forward --server a:1", ["Missing argument", "LISTEN=TARGET[@AGENT]..."]),
        ("forward 3=a:3 --server a", ["--server", "'a'", "HOST:PORT"]),
        ("forward 0.0.0.0:3=a:3 4=b:4 --server a:1", ["0.0.0.0:3=a:3: ", "loopback", "--insecure"]),
        ("connect nowhere --server a:1", ["TARGET[@AGENT]", "'nowhere'", "HOST:PORT"]),
        ("connect a:0 --server a:1", ["'a:0'", "1 to 65535"]),
        ("connect a:3@ --server a:1", ["''", "agent name"]),
        ("connect a:3", ["Missing option", "--server"]),
        ("connect --server a:1", ["Missing argument", "TARGET[@AGENT]"]),
        ("connect a:3 b:4 --server a:1", ["unexpected extra argument", "b:4"]),
        ("sever", ["No such command 'sever'"]),
        ("server --conect off", ["--conect", "--connect"]),
        ("--config /nowhere server", ["--config", "/nowhere", "No such file"]),
    ],
)
def test_what_cannot_be_used_is_named_and_ends_in_exit_2(
    programs: Programs, type_: Type, line: str, words: list[str]
) -> None:
    result = type_(line)
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words), result.stderr
    assert programs.started == []


def test_a_server_that_others_could_reach_is_refused(programs: Programs, type_: Type) -> None:
    result = type_("server --listen 0.0.0.0:7400")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: --listen 0.0.0.0:7400: ")
    assert programs.started == []


def test_an_insecure_server_starts_with_a_warning(programs: Programs, type_: Type) -> None:
    result = type_("server --insecure --listen 0.0.0.0:7400 --connect off")
    assert server(programs, result).insecure
    line = json.loads(result.stderr)
    assert (line["level"], line["event"], line["exposed"]) == ("warning", "insecure", "--listen 0.0.0.0:7400")


def test_insecure_on_loopback_is_no_news(programs: Programs, type_: Type) -> None:
    assert type_("server --insecure").stderr == ""


def test_the_version_is_told(type_: Type) -> None:
    assert type_("--version").output == f"tunnel {tunnel.__version__}\n"


def test_the_package_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "tunnel", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"tunnel {tunnel.__version__}\n"


def test_help_does_not_wait_for_heavy_imports() -> None:
    script = "import sys; from tunnel import cli; print({'trio', 'structlog', 'asyncio', 'h11'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# -- leaving


def test_what_a_server_does_when_it_leaves_are_flags(programs: Programs, type_: Type) -> None:
    config = server(programs, type_("server --shutdown-budget 1m --lame-duck 10s --drain-fallback deny"))
    assert (config.timeouts.shutdown, config.lame_duck, config.drain_fallback) == (60.0, 10.0, False)


def test_what_a_server_does_when_it_leaves_are_variables_too(programs: Programs, type_: Type) -> None:
    result = type_(
        "server",
        TUNNEL_SERVER_SHUTDOWN_BUDGET="1m",
        TUNNEL_SERVER_LAME_DUCK="10s",
        TUNNEL_SERVER_DRAIN_FALLBACK="deny",
    )
    config = server(programs, result)
    assert (config.timeouts.shutdown, config.lame_duck, config.drain_fallback) == (60.0, 10.0, False)


def test_what_a_server_does_when_it_leaves_may_stand_in_a_file(programs: Programs, type_: Type, tmp_path: Path) -> None:
    file = tmp_path / "tunnel.toml"
    file.write_text('[server]\nshutdown-budget = "1m"\nlame-duck = "10s"\ndrain-fallback = "deny"\n')
    config = server(programs, type_(f"--config {file} server"))
    assert (config.timeouts.shutdown, config.lame_duck, config.drain_fallback) == (60.0, 10.0, False)


def test_what_an_agent_does_when_it_leaves_are_flags(programs: Programs, type_: Type) -> None:
    config = agent(programs, type_("agent --server a:1 --shutdown-budget 500ms --exit-on-failure"))
    assert (config.timeouts.shutdown, config.exit_on_failure) == (0.5, True)


def test_what_an_agent_does_when_it_leaves_are_variables_too(programs: Programs, type_: Type) -> None:
    result = type_("agent --server a:1", TUNNEL_AGENT_SHUTDOWN_BUDGET="0s", TUNNEL_AGENT_EXIT_ON_FAILURE="true")
    config = agent(programs, result)
    assert (config.timeouts.shutdown, config.exit_on_failure) == (0.0, True)


def test_a_forwarder_has_a_budget_too(programs: Programs, type_: Type) -> None:
    result = type_("forward 5432=db:5432 --server a:1 --shutdown-budget 2s")
    assert result.exit_code == 0, result.output
    config = programs.started[0]
    assert isinstance(config, ClientConfig)
    assert config.timeouts.shutdown == 2.0


@pytest.mark.parametrize("text", ["ten", "-5s", "10 parsecs", "10"])
@pytest.mark.parametrize("line", ["server", "agent --server a:1", "forward 1=a:1 --server a:1"])
def test_a_budget_that_is_none_ends_in_exit_2(programs: Programs, type_: Type, line: str, text: str) -> None:
    result = type_(line, **{f"TUNNEL_{line.split()[0].upper()}_SHUTDOWN_BUDGET": text})
    assert result.exit_code == 2
    assert all(word in result.stderr for word in ("--shutdown-budget", repr(text), "500ms, 30s, 5m or 1h"))
    assert programs.started == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("server --lame-duck 26s", ["--lame-duck 26s", "--shutdown-budget 25s"]),
        ("server --lame-duck 2s --shutdown-budget 1s", ["--lame-duck 2s", "--shutdown-budget 1s"]),
        ("server --lame-duck long", ["--lame-duck", "'long'", "500ms, 30s, 5m or 1h"]),
        ("server --drain-fallback maybe", ["--drain-fallback", "'maybe'", "'allow', 'deny'"]),
    ],
)
def test_a_way_to_leave_that_makes_no_sense_ends_in_exit_2(
    programs: Programs, type_: Type, line: str, words: list[str]
) -> None:
    result = type_(line)
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words), result.stderr
    assert programs.started == []
