"""Operating real programs with the commands, as people and scripts do: pipes, exit codes, and a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from endpoints import Blackhole, NewTarget, check_echo, connect_head, echo, read_head
from programs import DEADLINE, Program, StartProgram, eventually, free_port
from tunnels import NewTunnel, Tunnel

OPERATED = ("--admin", "127.0.0.1:0")
_IN_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C is a signal for whom the terminal belongs to
from tunnel.__main__ import main
main()
"""


def admin(program: Program) -> str:
    return str(program.wait_for("listening", use="admin")["address"])


def run(at: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tunnel", *arguments, "--admin", at]
    return subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE, check=False)


def ask(at: str, *arguments: str) -> Any:
    done = run(at, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def agents(at: str) -> list[dict[str, Any]]:
    """All that are linked to a server, asked for without any of our own code."""
    with urllib.request.urlopen(f"http://{at}/api/v1/agents", timeout=DEADLINE) as reply:
        found: list[dict[str, Any]] = json.load(reply)["agents"]
    return found


def state(at: str) -> list[str]:
    """Of each agent."""
    return [view["state"] for view in agents(at)]


class Command:
    """A command that runs for a while; what it prints is read while it comes.

    Args:
        terminal: it runs in one of its own, 100 columns wide.
    """

    def __init__(self, at: str, *arguments: str, terminal: bool = False) -> None:
        self.printed = ""
        self._news = threading.Condition()
        ours, theirs = pty.openpty() if terminal else os.pipe()
        program = ["-c", _IN_TERMINAL] if terminal else ["-m", "tunnel"]
        self._process = subprocess.Popen(
            [sys.executable, *program, *arguments, "--admin", at],
            stdin=theirs if terminal else subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=terminal,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        )
        os.close(theirs)
        self._ours = ours
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # how a terminal ends
            while data := os.read(self._ours, 65536):
                with self._news:
                    self.printed += data.decode()
                    self._news.notify_all()

    @property
    def text(self) -> str:
        """What was printed, without what a terminal does not show."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.printed).replace("\r", "")

    def wait_for(self, words: str, since: int = 0) -> int:
        """Where in ``text`` the words end, once they are there after ``since``."""
        with self._news:
            came = self._news.wait_for(lambda: words in self.text[since:], DEADLINE)
        assert came, f"never printed: {words!r}\n{self.text}"
        return self.text.index(words, since) + len(words)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def ended(self) -> int:
        """The exit code, once there is one and all is read."""
        code = self._process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return code

    def close(self) -> None:
        if self.running:
            self._process.kill()
        self.ended()
        os.close(self._ours)


NewCommand = Callable[..., Command]


@pytest.fixture
def command() -> Iterator[NewCommand]:
    """Starts a command."""
    with contextlib.ExitStack() as stack:

        def command(at: str, *arguments: str, terminal: bool = False) -> Command:
            return stack.enter_context(contextlib.closing(Command(at, *arguments, terminal=terminal)))

        yield command


@pytest.fixture
def operated(tunnel: NewTunnel) -> Tunnel:
    """A server with one agent."""
    return tunnel(*OPERATED)


# -- drain --wait


def test_a_pending_dial_holds_a_drain_until_it_is_done(
    operated: Tunnel, command: NewCommand, blackhole: Blackhole
) -> None:
    client = operated.client("connect")
    client.sendall(connect_head("127.0.0.1", blackhole.port))
    at = admin(operated.server)
    eventually(lambda: agents(at)[0]["streams"] == 1, "a dial")
    waiting = command(at, "drain", "a0", "--wait")
    waiting.wait_for("draining: 0 open, 1 pending")
    assert waiting.running
    with blackhole.open_up() as listener:
        target, _ = listener.accept()
        with target:
            assert read_head(client).startswith(b"HTTP/1.1 200 ")
            waiting.wait_for("draining: 1 open, 0 pending")
            assert waiting.running
            client.close()
            assert target.recv(1) == b""
    assert waiting.ended() == 0
    assert waiting.text.splitlines()[-1] == "a0: drained"


def test_an_agent_that_is_killed_ends_the_waiting_with_6(
    operated: Tunnel, command: NewCommand, target: NewTarget
) -> None:
    check_echo(operated.open("connect", target(echo).port))
    waiting = command(admin(operated.server), "drain", "a0", "--wait")
    waiting.wait_for("draining: 1 open, 0 pending")
    operated.agent.kill()
    assert waiting.ended() == 6
    assert waiting.text.splitlines()[-1] == "a0: went away before it was drained, with 1 open"


def test_an_agent_that_is_drained_already_ends_the_waiting_at_once(operated: Tunnel) -> None:
    at = admin(operated.server)
    assert run(at, "drain", "a0", "--wait").returncode == 0
    assert run(at, "drain", "a0", "--wait", "--timeout", "0s").returncode == 0


def test_an_undrain_by_somebody_else_ends_the_waiting_with_4(
    operated: Tunnel, command: NewCommand, target: NewTarget
) -> None:
    at = admin(operated.server)
    check_echo(operated.open("connect", target(echo).port))
    waiting = command(at, "drain", "a0", "--wait")
    waiting.wait_for("draining: 1 open, 0 pending")
    assert run(at, "undrain", "a0").returncode == 0
    assert waiting.ended() == 4
    assert state(at) == ["active"]


def test_the_time_that_waiting_gets_ends_with_3_and_the_drain_goes_on(operated: Tunnel, target: NewTarget) -> None:
    at = admin(operated.server)
    check_echo(operated.open("connect", target(echo).port))
    done = run(at, "drain", "a0", "--wait", "--timeout", "100ms")
    assert done.returncode == 3
    assert state(at) == ["draining"]


def test_an_agent_may_be_told_to_exit_when_drained(operated: Tunnel, command: NewCommand, target: NewTarget) -> None:
    sock = operated.open("connect", target(echo).port)
    check_echo(sock)
    waiting = command(admin(operated.server), "drain", "a0", "--wait", "--exit", "--reason", "a new one is there")
    waiting.wait_for("draining: 1 open, 0 pending")
    check_echo(sock)
    sock.close()
    assert operated.agent.ended() == 0
    assert waiting.ended() == 0
    assert operated.agent.said("command", action="drain", text="a new one is there")


def test_an_idle_agent_that_exits_at_once_was_drained(operated: Tunnel) -> None:
    assert run(admin(operated.server), "drain", "a0", "--wait", "--exit").returncode == 0
    assert operated.agent.ended() == 0


def test_no_such_agent_ends_with_5(operated: Tunnel) -> None:
    at = admin(operated.server)
    done = [run(at, "drain", "edge"), run(at, "drain", "edge", "--wait"), run(at, "undrain", "edge")]
    assert [each.returncode for each in done] == [5, 5, 5]
    assert state(at) == ["active"]


def test_while_a_server_restarts_nothing_is_known_and_nothing_is_over(
    operated: Tunnel, start: StartProgram, command: NewCommand, target: NewTarget
) -> None:
    links, at = free_port(), f"127.0.0.1:{free_port()}"
    line = ("server", "--listen", f"127.0.0.1:{links}", "--connect", "off", "--admin", at)
    restarted = start(*line)
    restarted.wait_for("listening", use="admin")
    servers = [part for port in (links, operated.port("links")) for part in ("--server", f"127.0.0.1:{port}")]
    agent = start("agent", *servers, "--name", "edge", "--admin", "off")
    agent.wait_for("linked", nth=2)
    operated.agent.stop()
    sock = operated.open("connect", target(echo).port)  # through the server that stays
    check_echo(sock)
    waiting = command(at, "drain", "edge", "--wait")
    seen = waiting.wait_for("draining: 1 open, 0 pending")
    restarted.stop()
    seen = waiting.wait_for("unknown: no answer from", seen)
    start(*line)
    waiting.wait_for("draining: 1 open, 0 pending", seen)
    check_echo(sock)
    assert waiting.running
    sock.close()
    assert waiting.ended() == 0


# -- programs themselves


def test_an_agent_drains_itself(tunnel: NewTunnel, start: StartProgram) -> None:
    server = tunnel(*OPERATED, agents=0)
    agent = start("agent", "--server", f"127.0.0.1:{server.port('links')}", "--name", "edge", *OPERATED)
    agent.wait_for("linked")
    assert run(admin(agent), "drain", "--self", "--wait").returncode == 0
    assert ask(admin(agent), "status")["drain"]["state"] == "drained"
    assert run(admin(agent), "agents").returncode == 1
    assert run(admin(server.server), "undrain", "edge").returncode == 0
    agent.wait_for("drain undone")


def test_a_server_leaves_when_told_to(operated: Tunnel, command: NewCommand, target: NewTarget) -> None:
    sock = operated.open("connect", target(echo).port)
    check_echo(sock)
    waiting = command(admin(operated.server), "drain", "--self", "--exit", "--wait")
    waiting.wait_for("stopping: 1 open, 0 pending")
    check_echo(sock)
    sock.close()
    assert operated.server.ended() == 0
    assert waiting.ended() == 0


def test_a_server_that_is_to_stay_does_not_drain(operated: Tunnel) -> None:
    done = run(admin(operated.server), "drain", "--self")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: too_late: ")


def test_changes_need_the_token_where_there_is_one(start: StartProgram, tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.touch(0o600)
    secrets = {"ops": "s3cret" * 6, "edge": "s3cr3t" * 6}
    file.write_text(
        f'[[token]]\nid = "ops"\nrole = "admin"\nsecret = "{secrets["ops"]}"\n'
        f'[[token]]\nid = "edge"\nrole = "agent"\nsecret = "{secrets["edge"]}"\nagents = ["*"]\n'
    )
    server = start("server", "--listen", "127.0.0.1:0", "--connect", "off", *OPERATED, "--token-file", str(file))
    links = f"127.0.0.1:{server.port('links')}"
    start("agent", "--server", links, "--name", "a0", "--token-file", str(file)).wait_for("linked")
    at = admin(server)
    done = run(at, "drain", "a0")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: unauthorized: ")
    assert state(at) == ["active"]
    assert run(at, "drain", "a0", "--wait", "--token-file", str(file)).returncode == 0
    assert not [secret for secret in secrets.values() if secret in str(server)]


def test_a_unix_socket_is_operated_like_any_other(tunnel: NewTunnel, tmp_path: Path) -> None:
    at = f"unix:{tmp_path}/admin"
    tunnel("--admin", at)
    assert run(at, "drain", "a0", "--wait").returncode == 0


def test_what_serves_a_target_is_explained(operated: Tunnel) -> None:
    at = admin(operated.server)
    assert ask(at, "explain", "db.internal:5432")["decision"]["agent"] == "a0"
    lines = run(at, "explain", "db.internal:5432").stdout.splitlines()
    assert lines[0].startswith("db.internal:5432: a0 (instance ")
    assert lines[-1].endswith("picked")
    assert "nobody" in run(at, "explain", "db.internal:5432@edge").stdout


# -- in a terminal


def test_a_watch_follows_what_it_watches(start: StartProgram, command: NewCommand) -> None:
    links, at = free_port(), f"127.0.0.1:{free_port()}"
    line = ("server", "--listen", f"127.0.0.1:{links}", "--connect", "off", "--admin", at)
    server = start(*line)
    server.wait_for("listening", use="admin")
    watch = command(at, "status", "--watch", terminal=True)
    seen = watch.wait_for("no agent is linked")
    agent = start("agent", "--server", f"127.0.0.1:{links}", "--name", "edge-7", "--admin", "off")
    seen = watch.wait_for("edge-7", seen)
    seen = watch.wait_for("active", seen)
    assert server.stop() == 0
    seen = watch.wait_for("no answer from", seen)
    agent.signal(signal.SIGSTOP)  # or it may be there again before the watch has seen a server without it
    start(*line).wait_for("listening", use="admin")
    seen = watch.wait_for("no agent is linked", seen)
    agent.signal(signal.SIGCONT)
    watch.wait_for("edge-7", seen)
    watch.type(b"\x03")
    assert watch.ended() == 0


def test_waiting_is_one_line_that_changes(operated: Tunnel, command: NewCommand, target: NewTarget) -> None:
    sock = operated.open("connect", target(echo).port)
    check_echo(sock)
    waiting = command(admin(operated.server), "drain", "a0", "--wait", terminal=True)
    seen = waiting.wait_for("a0: draining: 1 open, 0 pending, oldest ")
    waiting.wait_for("a0: draining: 1 open, 0 pending, oldest ", seen)  # it is told again, older
    sock.close()
    assert waiting.ended() == 0
    assert waiting.text.count("\n") == 1
    assert waiting.text.endswith("a0: drained\n")


def test_ctrl_c_ends_the_waiting_and_not_the_drain(operated: Tunnel, command: NewCommand, target: NewTarget) -> None:
    at = admin(operated.server)
    check_echo(operated.open("connect", target(echo).port))
    waiting = command(at, "drain", "a0", "--wait", terminal=True)
    waiting.wait_for("draining: 1 open")
    waiting.type(b"\x03")
    assert waiting.ended() == 130
    assert "the drain of a0 goes on" in waiting.text
    assert state(at) == ["draining"]


def test_a_terminal_gets_tables_with_colours(operated: Tunnel, command: NewCommand) -> None:
    listed = command(admin(operated.server), "agents", terminal=True)
    assert listed.ended() == 0
    assert re.search(r"\x1b\[32mactive", listed.printed)
