"""Turns: what is due is done once, when nobody can run any more; sockets are served by calls, whoever it is that waits.

``both`` runs a test under trio's own clock, where trio waits, and under ours, where it is the turns that wait. Under
ours ``wait_all_tasks_blocked`` does not return: trio cannot see that nothing happens.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from trio.testing import MockClock, wait_all_tasks_blocked

from tunnel import turns
from tunnel.poller import READ, WRITE

if TYPE_CHECKING:
    from conftest import TcpPair

Both = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture(params=["trio waits", "the turns wait"])
def both(request: pytest.FixtureRequest) -> Both:
    clock = turns.Clock() if request.param == "the turns wait" else None

    async def in_time(test: Callable[[], Awaitable[None]]) -> None:
        with trio.fail_after(30):
            await test()

    return lambda test: trio.run(in_time, test, clock=clock)


class Due:
    """Counts its turns' ends, and does something at each."""

    def __init__(self, *acts: object) -> None:
        self.ends = 0
        self._acts = list(acts)

    def end_turn(self) -> None:
        self.ends += 1
        act = self._acts.pop(0) if self._acts else None
        if isinstance(act, Exception):
            raise act
        if isinstance(act, trio.Event):
            act.set()
        elif callable(act):
            act()


class TestWhatIsDue:
    async def test_is_done_once_however_often_it_was_asked_for(self) -> None:
        due = Due()
        for _ in range(3):
            turns.of_this_run().at_end(due)
        assert due.ends == 0
        await wait_all_tasks_blocked()
        assert due.ends == 1
        await wait_all_tasks_blocked()
        assert due.ends == 1

    async def test_waits_until_all_tasks_that_can_run_have_run(self, nursery: trio.Nursery) -> None:
        due = Due()
        seen: list[int] = []

        async def queue() -> None:
            turns.of_this_run().at_end(due)
            seen.append(due.ends)

        for _ in range(10):
            nursery.start_soon(queue)
        await trio.testing.wait_all_tasks_blocked()
        assert (seen, due.ends) == ([0] * 10, 1)

    async def test_that_wakes_a_task_has_it_run_at_once(self, autojump_clock: trio.testing.MockClock) -> None:
        woken = trio.Event()
        turns.of_this_run().at_end(Due(woken))
        with trio.fail_after(1000):
            await woken.wait()
        assert trio.current_time() == 0

    def test_that_wakes_a_task_has_it_run_at_once_whoever_waits(self, both: Both) -> None:
        async def main() -> None:
            woken = trio.Event()
            turns.of_this_run().at_end(Due(woken))
            await woken.wait()

        both(main)

    def test_is_done_while_tasks_are_busy(self, both: Both) -> None:
        async def main() -> None:
            due = Due()
            turns.of_this_run().at_end(due)
            while not due.ends:
                await trio.lowlevel.checkpoint()

        both(main)

    async def test_can_become_due_meanwhile_and_is_done_in_the_same_turn(self) -> None:
        second = Due()
        first = Due(lambda: turns.of_this_run().at_end(second))
        turns.of_this_run().at_end(first)
        await wait_all_tasks_blocked()
        assert (first.ends, second.ends) == (1, 1)

    async def test_costs_the_others_nothing_by_a_fault(self, caplog: pytest.LogCaptureFixture) -> None:
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


class Reader:
    """A watcher that keeps what its socket has, and does something each time."""

    def __init__(self, sock: socket.socket, act: Callable[[], object] = lambda: None) -> None:
        self.read = bytearray()
        self.faults = 0
        self._sock = sock
        self._act = act

    def ready(self, events: int) -> None:
        self.read += self._sock.recv(100)
        self._act()

    def fault(self) -> None:
        self.faults += 1


class TestSockets:
    def test_are_served_without_a_task(self, both: Both, tcp_pair: TcpPair) -> None:
        async def main() -> None:
            near, far = tcp_pair()
            over = trio.Event()
            reader = Reader(near, lambda: len(reader.read) == 6 and over.set())
            turns.of_this_run().watch(near.fileno(), READ, reader)
            for word in (b"one", b"two"):
                far.send(word)
                await trio.sleep(0.001)
            await over.wait()
            turns.of_this_run().unwatch(near.fileno())
            assert reader.read == b"onetwo"

        both(main)

    def test_are_served_while_what_is_due_wakes_a_task_each_time(self, both: Both, tcp_pair: TcpPair) -> None:
        async def main() -> None:
            near, far = tcp_pair()
            reader = Reader(near)
            turns.of_this_run().watch(near.fileno(), READ, reader)
            far.send(b"word")
            while not reader.read:
                woken = trio.Event()
                turns.of_this_run().at_end(Due(woken))
                await woken.wait()

        both(main)

    def test_are_served_while_tasks_are_busy(self, both: Both, tcp_pair: TcpPair) -> None:
        async def main() -> None:
            near, far = tcp_pair()
            reader = Reader(near)
            turns.of_this_run().watch(near.fileno(), READ, reader)
            far.send(b"word")
            while not reader.read:
                await trio.lowlevel.checkpoint()

        both(main)

    def test_have_what_they_queue_sent_in_the_same_turn(self, both: Both, tcp_pair: TcpPair) -> None:
        async def main() -> None:
            near, far = tcp_pair()
            done = trio.Event()
            due = Due(done)
            turns.of_this_run().watch(near.fileno(), READ, Reader(near, lambda: turns.of_this_run().at_end(due)))
            far.send(b"word")
            await done.wait()
            assert due.ends == 1

        both(main)

    async def test_have_what_they_queue_sent_before_a_long_turn_is_over(self, tcp_pair: TcpPair) -> None:
        here = turns.of_this_run()
        due = Due()
        ends: list[int] = []

        def queue() -> None:
            ends.append(due.ends)
            here.at_end(due)

        for near, far in [tcp_pair() for _ in range(80)]:
            here.watch(near.fileno(), READ, Reader(near, queue))
            far.send(b"word")
        while len(ends) < 80:
            await wait_all_tasks_blocked()
        assert ends == [0] * 32 + [1] * 32 + [2] * 16
        assert due.ends == 3

    async def test_harm_no_other_by_a_fault(self, tcp_pair: TcpPair) -> None:
        readers = []
        for act in (lambda: 1 / 0, lambda: None):
            near, far = tcp_pair()
            readers.append(Reader(near, act))
            turns.of_this_run().watch(near.fileno(), READ, readers[-1])
            far.send(b"word")
        while not all(reader.read for reader in readers):
            await wait_all_tasks_blocked()
        assert [reader.faults for reader in readers] == [1, 0]

    async def test_of_whoever_cannot_deal_with_a_fault_are_not_served_any_more(
        self, tcp_pair: TcpPair, caplog: pytest.LogCaptureFixture
    ) -> None:
        near, far = tcp_pair()
        reader = Reader(near, lambda: 1 / 0)
        reader.fault = lambda: 1 // 0  # type: ignore[method-assign, assignment, return-value]
        turns.of_this_run().watch(near.fileno(), READ, reader)
        far.send(b"word")
        while not caplog.records:
            await wait_all_tasks_blocked()
        far.send(b"more")
        await wait_all_tasks_blocked(0.01)
        assert reader.read == b"word"
        assert [record.levelname for record in caplog.records] == ["ERROR"]

    async def test_that_go_away_in_a_turn_are_not_served_any_more_in_it(self, tcp_pair: TcpPair) -> None:
        here, pairs = turns.of_this_run(), [tcp_pair() for _ in range(2)]
        readers: list[Reader] = []

        def unwatch_all() -> None:
            for near, _ in pairs:
                here.unwatch(near.fileno())

        for near, far in pairs:
            readers.append(Reader(near, unwatch_all))
            here.watch(near.fileno(), READ, readers[-1])
            far.send(b"word")
        while not any(reader.read for reader in readers):
            await wait_all_tasks_blocked()
        await wait_all_tasks_blocked()
        assert sorted(bytes(reader.read) for reader in readers) == [b"", b"word"]


class TestServe:
    def test_ends_with_what_the_call_gives(self, both: Both, tcp_pair: TcpPair) -> None:
        async def main() -> None:
            near, far = tcp_pair()
            words: list[bytes] = []

            def call() -> int | None:
                words.append(near.recv(3))
                return len(words) if words[-1] == b"end" else None

            far.send(b"oneend")
            assert await turns.of_this_run().serve(near.fileno(), READ, call) == 2
            assert words == [b"one", b"end"]

        both(main)

    async def test_raises_what_the_call_raises(self, tcp_pair: TcpPair) -> None:
        near, far = tcp_pair()
        far.send(b"x")
        with pytest.raises(ZeroDivisionError):
            await turns.of_this_run().serve(near.fileno(), READ, lambda: 1 // 0)

    def test_calls_no_more_when_another_call_for_the_socket_cancelled_it(self, both: Both, tcp_pair: TcpPair) -> None:
        async def main() -> None:
            near, far = tcp_pair()
            calls: list[str] = []
            far.send(b"x")

            def read() -> None:
                calls.append("read")
                nursery.cancel_scope.cancel()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(turns.of_this_run().serve, near.fileno(), READ, read)
                nursery.start_soon(turns.of_this_run().serve, near.fileno(), WRITE, lambda: calls.append("write"))
            assert calls.count("read") == 1
            assert calls in (["read"], ["write", "read"])  # whoever is called first

        both(main)

    async def test_is_for_one_task_and_mask_at_a_time(self, tcp_pair: TcpPair, nursery: trio.Nursery) -> None:
        near, _ = tcp_pair()
        nursery.start_soon(turns.of_this_run().ready, near.fileno(), READ)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await turns.of_this_run().ready(near.fileno(), READ)

    async def test_calls_no_more_when_it_was_cancelled(self, tcp_pair: TcpPair) -> None:
        near, far = tcp_pair()
        calls: list[None] = []
        with trio.CancelScope() as scope:
            scope.cancel()
            await turns.of_this_run().serve(near.fileno(), READ, partial(calls.append, None))
        far.send(b"x")
        await wait_all_tasks_blocked(0.01)
        assert calls == []

    async def test_is_too_slow_after_its_time_and_calls_no_more(
        self, autojump_clock: MockClock, tcp_pair: TcpPair
    ) -> None:
        near, far = tcp_pair()
        calls: list[None] = []
        with pytest.raises(trio.TooSlowError):
            await turns.of_this_run().serve(near.fileno(), READ, partial(calls.append, None), 5)
        assert trio.current_time() == pytest.approx(5)
        far.send(b"x")
        await wait_all_tasks_blocked(0.01)
        assert calls == []

    async def test_that_ended_in_time_is_not_too_slow_afterwards(
        self, autojump_clock: MockClock, tcp_pair: TcpPair, nursery: trio.Nursery
    ) -> None:
        near, far = tcp_pair()
        far.send(b"x")
        assert await turns.of_this_run().serve(near.fileno(), READ, lambda: near.recv(1), 5) == b"x"
        with trio.move_on_after(10) as scope:
            await turns.of_this_run().serve(near.fileno(), READ, lambda: None)
        assert scope.cancelled_caught

    async def test_can_begin_anew(self, tcp_pair: TcpPair) -> None:
        near, far = tcp_pair()
        for mask in (WRITE, READ, WRITE):
            far.send(b"x")
            await turns.of_this_run().ready(near.fileno(), mask)

    async def test_is_told_that_the_socket_is_going_to_be_closed(
        self, tcp_pair: TcpPair, nursery: trio.Nursery
    ) -> None:
        near, _ = tcp_pair()

        async def wait() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await turns.of_this_run().ready(near.fileno(), READ)

        async with trio.open_nursery() as waiting:
            waiting.start_soon(wait)
            await wait_all_tasks_blocked()
            turns.of_this_run().closing(near.fileno())


class TestClock:
    """Whatever wakes trio wakes it where the turns wait in its place."""

    def test_lets_trio_wait_in_peace_before_anybody_needs_turns(self) -> None:
        trio.run(trio.sleep, 0.001, clock=turns.Clock())

    def test_may_be_used_again(self) -> None:
        async def main() -> None:
            turns.of_this_run()
            await trio.sleep(0.001)

        clock = turns.Clock()
        for _ in range(2):
            trio.run(main, clock=clock)

    def test_ends_a_wait_in_time(self, both: Both) -> None:
        async def main() -> None:
            turns.of_this_run()
            with trio.move_on_after(0.01) as scope:
                await trio.sleep_forever()
            assert scope.cancelled_caught

        both(main)

    def test_hears_a_thread(self, both: Both) -> None:
        async def main() -> None:
            turns.of_this_run()
            assert await trio.to_thread.run_sync(lambda: trio.from_thread.run_sync(lambda: 5)) == 5

        both(main)

    def test_hears_a_socket_that_trio_waits_for(self, both: Both, tcp_pair: TcpPair) -> None:
        async def main() -> None:
            near, far = tcp_pair()
            turns.of_this_run()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.lowlevel.wait_readable, near)
                await trio.sleep(0.001)
                far.send(b"x")

        both(main)

    def test_waits_with_what_trio_waits_with(self) -> None:
        """Where this fails, a release of trio has hidden its selector elsewhere: everything works, but slower."""

        async def main() -> turns.Turns | None:
            turns.of_this_run()
            clock = trio.lowlevel.current_clock()
            assert isinstance(clock, turns.Clock)
            return clock.turns

        assert trio.run(main, clock=turns.Clock())

    def test_leaves_the_waiting_to_trio_where_its_selector_is_not_found(
        self, monkeypatch: pytest.MonkeyPatch, tcp_pair: TcpPair
    ) -> None:
        monkeypatch.setattr(turns, "_selector_of_trio", lambda: None)

        async def main() -> None:
            near, far = tcp_pair()
            far.send(b"x")
            await turns.of_this_run().ready(near.fileno(), READ)

        trio.run(main, clock=turns.Clock())
