"""``tunnel demo``: it plays to its end, and says what happened."""

from __future__ import annotations

import re

import pytest

from tunnel import demo


def test_the_demo_ends_well_and_shows_what_happened(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_PAUSE", 0.01)
    assert demo.run() == 0
    shown = capsys.readouterr().out
    for name in ("blue", "green"):
        assert re.search(rf"{name} +GET / +29 +[0-9.]+ ms", shown)
    drained = re.search(r"a slow download runs through (blue|green); draining \1 now", shown)
    assert drained
    other = {"blue": "green", "green": "blue"}[drained[1]]
    assert f"ten new dials meanwhile went to: {other}\n" in shown
    assert re.search(rf"{drained[1]} +GET /slow +1,572,864 ", shown)
    assert "the agents and the server have shut down cleanly" in shown


def test_a_step_that_fails_ends_the_demo_with_1_and_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise demo.DemoFailed("the curtain is stuck")

    monkeypatch.setattr(demo, "_play", fail)
    assert demo.run() == 1
    assert "the demo failed: the curtain is stuck\n" in capsys.readouterr().out
