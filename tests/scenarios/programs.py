"""Processes for the scenarios: our own programs, and the programs of others that stand behind or before them.

Rules that hold here:

- Waiting is reading what a process says, or asking again until a deadline; nothing here sleeps and hopes.
- Every port is chosen by the system and read from the log. Where a program cannot say its port, or must come back on
  the same one, ``free_port`` chooses below the range from which the system gives ports to others.
- A process is ended by its own id, and only by who started it.
"""

from __future__ import annotations

import getpass
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DEADLINE = 30.0  # seconds after which whatever is waited for counts as never coming
Event = dict[str, Any]


def eventually(condition: Callable[[], object], what: str, seconds: float = DEADLINE) -> None:
    """Ask again and again until it is true."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"never came: {what}")
        time.sleep(0.02)


def free_port() -> int:
    """A port on loopback that nobody has, and that the system gives to nobody by itself."""
    while True:
        port = random.randint(10_000, 30_000)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def needs(name: str) -> str:
    """Where a program is; the test is skipped if it is not installed."""
    path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


# Not slowed down by counting lines, which the tests within one process do.
_AS_PEOPLE_HAVE_IT = {name: value for name, value in os.environ.items() if name != "COVERAGE_PROCESS_START"}


class Program:
    """One of our own programs, started as people start it; its log is read while it comes.

    Operators talk to it on a port that the system chooses, unless the arguments say otherwise.

    Attributes:
        log: the events so far.
        noise: lines on stderr that are no events.
        arguments: what it was started with.
    """

    def __init__(self, *arguments: str) -> None:
        self.log: list[Event] = []
        self.noise: list[str] = []
        if arguments[0] in ("server", "agent") and "--admin" not in arguments:
            arguments = (*arguments, "--admin", "127.0.0.1:0")
        self.arguments = arguments
        self._name = " ".join(arguments)
        self._news = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tunnel", *arguments, "--log-format", "json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=_AS_PEOPLE_HAVE_IT,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr
        with self._process.stderr as lines:
            for line in lines:
                with self._news:
                    if line.startswith("{"):
                        self.log.append(json.loads(line))
                    else:
                        self.noise.append(line)
                    self._news.notify_all()

    def __str__(self) -> str:
        lines = [json.dumps(event) for event in self.log]
        lines[20:-80] = [f"... {len(lines)} lines in all"] if len(lines) > 100 else lines[20:-80]
        return "\n".join([f"--- tunnel {self._name} (pid {self.pid})", *lines, *self.noise])

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def said(self, event: str, **facts: object) -> list[Event]:
        """Those events so far that have this name and these facts."""
        return [entry for entry in list(self.log) if entry["event"] == event and facts.items() <= entry.items()]

    def wait_for(self, event: str, nth: int = 1, **facts: object) -> Event:
        """The nth such event, once it has come."""
        with self._news:
            came = self._news.wait_for(lambda: len(self.said(event, **facts)) >= nth, DEADLINE)
        if not came:
            pytest.fail(f"never logged: {event} {facts}\n{self}")
        return self.said(event, **facts)[nth - 1]

    def port(self, use: str, nth: int = 1) -> int:
        """Where it listens for ``links``, ``connect`` or ``forward``; of several, the nth."""
        return int(self.wait_for("listening", nth, use=use)["address"].rpartition(":")[2])

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def ended(self) -> int:
        """The exit code, once there is one."""
        code = self._process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return code

    def stop(self) -> int:
        """SIGTERM, and the exit code. A stopped process is woken, one that does not end is killed."""
        if self.running:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)
        try:
            return self.ended()
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        self.signal(signal.SIGKILL)
        return self.ended()

    def descriptors(self) -> int:
        """How many are open in the process."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def memory(self) -> int:
        """Bytes that the process holds in memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) * 1024


StartProgram = Callable[..., Program]


def connect_argv(target: str, server: str) -> list[str]:
    """``tunnel connect``, which has no log: its standard input and output are the stream."""
    return [sys.executable, "-m", "tunnel", "connect", target, "--server", server]


class Stdio:
    """``tunnel connect``, with pipes to this process unless its input or output is something else.

    Attributes:
        input, output: this side's ends of the pipes.
    """

    def __init__(self, target: str, server: str, stdin: Any = subprocess.PIPE, stdout: Any = subprocess.PIPE) -> None:
        self._process = subprocess.Popen(
            connect_argv(target, server), stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, bufsize=0
        )
        self.input: Any = self._process.stdin
        self.output: Any = self._process.stdout

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def ended(self) -> tuple[int, str]:
        """The exit code, and what it said on stderr."""
        code = self._process.wait(DEADLINE)
        assert self._process.stderr
        return code, self._process.stderr.read().decode()

    def close(self) -> None:
        """Kill it if it still runs; close the pipes."""
        self._process.kill()
        with self._process:
            pass


class Service:
    """A program of others that runs until it is stopped; what it prints goes to a file."""

    def __init__(self, argv: list[str], output: Path) -> None:
        self._output = output
        with output.open("wb") as file:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        eventually(lambda: ready() or self._process.poll() is not None, "a service that is ready")
        assert self._process.poll() is None, self.printed()

    def wait_for_port(self, port: int) -> None:
        with socket.socket() as sock:
            self.wait_until(lambda: sock.connect_ex(("127.0.0.1", port)) == 0)

    def printed(self) -> str:
        return self._output.read_text(errors="replace")

    def stop(self) -> int:
        """SIGTERM, and the exit code. One that does not end is killed."""
        self._process.terminate()
        try:
            return self._process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def run(*argv: str, seconds: float = 100.0) -> bytes:
    """What a client program prints; it must exit with 0."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False)
    assert done.returncode == 0, (argv, done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


@dataclass
class Nginx:
    """An nginx on loopback that serves ``folder``, and takes uploads into it."""

    port: int
    folder: Path

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}"


@dataclass
class Sshd:
    """An sshd on loopback that takes one key, from whoever runs the tests."""

    port: int
    key: Path

    def options(self) -> list[str]:
        """What ssh and scp need to be told, besides the port."""
        settings = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "BatchMode=yes", "LogLevel=ERROR")
        return ["-F", "none", "-i", str(self.key), *(part for setting in settings for part in ("-o", setting))]

    @property
    def login(self) -> str:
        return f"{getpass.getuser()}@127.0.0.1"
