"""How much the peers of a link's streams may send unasked, when they get more, and when a window grows.

    first window --its stream's peer has used up all of it, its reader waits, and more could come--> doubled, and again

Rules that hold here:

- Who sends more than its window has left breaks a rule. What is *consumed* goes back half a window or a MiB at a time.
- First windows count in what the link lends in all, from when the peer hears of one to the end of its stream: a few
  streams have a large one each, many have small ones. That bounds what can be held for them.
- A window that is what bounds its stream doubles, up to a limit and within what the link has to spare. That is so if
  its reader was waiting for bytes, and the peer had used up all its credit before more of it arrived. A PING of the
  stream goes along with the credit to tell: what comes ahead of the PONG was sent without it.

This file must not know packets, streams' states, or who reads.
"""

from __future__ import annotations

from collections.abc import Callable

_RETURNED = 1024 * 1024  # bytes of credit that go back together: what is kept of a large window shall not slow it down
_LEAST = 16 * 1024  # what a stream gets however many there are


class Window:
    """What one stream's peer may have on its way to us.

    Attributes:
        size: bytes in all; 0 until it is said.
        left: bytes that may still come now.
        lent: how much of the size counts in what the link lends.
        grown: how much of the size came after the first.
        probed: while it is looked at, what its peer may still send without the credit that the PING went along with.
    """

    __slots__ = ("grown", "left", "lent", "probed", "size", "unreturned")

    def __init__(self) -> None:
        self.size = self.left = 0
        self.lent = self.grown = 0
        self.probed: int | None = None
        self.unreturned = 0  # consumed, and not given back yet

    def say(self, size: int, lent: int = 0) -> None:
        """So many bytes may come unasked."""
        self.size = self.left = size
        self.lent = lent

    def arrived(self, size: int) -> bool:
        """So many bytes came; whether they were allowed."""
        if size > self.left:
            return False
        self.left -= size
        if self.probed is not None:
            self.probed -= size
        return True

    def due(self, size: int) -> int:
        """So many bytes more were consumed: what of all that goes back now, if the peer is told."""
        self.unreturned += size
        if self.unreturned * 2 >= self.size or self.unreturned >= _RETURNED:
            return self.unreturned
        return 0


class Windows:
    """The windows of one link together.

    Args:
        first: bytes a stream's peer may send unasked, while ``budget`` lasts.
        budget: bytes that first windows may have together; beyond it each gets 16 KiB at most.
        most: what a window may grow to.
        spare: bytes that all windows together may grow by.
        on_small: called when a first window is smaller than it should be.
    """

    def __init__(self, first: int, budget: int, most: int, spare: int, on_small: Callable[[], None]) -> None:
        self.budget = budget
        self.spare = spare
        self._first = first
        self._most = most
        self._on_small = on_small

    def lend(self, window: Window) -> None:
        """Say a first window."""
        size = min(self._first, max(_LEAST, self.budget // 4))
        if size < self._first:
            self._on_small()
        self.budget -= size
        window.say(size, lent=size)

    def take_back(self, window: Window) -> None:
        """The stream has ended."""
        self.spare += window.grown
        self.budget += window.lent

    def look(self, window: Window) -> bool:
        """What is unreturned goes back now: whether to look if it is the window that bounds its stream."""
        waited = window.left + window.unreturned == window.size  # its reader, for bytes
        if not waited or window.probed is not None or not self.spare or window.size >= self._most:
            return False
        window.probed = window.left
        return True

    def growth(self, window: Window) -> int:
        """The PONG is there: bytes to grow by; none if it was not looked at, or its peer had credit left."""
        probed, window.probed = window.probed, None
        return min(window.size, self._most - window.size, self.spare) if probed == 0 else 0

    def grow(self, window: Window, size: int) -> None:
        """Have the window grow."""
        self.spare -= size
        window.size += size
        window.grown += size
