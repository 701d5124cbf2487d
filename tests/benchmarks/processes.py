"""Programs that a benchmark starts and looks at: they say in JSON lines on stderr where they listen. Linux only."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ANY = "127.0.0.1:0"
_TICKS = os.sysconf("SC_CLK_TCK")
_DEADLINE = 60.0


def announce(use: str, port: int) -> None:
    """For a helper of a benchmark: say where it listens, as our own programs do."""
    event = {"event": "listening", "use": use, "address": f"127.0.0.1:{port}"}
    print(json.dumps(event), file=sys.stderr, flush=True)


class Program:
    """A Python program; ``argv`` is what comes behind the interpreter's name."""

    def __init__(self, *argv: str) -> None:
        with tempfile.NamedTemporaryFile(suffix=".log", delete=False) as file:
            self._log = Path(file.name)
            self._process = subprocess.Popen([sys.executable, *argv], stdin=subprocess.DEVNULL, stderr=file)
        self.pid = self._process.pid

    def wait_for(self, event: str, nth: int = 1, **facts: object) -> dict[str, Any]:
        """The nth such event, once it has come."""
        end = time.monotonic() + _DEADLINE
        while time.monotonic() < end and self._process.poll() is None:
            lines = self._log.read_text().split("\n")[:-1]
            events = [json.loads(line) for line in lines if f'"{event}"' in line]
            said = [entry for entry in events if entry["event"] == event and facts.items() <= entry.items()]
            if len(said) >= nth:
                return dict(said[nth - 1])
            time.sleep(0.02)
        raise TimeoutError(f"never logged: {event} {facts}\n{self._log.read_text()[-4000:]}")

    def port(self, use: str, nth: int = 1) -> int:
        """Where it listens for something; of several, the nth."""
        return int(self.wait_for("listening", nth, use=use)["address"].rpartition(":")[2])

    def cpu(self) -> float:
        """Seconds of CPU so far, to a tick of the system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.unlink()


def tunnel(command: str, *arguments: str) -> Program:
    """One of our own programs, which talks to no operator."""
    quiet = () if command == "forward" else ("--admin", "off")
    return Program("-m", "tunnel", command, *arguments, *quiet, "--log-format", "json")


@contextlib.contextmanager
def running() -> Iterator[list[Program]]:
    """A list for what is to be killed in the end, the last first."""
    programs: list[Program] = []
    try:
        yield programs
    finally:
        for program in reversed(programs):
            program.kill()
