"""Programs put together: where operators may reach them, how they end, and what a process loads."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from tunnel import programs
from tunnel.address import ListenAddress, Target
from tunnel.config import (
    AdminConfig,
    AgentConfig,
    ClientConfig,
    Forward,
    ServerConfig,
    UnixAddress,
    check_exposed,
    parse_admin_address,
)
from tunnel.credentials import new_token
from tunnel.errors import ConfigError
from tunnel.lifecycle import EXIT_NEVER_LINKED, Lifecycle

EVERYWHERE = ListenAddress("0.0.0.0", 7402)
SERVERS = (Target("a", 1),)


def check(config: ServerConfig) -> None:
    """As the program does."""
    check_exposed(config.exposed(), config.insecure)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return secret(tmp_path / "token")


def secret(path: Path, content: bytes = b"s3cret\n", mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


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


def test_a_forwarder_that_cannot_listen_ends_with_1_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = ListenAddress(*taken.getsockname())
        code = programs.run_forwarder(ClientConfig(SERVERS), [Forward(at, Target("a", 1))])
    assert code == programs.EXIT_CANNOT_START
    assert f'"cannot start" cause="cannot listen on {at}' in caplog.messages[-1]


@pytest.mark.parametrize("admin", [AdminConfig(), AdminConfig(ListenAddress("127.0.0.1", 0))], ids=["off", "on"])
def test_a_program_ends_with_the_exit_code_of_its_life(admin: AdminConfig) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        servers = (Target(*nobody.getsockname()),)
        assert programs.run_agent(AgentConfig(servers, "one", exit_on_failure=True, admin=admin)) == EXIT_NEVER_LINKED


# -- signals


class Signals:
    """Stands in for ``live``: remembers what the program does at each, and ends.

    Attributes:
        drain, undrain, look: commands, or None.
    """

    drain: Callable[[], object] | None
    undrain: Callable[[], object] | None
    look: Callable[[], object] | None

    async def live(
        self,
        life: Lifecycle,
        dump: Callable[[], object],
        drain: Callable[[], object] | None = None,
        undrain: Callable[[], object] | None = None,
        look: Callable[[], object] | None = None,
    ) -> int:
        await trio.lowlevel.checkpoint()
        self.drain, self.undrain, self.look = drain, undrain, look
        return 0


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Signals:
    signals = Signals()
    monkeypatch.setattr(programs, "live", signals.live)
    return signals


def run(kind: str, token_file: str | None) -> int:
    match kind:
        case "server":
            return programs.run_server(ServerConfig(token_file=token_file))
        case "agent":
            return programs.run_agent(AgentConfig(SERVERS, "one", token_file=token_file))
        case _:
            return programs.run_forwarder(ClientConfig(SERVERS, token_file=token_file), [])


KINDS = ["server", "agent", "forwarder"]


@pytest.mark.parametrize(("kind", "drains"), [("server", False), ("agent", True), ("forwarder", False)])
def test_an_agent_alone_drains_at_a_signal(signals: Signals, kind: str, drains: bool) -> None:
    assert run(kind, None) == 0
    assert [signals.drain is not None, signals.undrain is not None] == [drains] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_follows_files_looks_at_them_at_a_signal(signals: Signals, tmp_path: Path, kind: str) -> None:
    tokens = "".join(new_token(role, role, {}) for role in ("agent", "client"))
    assert run(kind, str(secret(tmp_path / "tokens.toml", tokens.encode()))) == 0
    assert signals.look is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_follows_no_file_leaves_that_signal_its_usual_meaning(signals: Signals, kind: str) -> None:
    assert run(kind, None) == 0
    assert signals.look is None


# -- loading


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
