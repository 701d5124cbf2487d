"""A heart that beats as long as the loop does, for whoever wants to know whether the loop does.

This file must not know who asks.
"""

from __future__ import annotations

import trio

_BEAT = 1.0  # seconds between two beats
_STALLED = 10.0  # seconds without one


class Heart:
    """See the head of this file. ``beat`` is when the last one was, on trio's clock."""

    def __init__(self) -> None:
        self.beat = trio.current_time()

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            self.beat = trio.current_time()
            await trio.sleep(_BEAT)

    @property
    def alive(self) -> bool:
        """Whether there was a beat lately."""
        return trio.current_time() - self.beat < _STALLED
