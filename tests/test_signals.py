"""What signals mean to a running program: in the main thread of this very process, whose handlers are put back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from service_manager import ServiceManager, service_manager
from trio.testing import MockClock, wait_all_tasks_blocked

from tunnel import early
from tunnel.lifecycle import Lifecycle, Phase, Slices
from tunnel.signals import live

BUDGET = 25.0
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

Press = tuple[float, signal.Signals]


class Idle:
    """A program that has nothing to do; its goodbye takes as long as a test says."""

    slices = Slices(final=2.0, cut=1.0, close=1.0)
    lame_duck = 0.0
    unsent = False

    def __init__(self) -> None:
        self.close_takes = 0.0

    async def start(self, life: Lifecycle) -> None: ...
    def announce(self) -> None: ...
    async def soft(self) -> None: ...
    async def settle(self) -> None: ...
    async def final(self) -> None: ...
    async def cut(self, seconds: float) -> None: ...

    async def close(self, seconds: float) -> None:
        await trio.sleep(self.close_takes)

    def tally(self) -> dict[str, int]:
        return {}


class Exited(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def program() -> Idle:
    return Idle()


@pytest.fixture
def life(program: Idle) -> Lifecycle:
    return Lifecycle(program, BUDGET)


@pytest.fixture
def no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process does not end where it should; ``Exited`` is raised instead."""

    def leave(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", leave)


@pytest.fixture
def held() -> Iterator[None]:
    """Signals are held as they are while a program is being loaded."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    early.hold()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    early.taken()


async def live_through(
    life: Lifecycle,
    *presses: Press,
    dump: Callable[[], object] = list,
    drain: Callable[[], object] | None = None,
    undrain: Callable[[], object] | None = None,
    connection: float = 0.0,
) -> float:
    """A whole life, with signals after so many seconds each, perhaps with a connection; the seconds it took."""
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(live, life, dump, drain, undrain)
        await life.phase.wait_value(Phase.READY)
        if connection:
            life.spawn(trio.sleep, connection)
        await wait_all_tasks_blocked()
        for seconds, number in presses:
            await trio.sleep(seconds)
            signal.raise_signal(number)
    return trio.current_time() - began


# -- to leave


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_one_leaves(autojump_clock: MockClock, life: Lifecycle, number: signal.Signals) -> None:
    await live_through(life, (0, number))
    assert life.exit_code == 0


async def test_one_waits_for_what_is_open(autojump_clock: MockClock, life: Lifecycle) -> None:
    assert await live_through(life, (0, signal.SIGTERM), connection=10.0) == 10.0
    assert life.exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_cuts(autojump_clock: MockClock, life: Lifecycle, number: signal.Signals) -> None:
    assert await live_through(life, (0, signal.SIGTERM), (1, number), connection=10.0) == 1.0
    assert (life.exit_code, life.cuts) == (4, 1)


async def test_a_second_after_exactly_half_a_second_counts(autojump_clock: MockClock, life: Lifecycle) -> None:
    await live_through(life, (0, signal.SIGTERM), (0.5, signal.SIGTERM), connection=10.0)
    assert life.exit_code == 4


async def test_repeats_within_half_a_second_are_one(autojump_clock: MockClock, life: Lifecycle) -> None:
    presses = [(0, signal.SIGINT), (0.1, signal.SIGTERM), (0.3, signal.SIGINT)]
    assert await live_through(life, *presses, connection=10.0) == 10.0
    assert life.exit_code == 0


async def test_repeats_do_not_put_off_the_second(autojump_clock: MockClock, life: Lifecycle) -> None:
    presses = [(0, signal.SIGINT), (0.4, signal.SIGINT), (0.2, signal.SIGINT)]
    await live_through(life, *presses, connection=10.0)
    assert life.exit_code == 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, "143"), (signal.SIGINT, "130")])
@pytest.mark.usefixtures("no_exit")
async def test_a_third_ends_the_process(
    autojump_clock: MockClock, life: Lifecycle, program: Idle, number: signal.Signals, code: str
) -> None:
    program.close_takes = 10.0
    with pytest.RaisesGroup(pytest.RaisesExc(Exited, match=code), flatten_subgroups=True):
        await live_through(life, (0, signal.SIGTERM), (1, signal.SIGTERM), (1, number))


@pytest.mark.usefixtures("no_exit")
async def test_a_third_within_half_a_second_of_the_second_is_none(
    autojump_clock: MockClock, life: Lifecycle, program: Idle
) -> None:
    program.close_takes = 10.0
    await live_through(life, (0, signal.SIGTERM), (1, signal.SIGTERM), (0.4, signal.SIGTERM))
    assert life.phase.value is Phase.EXIT


# -- what came before


@pytest.mark.usefixtures("held")
async def test_one_that_came_while_it_was_loaded_leaves(autojump_clock: MockClock, life: Lifecycle) -> None:
    signal.raise_signal(signal.SIGTERM)
    assert await live(life, list) == 0


@pytest.mark.usefixtures("held")
async def test_several_that_came_while_it_was_loaded_are_one(autojump_clock: MockClock, life: Lifecycle) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        signal.raise_signal(number)
    assert await live_through(life, connection=10.0) == 10.0
    assert life.exit_code == 0


@pytest.mark.usefixtures("held")
async def test_one_that_came_while_it_was_loaded_makes_the_next_the_second(
    autojump_clock: MockClock, life: Lifecycle
) -> None:
    signal.raise_signal(signal.SIGTERM)
    await live_through(life, (1, signal.SIGTERM), connection=10.0)
    assert life.exit_code == 4


# -- the operator's commands


async def test_usr1_and_usr2_are_drain_and_undrain(autojump_clock: MockClock, life: Lifecycle) -> None:
    done: list[str] = []
    presses = [(0, signal.SIGUSR1), (0.1, signal.SIGUSR2), (0.1, signal.SIGUSR1), (0, signal.SIGTERM)]
    await live_through(life, *presses, drain=lambda: done.append("drain"), undrain=lambda: done.append("undrain"))
    assert done == ["drain", "undrain", "drain"]
    assert life.exit_code == 0


async def test_quit_has_it_say_what_it_holds(autojump_clock: MockClock, life: Lifecycle) -> None:
    dumps: list[None] = []
    presses = [(0, signal.SIGQUIT), (0.1, signal.SIGQUIT), (1, signal.SIGTERM)]
    await live_through(life, *presses, dump=lambda: dumps.append(None))
    assert len(dumps) == 2
    assert life.exit_code == 0


async def test_commands_do_not_count_as_signals_to_leave(autojump_clock: MockClock, life: Lifecycle) -> None:
    presses = [(0, signal.SIGTERM), (1, signal.SIGUSR1), (1, signal.SIGUSR2)]
    assert await live_through(life, *presses, drain=list, undrain=list, connection=10.0) == 10.0
    assert life.exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
async def test_where_there_is_no_command_its_signal_is_warned_about(
    autojump_clock: MockClock, life: Lifecycle, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    await live_through(life, (0, number), (1, signal.SIGTERM))
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f'"signal without meaning here" signal={number.name}'
    ]
    assert life.exit_code == 0


# -- afterwards


async def test_after_the_end_signals_do_what_they_did_before(autojump_clock: MockClock, life: Lifecycle) -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    await live_through(life, (0, signal.SIGTERM))
    assert [signal.getsignal(number) for number in NUMBERS] == before


@pytest.mark.usefixtures("held")
async def test_one_that_comes_after_the_end_ends_nothing_either(autojump_clock: MockClock, life: Lifecycle) -> None:
    await live_through(life, (0, signal.SIGTERM))
    signal.raise_signal(signal.SIGTERM)
    assert early.taken() == [signal.SIGTERM]


# -- the service manager


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceManager]:
    monkeypatch.setenv("NOTIFY_SOCKET", path := str(tmp_path / "notify"))
    with service_manager(path) as manager:
        yield manager


async def test_a_service_manager_hears_when_it_is_ready_and_when_it_stops(
    autojump_clock: MockClock, life: Lifecycle, manager: ServiceManager
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(live, life, list)
        await life.phase.wait_value(Phase.READY)
        await wait_all_tasks_blocked()
        assert manager.heard() == ["READY=1", "WATCHDOG=1", "STATUS=ready, 0 open"]
        life.leave()
    assert "STOPPING=1" in manager.heard()


async def test_a_service_manager_hears_that_it_lives_twice_as_often_as_it_asks_for(
    autojump_clock: MockClock, life: Lifecycle, manager: ServiceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "4000000")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(live, life, list)
        await life.phase.wait_value(Phase.READY)
        await wait_all_tasks_blocked()
        manager.heard()
        await trio.sleep(9)
        assert manager.heard().count("WATCHDOG=1") == 4
        life.leave()
