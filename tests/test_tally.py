"""Sums and histograms."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunnel.tally import Histogram, Traffic


@pytest.mark.parametrize(
    ("value", "counts"), [(0, [1, 0, 0]), (1, [1, 0, 0]), (1.5, [0, 1, 0]), (2, [0, 1, 0]), (2.5, [0, 0, 1])]
)
def test_a_value_counts_under_the_first_bound_that_is_not_below_it(value: float, counts: list[int]) -> None:
    histogram = Histogram(1, 2)
    histogram.observe(value)
    assert histogram.counts == counts


@given(st.lists(st.floats(0, 1e6)))
def test_every_value_counts_once(values: list[float]) -> None:
    histogram = Histogram(0.1, 1, 10)
    for value in values:
        histogram.observe(value)
    assert sum(histogram.counts) == len(values)
    assert histogram.sum == pytest.approx(sum(values))


@dataclass
class Carrier:
    sent: int
    received: int
    frames_sent: int
    frames_received: int


def test_what_has_ended_is_kept_and_what_is_there_is_looked_at() -> None:
    traffic = Traffic()
    traffic.add(Carrier(1, 2, 3, 4))
    there = [Carrier(10, 20, 30, 40), Carrier(100, 200, 300, 400)]
    assert traffic.with_those(there) == Traffic(111, 222, 333, 444)
    assert traffic == Traffic(1, 2, 3, 4)
