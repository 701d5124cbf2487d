"""The streams that are open now, for whoever asks: where each one leads, since when, and how much it has carried.

This file must not know who moves the bytes, or who asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import trio

from tunnel.operate import StreamView
from tunnel.session import Stream


@dataclass(frozen=True, slots=True)
class Entry:
    """One open stream.

    Attributes:
        number: greater than those of all entries before it.
        use: the way in: ``connect``, ``forward``, ``client``; on an agent ``dial``.
        agent: the name of the agent that serves it.
        since: on trio's clock.
    """

    number: int
    use: str
    target: str
    agent: str
    since: float
    stream: Stream


def view_of(entry: Entry) -> StreamView:
    """An entry as operators see it."""
    return StreamView(
        number=entry.number,
        use=entry.use,
        target=entry.target,
        agent=entry.agent,
        state=entry.stream.state.name.lower(),
        age_s=trio.current_time() - entry.since,
        sent=entry.stream.sent,
        received=entry.stream.received,
    )


class Book:
    """Entries by number, oldest first."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self._numbers = count(1)

    def __repr__(self) -> str:
        return f"<Book entries={len(self.entries)}>"

    @contextmanager
    def entry(self, use: str, target: object, agent: str, stream: Stream) -> Iterator[Entry]:
        """Have an entry for as long as the block lasts."""
        entry = Entry(next(self._numbers), use, str(target), agent, trio.current_time(), stream)
        self.entries[entry.number] = entry
        try:
            yield entry
        finally:
            del self.entries[entry.number]

    def page(self, after: int, most: int) -> list[Entry]:
        """At most so many entries with a greater number, oldest first."""
        found = (entry for entry in self.entries.values() if entry.number > after)
        return [entry for entry, _ in zip(found, range(most), strict=False)]
