"""Whether the peer of a link is still there, and how far away, without I/O: PINGs, and what is heard meanwhile.

Rules that hold here:

- Whatever was received shows that the peer is there. An interval in which nothing was read shows nothing.
- After three intervals in a row in which nothing came the peer counts as gone.
- Only the PONG of the last PING measures the way.

This file must not know how long an interval is, or what else is said on the link.
"""

from __future__ import annotations

from tunnel.packets import Ping, Pong

MISSES = 3  # silent intervals in a row, and the peer is gone
_TOKENS = 0xFFFF


class Liveness:
    """What is known of one peer.

    Attributes:
        heard: something was received in this interval; whoever receives sets it.
        rtt: seconds between the last PING that was answered and its PONG; None before the first.
    """

    __slots__ = ("_misses", "_pinged", "_token", "heard", "rtt")

    def __init__(self) -> None:
        self.heard = False
        self.rtt: float | None = None
        self._misses = 0
        self._token = 0
        self._pinged = 0.0

    def interval_over(self, *, reading: bool) -> bool:
        """Whether the peer counts as there. ``reading``: whether what it sends would have been heard."""
        self._misses = 0 if self.heard or not reading else self._misses + 1
        self.heard = False
        return self._misses < MISSES

    def ping(self, now: float) -> Ping:
        """What to ask it with."""
        self._token = self._token % _TOKENS + 1
        self._pinged = now
        return Ping(0, self._token)

    def answered(self, pong: Pong, now: float) -> None:
        """It answered."""
        if pong.token == self._token:
            self.rtt = now - self._pinged
