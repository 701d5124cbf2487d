"""What is done in a turn of the loop without a task: sockets that are served by calls, and what is due at its end.

A task that waits for a socket costs a switch, a wake-up and a system call each time. Bytes need none of that: whoever
moves them is called when its socket is ready. What was queued meanwhile, by whomever, goes out together: one system
call for a link, not one for each that has something to send.

Who waits depends on the clock that trio was started with, and nothing else does:

    ``Clock``      trio asks it how long to wait. It serves until there is something for trio to do; then: not at all.
    any other      trio waits, for the poller's own descriptor too; a task of the system serves when it is ready.

Rules that hold here:

- What is due is done once, whoever asked for it and how often. It is called between tasks, and does not wait.
- trio may have made up its mind how long to wait by then: whoever has woken a task sees to it that it runs now.
- In a long turn what is due is done every few sockets, so that the other end of a link works at the same time.
- A fault in one thing that is due, or served, costs the others nothing.

This file must not know what is done, or what the sockets are for.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

import trio

from tunnel import deadlines, logs
from tunnel.parked import Parked
from tunnel.poller import HUNG_UP, READ, WRITE, Poller, new_poller

log = logs.get_logger(__name__)

T = TypeVar("T")
_ROUND = 256  # sockets served before trio's tasks have their turn
_TOGETHER = 32  # sockets served before what they queued goes out
_LONGEST = 3600.0  # seconds of one wait, which may be asked to be endless
_KEPT = 4 * 1024 * 1024  # bytes; a heap that shrinks gives back what is more than twice that


class Due(Protocol):
    """Something that may have something to do when a turn ends."""

    def end_turn(self) -> None:
        """Do it."""


class Watcher(Protocol):
    """Whoever is called for a socket."""

    def ready(self, events: int) -> None:
        """What the poller reported; it may be old news by now."""

    def fault(self) -> None:
        """``ready`` raised what is handled just now: a fault of ours, which must cost nobody else anything."""


class Turns(trio.abc.Instrument):
    """The turns of one run of trio; see ``of_this_run``.

    Args:
        selector: the descriptor of what trio itself waits with, if ``wait`` is going to be called.
    """

    def __init__(self, token: trio.lowlevel.TrioToken, poller: Poller, selector: int | None = None) -> None:
        self._token = token
        self._poller = poller
        self._selector = selector
        self._deadlines = deadlines.of_this_run()
        self._watchers: dict[int, Watcher] = {}
        self._due: dict[Due, None] = {}
        self._woken = False  # a task was, in this turn
        self._waited = False  # ``wait`` was called in this turn
        if selector is not None:
            poller.register(selector, READ)

    # -- sockets

    def watch(self, fd: int, mask: int, watcher: Watcher) -> None:
        """Have ``watcher`` called when the socket, which nobody is called for, is ready for what the mask says."""
        self._poller.register(fd, mask)
        self._watchers[fd] = watcher

    def watch_for(self, fd: int, mask: int) -> None:
        """From now on only for this."""
        self._poller.modify(fd, mask)

    def unwatch(self, fd: int) -> None:
        """Call nobody any more; to be done before the socket is closed."""
        if self._watchers.pop(fd, None) is not None:
            self._poller.unregister(fd)

    async def serve(self, fd: int, mask: int, call: Callable[[], T | None], seconds: float = math.inf) -> T:
        """Have ``call`` called whenever the socket is ready, until it gives anything but None: that is returned.

        What it raises is raised here. If this is cancelled, it is not called any more. One task may wait for a socket
        with each mask.

        Raises:
            trio.ClosedResourceError: ``closing`` was called.
            trio.TooSlowError: so many seconds have gone by.
        """
        services = self._watchers.get(fd)
        if not isinstance(services, _Services):
            services = _Services(self, fd)
            self.watch(fd, mask, services)
        service = _Service(services, mask, call)
        services.add(service)
        late = self._deadlines.at(trio.current_time() + seconds, service.late) if seconds < math.inf else None
        try:
            await service.wait()
        finally:
            if late is not None:
                late.take_back()
        assert service.result is not None  # noqa: S101  # for the type checker
        return service.result

    async def ready(self, fd: int, mask: int) -> None:
        """Wait until the socket is ready for what the mask says."""
        await self.serve(fd, mask, _true)

    def closing(self, fd: int) -> None:
        """The socket is going to be closed: whoever waits in ``serve`` for it is told."""
        services = self._watchers.get(fd)
        if isinstance(services, _Services):
            services.close()

    def _serve(self, events: list[tuple[int, int]]) -> bool:
        """Call whom it concerns; whether trio has something too."""
        trio_too = False
        for count, (fd, ready) in enumerate(events, 1):
            watcher = self._watchers.get(fd)
            if watcher is None:  # it went away earlier in this round
                trio_too |= fd == self._selector
                continue
            try:
                watcher.ready(ready)
            except Exception:  # a fault of ours
                self._fault(fd, watcher)
            if not count % _TOGETHER:
                self._do()
        self._do()
        return trio_too

    def _fault(self, fd: int, watcher: Watcher) -> None:
        """Have a watcher deal with what it has raised. If it cannot do even that, it is called no more."""
        try:
            watcher.fault()
        except Exception:
            log.exception("fault at a socket")
            self.unwatch(fd)

    # -- what is due

    def at_end(self, due: Due) -> None:
        """Have it called when this turn ends."""
        self._due[due] = None

    def _do(self) -> None:
        while self._due:
            due, self._due = self._due, {}
            for each in due:
                try:
                    each.end_turn()
                except Exception:  # a fault of ours
                    log.exception("fault at the end of a turn")

    # -- the loop

    async def run(self) -> None:
        """Serve, where it is trio that waits."""
        while True:
            await trio.lowlevel.wait_readable(self._poller.fileno())
            self._serve(self._poller.poll(0, _ROUND))

    def wait(self, seconds: float) -> None:
        """Serve until there is something for trio to do, or for so long."""
        self._waited = True
        self._woken = False
        self._do()
        left = min(seconds, _LONGEST)
        end = time.perf_counter() + left
        while True:  # once at least: what is due may wake a task each time
            trio_too = self._serve(self._poller.poll(0.0 if self._woken else max(0.0, left), _ROUND))
            left = end - time.perf_counter()
            if trio_too or self._woken or left <= 0:
                return

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        """See ``trio.abc.Instrument``."""
        self._woken = True

    def before_io_wait(self, timeout: float) -> None:
        """See ``trio.abc.Instrument``."""
        if self._waited:
            self._waited = False
        elif self._selector is not None:  # tasks are busy: sockets have their turn nevertheless
            self._do()
            self._serve(self._poller.poll(0, _ROUND))
        elif self._due:
            self._woken = False
            self._do()
            if self._woken and timeout:
                self._token.run_sync_soon(_nothing)  # trio does not wait then


class _Services:
    """Who waits for one socket in ``serve``: one that reads, one that writes, or both."""

    __slots__ = ("_by_mask", "_fd", "_turns")

    def __init__(self, turns: Turns, fd: int) -> None:
        self._turns = turns
        self._fd = fd
        self._by_mask: dict[int, _Service[Any]] = {}

    def add(self, service: _Service[Any]) -> None:
        """Somebody waits."""
        if service.mask in self._by_mask:
            raise trio.BusyResourceError("another task waits for this socket")
        self._by_mask[service.mask] = service
        if len(self._by_mask) > 1:
            self._turns.watch_for(self._fd, READ | WRITE)

    def remove(self, service: _Service[Any]) -> None:
        """And does not any more. No effect if that is so already: what a call does may cancel whoever waits here."""
        if self._by_mask.get(service.mask) is not service:
            return
        del self._by_mask[service.mask]
        for mask in self._by_mask:
            self._turns.watch_for(self._fd, mask)
        if not self._by_mask:
            self._turns.unwatch(self._fd)

    def ready(self, events: int) -> None:
        """See ``Watcher``. Whoever waits finds out about a break by itself."""
        for service in tuple(self._by_mask.values()):
            if events & (service.mask | HUNG_UP) and self._by_mask.get(service.mask) is service:
                service.call()

    def fault(self) -> None:
        """See ``Watcher``. ``ready`` does not raise."""

    def close(self) -> None:
        """The socket is going to be closed."""
        for service in tuple(self._by_mask.values()):
            service.finish(trio.ClosedResourceError("another task closed this socket"))


class _Service(Parked, Generic[T]):
    """A call that is made while its task is parked. The task is woken by a result, or by an error."""

    __slots__ = ("_call", "_services", "mask", "result")

    def __init__(self, services: _Services, mask: int, call: Callable[[], T | None]) -> None:
        super().__init__()
        self.mask = mask
        self.result: T | None = None
        self._services = services
        self._call = call

    def call(self) -> None:
        """The socket is ready."""
        try:
            self.result = self._call()
        except Exception as error:  # it is raised where it belongs
            self.finish(error)
        else:
            if self.result is not None:
                self.finish()

    def finish(self, error: Exception | None = None) -> None:
        """Wake the task."""
        self._services.remove(self)
        self.end(error)

    def late(self) -> None:
        """The time is over."""
        self.finish(trio.TooSlowError())

    def abandoned(self) -> None:
        """See ``Parked``."""
        self._services.remove(self)


class Clock(trio.abc.Clock):
    """Time as trio's own clock has it. trio asks it how long to wait; it does the waiting itself, see above.

    trio cannot see then that nothing happens: ``wait_all_tasks_blocked`` does not return. Not for guest runs.
    """

    def __init__(self) -> None:
        self.turns: Turns | None = None

    def start_clock(self) -> None:
        """See ``trio.abc.Clock``."""
        self.turns = None  # those of the last run, if there was one

    def current_time(self) -> float:
        """See ``trio.abc.Clock``."""
        return time.perf_counter()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """See ``trio.abc.Clock``."""
        if self.turns is None:
            return deadline - time.perf_counter()
        self.turns.wait(deadline - time.perf_counter())
        return 0.0


def run(main: Callable[..., Awaitable[T]], *args: object) -> T:
    """``trio.run`` for a program that is all ours: the turns wait, and memory is kept for what is read and sent."""
    _keep_memory()
    gc.freeze()  # what was imported is there for good: the collector need not look through it
    return trio.run(main, *args, clock=Clock())


def _keep_memory() -> None:
    """Bytes come and go in pieces of some 100 KiB. glibc gives each back to the system, and gets it again page by page,
    which costs as much as copying it; but nothing that is smaller than what was freed in one piece before.
    """
    _ = bytes(_KEPT)


def _nothing() -> None:
    """Only to run."""


def _true() -> bool:
    return True


def _selector_of_trio() -> int | None:
    """The descriptor of what trio waits with. It has no public name but for kqueue; None where it is not found."""
    try:
        if hasattr(trio.lowlevel, "current_kqueue"):
            return int(trio.lowlevel.current_kqueue().fileno())
        return int(trio._core._run.GLOBAL_RUN_CONTEXT.runner.io_manager._epoll.fileno())
    except AttributeError:
        return None


_turns: trio.lowlevel.RunVar[Turns] = trio.lowlevel.RunVar("tunnel.turns")


def of_this_run() -> Turns:
    """The turns of the run of trio that this is called in."""
    try:
        return _turns.get()
    except LookupError:
        turns = _start()
        _turns.set(turns)
        return turns


def _start() -> Turns:
    clock, token = trio.lowlevel.current_clock(), trio.lowlevel.current_trio_token()
    selector = _selector_of_trio() if isinstance(clock, Clock) else None
    turns = Turns(token, new_poller(), selector)
    trio.lowlevel.add_instrument(turns)
    if isinstance(clock, Clock) and selector is not None:
        clock.turns = turns
    else:
        trio.lowlevel.spawn_system_task(turns.run)
    return turns
