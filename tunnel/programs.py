"""The three programs that live under signals, put together: a life, and beside it what an operator talks to.

Rules that hold here:

- The admin listener is there before the life begins, and closes when it has ended.
- An address that cannot be listened on is one line in the log, and exit 1.

This file must not know the command line.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from tunnel import logs
from tunnel.agent import Agent
from tunnel.config import AgentConfig, ClientConfig, Forward, ServerConfig
from tunnel.errors import first_of
from tunnel.forwarder import Forwarder
from tunnel.listen import BindError
from tunnel.server import Server
from tunnel.signals import live

log = logs.get_logger(__name__)

EXIT_CANNOT_START = 1


def run_server(config: ServerConfig) -> int:
    """Run a server as this process's program; the exit code."""
    server = Server(config)
    return _run(lambda: live(server.life))


def run_agent(config: AgentConfig) -> int:
    """Run an agent as this process's program; the exit code."""
    agent = Agent(config)
    return _run(lambda: live(agent.life, agent.drain, agent.undrain))


def run_forwarder(config: ClientConfig, forwards: Sequence[Forward]) -> int:
    """Run a forwarder as this process's program; the exit code."""
    forwarder = Forwarder(config, forwards)
    return _run(lambda: live(forwarder.life))


def _run(main: Callable[[], Awaitable[int]]) -> int:
    code = EXIT_CANNOT_START
    try:
        code = trio.run(main)
    except* BindError as group:
        log.error("cannot start", cause=first_of(group))
    return code
