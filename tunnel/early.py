"""Signals that arrive while the program is still being loaded: remembered, until somebody can act on them; and while it
is ending already: without effect.

Rules that hold here:

- ``hold`` is the first thing a process does; from then on SIGTERM and SIGINT end nothing by themselves.
- Whoever lives under signals asks ``taken`` once its own handlers are in place. A command that does not calls
  ``release``: what was held arrives then, with the effect that it always has.
- ``ignore`` is the last: the interpreter gives signals their usual effect back while it ends, and a repeat would take
  the exit code away.

This file must not know anything else of the package, and imports nothing that takes time.
"""

from __future__ import annotations

import signal
from types import FrameType

_HELD = (signal.SIGTERM, signal.SIGINT)
_came: list[int] = []


def _remember(number: int, _frame: FrameType | None) -> None:
    _came.append(number)


def hold() -> None:
    """Remember these signals instead of dying of them."""
    for number in _HELD:
        signal.signal(number, _remember)


def taken() -> list[int]:
    """What came since ``hold``, each told once."""
    came = _came.copy()
    _came.clear()
    return came


def release() -> None:
    """Let these signals have their usual effect again, those that came already first of all."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in taken():
        signal.raise_signal(number)


def ignore() -> None:
    """Let these signals have no effect any more."""
    for number in _HELD:
        signal.signal(number, signal.SIG_IGN)
