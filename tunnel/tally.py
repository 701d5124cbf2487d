"""Sums and histograms that cost next to nothing to fill; whoever reads them makes of them what is wanted.

This file must not know what is measured, or metrics libraries.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Histogram:
    """Counts by upper bound.

    Attributes:
        bounds: ascending; what is above the last counts under infinity.
        counts: one more than bounds, not cumulative.
        sum: of all that was observed.
    """

    def __init__(self, *bounds: float) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Carrier(Protocol):
    """Something that counts what it carries, as long as it is there."""

    @property
    def frames_sent(self) -> int:
        """Frames one way."""

    @property
    def frames_received(self) -> int:
        """Frames the other way."""

    @property
    def sent(self) -> int:
        """Bytes one way."""

    @property
    def received(self) -> int:
        """Bytes the other way."""


@dataclass(slots=True)
class Traffic:
    """What carriers carried, those included that are not there any more."""

    sent: int = 0
    received: int = 0
    frames_sent: int = 0
    frames_received: int = 0

    def add(self, carrier: Carrier) -> None:
        """Count what one has carried; once, when it has ended."""
        self.sent += carrier.sent
        self.received += carrier.received
        self.frames_sent += carrier.frames_sent
        self.frames_received += carrier.frames_received

    def with_those(self, carriers: Iterable[Carrier]) -> Traffic:
        """The same, and what those have carried so far that are still there."""
        total = Traffic(self.sent, self.received, self.frames_sent, self.frames_received)
        for carrier in carriers:
            total.add(carrier)
        return total
