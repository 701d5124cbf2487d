"""What signals mean to a running program, and what its service manager hears of it.

SIGTERM and SIGINT alike begin to leave; another one, at least half a second later, cuts at once; a third ends the
process. SIGUSR1 and SIGUSR2 are the operator's drain and undrain, where the program has them. SIGQUIT has it say what
it holds. SIGHUP has a program look at its files at once, where it follows any; otherwise it ends it, as it does when a
terminal is closed.

Rules that hold here:

- One receiver, from before the start until the exit. What came before it was there counts as well.
- Repeats within half a second are one: Ctrl-C reaches a whole group, and some send both.

This file must not know links, streams, or which program it is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import NoReturn

import trio

from tunnel import early, logs
from tunnel.lifecycle import Lifecycle, Phase
from tunnel.notify import notify

log = logs.get_logger(__name__)

_SAME_PRESS = 0.5  # seconds within which signals count as one
_STATUS = 10.0  # seconds between two words to the service manager

Command = Callable[[], object]


class _Presses:
    """Counts the signals that mean: leave."""

    def __init__(self, life: Lifecycle) -> None:
        self._steps = [life.leave, life.cut]
        self._last = -_SAME_PRESS

    def press(self, number: int) -> None:
        now = trio.current_time()
        if now - self._last < _SAME_PRESS:
            return
        self._last = now
        if not self._steps:
            os._exit(128 + number)
        self._steps.pop(0)()


async def _obey(
    life: Lifecycle, commands: Mapping[signal.Signals, Command | None], *, task_status: trio.TaskStatus[None]
) -> NoReturn:
    presses = _Presses(life)
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, *commands) as signals:
        for number in early.taken():
            presses.press(number)
        task_status.started()
        async for number in signals:
            if number not in commands:
                presses.press(number)
            elif command := commands[signal.Signals(number)]:
                try:
                    command()
                except Exception:  # a fault of ours; the program goes on
                    log.exception("fault in a command", signal=signal.Signals(number).name)
            else:
                log.warning("signal without meaning here", signal=signal.Signals(number).name)
    raise AssertionError("a signal receiver does not end")


async def _tell_manager(life: Lifecycle) -> None:
    """Say when it is ready and when it stops, and meanwhile that it lives, as often as is asked for."""
    seconds = min(_STATUS, int(os.environ.get("WATCHDOG_USEC", "0") or 0) / 2_000_000 or _STATUS)
    await life.phase.wait_value(Phase.READY)
    notify("READY=1")
    while True:
        phase = life.phase.value
        notify(f"WATCHDOG=1\nSTATUS={phase.value}, {life.open.value} open")
        with trio.move_on_after(seconds):
            await life.phase.wait_value(lambda now, phase=phase: now is not phase)
            if phase is Phase.READY:
                notify("STOPPING=1")


async def live(
    life: Lifecycle,
    dump: Command,
    drain: Command | None = None,
    undrain: Command | None = None,
    look: Command | None = None,
) -> int:
    """Run a whole program under signals; the exit code."""
    commands = {signal.SIGQUIT: dump, signal.SIGUSR1: drain, signal.SIGUSR2: undrain}
    if look:
        commands[signal.SIGHUP] = look
    async with trio.open_nursery() as nursery:
        await nursery.start(_obey, life, commands)
        nursery.start_soon(_tell_manager, life)
        code = await life.run()
        nursery.cancel_scope.cancel()
    return code
