"""How a server or an agent lives and leaves: three nested nurseries, signals, one deadline.

    STARTING --start() returned--> READY --leave()--> LEAVING --none open, or cut--> CLOSING --> EXIT

``background > connections > accepting``: what is inside ends first. On leaving, ``accepting`` is cancelled (nothing
new arrives), the program's ``tell`` step says so to its links, open connections get the budget, the program's ``close``
step ends the links, and ``background`` (switchboard, links) is cancelled last.

Rules that hold here:

- The cut is one cancellation of ``connections``, never a loop over tasks.
- A connection that has ended may have left bytes on a link: leaving waits for those too.
- Connections are counted by ``spawn``; between the count reaching zero and CLOSING there is no checkpoint, so none can
  slip in and be lost.
- SIGTERM and SIGINT alike start leaving. Another one, at least half a second later, cuts at once; a third ends the
  process. Repeats within that half second are ignored: Ctrl-C reaches a whole group, and some send both.

This file must not know links, sockets or streams: the two programs give it their steps.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, NoReturn, Protocol

import trio
from trio_util import AsyncValue

from tunnel import logs

log = logs.get_logger(__name__)

EXIT_DONE, EXIT_CUT_BY_DEADLINE, EXIT_CUT_BY_SIGNAL = 0, 3, 4
_SAME_PRESS = 0.5  # seconds within which signals count as one


class Phase(Enum):
    """See the head of this file."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"
    CLOSING = "closing"
    EXIT = "exit"


class Program(Protocol):
    """The steps of a server or an agent."""

    async def start(self, life: Lifecycle) -> None:
        """Start everything in ``life``'s nurseries; return when ready to serve."""

    async def tell(self) -> None:
        """Say to the links that this side is leaving."""

    @property
    def unsent(self) -> bool:
        """Whether links have something to send that did not go yet."""

    async def settle(self) -> None:
        """Wait until that is not so."""

    async def close(self) -> None:
        """End the links. Bounds itself to two seconds."""


class Lifecycle:
    """One life of a program.

    Args:
        program: the steps.
        budget: seconds that open connections get once leaving has begun.

    Attributes:
        phase: where it is; can be waited for.
        open: how many connections are open; can be waited for.
        exit_code: what the process should end with, once in EXIT.
        background, accepting: nurseries for the program's own tasks, from ``start`` on.
    """

    background: trio.Nursery
    accepting: trio.Nursery

    def __init__(self, program: Program, budget: float) -> None:
        self.phase: AsyncValue[Phase] = AsyncValue(Phase.STARTING)
        self.open: AsyncValue[int] = AsyncValue(0)
        self.exit_code = EXIT_DONE
        self._program = program
        self._budget = budget
        self._leaving = trio.Event()
        self._cut = trio.Event()
        self._connections: trio.Nursery

    def __repr__(self) -> str:
        return f"<Lifecycle {self.phase.value.name} open={self.open.value}>"

    def leave(self) -> None:
        """Begin to leave. No effect when that has begun."""
        self._leaving.set()

    def cut(self) -> None:
        """Leave, and give open connections no more time."""
        self._leaving.set()
        self._cut.set()

    def spawn(self, handler: Callable[..., Awaitable[None]], *args: Any) -> bool:
        """Start ``handler(*args)`` as a connection. False, and nothing started, if it is too late for that."""
        if self.phase.value not in (Phase.STARTING, Phase.READY, Phase.LEAVING):
            return False
        self.open.value += 1
        self._connections.start_soon(self._connection, handler, args)
        return True

    async def _connection(self, handler: Callable[..., Awaitable[None]], args: tuple[Any, ...]) -> None:
        try:
            await handler(*args)
        except* Exception:
            log.exception("fault in a connection")
        finally:
            self.open.value -= 1

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> int:
        """Live until ``leave`` was called and everything has ended; the exit code.

        ``task_status.started()`` is called when READY. Cancelling ends everything at once.
        """
        async with trio.open_nursery() as self.background:
            async with trio.open_nursery() as self._connections:
                async with trio.open_nursery() as self.accepting:
                    await self._program.start(self)
                    self.phase.value = Phase.READY
                    task_status.started()
                    await self._leaving.wait()
                    self.accepting.cancel_scope.cancel()
                self.phase.value = Phase.LEAVING
                hint = {"hint": "a second signal cuts them"} if self.open.value else {}
                log.info("leaving", open=self.open.value, seconds=self._budget, **hint)
                self.background.start_soon(self._cut_when_due)
                await self._program.tell()
                await self._until_none_open()
                self.phase.value = Phase.CLOSING
            self.phase.value = Phase.CLOSING  # also after a cut, which skips the line above
            await self._program.close()
            self.background.cancel_scope.cancel()
        self.phase.value = Phase.EXIT
        log.info("exit", code=self.exit_code)
        return self.exit_code

    async def _until_none_open(self) -> None:
        while True:
            await self._program.settle()
            if not self.open.value:
                return
            await self.open.wait_value(0)

    async def _cut_when_due(self) -> None:
        code = EXIT_CUT_BY_DEADLINE
        with trio.move_on_after(self._budget):
            await self._cut.wait()
            code = EXIT_CUT_BY_SIGNAL
        if self.phase.value is Phase.LEAVING:
            if self.open.value or self._program.unsent:
                self.exit_code = code
                log.warning("cutting open connections", open=self.open.value)
            self._connections.cancel_scope.cancel()


async def _obey_signals(life: Lifecycle, *, task_status: trio.TaskStatus[None]) -> NoReturn:
    steps = [life.leave, life.cut]
    last = -_SAME_PRESS
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for number in signals:
            if trio.current_time() - last < _SAME_PRESS:
                continue
            last = trio.current_time()
            if not steps:
                os._exit(128 + number)
            steps.pop(0)()
    raise AssertionError("a signal receiver does not end")


async def live(life: Lifecycle) -> int:
    """Run a whole program under signals; the exit code."""
    async with trio.open_nursery() as nursery:
        await nursery.start(_obey_signals, life)
        code = await life.run()
        nursery.cancel_scope.cancel()
    return code
