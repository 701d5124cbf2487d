"""The three programs that live under signals, put together: a life, and beside it what an operator talks to.

Rules that hold here:

- The operator's listeners are there before the life begins, and close when it has ended.
- An address that cannot be listened on is one line in the log, and exit 1.
- A program loads what it runs, and nothing else.
- It takes as many descriptors as the system lets it have, and says how many: each connection is one.

This file must not know the command line.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import trio

from tunnel import logs, turns
from tunnel.dump import dump
from tunnel.errors import first_of
from tunnel.listen import BindError
from tunnel.signals import live

if TYPE_CHECKING:
    from tunnel.config import AdminConfig, AgentConfig, ClientConfig, Forward, ServerConfig
    from tunnel.operate import Operated
    from tunnel.secure import Files

log = logs.get_logger(__name__)

EXIT_CANNOT_START = 1

_DESCRIPTORS = (1 << 20, 10_240)  # no more than any system takes; macOS takes no more than the second

Live = Callable[[], Awaitable[int]]


def run_server(config: ServerConfig) -> int:
    """Run a server as this process's program; the exit code."""
    from tunnel.desk import ServerDesk
    from tunnel.server import Server

    server = Server(config)
    desk = ServerDesk(server)
    under_signals = partial(live, server.life, partial(dump, server.life, desk), look=_looks(server.secure))
    return _run(_operated(under_signals, desk, config.admin))


def run_agent(config: AgentConfig) -> int:
    """Run an agent as this process's program; the exit code."""
    from tunnel.agent import Agent
    from tunnel.desk import AgentDesk

    agent = Agent(config)
    desk = AgentDesk(agent)
    under_signals = partial(
        live, agent.life, partial(dump, agent.life, desk), agent.drain, agent.undrain, _looks(agent.secure)
    )
    return _run(_operated(under_signals, desk, config.admin))


def run_forwarder(config: ClientConfig, forwards: Sequence[Forward]) -> int:
    """Run a forwarder as this process's program; the exit code."""
    from tunnel.forwarder import Forwarder

    forwarder = Forwarder(config, forwards)
    look = _looks(forwarder.client.secure)
    return _run(partial(live, forwarder.life, partial(dump, forwarder.life, None), look=look))


def _looks(secure: Files) -> Callable[[], None] | None:
    """What SIGHUP does to a program."""
    return secure.look if secure.followed else None


def _operated(live: Live, operated: Operated, config: AdminConfig) -> Live:
    """The same life, with an operator's interface around it if there is to be one."""
    if config.listen is None and config.health is None:
        return live
    from tunnel.admin.serve import serve

    async def live_operated() -> int:
        closing = trio.Event()
        async with trio.open_nursery() as nursery:
            await nursery.start(serve, operated, config, closing)
            code = await live()
            closing.set()
        return code

    return live_operated


def _raise_descriptors() -> None:
    """Make the soft limit the hard one, or what the system takes instead."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for most in _DESCRIPTORS:
        wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                soft = wanted
    log.info("descriptors", soft=_spelled(soft), hard=_spelled(hard))


def _spelled(limit: int) -> int | str:
    return "unlimited" if limit == resource.RLIM_INFINITY else limit


def _run(main: Live) -> int:
    _raise_descriptors()
    code = EXIT_CANNOT_START
    try:
        code = turns.run(main)
    except* BindError as group:
        log.error("cannot start", cause=first_of(group))
    return code
