"""The command line as people type it, and what stands in for the programs that it starts."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

import tunnel
from tunnel import cli, logs
from tunnel.config import AgentConfig, ServerConfig

Type = Callable[..., Result]


class Programs:
    """Stands in for what the commands start: remembers the config, and ends as it was told to."""

    def __init__(self) -> None:
        self.started: list[object] = []
        self.end: int | BaseException = 0

    def run(self, *config: object) -> int:
        self.started.extend(config or (None,))
        if isinstance(self.end, BaseException):
            raise self.end
        return self.end


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Have the commands start this instead."""
    programs = Programs()
    for name in ("run_server", "run_agent", "run_forwarder"):
        monkeypatch.setattr(f"tunnel.programs.{name}", programs.run)
    for name in ("stdio", "demo"):
        module = ModuleType(f"tunnel.{name}")
        monkeypatch.setattr(module, "run", programs.run, raising=False)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(tunnel, name, module, raising=False)
    return programs


@contextmanager
def typist(monkeypatch: pytest.MonkeyPatch) -> Iterator[Type]:
    """Types a line, split at its spaces, with the given variables."""
    for variable in [name for name in os.environ if name.startswith("TUNNEL_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(logs, "_Aside", logs._Handler)  # what is logged is there when the line has been run
    root, ours = logging.getLogger(), logging.getLogger("tunnel")
    before, levels = set(root.handlers), (root.level, ours.level)
    yield lambda line, **variables: CliRunner().invoke(cli.program, line.split(), env=variables)
    for handler in set(root.handlers) - before:
        root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def started(programs: Programs, result: Result) -> object:
    assert result.exit_code == 0, result.output
    (config,) = programs.started
    return config


def server(programs: Programs, result: Result) -> ServerConfig:
    config = started(programs, result)
    assert isinstance(config, ServerConfig)
    return config


def agent(programs: Programs, result: Result) -> AgentConfig:
    config = started(programs, result)
    assert isinstance(config, AgentConfig)
    return config
