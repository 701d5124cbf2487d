"""A task that is parked while calls do its work, and runs again when that is over.

    PARKED --end(): over, with an error or without--> the task runs, and wait() returns or raises
       +----the task is cancelled--> abandoned() is called, and the task runs with that

Rules that hold here:

- The task is woken once, whoever says first that it is over. What is said before it waits counts, too.
- Nobody holds the error once it is raised: a frame that holds what was raised in it is a circle, which is freed late.

This file must not know what is waited for.
"""

from __future__ import annotations

import trio


class Parked:
    """Something that one task waits for.

    Attributes:
        over: whether it is.
    """

    __slots__ = ("_error", "_task", "over")

    def __init__(self) -> None:
        self.over = False
        self._error: Exception | None = None
        self._task: trio.lowlevel.Task | None = None

    def end(self, error: Exception | None = None) -> None:
        """It is over; the error is raised where it is waited for. No effect if it was over before."""
        if not self.over:
            self.over = True
            self._error = error
            if self._task is not None:
                trio.lowlevel.reschedule(self._task)

    async def wait(self) -> None:
        """Return when it is over, or raise its error. If cancelled, it is abandoned."""
        if not self.over:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._abort)
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        self.abandoned()
        return trio.lowlevel.Abort.SUCCEEDED

    def abandoned(self) -> None:
        """The task was cancelled: nobody waits any more. It may say now that it is over."""
        raise NotImplementedError
