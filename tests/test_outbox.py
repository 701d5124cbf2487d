"""The outbox: who comes first, who takes turns, and what waits."""

from __future__ import annotations

import pytest

from tunnel import outbox as module
from tunnel.outbox import Frame, Line, Outbox
from tunnel.packets import Ping

ALL = 1 << 20


def queue(outbox: Outbox, line: Line, *frames: Frame) -> None:
    for frame in frames:
        outbox.queue(line, frame, len(frame) if isinstance(frame, bytes) else sum(map(len, frame)))


def test_control_packets_are_one_buffer_ahead_of_all_frames() -> None:
    outbox = Outbox()
    queue(outbox, Line(), b"data")
    for token in (1, 2):
        outbox.control(Ping(0, token))
    assert outbox.take(ALL) == [Ping(0, 1).encode() + Ping(0, 2).encode(), b"data"]


def test_lines_take_turns_and_each_keeps_its_order() -> None:
    outbox, one, other = Outbox(), Line(), Line()
    queue(outbox, one, b"a1", b"a2", b"a3")
    queue(outbox, other, b"b1", b"b2")
    assert outbox.take(ALL) == [b"a1", b"b1", b"a2", b"b2", b"a3"]


def test_a_take_ends_with_the_frame_that_reaches_its_limit_and_the_next_goes_on() -> None:
    outbox, line = Outbox(), Line()
    queue(outbox, line, b"12345", b"678", b"9")
    assert [outbox.take(6), outbox.take(6), outbox.take(6)] == [[b"12345", b"678"], [b"9"], []]


def test_a_long_frame_is_two_buffers_and_never_torn() -> None:
    outbox, line = Outbox(), Line()
    queue(outbox, line, (b"head", b"payload"))
    assert outbox.take(1) == [b"head", b"payload"]


def test_a_line_that_was_dropped_sends_nothing_and_may_queue_again() -> None:
    outbox, line = Outbox(), Line()
    queue(outbox, line, b"old", (b"head", b"old"))
    outbox.drop(line)
    assert (outbox.queued, bool(outbox)) == (0, False)
    queue(outbox, line, b"new")
    assert outbox.take(ALL) == [b"new"]


def test_dropping_a_line_with_nothing_changes_nothing() -> None:
    outbox, line = Outbox(), Line()
    queue(outbox, line, b"gone")
    outbox.take(ALL)
    outbox.drop(line)
    assert outbox.queued == 0


def test_it_is_known_what_is_our_own_and_what_only_passes() -> None:
    outbox, own, passing = Outbox(), Line(), Line()
    passing.passing = True
    queue(outbox, own, b"12345")
    queue(outbox, passing, b"678")
    assert (outbox.queued, outbox.own_queued, outbox.passing) == (8, 5, 3)
    outbox.take(ALL)
    assert (outbox.queued, outbox.own_queued, outbox.passing) == (0, 0, 0)


def test_frames_of_lines_are_counted_when_they_go_out() -> None:
    outbox = Outbox()
    queue(outbox, Line(), b"1", b"2")
    outbox.control(Ping(0, 1))
    assert outbox.frames_sent == 0
    outbox.take(ALL)
    assert outbox.frames_sent == 2


def test_it_is_crowded_and_then_clogged_by_control_packets_that_nobody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(Ping(0, 1).encode())
    monkeypatch.setattr(module, "_MAX_CONTROL", 4 * size)
    outbox, seen = Outbox(), []
    for _ in range(5):
        outbox.control(Ping(0, 1))
        seen.append((outbox.unread // size, outbox.crowded, outbox.clogged))
    assert seen == [(1, False, False), (2, False, False), (3, True, False), (4, True, False), (5, True, True)]
    outbox.take(0)
    assert (outbox.unread, outbox.crowded, outbox.clogged) == (0, False, False)
