"""Windows: what may come, what goes back when, and which of them grows."""

from __future__ import annotations

import pytest

from tunnel.windows import Window, Windows

KIB, MIB = 1 << 10, 1 << 20


class Link:
    """A link's windows, and how often a first one was small."""

    def __init__(
        self, first: int = 100 * KIB, budget: int = MIB, most: int = 400 * KIB, spare: int = 250 * KIB
    ) -> None:
        self.small = 0
        self.windows = Windows(first, budget, most, spare, self._note)

    def _note(self) -> None:
        self.small += 1

    def lend(self) -> Window:
        window = Window()
        self.windows.lend(window)
        return window

    def fill(self, window: Window) -> bool:
        """The peer uses up all it may, the reader takes it at once: whether the window is looked at."""
        size = window.left
        assert window.arrived(size)
        due = window.due(size)
        look = self.windows.look(window)
        window.left += due
        window.unreturned = 0
        return look

    def grow(self, window: Window) -> int:
        size = self.windows.growth(window)
        self.windows.grow(window, size)
        window.left += size
        return size


def test_no_more_may_come_than_is_left() -> None:
    window = Link().lend()
    assert window.arrived(60 * KIB)
    assert not window.arrived(40 * KIB + 1)
    assert window.arrived(40 * KIB)
    assert window.left == 0


@pytest.mark.parametrize(("size", "consumed", "goes_back"), [
    (100, [49], [0]), (100, [50], [50]), (101, [50, 1], [0, 51]), (8 * MIB, [MIB - 1, 1], [0, MIB]),
])  # fmt: skip
def test_half_a_window_or_a_mib_goes_back_at_a_time(size: int, consumed: list[int], goes_back: list[int]) -> None:
    window = Window()
    window.say(size)
    assert [window.due(each) for each in consumed] == goes_back


class TestGrowth:
    def test_is_for_a_window_that_was_used_up_before_more_was_allowed(self) -> None:
        link = Link()
        window = link.lend()
        assert link.fill(window)  # ... and nothing came ahead of the PONG: there was no credit left
        assert link.grow(window) == 100 * KIB
        assert (window.size, window.left, window.grown) == (200 * KIB, 200 * KIB, 100 * KIB)

    def test_is_not_for_a_window_whose_peer_had_credit_left(self) -> None:
        link = Link()
        window = link.lend()
        window.arrived(60 * KIB)
        assert window.due(60 * KIB)
        assert link.windows.look(window)
        assert link.grow(window) == 0

    def test_is_not_for_a_window_whose_reader_is_behind(self) -> None:
        link = Link()
        window = link.lend()
        window.arrived(100 * KIB)
        assert window.due(60 * KIB)
        assert not link.windows.look(window)

    def test_ends_at_the_limit(self) -> None:
        link = Link(spare=MIB)
        window = link.lend()
        sizes = []
        while link.fill(window):
            link.grow(window)
            sizes.append(window.size // KIB)
        assert sizes == [200, 400]

    def test_is_within_what_the_link_has_to_spare_which_comes_back_at_the_end(self) -> None:
        link = Link()
        one, other = link.lend(), link.lend()
        link.fill(one)
        link.grow(one)
        link.fill(one)
        assert link.grow(one) == 150 * KIB
        assert not link.fill(other)  # there is nothing to spare
        link.windows.take_back(one)
        assert link.fill(other)

    def test_is_looked_at_for_each_window_by_itself_and_once_at_a_time(self) -> None:
        link = Link()
        one, other = link.lend(), link.lend()
        assert link.fill(one)
        assert not link.fill(one)  # its PONG is still to come
        assert link.fill(other)
        assert link.grow(other) == 100 * KIB
        assert link.grow(one) == 0  # more came than its peer could send when it was looked at

    def test_is_not_for_a_window_that_was_not_looked_at(self) -> None:
        link = Link()
        assert link.grow(link.lend()) == 0

    def test_of_one_window_leaves_the_others_what_is_left_to_spare(self) -> None:
        link = Link()
        windows = [link.lend() for _ in range(3)]
        for window in windows:
            link.fill(window)
        assert [link.grow(window) // KIB for window in windows] == [100, 100, 50]


class TestFirstWindows:
    def test_are_a_quarter_of_what_is_left_if_that_is_less_and_16_kib_at_least(self) -> None:
        link = Link(first=100 * KIB, budget=200 * KIB)
        assert [link.lend().size // KIB for _ in range(7)] == [50, 37, 28, 21, 16, 16, 16]
        assert link.small == 7

    def test_come_back_with_the_end_of_the_stream(self) -> None:
        link = Link()
        windows = [link.lend() for _ in range(3)]
        assert link.windows.budget == MIB - 300 * KIB
        for window in windows:
            link.windows.take_back(window)
        assert link.windows.budget == MIB
        assert link.small == 0

    def test_that_were_said_and_not_lent_count_nowhere(self) -> None:
        link, window = Link(), Window()
        window.say(50 * KIB)
        link.windows.take_back(window)
        assert link.windows.budget == MIB
