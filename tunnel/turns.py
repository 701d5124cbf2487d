"""What is done at the end of each turn of the loop: when all tasks that could run have run, and before trio waits.

Whatever was queued in a turn, by whomever, goes out together: one system call for a link, not one for each task.

Rules that hold here:

- What is due is done once, whoever asked for it and how often. It is called between tasks, and does not wait.
- trio has made up its mind how long to wait by then: what is done says whether somebody has to run now.
- A fault in one thing that is due costs the others nothing.

This file must not know what is done.
"""

from __future__ import annotations

from typing import Protocol

import trio

from tunnel import logs

log = logs.get_logger(__name__)


class Due(Protocol):
    """Something that may have something to do when a turn ends."""

    def end_turn(self) -> bool:
        """Do it; whether that has woken a task."""


class Turns(trio.abc.Instrument):
    """The turns of one run of trio; see ``of_this_run``."""

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self._token = token
        self._due: dict[Due, None] = {}

    def at_end(self, due: Due) -> None:
        """Have it called when this turn ends."""
        self._due[due] = None

    def before_io_wait(self, timeout: float) -> None:
        """See ``trio.abc.Instrument``."""
        if self._due and self._do() and timeout:
            self._token.run_sync_soon(_nothing)  # trio does not wait then

    def _do(self) -> bool:
        woken = False
        while self._due:
            due, self._due = self._due, {}
            for each in due:
                try:
                    woken |= each.end_turn()
                except Exception:  # a fault of ours
                    log.exception("fault at the end of a turn")
        return woken


def _nothing() -> None:
    """Only to run."""


_turns: trio.lowlevel.RunVar[Turns] = trio.lowlevel.RunVar("tunnel.turns")


def of_this_run() -> Turns:
    """The turns of the run of trio that this is called in."""
    try:
        return _turns.get()
    except LookupError:
        turns = Turns(trio.lowlevel.current_trio_token())
        trio.lowlevel.add_instrument(turns)
        _turns.set(turns)
        return turns
