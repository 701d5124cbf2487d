"""Errors: each code means the same to every front-end, and an answer from the wire finds its class."""

from __future__ import annotations

import pytest

from tunnel import errors
from tunnel.errors import (
    DIAL_ERRORS,
    DialError,
    DialProtocolError,
    HandshakeRefused,
    StreamReset,
    dial_error,
)

TABLE = {
    "refused": (502, 5, 69),
    "unreachable": (502, 4, 69),
    "dns": (502, 4, 69),
    "timeout": (504, 6, 69),
    "denied": (403, 2, 69),
    "no_backend": (503, 1, 75),
    "no_server": (503, 1, 75),
    "refused_draining": (503, 1, 75),
    "too_many": (503, 1, 75),
    "link_lost": (503, 1, 75),
    "protocol": (502, 1, 69),
}


def test_the_codes_are_these() -> None:
    assert set(DIAL_ERRORS) == set(TABLE)


def test_every_class_of_dial_error_has_its_code() -> None:
    assert set(DialError.__subclasses__()) == set(DIAL_ERRORS.values())


@pytest.mark.parametrize(("code", "answers"), TABLE.items(), ids=TABLE)
def test_each_code_has_its_status_reply_and_exit_code(code: str, answers: tuple[int, int, int]) -> None:
    kind = DIAL_ERRORS[code]
    assert (kind.http_status, kind.socks_reply, kind.exit_code) == answers


@pytest.mark.parametrize("code", TABLE)
def test_an_answer_from_the_wire_becomes_the_error_of_its_code(code: str) -> None:
    error = dial_error(code, "because")
    assert type(error) is DIAL_ERRORS[code]
    assert (error.code, error.text, str(error)) == (code, "because", "because")


@pytest.mark.parametrize("code", TABLE)
def test_an_answer_without_a_text_says_its_code(code: str) -> None:
    error = dial_error(code, "")
    assert (error.text, str(error)) == (code, code)


def test_an_unknown_code_is_a_protocol_error_that_keeps_the_word() -> None:
    error = dial_error("from_the_future", "because")
    assert type(error) is DialProtocolError
    assert error.text == "because (from_the_future)"


@pytest.mark.parametrize("kind", [HandshakeRefused, StreamReset])
def test_an_end_that_the_peer_explained_keeps_code_and_text(kind: type[HandshakeRefused | StreamReset]) -> None:
    error = kind("drain_deadline", "the agent left")
    assert (error.code, error.text, str(error)) == (
        "drain_deadline",
        "the agent left",
        "the agent left (drain_deadline)",
    )


def test_everything_raised_on_purpose_has_one_root() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert all(issubclass(kind, errors.TunnelError) for kind in kinds)
