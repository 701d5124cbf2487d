"""The configuration file: what it may say, and where it says what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunnel.configfile import lines_of, load
from tunnel.errors import ConfigError

KNOWN: dict[str, dict[str, type]] = {
    "server": {"listen": str, "forward": list, "insecure": bool, "dial-timeout": str, "server-count": int},
    "agent": {"server": list},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tunnel.toml"


def refusal(file: Path, text: str) -> str:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(file, KNOWN)
    return str(caught.value)


def test_a_file_gives_what_it_says(file: Path) -> None:
    file.write_text('[server]\nlisten = "1"\nforward = ["2=a:3"]\ninsecure = true\n[agent]\nserver = ["a:1"]\n')
    assert load(file, KNOWN) == {
        "server": {"listen": "1", "forward": ["2=a:3"], "insecure": True},
        "agent": {"server": ["a:1"]},
    }


def test_an_unknown_section_is_refused_with_a_suggestion(file: Path) -> None:
    assert refusal(file, "[sever]") == f"{file}:1: sever: is an unknown section; did you mean server?"


def test_an_unknown_key_is_refused_with_a_suggestion(file: Path) -> None:
    text = refusal(file, '[server]\ndial_timeout = "1s"')
    assert text == f"{file}:2: server.dial_timeout: is an unknown key; did you mean dial-timeout?"


def test_an_unknown_key_like_no_other_is_answered_with_all(file: Path) -> None:
    assert refusal(file, "[agent]\nx = 1").endswith(":2: agent.x: is an unknown key; taken: server")


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        ("listen = 7400", "a text"),
        ("insecure = 1", "true or false"),
        ('insecure = "yes"', "true or false"),
        ('forward = "1=a:2"', "a list of texts"),
        ("forward = [1]", "a list of texts"),
        ('server-count = "3"', "a whole number"),
        ("server-count = true", "a whole number"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_right_one(file: Path, line: str, taken: str) -> None:
    key = line.split()[0]
    text = refusal(file, f"[server]\n{line}")
    assert text.startswith(f"{file}:2: server.{key}: ")
    assert text.endswith(f"; taken: {taken}")


def test_a_value_in_the_place_of_a_section_is_refused(file: Path) -> None:
    assert refusal(file, "server = 1").endswith(":1: server: is a value; taken: a section [server]")


def test_a_syntax_error_is_named_with_its_line(file: Path) -> None:
    assert refusal(file, "[server]\nlisten = \n").startswith(f"{file}:2: not TOML")


def test_a_syntax_error_at_the_end_has_a_line_too(file: Path) -> None:
    assert refusal(file, '[server]\n\nlisten = "').startswith(f"{file}:3: not TOML")


def test_a_missing_file_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(file, KNOWN)


def test_a_file_that_is_not_utf8_is_refused(file: Path) -> None:
    file.write_bytes(b"# \xff")
    with pytest.raises(ConfigError, match=r"not UTF-8: .* at byte 2"):
        load(file, KNOWN)


# -- lines


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[server]\nlisten = "1"', 2),
        ('# [server]\n# listen\n\n[ server ] # listen\n\n  listen="1" # x', 6),
        ('[server]\n"listen" = "1"', 2),
        ("[server]\n'listen' = '1'", 2),
        ('server.listen = "1"', 1),
        ('server = { connect = "off", listen = "1" }', 1),
        ('[agent]\nname = """\n[server]\nlisten = 1"""\n[server]\nlisten = "1"', 6),
        ('[agent]\nserver = [\n  "a:1", # listen =\n]\n[server]\nlisten = "1"', 6),
        ('[server]\nforward = [\n"1=a:1",\n]\nlisten = [\n]', 5),
        ('[agent]\nlisten = "1"\n[server]\r\nlisten = "1"\r\n', 4),
        ('[server]\nx."listen" = 1\nlisten = "1"', 3),
    ],
)
def test_the_line_of_a_key_is_found_however_it_is_spelled(text: str, line: int) -> None:
    assert lines_of(text)["server", "listen"] == line
