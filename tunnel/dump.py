"""What a running program holds, written to its log when somebody asks (SIGQUIT): state, agents, streams, and its tasks.

Rules that hold here:

- It shows what the admin interface shows, and no more: no payload, no secret.
- It is bounded: a thousand streams, and tasks that wait at the same place are one line.

This file must not know signals, or how a program finds out what it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import trio

from tunnel import logs
from tunnel.lifecycle import Lifecycle
from tunnel.operate import Operated, is_server

log = logs.get_logger(__name__)

_MOST = 1000  # streams that are listed
_OURS = Path(__file__).parent


def dump(life: Lifecycle, operated: Operated | None) -> None:
    """Write it; ``operated`` is None for a program that nobody operates."""
    log.info("state", phase=life.phase.value.value, open=life.open.value, oldest=f"{life.oldest:.1f}s")
    if operated is not None:
        if is_server(operated):
            for agent in operated.agents():
                log.info("state agent", **asdict(agent))
        for stream in operated.streams(0, _MOST):
            log.info("state stream", **asdict(stream))
    root = trio.lowlevel.current_root_task()
    for (name, where), count in Counter(map(_spelled, _below(root) if root else ())).most_common():
        log.info("state tasks", task=name, where=where, count=count)


def _below(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    """A task and all that it has started."""
    tasks = [task]
    while tasks:
        task = tasks.pop()
        yield task
        for nursery in task.child_nurseries:
            tasks += nursery.child_tasks


def _spelled(task: trio.lowlevel.Task) -> tuple[str, str]:
    """What it is, and the three innermost lines of ours that it waits in; empty if none is ours."""
    frames = [(Path(frame.f_code.co_filename), line) for frame, line in task.iter_await_frames()]
    ours = [f"{path.name}:{line}" for path, line in frames if path.is_relative_to(_OURS)]
    return task.name, " ".join(ours[-3:])
