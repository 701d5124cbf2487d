"""Liveness: who counts as gone, and how far away a peer is."""

from __future__ import annotations

from tunnel.liveness import MISSES, Liveness
from tunnel.packets import Ping, Pong


def intervals(liveness: Liveness, count: int, *, reading: bool = True) -> list[bool]:
    return [liveness.interval_over(reading=reading) for _ in range(count)]


def test_a_peer_is_gone_after_three_silent_intervals() -> None:
    assert intervals(Liveness(), MISSES) == [True, True, False]


def test_what_is_heard_counts_for_its_interval_and_the_count_begins_anew() -> None:
    liveness = Liveness()
    intervals(liveness, 2)
    liveness.heard = True
    assert intervals(liveness, 4) == [True, True, True, False]


def test_an_interval_in_which_nothing_was_read_says_nothing() -> None:
    liveness = Liveness()
    intervals(liveness, 2)
    assert intervals(liveness, 10, reading=False) == [True] * 10
    assert intervals(liveness, 3) == [True, True, False]


def test_the_way_is_not_known_before_an_answer() -> None:
    liveness = Liveness()
    liveness.ping(1.0)
    assert liveness.rtt is None


def test_an_answer_measures_the_way() -> None:
    liveness = Liveness()
    ping = liveness.ping(1.0)
    liveness.answered(Pong(0, ping.token), 1.25)
    assert liveness.rtt == 0.25


def test_a_late_answer_to_an_earlier_ping_measures_nothing() -> None:
    liveness = Liveness()
    first = liveness.ping(1.0)
    liveness.ping(6.0)
    liveness.answered(Pong(0, first.token), 6.5)
    assert liveness.rtt is None


def test_tokens_stay_within_two_bytes_and_are_not_zero() -> None:
    liveness = Liveness()
    tokens = [liveness.ping(0.0).token for _ in range(0x10001)]
    assert (min(tokens), max(tokens), tokens[-2:]) == (1, 0xFFFF, [1, 2])
    assert liveness.ping(0.0) == Ping(0, 3)
