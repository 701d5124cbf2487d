"""Which sockets are ready: epoll, or what the standard library finds in its place.

Rules that hold here:

- Level-triggered: what is not dealt with is reported again.
- A poller has a descriptor of its own, so that another one can wait for it.

This file must not know trio, or what the sockets are for.
"""

from __future__ import annotations

import contextlib
import select
import selectors
from typing import Protocol

READ, WRITE, HUNG_UP = 1, 4, 8 | 16  # as epoll numbers them


class Poller(Protocol):
    """A level-triggered selector whose own descriptor can be waited for."""

    def fileno(self) -> int:
        """Readable while any watched socket is ready."""

    def register(self, fd: int, mask: int) -> None:
        """Watch a socket."""

    def modify(self, fd: int, mask: int) -> None:
        """Watch it for something else. A mask of 0 still reports HUNG_UP where the system can."""

    def unregister(self, fd: int) -> None:
        """Watch it no more."""

    def poll(self, timeout: float, most: int) -> list[tuple[int, int]]:
        """Sockets and what they are ready for, after so many seconds at most; about ``most`` of them, in turns."""


class SelectorPoller:
    """The same over the standard library's selectors, for systems without epoll."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector

    def fileno(self) -> int:
        """See ``Poller``."""
        return self._selector.fileno()  # type: ignore[attr-defined, no-any-return]  # kqueue and epoll have one

    def register(self, fd: int, mask: int) -> None:
        """See ``Poller``."""
        self.modify(fd, mask)

    def modify(self, fd: int, mask: int) -> None:
        """See ``Poller``. With a mask of 0 nothing is reported until the next call."""
        events = (selectors.EVENT_READ if mask & READ else 0) | (selectors.EVENT_WRITE if mask & WRITE else 0)
        self.unregister(fd)
        if events:
            self._selector.register(fd, events)

    def unregister(self, fd: int) -> None:
        """See ``Poller``."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def poll(self, timeout: float, most: int) -> list[tuple[int, int]]:
        """See ``Poller``."""
        return [
            (key.fd, (READ if events & selectors.EVENT_READ else 0) | (WRITE if events & selectors.EVENT_WRITE else 0))
            for key, events in self._selector.select(timeout)  # all there are: a cut would always leave out the same
        ]


def new_poller() -> Poller:
    """The best that this system has."""
    return select.epoll() if hasattr(select, "epoll") else SelectorPoller(selectors.DefaultSelector())
