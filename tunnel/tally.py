"""A histogram that costs next to nothing to fill; whoever reads it makes of it what is wanted.

This file must not know what is measured, or metrics libraries.
"""

from __future__ import annotations

from bisect import bisect_left


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
