"""How many descriptors a program takes at its start, whatever the system says to that."""

from __future__ import annotations

import logging

import pytest

from tunnel import programs

INFINITY = -1


class System:
    """Has limits, and refuses what is above ``most``."""

    RLIMIT_NOFILE, RLIM_INFINITY = 7, INFINITY

    def __init__(self, soft: int, hard: int, most: int = 1 << 30) -> None:
        self.limits = soft, hard
        self.most = most

    def getrlimit(self, what: int) -> tuple[int, int]:
        return self.limits

    def setrlimit(self, what: int, limits: tuple[int, int]) -> None:
        if not 0 <= limits[0] <= self.most:
            raise ValueError("current limit exceeds maximum limit")
        self.limits = limits


@pytest.mark.parametrize(
    ("system", "soft", "said"),
    [
        (System(1024, 20_000), 20_000, "soft=20000 hard=20000"),
        (System(20_000, 20_000), 20_000, "soft=20000 hard=20000"),
        (System(1024, 1 << 30), 1 << 20, f"soft={1 << 20} hard={1 << 30}"),
        (System(256, INFINITY, most=10_240), 10_240, "soft=10240 hard=unlimited"),
        (System(256, INFINITY), 1 << 20, f"soft={1 << 20} hard=unlimited"),
        (System(1024, 20_000, most=100), 1024, "soft=1024 hard=20000"),
        (System(INFINITY, INFINITY), INFINITY, "soft=unlimited hard=unlimited"),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_it_goes_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, system: System, soft: int, said: str
) -> None:
    monkeypatch.setattr(programs, "resource", system)
    caplog.set_level(logging.INFO, "tunnel")
    hard = system.limits[1]
    programs._raise_descriptors()
    assert system.limits == (soft, hard)
    assert [record.getMessage() for record in caplog.records] == [f"descriptors {said}"]
