"""What programs are put together from: the flags that an operator's interface has, and what a process loads."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tunnel import cli, programs
from tunnel.address import ListenAddress, Target
from tunnel.config import (
    AdminConfig,
    AgentConfig,
    ServerConfig,
    UnixAddress,
    check_exposed,
    parse_admin_address,
)
from tunnel.errors import ConfigError

EVERYWHERE = ListenAddress("0.0.0.0", 7402)
Type = Callable[..., Result]


def check(config: ServerConfig) -> None:
    """As the program does."""
    check_exposed(config.exposed(), config.insecure)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig | AgentConfig]:
    """The configs of what was started; nothing is."""
    configs: list[ServerConfig | AgentConfig] = []

    def remember(config: ServerConfig | AgentConfig) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(programs, "run_server", remember)
    monkeypatch.setattr(programs, "run_agent", remember)
    return configs


@pytest.fixture
def type_(monkeypatch: pytest.MonkeyPatch) -> Type:
    monkeypatch.setattr(cli, "begin", lambda *_: None)
    for variable in [name for name in os.environ if name.startswith("TUNNEL_")]:
        monkeypatch.delenv(variable)
    return lambda line, **variables: CliRunner().invoke(cli.program, line.split(), env=variables)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return secret(tmp_path / "token")


def secret(path: Path, content: bytes = b"s3cret\n", mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


# -- flags


@pytest.mark.parametrize(("line", "port"), [("server", 7402), ("agent --server a:1", 7403)])
def test_the_interface_is_on_loopback_unless_told_otherwise(
    started: list[ServerConfig | AgentConfig], type_: Type, line: str, port: int
) -> None:
    result = type_(line)
    assert result.exit_code == 0, result.output
    assert started[0].admin == AdminConfig(ListenAddress("127.0.0.1", port), required=False)


@pytest.mark.parametrize("line", ["server", "agent --server a:1"])
@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--admin 127.0.0.1:7402", AdminConfig(ListenAddress("127.0.0.1", 7402))),
        ("--admin 127.0.0.1:7403", AdminConfig(ListenAddress("127.0.0.1", 7403))),
        ("--admin 0", AdminConfig(ListenAddress("127.0.0.1", 0))),
        ("--admin [::1]:9", AdminConfig(ListenAddress("::1", 9))),
        ("--admin unix:/run/t.sock", AdminConfig(UnixAddress("/run/t.sock"))),
        ("--admin off", AdminConfig()),
        ("--admin off --health 0.0.0.0:9", AdminConfig(health=ListenAddress("0.0.0.0", 9))),
        ("--admin off --health off", AdminConfig()),
    ],
)
def test_an_address_that_is_asked_for_is_required(
    started: list[ServerConfig | AgentConfig], type_: Type, line: str, flags: str, wanted: AdminConfig
) -> None:
    result = type_(f"{line} {flags}")
    assert result.exit_code == 0, result.output
    assert started[0].admin == wanted


@pytest.mark.parametrize(("section", "rest"), [("server", ""), ("agent", 'server = ["a:1"]\n')])
def test_the_flags_are_variables_and_keys_too(
    started: list[ServerConfig | AgentConfig], type_: Type, tmp_path: Path, token_file: Path, section: str, rest: str
) -> None:
    file = tmp_path / "tunnel.toml"
    file.write_text(f'[{section}]\nadmin = "127.0.0.1:1"\ntoken-file = "{token_file}"\n{rest}')
    result = type_(f"--config {file} {section}", **{f"TUNNEL_{section.upper()}_HEALTH": "127.0.0.1:2"})
    assert result.exit_code == 0, result.output
    admin = started[0].admin
    assert (admin.listen, admin.required) == (ListenAddress("127.0.0.1", 1), True)
    assert admin.health == ListenAddress("127.0.0.1", 2)
    assert started[0].token_file == str(token_file)


@pytest.mark.parametrize("line", ["server", "agent --server a:1"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--admin nowhere", ["--admin", "'nowhere'", "HOST:PORT"]),
        ("--admin unix:t.sock", ["--admin", "'unix:t.sock'", "unix:/PATH"]),
        ("--admin unix:", ["--admin", "'unix:'", "unix:/PATH"]),
        ("--health on", ["--health", "'on'", "HOST:PORT"]),
        ("--admin 0.0.0.0:7402", ["--admin 0.0.0.0:7402", "not a loopback address"]),
    ],
)
def test_what_cannot_be_used_is_named_and_ends_in_exit_2(
    started: list[ServerConfig | AgentConfig], type_: Type, line: str, flags: str, words: list[str]
) -> None:
    result = type_(f"{line} {flags}")
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words), result.stderr
    assert started == []


# -- what is safe


def test_an_interface_that_others_can_reach_is_exposed_unless_it_has_a_token(token_file: Path) -> None:
    assert ServerConfig(admin=AdminConfig(EVERYWHERE)).exposed() == ["--admin 0.0.0.0:7402"]
    with pytest.raises(ConfigError, match=r"--admin 0\.0\.0\.0:7402: .*--insecure"):
        check(ServerConfig(admin=AdminConfig(EVERYWHERE)))
    assert ServerConfig(admin=AdminConfig(EVERYWHERE), token_file=str(token_file)).exposed() == []


def test_a_server_may_be_exposed_on_purpose() -> None:
    check(ServerConfig(admin=AdminConfig(EVERYWHERE), insecure=True))


def test_an_agent_may_not(token_file: Path) -> None:
    servers = (Target("a", 1),)
    with pytest.raises(ConfigError, match=r"--admin 0\.0\.0\.0:7402: .*--token-file"):
        AgentConfig(servers, "one", admin=AdminConfig(EVERYWHERE))
    AgentConfig(servers, "one", admin=AdminConfig(EVERYWHERE), token_file=str(token_file))


def test_probes_may_come_from_elsewhere() -> None:
    assert ServerConfig(admin=AdminConfig(health=EVERYWHERE)).exposed() == []
    AgentConfig((Target("a", 1),), "one", admin=AdminConfig(health=EVERYWHERE))


@pytest.mark.parametrize("text", ["127.0.0.1:7402", "[::1]:1", "unix:/run/tunnel/admin.sock"])
def test_an_address_is_read_as_it_is_written(text: str) -> None:
    assert str(parse_admin_address(text)) == text


@pytest.mark.parametrize("path", ["", "a", "./a", "/a\0b", "/" + "x" * 100])
def test_what_is_no_path_of_a_socket_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="taken: unix:/PATH"):
        UnixAddress(path)


# -- running


@pytest.mark.parametrize("use", ["listen", "admin", "health"])
def test_a_program_that_cannot_listen_ends_with_1_and_says_why(use: str, caplog: pytest.LogCaptureFixture) -> None:
    free = ListenAddress("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = {use: ListenAddress(*taken.getsockname())}
        admin = AdminConfig(at.get("admin", free), health=at.get("health"))
        config = ServerConfig(listen=at.get("listen", free), connect=None, admin=admin)
        assert programs.run_server(config) == programs.EXIT_CANNOT_START
    assert f'"cannot start" cause="cannot listen on {at[use]}' in caplog.messages[-1]


def loaded(script: str) -> set[str]:
    """What a process has loaded in the end."""
    script = f"import sys; {script}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_command_line_does_not_load_what_operators_need() -> None:
    assert not loaded("import tunnel.cli") & {"trio", "starlette", "hypercorn", "prometheus_client", "rich", "hmac"}


def test_a_program_without_an_operator_loads_nothing_for_one() -> None:
    script = "from tunnel import programs; import tunnel.server, tunnel.desk"
    assert not loaded(script) & {"starlette", "hypercorn", "prometheus_client", "tunnel.agent", "tunnel.client"}


def test_what_talks_http_is_not_loaded_before_somebody_comes() -> None:
    assert not loaded("import tunnel.admin.serve") & {"starlette", "hypercorn", "prometheus_client"}


def test_metrics_are_not_loaded_before_somebody_wants_them() -> None:
    modules = loaded("import tunnel.admin.talk")
    assert "hypercorn" in modules
    assert "prometheus_client" not in modules
