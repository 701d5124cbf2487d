"""The life cycle: its phases in order, its budget, its exit codes, and that no connection is lost between them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import astuple

import pytest
import trio
import trio.lowlevel
from trio.testing import MockClock, wait_all_tasks_blocked

from tunnel.lifecycle import Lifecycle, Phase, Plan, Slices

BUDGET = 25.0
SLICES = Slices(final=2.0, cut=3.0, close=1.0)
GRACE = 0.5  # seconds by which an exit may miss the budget


class Program:
    """Steps that say what is done, in which phase and how long after leaving began, and take as long as a test says.

    Attributes:
        steps: what was done, and the phase then.
        at: when each step was done first, in seconds from ``leave``.
        takes: seconds that a step takes; it is cancellable.
        late: what is done in a step, before it takes its time.
        cut_in, close_in: the seconds that those two were given.
    """

    slices = SLICES
    lame_duck = 0.0

    def __init__(self) -> None:
        self.steps: list[tuple[str, Phase]] = []
        self.at: dict[str, float] = {}
        self.began = 0.0
        self.takes: dict[str, float] = {}
        self.late: dict[str, Callable[[Lifecycle], object]] = {}
        self.settled = trio.Event()
        self.settled.set()
        self.cut_in: float | None = None
        self.close_in: float | None = None
        self.life: Lifecycle

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.steps]

    async def start(self, life: Lifecycle) -> None:
        self.life = life
        await self._step("start")
        life.accepting.start_soon(self._until_cancelled, "accepting")
        life.background.start_soon(self._until_cancelled, "background")

    def announce(self) -> None:
        self.began = trio.current_time()
        self._note("announce")

    async def soft(self) -> None:
        await self._step("soft")

    @property
    def unsent(self) -> bool:
        return not self.settled.is_set()

    async def settle(self) -> None:
        await self.settled.wait()

    async def final(self) -> None:
        await self._step("final")

    async def cut(self, seconds: float) -> None:
        self.cut_in = seconds
        await self._step("cut")

    async def close(self, seconds: float) -> None:
        self.close_in = seconds
        await self._step("close")

    def tally(self) -> dict[str, int]:
        return {"refused": 7}

    async def _step(self, name: str) -> None:
        self._note(name)
        self.late.get(name, lambda life: None)(self.life)
        await trio.sleep(self.takes.get(name, 0.0))

    async def _until_cancelled(self, name: str) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self._note(f"{name} ends")

    def _note(self, name: str) -> None:
        self.steps.append((name, self.life.phase.value))
        self.at.setdefault(name, trio.current_time() - self.began)


class Handlers:
    """Connections that end when a test says so, and note how they ended."""

    def __init__(self) -> None:
        self.go = trio.Event()
        self.ended: list[str] = []

    async def wait(self) -> None:
        try:
            await self.go.wait()
        except trio.Cancelled:
            self.ended.append("cut")
            raise
        self.ended.append("done")


@pytest.fixture
def program() -> Program:
    return Program()


@pytest.fixture
def life(program: Program) -> Lifecycle:
    return Lifecycle(program, BUDGET)


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


@asynccontextmanager
async def alive(life: Lifecycle) -> AsyncIterator[None]:
    """A life that is READY inside, and has ended when this is left."""
    async with trio.open_nursery() as nursery:
        await nursery.start(life.run)
        yield


async def time_to_leave(life: Lifecycle, during: Callable[[], object] = lambda: None) -> float:
    """Live, do something when READY, and leave; the seconds from ``leave`` to the exit."""
    async with alive(life):
        during()
        await wait_all_tasks_blocked()
        began = trio.current_time()
        life.leave()
    return trio.current_time() - began


def said(caplog: pytest.LogCaptureFixture, start: str) -> list[str]:
    return [message for message in caplog.messages if message.startswith(start)]


# -- the arithmetic


def test_slices_are_taken_from_the_end_of_the_budget() -> None:
    assert Plan.of(25.0, SLICES) == Plan(lame_duck=0.0, serve=19.0, final=21.0, cut=24.0, close=25.0)


def test_a_lame_duck_is_taken_from_the_beginning_of_the_budget() -> None:
    assert Plan.of(25.0, SLICES, 10.0) == Plan(lame_duck=10.0, serve=19.0, final=21.0, cut=24.0, close=25.0)


def test_a_budget_of_twice_the_slices_is_shared_half_and_half() -> None:
    assert Plan.of(12.0, SLICES) == Plan(lame_duck=0.0, serve=6.0, final=8.0, cut=11.0, close=12.0)


def test_slices_shrink_alike_when_the_budget_is_small() -> None:
    assert astuple(Plan.of(1.2, SLICES)) == pytest.approx((0.0, 0.6, 0.8, 1.1, 1.2))


def test_slices_shrink_to_what_a_lame_duck_leaves() -> None:
    assert astuple(Plan.of(11.2, SLICES, 10.0)) == pytest.approx((10.0, 10.6, 10.8, 11.1, 11.2))


def test_without_a_budget_everything_is_over_at_once() -> None:
    assert astuple(Plan.of(0.0, SLICES)) == (0.0,) * 5


def test_a_lame_duck_may_take_the_whole_budget() -> None:
    assert astuple(Plan.of(10.0, SLICES, 10.0)) == (10.0,) * 5


# -- phases and steps


class TestSteps:
    async def test_of_an_idle_program_are_done_in_order(self, life: Lifecycle, program: Program) -> None:
        async with alive(life):
            await wait_all_tasks_blocked()
            life.leave()
        assert program.steps == [
            ("start", Phase.STARTING),
            ("announce", Phase.READY),
            ("accepting ends", Phase.READY),
            ("soft", Phase.DRAINING),
            ("final", Phase.DRAINING),
            ("close", Phase.CLOSING),
            ("background ends", Phase.CLOSING),
        ]
        assert life.phase.value is Phase.EXIT
        assert life.exit_code == 0

    async def test_with_a_lame_duck_it_still_accepts_after_the_announcement(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program
    ) -> None:
        program.lame_duck = 10.0
        await time_to_leave(life)
        assert program.steps[1:4] == [
            ("announce", Phase.READY),
            ("accepting ends", Phase.LAME_DUCK),
            ("soft", Phase.DRAINING),
        ]
        assert (program.at["announce"], program.at["accepting ends"]) == (0.0, 10.0)

    async def test_of_a_program_that_is_cut_have_the_cut_before_the_end(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program, handlers: Handlers
    ) -> None:
        await time_to_leave(life, lambda: life.spawn(handlers.wait))
        assert program.steps[3:] == [
            ("soft", Phase.DRAINING),
            ("final", Phase.DRAINING),
            ("cut", Phase.CUT),
            ("close", Phase.CLOSING),
            ("background ends", Phase.CLOSING),
        ]

    async def test_are_not_begun_before_the_program_is_ready(self, life: Lifecycle, program: Program) -> None:
        program.late["start"] = lambda life: phases.append(life.phase.value)
        phases: list[Phase] = []
        async with alive(life):
            phases.append(life.phase.value)
            life.leave()
        assert phases == [Phase.STARTING, Phase.READY]

    async def test_follow_right_after_the_start_if_it_was_told_to_leave_meanwhile(
        self, life: Lifecycle, program: Program
    ) -> None:
        program.late["start"] = Lifecycle.leave
        assert await life.run() == 0
        assert program.names[-1] == "background ends"

    async def test_do_not_follow_a_start_that_fails(self, life: Lifecycle, program: Program) -> None:
        def fail(_: Lifecycle) -> None:
            raise OSError("no such address")

        program.late["start"] = fail
        with pytest.RaisesGroup(OSError, flatten_subgroups=True):
            await life.run()
        assert program.names == ["start"]

    async def test_are_done_once_however_often_it_is_told_to_leave(self, life: Lifecycle, program: Program) -> None:
        async with alive(life):
            life.leave()
            life.leave()
        assert program.names.count("announce") == program.names.count("soft") == 1

    async def test_are_left_out_when_it_is_cancelled(
        self, life: Lifecycle, program: Program, handlers: Handlers
    ) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.spawn(handlers.wait)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert handlers.ended == ["cut"]
        assert life.open.value == 0
        assert not {"announce", "soft", "final", "cut", "close"} & set(program.names)


# -- the latest end of each


class TestTime:
    async def test_of_an_idle_program_is_none(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program
    ) -> None:
        assert await time_to_leave(life) == 0.0

    async def test_is_as_long_as_the_last_connection(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program
    ) -> None:
        assert await time_to_leave(life, lambda: life.spawn(trio.sleep, 18.0)) == 18.0
        assert (life.exit_code, life.cuts) == (0, 0)

    async def test_of_serving_ends_when_its_slice_is_over(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program, handlers: Handlers
    ) -> None:
        await time_to_leave(life, lambda: life.spawn(handlers.wait))
        assert program.at["final"] == 19.0

    @pytest.mark.parametrize("lame_duck", [0.0, 10.0])
    async def test_of_each_step_is_its_slice(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program, handlers: Handlers, lame_duck: float
    ) -> None:
        program.lame_duck = lame_duck
        program.takes = dict.fromkeys(("final", "cut"), 3600.0)
        await time_to_leave(life, lambda: life.spawn(handlers.wait))
        at = program.at
        assert [at["soft"], at["final"], at["cut"], at["close"]] == [lame_duck, 19.0, 21.0, 24.0]

    async def test_of_each_step_shrinks_with_the_budget(
        self, autojump_clock: MockClock, program: Program, handlers: Handlers
    ) -> None:
        program.takes = dict.fromkeys(("final", "cut"), 3600.0)
        life = Lifecycle(program, 1.2)
        await time_to_leave(life, lambda: life.spawn(handlers.wait))
        assert [program.at[step] for step in ("final", "cut", "close")] == pytest.approx([0.6, 0.8, 1.1])

    async def test_of_the_last_acknowledgements_is_not_waited_for_in_vain(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program, handlers: Handlers
    ) -> None:
        await time_to_leave(life, lambda: life.spawn(handlers.wait))
        assert program.at["cut"] == program.at["final"]

    async def test_a_soft_that_takes_some_is_part_of_serving(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program
    ) -> None:
        program.takes["soft"] = 5.0
        assert await time_to_leave(life, lambda: life.spawn(trio.sleep, 7.0)) == 7.0

    async def test_a_lame_duck_is_always_that_long(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program
    ) -> None:
        program.lame_duck = 10.0
        assert await time_to_leave(life) == 10.0

    @pytest.mark.parametrize("budget", [0.0, 0.1, 1.2, 6.0, 12.0, 25.0])
    @pytest.mark.parametrize("lame_duck", [0.0, 0.5, 1.0])  # as a part of the budget
    @pytest.mark.parametrize(
        "hanging", [("soft",), ("settle",), ("final",), ("cut",), ("soft", "settle", "final", "cut")]
    )
    async def test_to_the_exit_is_the_budget_whatever_hangs(
        self,
        autojump_clock: MockClock,
        program: Program,
        handlers: Handlers,
        budget: float,
        lame_duck: float,
        hanging: tuple[str, ...],
    ) -> None:
        program.lame_duck = budget * lame_duck
        program.takes = dict.fromkeys(hanging, 3600.0)
        if "settle" in hanging:
            program.settled = trio.Event()
        life = Lifecycle(program, budget)
        assert await time_to_leave(life, lambda: life.spawn(handlers.wait)) <= budget + GRACE
        assert life.exit_code == 3

    async def test_to_the_exit_is_the_budget_also_when_closing_takes_what_it_may(
        self, autojump_clock: MockClock, program: Program, handlers: Handlers
    ) -> None:
        async def close(seconds: float) -> None:
            await trio.sleep(seconds)

        program.close = close  # type: ignore[method-assign]
        for budget in (0.0, 1.2, 25.0):
            life = Lifecycle(program, budget)
            assert await time_to_leave(life, lambda life=life: life.spawn(handlers.wait)) <= budget + GRACE  # type: ignore[misc]

    async def test_for_closing_is_a_second(self, autojump_clock: MockClock, life: Lifecycle, program: Program) -> None:
        await time_to_leave(life)
        assert program.close_in == 1.0

    async def test_for_closing_is_what_is_left(
        self, autojump_clock: MockClock, program: Program, handlers: Handlers
    ) -> None:
        life = Lifecycle(program, 7.2)  # of which the last steps get half, and closing a sixth of that
        await time_to_leave(life, lambda: life.spawn(handlers.wait))
        assert program.close_in == pytest.approx(0.6)

    async def test_for_closing_is_never_less_than_a_goodbye_takes(
        self, autojump_clock: MockClock, program: Program, handlers: Handlers
    ) -> None:
        life = Lifecycle(program, 0.0)
        await time_to_leave(life, lambda: life.spawn(handlers.wait))
        assert program.close_in == 0.4


# -- leaving


class TestLeaving:
    async def test_waits_for_what_ended_connections_left_on_links(self, life: Lifecycle, program: Program) -> None:
        program.settled = trio.Event()
        async with alive(life):
            life.leave()
            await wait_all_tasks_blocked()
            assert program.names[-1] == "soft"
            program.settled.set()
        assert life.exit_code == 0

    async def test_with_bytes_left_on_links_is_no_clean_exit(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program
    ) -> None:
        program.settled = trio.Event()
        await time_to_leave(life)
        assert (life.exit_code, life.cuts) == (3, 0)

    async def test_ends_with_the_code_that_was_asked_for(self, life: Lifecycle) -> None:
        async with alive(life):
            life.leave(5)
            life.leave()
        assert life.exit_code == 5

    async def test_ends_with_3_and_their_number_when_connections_were_cut(
        self, autojump_clock: MockClock, life: Lifecycle, handlers: Handlers
    ) -> None:
        await time_to_leave(life, lambda: [life.spawn(handlers.wait) for _ in range(2)])
        assert (life.exit_code, life.cuts) == (3, 2)

    async def test_tells_what_is_left_of_the_budget(
        self, autojump_clock: MockClock, life: Lifecycle, handlers: Handlers
    ) -> None:
        async with alive(life):
            await trio.sleep(100)
            assert life.remaining == BUDGET
            life.spawn(handlers.wait)
            life.leave()
            await trio.sleep(5)
            assert life.remaining == BUDGET - 5
            handlers.go.set()
        await trio.sleep(100)
        assert life.remaining == 0.0

    async def test_begins_with_the_whole_budget(self, autojump_clock: MockClock, life: Lifecycle) -> None:
        async with alive(life):
            await trio.sleep(100)
            life.leave()
            assert life.remaining == BUDGET

    async def test_counts_from_when_it_was_told_although_it_was_starting(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program, handlers: Handlers
    ) -> None:
        program.late["start"] = lambda life: (life.leave(), life.spawn(handlers.wait))
        program.takes["start"] = 5.0
        began = trio.current_time()
        await life.run()
        assert trio.current_time() - began <= BUDGET + GRACE

    async def test_tells_how_old_the_oldest_connection_is(self, autojump_clock: MockClock, life: Lifecycle) -> None:
        async with alive(life):
            assert life.oldest == 0.0
            life.spawn(trio.sleep, 20.0)
            await trio.sleep(5)
            life.spawn(trio.sleep, 10.0)
            await trio.sleep(5)
            assert life.oldest == 10.0
            await trio.sleep(6)
            assert life.oldest == 16.0
            await trio.sleep(5)
            assert life.oldest == 0.0
            life.leave()


# -- the cut


class TestCut:
    async def test_gives_the_program_its_slice(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program, handlers: Handlers
    ) -> None:
        program.takes["final"] = 3600.0
        await time_to_leave(life, lambda: life.spawn(handlers.wait))
        assert program.cut_in == 3.0

    async def test_gives_the_program_also_what_came_earlier_than_planned(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program, handlers: Handlers
    ) -> None:
        await time_to_leave(life, lambda: life.spawn(handlers.wait))
        assert program.cut_in == 5.0  # its own slice, and the one before

    async def test_lets_the_program_end_connections_its_own_way(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program, handlers: Handlers
    ) -> None:
        program.late["cut"] = lambda _: handlers.go.set()
        took = await time_to_leave(life, lambda: life.spawn(handlers.wait))
        assert handlers.ended == ["done"]
        assert (life.exit_code, took) == (3, 19.0)

    async def test_ends_what_is_left_when_its_slice_is_over(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program, handlers: Handlers
    ) -> None:
        await time_to_leave(life, lambda: life.spawn(handlers.wait))
        assert handlers.ended == ["cut"]
        assert program.at["close"] == 24.0

    async def test_without_a_budget_is_at_once(
        self, autojump_clock: MockClock, program: Program, handlers: Handlers
    ) -> None:
        life = Lifecycle(program, 0.0)
        assert await time_to_leave(life, lambda: life.spawn(handlers.wait)) == 0.0
        assert handlers.ended == ["cut"]
        assert (life.exit_code, program.cut_in) == (3, 0.0)

    async def test_that_is_asked_for_is_at_once(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program, handlers: Handlers
    ) -> None:
        async with alive(life):
            life.spawn(handlers.wait)
            await wait_all_tasks_blocked()
            began = trio.current_time()
            life.cut()
        assert trio.current_time() == began
        assert handlers.ended == ["cut"]
        assert (life.exit_code, life.cuts, program.cut_in) == (4, 1, 0.0)

    @pytest.mark.parametrize(
        ("hanging", "seconds"), [("soft", 5.0), ("settle", 5.0), ("serve", 5.0), ("lame duck", 5.0), ("final", 20.0)]
    )
    async def test_that_is_asked_for_while_leaving_waits_for_nothing(
        self,
        autojump_clock: MockClock,
        life: Lifecycle,
        program: Program,
        handlers: Handlers,
        hanging: str,
        seconds: float,
    ) -> None:
        program.takes[hanging] = 3600.0
        if hanging == "settle":
            program.settled = trio.Event()
        if hanging == "lame duck":
            program.lame_duck = 10.0
        async with alive(life):
            life.spawn(handlers.wait)
            began = trio.current_time()
            life.leave()
            await trio.sleep(seconds)
            life.cut()
        assert trio.current_time() == began + seconds
        assert handlers.ended == ["cut"]
        assert (life.exit_code, program.cut_in) == (4, 0.0)

    async def test_of_nothing_is_a_clean_exit(self, life: Lifecycle, program: Program) -> None:
        async with alive(life):
            life.cut()
        assert (life.exit_code, life.cuts) == (0, 0)
        assert "cut" not in program.names

    async def test_during_a_lame_duck_with_nothing_open_is_a_clean_exit(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program
    ) -> None:
        program.lame_duck = 10.0
        async with alive(life):
            began = trio.current_time()
            life.leave()
            await trio.sleep(1)
            life.cut()
        assert (life.exit_code, trio.current_time() - began) == (0, 1.0)

    async def test_during_the_start_leaves_right_after_it(self, life: Lifecycle, program: Program) -> None:
        program.late["start"] = Lifecycle.cut
        assert await life.run() == 0


# -- connections


class TestSpawn:
    async def test_counts_what_is_open(self, life: Lifecycle, handlers: Handlers) -> None:
        async with alive(life):
            assert [life.spawn(handlers.wait) for _ in range(3)] == [True] * 3
            assert life.open.value == 3
            handlers.go.set()
            await life.open.wait_value(0)
            life.leave()

    async def test_hands_its_arguments_on(self, life: Lifecycle) -> None:
        got: list[object] = []

        async def handler(*args: object) -> None:
            got.extend(args)

        async with alive(life):
            life.spawn(handler, 1, "two")
            life.leave()
        assert got == [1, "two"]

    async def test_is_accepted_during_the_start(self, life: Lifecycle, program: Program, handlers: Handlers) -> None:
        program.late["start"] = lambda life: life.spawn(handlers.wait)
        async with alive(life):
            assert life.open.value == 1
            life.leave()
            handlers.go.set()
        assert handlers.ended == ["done"]

    @pytest.mark.parametrize(("lame_duck", "phase"), [(10.0, Phase.LAME_DUCK), (0.0, Phase.DRAINING)])
    async def test_is_accepted_while_others_are_waited_for(
        self,
        autojump_clock: MockClock,
        life: Lifecycle,
        program: Program,
        handlers: Handlers,
        lame_duck: float,
        phase: Phase,
    ) -> None:
        program.lame_duck = lame_duck
        async with alive(life):
            life.spawn(handlers.wait)
            life.leave()
            await life.phase.wait_value(phase)
            assert life.spawn(handlers.wait)
            handlers.go.set()
        assert handlers.ended == ["done", "done"]
        assert life.exit_code == 0

    @pytest.mark.parametrize(("step", "phase"), [("cut", Phase.CUT), ("close", Phase.CLOSING)])
    async def test_is_refused_when_it_is_too_late(
        self,
        autojump_clock: MockClock,
        life: Lifecycle,
        program: Program,
        handlers: Handlers,
        step: str,
        phase: Phase,
    ) -> None:
        answers: list[tuple[bool, Phase]] = []
        program.late[step] = lambda life: answers.append((life.spawn(handlers.wait), life.phase.value))
        await time_to_leave(life, lambda: life.spawn(handlers.wait))
        assert answers == [(False, phase)]
        assert handlers.ended == ["cut"]  # the first one

    async def test_is_refused_after_the_exit(self, life: Lifecycle, handlers: Handlers) -> None:
        async with alive(life):
            life.leave()
        assert not life.spawn(handlers.wait)
        assert life.open.value == 0

    async def test_as_the_last_one_ends_loses_nothing(self, life: Lifecycle, program: Program) -> None:
        """Some arrive exactly when the count has become zero: they are served to their end, or come after ``final``,
        from which on the program takes nothing; none is cut."""
        outcomes: list[str] = []

        async def late() -> None:
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
            outcomes.append("served")

        async def arrive() -> None:
            await life.open.wait_value(0)
            if "final" in program.names or not life.spawn(late):
                outcomes.append("refused")

        async def brief() -> None:
            await life.phase.wait_value(Phase.DRAINING)
            await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.spawn(brief)
            for _ in range(5):
                nursery.start_soon(arrive)
            await wait_all_tasks_blocked()
            life.leave()
        assert len(outcomes) == 5
        assert set(outcomes) <= {"served", "refused"}
        assert life.exit_code == 0

    @pytest.mark.parametrize("turns", range(4))
    async def test_cannot_slip_in_between_the_last_end_and_the_final_word(
        self, life: Lifecycle, program: Program, turns: int
    ) -> None:
        """Whatever was spawned before ``final`` is called has ended by then, whenever it came."""
        open_at_final: list[int] = []
        program.late["final"] = lambda life: open_at_final.append(life.open.value)

        async def arrive() -> None:
            await life.open.wait_value(0)
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            if not open_at_final:
                life.spawn(trio.lowlevel.checkpoint)

        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.spawn(life.phase.wait_value, Phase.DRAINING)
            for _ in range(10):
                nursery.start_soon(arrive)
            await wait_all_tasks_blocked()
            life.leave()
        assert open_at_final == [0]

    async def test_by_a_handler_that_is_ending_loses_nothing(self, life: Lifecycle, handlers: Handlers) -> None:
        async def first() -> None:
            await life.phase.wait_value(Phase.DRAINING)
            assert life.spawn(handlers.wait)

        async with alive(life):
            life.spawn(first)
            life.leave()
            await wait_all_tasks_blocked()
            assert life.phase.value is Phase.DRAINING
            handlers.go.set()
        assert handlers.ended == ["done"]

    async def test_what_accepting_still_hands_over_at_its_end_is_served(
        self, life: Lifecycle, program: Program, handlers: Handlers
    ) -> None:
        async def sweep() -> None:
            try:
                await trio.sleep_forever()
            finally:
                assert life.spawn(handlers.wait)

        program.late["start"] = lambda life: life.accepting.start_soon(sweep)
        async with alive(life):
            await wait_all_tasks_blocked()
            life.leave()
            await wait_all_tasks_blocked()
            assert life.open.value == 1
            handlers.go.set()
        assert handlers.ended == ["done"]


class TestFaults:
    async def test_of_a_handler_are_logged_and_end_it_alone(
        self, life: Lifecycle, handlers: Handlers, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def fail() -> None:
            raise RuntimeError("a fault of ours")

        async with alive(life):
            life.spawn(handlers.wait)
            life.spawn(fail)
            await life.open.wait_value(1)
            assert handlers.ended == []
            life.leave()
            handlers.go.set()
        assert [record.levelname for record in caplog.records if record.levelname != "INFO"] == ["ERROR"]
        assert "a fault of ours" in caplog.text
        assert life.exit_code == 0

    async def test_beside_a_cancellation_do_not_leave_the_cut(
        self, life: Lifecycle, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A handler that fails while it is being cut raises a group of both."""

        async def fail_when_cut() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                try:
                    await trio.sleep_forever()
                finally:
                    raise ValueError("a fault while being cut")

        async with alive(life):
            life.spawn(fail_when_cut)
            await wait_all_tasks_blocked()
            life.cut()
        assert "a fault while being cut" in caplog.text
        assert life.exit_code == 4


# -- what is logged


class TestLog:
    @pytest.fixture(autouse=True)
    def _from_info_on(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "tunnel.lifecycle")

    async def test_has_the_arithmetic_when_ready(
        self, life: Lifecycle, program: Program, caplog: pytest.LogCaptureFixture
    ) -> None:
        program.lame_duck = 7.5
        async with alive(life):
            assert caplog.messages == ["ready lame_duck=7.5s serve=19s final=21s cut=24s close=25s"]
            life.cut()

    async def test_of_a_clean_one_has_nothing_above_info(
        self, autojump_clock: MockClock, life: Lifecycle, caplog: pytest.LogCaptureFixture
    ) -> None:
        await time_to_leave(life, lambda: life.spawn(trio.sleep, 3.0))
        assert caplog.messages[1:] == [
            'leaving open=1 seconds=25 hint="a second signal cuts them"',
            "drained took=3.0s cut=0 refused=7",
            "exit code=0",
        ]
        assert {record.levelname for record in caplog.records} == {"INFO"}

    async def test_of_an_idle_one_hints_at_nothing(self, life: Lifecycle, caplog: pytest.LogCaptureFixture) -> None:
        async with alive(life):
            life.leave()
        assert said(caplog, "leaving") == ["leaving open=0 seconds=25"]

    async def test_says_every_5_seconds_what_is_waited_for(
        self, autojump_clock: MockClock, life: Lifecycle, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with alive(life):
            life.spawn(trio.sleep, 11.0)
            await trio.sleep(2)
            life.spawn(trio.sleep, 14.0)
            life.leave()
        assert said(caplog, "draining") == [
            "draining open=2 oldest=7s remaining=20s",
            "draining open=1 oldest=10s remaining=15s",
        ]

    async def test_of_a_cut_by_the_deadline_warns_and_counts(
        self, autojump_clock: MockClock, life: Lifecycle, handlers: Handlers, caplog: pytest.LogCaptureFixture
    ) -> None:
        await time_to_leave(life, lambda: [life.spawn(handlers.wait) for _ in range(2)])
        assert caplog.messages[-3:] == [
            '"drain deadline, cutting" streams=2',
            "drained took=24.0s cut=2 refused=7",
            "exit code=3",
        ]
        assert [record.levelname for record in caplog.records][-3:] == ["WARNING", "INFO", "INFO"]

    async def test_of_a_cut_that_was_asked_for_warns_and_counts(
        self, life: Lifecycle, handlers: Handlers, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with alive(life):
            life.spawn(handlers.wait)
            life.cut()
        assert said(caplog, '"second') == ['"second signal, cutting" streams=1']
        assert caplog.messages[-1] == "exit code=4"
