"""Turns: what is due is done once, when nobody can run any more, and whoever it wakes runs at once."""

from __future__ import annotations

import logging

import pytest
import trio
import trio.testing
from trio.testing import wait_all_tasks_blocked

from tunnel import turns


class Due:
    """Counts its turns' ends, and does something at each."""

    def __init__(self, *acts: object) -> None:
        self.ends = 0
        self._acts = list(acts)

    def end_turn(self) -> bool:
        self.ends += 1
        act = self._acts.pop(0) if self._acts else None
        if isinstance(act, Exception):
            raise act
        if isinstance(act, trio.Event):
            act.set()
        elif callable(act):
            act()
        return isinstance(act, trio.Event)


async def test_what_is_due_is_done_once_however_often_it_was_asked_for() -> None:
    due = Due()
    for _ in range(3):
        turns.of_this_run().at_end(due)
    assert due.ends == 0
    await wait_all_tasks_blocked()
    assert due.ends == 1
    await wait_all_tasks_blocked()
    assert due.ends == 1


async def test_all_tasks_that_can_run_have_run_before(nursery: trio.Nursery) -> None:
    due = Due()
    seen: list[int] = []

    async def queue() -> None:
        turns.of_this_run().at_end(due)
        seen.append(due.ends)

    for _ in range(10):
        nursery.start_soon(queue)
    await trio.testing.wait_all_tasks_blocked()
    assert (seen, due.ends) == ([0] * 10, 1)


async def test_a_task_that_is_woken_runs_at_once(autojump_clock: trio.testing.MockClock) -> None:
    woken = trio.Event()
    turns.of_this_run().at_end(Due(woken))
    with trio.fail_after(1000):
        await woken.wait()
    assert trio.current_time() == 0


async def test_what_becomes_due_meanwhile_is_done_in_the_same_turn() -> None:
    second = Due()
    first = Due(lambda: turns.of_this_run().at_end(second))
    turns.of_this_run().at_end(first)
    await wait_all_tasks_blocked()
    assert (first.ends, second.ends) == (1, 1)


async def test_a_fault_in_one_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Due(ValueError("ours")), Due()
    turns.of_this_run().at_end(bad)
    turns.of_this_run().at_end(good)
    await wait_all_tasks_blocked()
    assert (bad.ends, good.ends) == (1, 1)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    turns.of_this_run().at_end(good)
    await wait_all_tasks_blocked()
    assert good.ends == 2


async def test_a_run_has_its_own_turns() -> None:
    mine = turns.of_this_run()
    assert turns.of_this_run() is mine

    async def other() -> turns.Turns:
        return turns.of_this_run()

    assert await trio.to_thread.run_sync(trio.run, other) is not mine
