"""A value that is made out of files, and made again when they change.

Rules that hold here:

- All or nothing: while what is in the files is bad, the last good value stays. It is tried again at every look, since
  files that belong together are not written at once; the log says it once for each cause.
- Files are looked at, not watched: whatever the way in which they were replaced, what is at the path now counts. A
  rename, a symbolic link that leads elsewhere and a change in place all show.

This file must not know what the files hold.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import trio

from tunnel import logs
from tunnel.errors import ConfigError

log = logs.get_logger(__name__)

_PERIOD = 1.0  # seconds between two looks

T = TypeVar("T")
Look = tuple[int, ...] | None
"""What tells a file from any other, and from what it was before; None where there is none."""


class Reloaded(Generic[T]):
    """A value that follows its files while ``run`` runs.

    Args:
        paths: the files.
        read: makes the value out of them; it is called in the event loop, so they should be small.
        on_change: called with each new value, but not with the first.

    Attributes:
        value: the last good one.

    Raises:
        ConfigError: what ``read`` raises about the files as they are now.
    """

    def __init__(
        self, paths: Iterable[str | Path], read: Callable[[], T], on_change: Callable[[T], None] = lambda value: None
    ) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._on_change = on_change
        self._cause: str | None = None  # why what is there now is not taken
        self._asked = trio.Event()
        self._seen = self._identify()  # before it is read: what changes meanwhile has changed since
        self.value = read()

    def __repr__(self) -> str:
        return f"<Reloaded {self._files}{' bad' if self._cause else ''}>"

    @property
    def _files(self) -> str:
        return ", ".join(map(str, self._paths))

    def look(self) -> None:
        """Have ``run`` look at the files now."""
        self._asked.set()

    async def run(self) -> NoReturn:
        """Look at the files each second, and when asked to, until cancelled."""
        while True:
            with trio.move_on_after(_PERIOD):
                await self._asked.wait()
            self._asked = trio.Event()
            self._refresh()

    def _refresh(self) -> None:
        found = self._identify()
        if found == self._seen and self._cause is None:
            return
        self._seen = found
        try:
            self.value = self._read()
        except ConfigError as error:
            self._complain(str(error))
            return
        self._cause = None
        log.info("reloaded", file=self._files)
        self._on_change(self.value)

    def _complain(self, cause: str) -> None:
        if cause != self._cause:
            self._cause = cause
            log.warning("not taken", file=self._files, cause=cause)

    def _identify(self) -> list[Look]:
        return list(map(_identify, self._paths))


def _identify(path: str | Path) -> Look:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
