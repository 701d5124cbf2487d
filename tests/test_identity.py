"""Identities: what HELLO and WELCOME say of a side is read as it was said, and whatever cannot be believed is named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunnel.errors import RemoteProtocolError
from tunnel.identity import Identity, new_instance, read_identity

AGENT = Identity("agent", "edge-1", "0" * 32, ("later",))
SERVER = Identity("server", "server", "f" * 32)
ROLES = ("agent", "client", "server")


def _read(**changes: Any) -> Identity:
    return read_identity({**AGENT.to_info(), **changes}, *ROLES)


def _read_without(*entries: str) -> Identity:
    return read_identity({key: value for key, value in AGENT.to_info().items() if key not in entries}, *ROLES)


@pytest.mark.parametrize(
    "identity",
    [AGENT, SERVER, Identity("client", "Zürich", draining=True), Identity("agent", "edge", linked=("f" * 32,))],
    ids=lambda identity: identity.name,
)
def test_an_identity_is_read_as_it_was_said(identity: Identity) -> None:
    assert read_identity(identity.to_info(), *ROLES) == identity


def test_an_instance_is_128_bits_that_differ_each_time() -> None:
    one, other = new_instance(), new_instance()
    assert one != other
    assert len(bytes.fromhex(one)) == 16


def test_what_need_not_be_said_may_be_left_out() -> None:
    assert _read_without(*AGENT.to_info().keys() - {"role", "name", "instance"}) == Identity(
        "agent", "edge-1", "0" * 32
    )


def test_unknown_entries_are_ignored() -> None:
    assert _read(later={"a": [1]}) == AGENT


def test_a_role_that_is_not_due_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match=r"^role is 'agent', not one of server$"):
        read_identity(AGENT.to_info(), "server")


_BAD: list[tuple[str, Any]] = [
    *[("role", role) for role in (None, "", "king", b"agent", 1, ["agent"], {})],
    *[("name", name) for name in (None, "", "two words", "a\nb", "\x1b[31m", "x" * 129, b"edge", 7)],
    *[("instance", text) for text in (None, "", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "0" * 32 + "\n", bytes(16))],
    *[("features", words) for words in (None, "later", {}, [1], ["a", None], 3)],
    *[("draining", value) for value in (None, 0, 1, "true", [])],
]


@pytest.mark.parametrize(("entry", "value"), _BAD)
def test_a_bad_entry_is_refused_by_name(entry: str, value: Any) -> None:
    with pytest.raises(RemoteProtocolError, match=f"^{entry}\\b"):
        _read(**{entry: value})


@pytest.mark.parametrize("entry", ["role", "name", "instance"])
def test_a_missing_entry_is_refused_by_name(entry: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"^{entry} is None"):
        _read_without(entry)


@pytest.mark.parametrize("entry", AGENT.to_info())
def test_an_entry_that_is_nested_deep_is_refused_by_name(entry: str) -> None:
    nested: list[Any] = []
    for _ in range(1000):
        nested = [nested]
    with pytest.raises(RemoteProtocolError, match=f"^{entry} is "):
        _read(**{entry: nested})


@pytest.mark.parametrize("entry", AGENT.to_info())
def test_a_refusal_does_not_repeat_a_long_entry(entry: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        _read(**{entry: "x" * 4000})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("limits", [1, [], {"body": 4095}, {"body": "8192"}, {"body": True}], ids=repr)
def test_limits_that_make_no_sense_are_refused_by_name(limits: object) -> None:
    with pytest.raises(RemoteProtocolError, match="limits is "):
        _read(limits=limits)


@pytest.mark.parametrize(("limits", "body"), [({}, 1 << 20), ({"later": 1}, 1 << 20), ({"body": 4096}, 4096)], ids=repr)
def test_a_peer_says_how_long_a_body_it_takes(limits: object, body: int) -> None:
    assert _read(limits=limits).body_limit == body


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(AGENT.to_info(), _anything)))
def test_no_entries_raise_anything_but_a_protocol_error(info: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError):
        read_identity(info, *ROLES)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(AGENT.to_info(), _anything)))
def test_entries_that_are_not_believed_raise_nothing_but_a_protocol_error(changes: dict[str, Any]) -> None:
    try:
        _read(**changes)
    except RemoteProtocolError as error:
        assert str(error)  # noqa: PT017
