"""The streams that are open now, for whoever asks: where each one leads, since when, and how much it has carried.

This file must not know who moves the bytes, or who asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Self

import trio

from tunnel.core import Stream
from tunnel.operate import StreamView


@dataclass(slots=True, eq=False)
class Entry:
    """One open stream, which is in the book for as long as the ``with`` block that it begins.

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
    book: Book

    def __enter__(self) -> Self:
        self.book.entries[self.number] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self.book.entries[self.number]


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

    def entry(self, use: str, target: object, agent: str, stream: Stream) -> Entry:
        """A new entry, not in the book yet."""
        return Entry(next(self._numbers), use, str(target), agent, trio.current_time(), stream, self)

    def page(self, after: int, most: int) -> list[Entry]:
        """At most so many entries with a greater number, oldest first."""
        found = (entry for entry in self.entries.values() if entry.number > after)
        return [entry for entry, _ in zip(found, range(most), strict=False)]
