"""Parked: a task that waits until something is over is woken once, by whoever says so first."""

from __future__ import annotations

import gc
import weakref

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tunnel.parked import Parked


class Why(Exception):
    """Unlike those of the language itself, it can be referred to weakly."""


class Thing(Parked):
    """Something that can be abandoned, which is counted, and may end it with an error."""

    def __init__(self, at_abandoned: Exception | None = None) -> None:
        super().__init__()
        self.times_abandoned = 0
        self._at_abandoned = at_abandoned

    def abandoned(self) -> None:
        self.times_abandoned += 1
        if self._at_abandoned:
            self.end(self._at_abandoned)


async def test_it_waits_until_it_is_over(nursery: trio.Nursery) -> None:
    thing, returned = Thing(), trio.Event()

    async def wait() -> None:
        await thing.wait()
        returned.set()

    nursery.start_soon(wait)
    await wait_all_tasks_blocked()
    assert (thing.over, returned.is_set()) == (False, False)
    thing.end()
    await returned.wait()
    assert thing.over


async def test_what_was_over_before_is_not_waited_for() -> None:
    thing = Thing()
    thing.end()
    await thing.wait()


@pytest.mark.parametrize("before", [True, False])
async def test_an_error_is_raised_where_it_is_waited_for(nursery: trio.Nursery, before: bool) -> None:
    thing = Thing()

    async def fail() -> None:
        thing.end(ValueError("why"))

    if before:
        await fail()
    else:
        nursery.start_soon(fail)
    with pytest.raises(ValueError, match="why"):
        await thing.wait()


async def test_what_is_said_first_counts_and_the_task_is_woken_once(nursery: trio.Nursery) -> None:
    thing = Thing()

    async def end() -> None:
        thing.end(ValueError("first"))
        thing.end(KeyError("second"))
        thing.end()

    nursery.start_soon(end)
    with pytest.raises(ValueError, match="first"):
        await thing.wait()
    thing.end()  # long over
    await wait_all_tasks_blocked()


async def test_a_cancelled_wait_abandons_it() -> None:
    thing = Thing()
    with trio.move_on_after(0) as scope:
        await thing.wait()
    assert (scope.cancelled_caught, thing.times_abandoned) == (True, 1)


async def test_what_ends_it_when_it_is_abandoned_wakes_nobody() -> None:
    thing = Thing(ValueError("given up"))
    with trio.move_on_after(0) as scope:
        await thing.wait()
    assert (scope.cancelled_caught, thing.over) == (True, True)
    thing.end()
    await wait_all_tasks_blocked()


async def test_what_is_over_in_the_moment_of_the_cancellation_is_woken_once() -> None:
    thing = Thing()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(thing.wait)
            await wait_all_tasks_blocked()
            scope.cancel()
            thing.end()
    assert thing.times_abandoned <= 1


async def test_nobody_holds_the_error_once_it_was_raised() -> None:
    thing = Thing()
    error = Why()
    freed = weakref.ref(error)
    thing.end(error)
    gc.disable()
    try:
        try:
            await thing.wait()
        except Why as raised:
            assert raised is error  # noqa: PT017  # pytest.raises would hold it
        del error
        assert freed() is None
    finally:
        gc.enable()
