"""Deadlines: each call is made once, in time, or not at all if it was taken back; and nothing waits for ever."""

from __future__ import annotations

import gc
import logging
import weakref
from functools import partial

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from tunnel import deadlines


class Calls:
    """Notes what is called, and when."""

    def __init__(self) -> None:
        self.made: list[tuple[str, float]] = []

    def __call__(self, name: str) -> None:
        self.made.append((name, trio.current_time()))


async def test_a_call_is_made_at_its_time(autojump_clock: MockClock) -> None:
    calls = Calls()
    deadlines.of_this_run().at(5.0, partial(calls, "five"))
    await trio.sleep(4.9)
    assert calls.made == []
    await trio.sleep(5)
    assert calls.made == [("five", pytest.approx(5))]


async def test_a_call_whose_time_is_past_is_made_at_once(autojump_clock: MockClock) -> None:
    calls = Calls()
    await trio.sleep(10)
    deadlines.of_this_run().at(5.0, partial(calls, "five"))
    await trio.sleep(0.001)
    assert calls.made == [("five", pytest.approx(10))]


async def test_an_earlier_one_does_not_wait_for_those_before_it(autojump_clock: MockClock) -> None:
    calls = Calls()
    deadlines.of_this_run().at(100.0, partial(calls, "hundred"))
    await trio.sleep(1)
    deadlines.of_this_run().at(5.0, partial(calls, "five"))
    await trio.sleep(200)
    assert calls.made == [("five", pytest.approx(5)), ("hundred", pytest.approx(100))]


async def test_those_of_the_same_time_are_called_in_the_order_they_were_asked_for(autojump_clock: MockClock) -> None:
    calls = Calls()
    for name in "abc":
        deadlines.of_this_run().at(5.0, partial(calls, name))
    await trio.sleep(6)
    assert [name for name, _ in calls.made] == ["a", "b", "c"]


async def test_what_is_taken_back_is_not_called(autojump_clock: MockClock) -> None:
    calls = Calls()
    deadline = deadlines.of_this_run().at(5.0, partial(calls, "five"))
    deadline.take_back()
    await trio.sleep(10)
    assert calls.made == []


async def test_taking_back_what_was_called_has_no_effect(autojump_clock: MockClock) -> None:
    calls = Calls()
    deadline = deadlines.of_this_run().at(5.0, partial(calls, "five"))
    await trio.sleep(10)
    deadline.take_back()
    assert len(calls.made) == 1


async def test_what_is_taken_back_keeps_nothing_alive(autojump_clock: MockClock) -> None:
    calls = Calls()
    gone = weakref.ref(calls)
    deadlines.of_this_run().at(3.0, int)  # an older one that still waits
    deadline = deadlines.of_this_run().at(5.0, partial(calls, "five"))
    deadline.take_back()
    del calls
    gc.collect()
    assert gone() is None


async def test_what_is_taken_back_is_forgotten_when_nothing_older_waits(autojump_clock: MockClock) -> None:
    of_this_run = deadlines.of_this_run()
    for _ in range(1000):
        of_this_run.at(trio.current_time() + 10, int).take_back()
    assert repr(of_this_run) == "<Deadlines waiting=1>"


async def test_what_is_taken_back_is_forgotten_when_there_is_much_of_it_though_something_older_waits(
    autojump_clock: MockClock,
) -> None:
    of_this_run = deadlines.of_this_run()
    calls = Calls()
    of_this_run.at(9.0, partial(calls, "nine"))
    for number in range(20_000):
        of_this_run.at(10.0 + number, int).take_back()
    assert len(of_this_run._waiting) <= 1024
    await trio.sleep(10)
    assert calls.made == [("nine", pytest.approx(9))]


async def test_a_call_may_ask_for_another(autojump_clock: MockClock) -> None:
    calls = Calls()

    def again() -> None:
        calls("first")
        deadlines.of_this_run().at(7.0, partial(calls, "second"))

    deadlines.of_this_run().at(5.0, again)
    await trio.sleep(10)
    assert calls.made == [("first", pytest.approx(5)), ("second", pytest.approx(7))]


async def test_a_fault_in_one_call_costs_the_others_nothing(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("boom")

    calls = Calls()
    deadlines.of_this_run().at(5.0, fail)
    deadlines.of_this_run().at(5.0, partial(calls, "five"))
    with caplog.at_level(logging.ERROR):
        await trio.sleep(10)
    assert [name for name, _ in calls.made] == ["five"]
    assert [record.exc_info is not None for record in caplog.records] == [True]


async def test_each_run_of_trio_has_its_own() -> None:
    here = deadlines.of_this_run()
    there = await trio.to_thread.run_sync(lambda: trio.run(_of_another_run))
    assert deadlines.of_this_run() is here
    assert there is not here


async def _of_another_run() -> deadlines.Deadlines:
    return deadlines.of_this_run()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.booleans()), max_size=30))
def test_whatever_is_asked_for_is_called_once_in_its_order_unless_taken_back(
    asked: list[tuple[int, int, bool]],
) -> None:
    """Each is (seconds at which it is asked for, its time, whether it is taken back at once)."""

    async def main() -> list[tuple[int, float]]:
        made: list[tuple[int, float]] = []
        for number, (at, when, taken_back) in enumerate(asked):
            await trio.sleep_until(at)
            note = partial(lambda number: made.append((number, trio.current_time())), number)
            deadline = deadlines.of_this_run().at(float(when), note)
            if taken_back:
                deadline.take_back()
        await trio.sleep_until(50)
        return made

    asked.sort(key=lambda each: each[0])
    made = trio.run(main, clock=MockClock(autojump_threshold=0))
    wanted = [(number, max(at, when)) for number, (at, when, taken_back) in enumerate(asked) if not taken_back]
    assert sorted(made) == [(number, pytest.approx(when)) for number, when in wanted]
    assert [when for _, when in made] == sorted(when for _, when in made)
