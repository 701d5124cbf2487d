"""Users of CONNECT: which files and which credentials are taken, and that no password shows."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunnel.errors import ConfigError
from tunnel.users import Users, read_users


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "users"
    path.touch(0o600)
    return path


def basic(text: str | bytes) -> str:
    return "Basic " + base64.b64encode(text if isinstance(text, bytes) else text.encode()).decode()


def users(file: Path, text: str) -> Users:
    file.write_text(text, encoding="utf-8")
    return read_users(file)


@pytest.mark.parametrize("shown", [basic("me:pass:word"), basic("me:pass:word").replace("Basic ", "basic  ")])
def test_a_name_with_its_password_is_taken(file: Path, shown: str) -> None:
    assert users(file, "me:pass:word\n").takes(shown)


@pytest.mark.parametrize(
    "shown",
    [
        "",
        "Basic",
        "Basic ",
        basic("me:wrong"),
        basic("you:pass"),
        basic("me:"),
        basic("me"),
        basic(":pass"),
        basic(""),
        basic(b"\xff:pass"),
        basic("me:pass").removeprefix("Basic "),
        basic("me:pass").replace("Basic", "Bearer"),
        basic("me:pass") + "!",
    ],
)
def test_anything_else_is_not(file: Path, shown: str) -> None:
    assert not users(file, "me:pass\n").takes(shown)


@given(st.text(max_size=60))
def test_no_header_is_an_error(shown: str) -> None:
    assert not Users({}).takes(shown)


def test_remarks_and_empty_lines_are_left_out(file: Path) -> None:
    found = users(file, "# people\n\n  \nme:one\n  you:two\n")
    assert found.takes(basic("me:one"))
    assert found.takes(basic("you:two"))
    assert not found.takes(basic("# people:"))


@pytest.mark.parametrize(
    ("text", "line"), [("me\n", 1), ("\nme:\n", 2), (":secret\n", 1), ("me:one\nyou:two\nme:three\n", 3)]
)
def test_a_line_that_is_no_user_is_named_by_its_number(file: Path, text: str, line: int) -> None:
    with pytest.raises(ConfigError, match=f"^{file}:{line}: taken: NAME:PASSWORD, each name once$"):
        users(file, text)


def test_a_file_without_users_lets_nobody_in_by_mistake(file: Path) -> None:
    with pytest.raises(ConfigError, match="holds no users"):
        users(file, "# nobody yet\n")


def test_a_file_that_others_can_use_is_refused(file: Path) -> None:
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="others than its owner"):
        users(file, "me:secret\n")


def test_no_password_shows(file: Path) -> None:
    assert "secret" not in repr(users(file, "me:secret\n"))
