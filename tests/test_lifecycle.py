"""The life cycle: its phases in order, its budget, its exit codes, and that no connection is lost between them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import trio
import trio.lowlevel
from trio.testing import MockClock, wait_all_tasks_blocked

from tunnel.lifecycle import Lifecycle, Phase, live

BUDGET = 25.0


class Program:
    """Steps that say what is done and when, and do what a test has put into them."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, Phase]] = []
        self.life: Lifecycle | None = None
        self.during_start: Callable[[Lifecycle], object] = lambda _: None
        self.tell_takes = 0.0
        self.settled = trio.Event()
        self.settled.set()

    async def start(self, life: Lifecycle) -> None:
        self.life = life
        self._note("start")
        self.during_start(life)
        life.accepting.start_soon(self._until_cancelled, "accepting")
        life.background.start_soon(self._until_cancelled, "background")
        await trio.lowlevel.checkpoint()

    async def tell(self) -> None:
        self._note("tell")
        await trio.sleep(self.tell_takes)

    @property
    def unsent(self) -> bool:
        return not self.settled.is_set()

    async def settle(self) -> None:
        await self.settled.wait()

    async def close(self) -> None:
        self._note("close")

    async def _until_cancelled(self, name: str) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self._note(f"{name} ends")

    def _note(self, step: str) -> None:
        assert self.life
        self.steps.append((step, self.life.phase.value))


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


class TestPhases:
    async def test_an_idle_program_goes_through_all_of_them(self, life: Lifecycle, program: Program) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            await wait_all_tasks_blocked()
            life.leave()
        assert program.steps == [
            ("start", Phase.STARTING),
            ("accepting ends", Phase.READY),
            ("tell", Phase.LEAVING),
            ("close", Phase.CLOSING),
            ("background ends", Phase.CLOSING),
        ]
        assert life.phase.value is Phase.EXIT
        assert life.exit_code == 0

    async def test_ready_is_not_said_before_the_program_is(self, life: Lifecycle, program: Program) -> None:
        program.during_start = lambda life: phases.append(life.phase.value)
        phases: list[Phase] = []
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            phases.append(life.phase.value)
            life.leave()
        assert phases == [Phase.STARTING, Phase.READY]

    async def test_leaving_during_the_start_leaves_right_after_it(self, life: Lifecycle, program: Program) -> None:
        program.during_start = Lifecycle.leave
        assert await life.run() == 0
        assert life.phase.value is Phase.EXIT

    async def test_a_failing_start_is_raised(self, life: Lifecycle, program: Program) -> None:
        def fail(_: Lifecycle) -> None:
            raise OSError("no such address")

        program.during_start = fail
        with pytest.RaisesGroup(OSError, flatten_subgroups=True):
            await life.run()

    async def test_leaving_twice_is_leaving_once(self, life: Lifecycle, program: Program) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.leave()
            life.leave()
        assert [step for step, _ in program.steps].count("tell") == 1

    async def test_cancelling_ends_everything_at_once(
        self, life: Lifecycle, program: Program, handlers: Handlers
    ) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.spawn(handlers.wait)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert handlers.ended == ["cut"]
        assert life.open.value == 0


class TestLeaving:
    async def test_waits_for_what_is_open(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program, handlers: Handlers
    ) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.spawn(handlers.wait)
            life.leave()
            await trio.sleep(BUDGET - 1)
            assert life.phase.value is Phase.LEAVING
            handlers.go.set()
        assert handlers.ended == ["done"]
        assert life.exit_code == 0

    async def test_waits_for_what_ended_connections_left_on_links(self, life: Lifecycle, program: Program) -> None:
        program.settled = trio.Event()
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.leave()
            await wait_all_tasks_blocked()
            assert life.phase.value is Phase.LEAVING
            program.settled.set()
        assert life.exit_code == 0

    async def test_a_cut_while_bytes_are_left_on_links_is_no_clean_exit(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program
    ) -> None:
        program.settled = trio.Event()
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.leave()
        assert life.exit_code == 3

    async def test_cuts_when_the_budget_is_spent(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program, handlers: Handlers
    ) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.spawn(handlers.wait)
            began = trio.current_time()
            life.leave()
        assert handlers.ended == ["cut"]
        assert life.exit_code == 3
        assert trio.current_time() - began == BUDGET
        assert program.steps[-2:] == [("close", Phase.CLOSING), ("background ends", Phase.CLOSING)]

    async def test_without_a_budget_cuts_at_once(self, program: Program, handlers: Handlers) -> None:
        life = Lifecycle(program, 0)
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.spawn(handlers.wait)
            await wait_all_tasks_blocked()
            life.leave()
        assert handlers.ended == ["cut"]
        assert life.exit_code == 3

    async def test_a_cut_cuts_at_once(
        self, autojump_clock: MockClock, life: Lifecycle, handlers: Handlers, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.spawn(handlers.wait)
            await wait_all_tasks_blocked()
            began = trio.current_time()
            life.cut()
        assert handlers.ended == ["cut"]
        assert life.exit_code == 4
        assert trio.current_time() == began
        assert "cutting open connections" in caplog.text

    async def test_a_cut_while_leaving(self, autojump_clock: MockClock, life: Lifecycle, handlers: Handlers) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.spawn(handlers.wait)
            life.leave()
            await trio.sleep(1)
            life.cut()
        assert handlers.ended == ["cut"]
        assert life.exit_code == 4

    async def test_a_cut_with_nothing_open_is_a_clean_exit(self, life: Lifecycle) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.cut()
        assert life.exit_code == 0

    async def test_a_tell_that_hangs_is_bounded(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program
    ) -> None:
        program.tell_takes = 3600
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            began = trio.current_time()
            life.leave()
        assert trio.current_time() - began == BUDGET
        assert life.phase.value is Phase.EXIT

    async def test_a_clean_one_logs_nothing_above_info(
        self, life: Lifecycle, handlers: Handlers, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.spawn(handlers.wait)
            life.leave()
            handlers.go.set()
        assert {record.levelname for record in caplog.records} <= {"INFO"}


class TestSpawn:
    async def test_counts_what_is_open(self, life: Lifecycle, handlers: Handlers) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            assert [life.spawn(handlers.wait) for _ in range(3)] == [True] * 3
            assert life.open.value == 3
            handlers.go.set()
            await life.open.wait_value(0)
            life.leave()

    async def test_hands_its_arguments_on(self, life: Lifecycle) -> None:
        got: list[object] = []

        async def handler(*args: object) -> None:
            got.extend(args)

        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.spawn(handler, 1, "two")
            life.leave()
        assert got == [1, "two"]

    async def test_is_accepted_during_the_start(self, life: Lifecycle, program: Program, handlers: Handlers) -> None:
        program.during_start = lambda life: life.spawn(handlers.wait)
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            assert life.open.value == 1
            life.leave()
            handlers.go.set()
        assert handlers.ended == ["done"]

    async def test_is_accepted_while_leaving(self, life: Lifecycle, handlers: Handlers) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.spawn(handlers.wait)
            life.leave()
            await life.phase.wait_value(Phase.LEAVING)
            assert life.spawn(handlers.wait)
            handlers.go.set()
        assert handlers.ended == ["done", "done"]
        assert life.exit_code == 0

    async def test_is_refused_when_closing(self, life: Lifecycle, program: Program, handlers: Handlers) -> None:
        answers: list[bool] = []

        async def close() -> None:
            answers.append(life.spawn(handlers.wait))

        program.close = close  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.leave()
        assert answers == [False]
        assert not life.spawn(handlers.wait)
        assert life.open.value == 0
        assert handlers.ended == []

    async def test_as_the_last_one_ends_loses_nothing(self, life: Lifecycle) -> None:
        """One arrives exactly when the count has become zero: it is served to its end, or refused; never cut."""
        outcomes: list[str] = []

        async def late() -> None:
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
            outcomes.append("served")

        async def arrive() -> None:
            await life.open.wait_value(0)
            if not life.spawn(late):
                outcomes.append("refused")

        async def brief() -> None:
            await life.phase.wait_value(Phase.LEAVING)
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

    async def test_by_a_handler_that_is_ending_loses_nothing(self, life: Lifecycle, handlers: Handlers) -> None:
        async def successor() -> None:
            await handlers.wait()

        async def first() -> None:
            await life.phase.wait_value(Phase.LEAVING)
            assert life.spawn(successor)

        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.spawn(first)
            life.leave()
            await wait_all_tasks_blocked()
            assert life.phase.value is Phase.LEAVING
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

        program.during_start = lambda life: life.accepting.start_soon(sweep)
        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
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

        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
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

        async with trio.open_nursery() as nursery:
            await nursery.start(life.run)
            life.spawn(fail_when_cut)
            await wait_all_tasks_blocked()
            life.cut()
        assert "a fault while being cut" in caplog.text
        assert life.exit_code == 4


class TestSignals:
    """In the main thread of this very process; handlers are put back when ``live`` returns."""

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    async def test_one_leaves(self, autojump_clock: MockClock, life: Lifecycle, number: signal.Signals) -> None:
        await _live_through(life, (0, number))
        assert life.exit_code == 0

    async def test_one_waits_for_what_is_open(
        self, autojump_clock: MockClock, life: Lifecycle, handlers: Handlers
    ) -> None:
        await _live_through(life, (0, signal.SIGTERM), handler=handlers.wait, end=handlers.go.set)
        assert handlers.ended == ["done"]
        assert life.exit_code == 0

    async def test_a_second_cuts(self, autojump_clock: MockClock, life: Lifecycle, handlers: Handlers) -> None:
        await _live_through(life, (0, signal.SIGTERM), (1, signal.SIGINT), handler=handlers.wait)
        assert handlers.ended == ["cut"]
        assert life.exit_code == 4

    async def test_repeats_within_half_a_second_are_one(
        self, autojump_clock: MockClock, life: Lifecycle, handlers: Handlers
    ) -> None:
        presses = [(0, signal.SIGINT), (0.1, signal.SIGTERM), (0.3, signal.SIGINT)]
        await _live_through(life, *presses, handler=handlers.wait, end=handlers.go.set)
        assert handlers.ended == ["done"]
        assert life.exit_code == 0

    async def test_a_third_ends_the_process(
        self, autojump_clock: MockClock, life: Lifecycle, program: Program, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Exited(Exception):
            """Stands for the end of the process."""

        def leave(code: int) -> None:
            raise Exited(code)

        async def close() -> None:
            await trio.sleep(10)

        monkeypatch.setattr(os, "_exit", leave)
        program.close = close  # type: ignore[method-assign]
        presses = [(0, signal.SIGTERM), (1, signal.SIGTERM), (1, signal.SIGTERM)]
        with pytest.RaisesGroup(pytest.RaisesExc(Exited, match="143"), flatten_subgroups=True):
            await _live_through(life, *presses)

    async def test_after_the_end_signals_do_what_they_did_before(
        self, autojump_clock: MockClock, life: Lifecycle
    ) -> None:
        before = signal.getsignal(signal.SIGTERM)
        await _live_through(life, (0, signal.SIGTERM))
        assert signal.getsignal(signal.SIGTERM) is before


async def _live_through(
    life: Lifecycle,
    *presses: tuple[float, signal.Signals],
    handler: Callable[..., object] | None = None,
    end: Callable[[], None] | None = None,
) -> None:
    """A whole life, with signals after so many seconds each, perhaps with a connection."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(live, life)
        await life.phase.wait_value(Phase.READY)
        if handler:
            life.spawn(handler)  # type: ignore[arg-type]
        await wait_all_tasks_blocked()
        for seconds, number in presses:
            await trio.sleep(seconds)
            signal.raise_signal(number)
        if end:
            await trio.sleep(1)
            end()
