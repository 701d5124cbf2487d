"""Following a drain: what is certain, and what is not, from what was seen and when."""

from __future__ import annotations

from typing import Any

import pytest

from tunnel.follow import Following, Outcome, Seen

ACTIVE, BUSY, DRAINED = Seen("i1", "active", 2), Seen("i1", "draining", 2, 1, 3.0), Seen("i1", "drained")
STOPPING, EMPTY, SILENT = Seen("i1", "stopping", 1), Seen("i1", "draining"), Seen("i1", "unknown", 2)
OTHER = Seen("i2", "draining", 4)


def following(*told: Seen, leaves: bool = False) -> Following:
    return Following(told or [BUSY], leaves=leaves, patience=2, relinking=20)


# -- what became of it


@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        (DRAINED, Outcome.DRAINED),
        (ACTIVE, Outcome.UNDRAINED),
        (BUSY, None),
        (EMPTY, None),  # nothing is open, but not all servers know that it drains
        (STOPPING, None),
        (SILENT, None),
    ],
)
def test_only_what_an_agent_says_itself_is_an_outcome(seen: Seen, outcome: Outcome | None) -> None:
    drain = following()
    drain.saw([seen], 100)
    assert drain.outcome(1_000) is outcome


def test_an_agent_that_was_drained_already_is_drained() -> None:
    assert following(DRAINED).outcome(0) is Outcome.DRAINED


def test_all_processes_of_a_name_must_be_drained() -> None:
    drain = following(BUSY, OTHER)
    drain.saw([DRAINED, OTHER], 1)
    assert drain.outcome(1) is None
    drain.saw([DRAINED, Seen("i2", "drained")], 2)
    assert drain.outcome(2) is Outcome.DRAINED


def test_one_process_that_was_undrained_is_enough() -> None:
    drain = following(BUSY, OTHER)
    drain.saw([ACTIVE, Seen("i2", "drained")], 1)
    assert drain.outcome(1) is Outcome.UNDRAINED


def test_another_process_of_the_same_name_is_not_followed() -> None:
    drain = following()
    drain.saw([DRAINED, Seen("i3", "active", 7)], 1)
    assert drain.outcome(1) is Outcome.DRAINED


# -- processes that are no longer there


@pytest.mark.parametrize("last", [BUSY, EMPTY, SILENT])
def test_an_agent_that_stays_away_before_it_was_drained_is_gone(last: Seen) -> None:
    drain = following(last)
    drain.saw([], 100)
    assert drain.outcome(101.9) is None
    drain.saw([], 102)
    assert drain.outcome(102) is Outcome.GONE
    assert drain.left_behind == last.left


def test_an_agent_that_comes_back_is_not_gone() -> None:
    drain = following()
    drain.saw([], 100)
    drain.saw([BUSY], 101)
    drain.saw([], 102)
    assert drain.outcome(103) is None


@pytest.mark.parametrize("last", [DRAINED, Seen("i1", "stopping")])
def test_an_agent_that_left_with_nothing_open_is_drained_at_once(last: Seen) -> None:
    drain = following()
    drain.saw([last], 1)
    drain.saw([], 2)
    assert drain.outcome(2) is Outcome.DRAINED


def test_an_agent_that_left_with_something_open_is_gone() -> None:
    drain = following()
    drain.saw([STOPPING], 1)
    drain.saw([], 2)
    assert drain.outcome(2) is None
    assert drain.outcome(4) is Outcome.GONE


@pytest.mark.parametrize(
    ("last", "outcome"), [(EMPTY, Outcome.DRAINED), (BUSY, Outcome.GONE), (Seen("i1", "unknown"), Outcome.GONE)]
)
def test_one_that_was_to_leave_is_drained_if_nothing_was_left(last: Seen, outcome: Outcome) -> None:
    drain = following(last, leaves=True)
    drain.saw([], 1)
    assert drain.outcome(1) is None
    assert drain.outcome(3) is outcome


def test_what_is_not_seen_at_all_is_neither_drained_nor_gone() -> None:
    drain = following()
    drain.saw([], 1)
    drain.saw_nothing("it is dark")
    assert drain.outcome(1_000) is None


def test_agents_get_longer_to_link_to_a_server_that_was_away_itself() -> None:
    drain = following()
    drain.saw_nothing("it is dark")
    drain.saw([], 100)
    assert drain.outcome(119) is None
    assert drain.outcome(120) is Outcome.GONE


# -- what is said of it


def test_how_far_it_is_is_told_with_what_is_left() -> None:
    drain = following()
    assert (str(drain), drain.state, drain.oldest_s) == ("draining: 2 open, 1 pending", "draining", 3.0)


def test_of_several_the_least_far_counts() -> None:
    drain = following(BUSY, Seen("i2", "drained"))
    assert str(drain) == "draining (1 of 2 drained): 2 open, 1 pending"


def test_what_an_agent_has_not_said_is_unknown() -> None:
    assert str(following(SILENT)) == "unknown: 2 open, 0 pending"


def test_what_is_not_linked_is_unknown() -> None:
    drain = following()
    drain.saw([], 1)
    assert str(drain) == "unknown: not linked now; last seen: 2 open, 1 pending"


def test_what_cannot_be_seen_is_unknown_with_the_cause() -> None:
    drain = following()
    drain.saw_nothing("it is dark")
    assert str(drain) == "unknown: it is dark; last seen: 2 open, 1 pending"


def test_it_is_told_to_programs_as_well() -> None:
    assert following().as_json() == {
        "state": "draining",
        "instances": [{"instance": "i1", "state": "draining", "open": 2, "pending": 1, "oldest_s": 3.0}],
    }


# -- what is read from answers


def view(state: str, drain: dict[str, Any] | None) -> dict[str, Any]:
    return {"instance": "i1", "state": state, "streams": 5, "drain": drain}


SAID = {"state": "drained", "open": 0, "pending": 0, "oldest_s": 0.0}


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        (view("active", None), Seen("i1", "active", 5)),
        (view("draining", None), Seen("i1", "unknown", 5)),
        (view("draining", SAID), DRAINED),
        (view("final", {**SAID, "state": "stopping", "open": 1}), STOPPING),
        (view("draining", {**SAID, "state": "dreaming"}), Seen("i1", "unknown")),
    ],
)
def test_an_agent_is_seen_as_it_says_itself(answer: dict[str, Any], seen: Seen) -> None:
    assert Seen.agent(answer) == seen


@pytest.mark.parametrize(
    ("role", "state", "reasons", "seen"),
    [
        ("agent", "ready", [], "active"),
        ("agent", "drained", ["admin"], "drained"),
        ("agent", "stopping", ["admin", "signal"], "stopping"),
        ("server", "ready", [], "active"),
        ("server", "lame duck", ["leaving"], "stopping"),
    ],
)
def test_a_program_is_seen_as_it_says_of_itself(role: str, state: str, reasons: list[str], seen: str) -> None:
    answer = {**SAID, "instance": "i1", "role": role, "state": state, "reasons": reasons}
    assert Seen.itself(answer).state == seen
