"""``tunnel check``: each problem of a file with its line, and never another opinion than the program's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunnel import cli, logs, options, programs


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tunnel.toml"


def checked(file: Path, text: str, *options: str) -> Result:
    file.write_text(text, encoding="utf-8")
    return CliRunner().invoke(cli.program, ["check", str(file), *options])


def problem(file: Path, text: str) -> str:
    """The only one, without the file's name."""
    result = checked(file, text)
    assert result.exit_code == 2
    (line,) = result.stdout.splitlines()
    return line.removeprefix(f"{file}:")


def test_a_file_that_is_taken_is_ok(file: Path) -> None:
    result = checked(
        file,
        '[server]\nlisten = "7400"\nconnect = "off"\nforward = ["1=a:1"]\nserver-count = 3\n'
        '[agent]\nserver = ["a:1"]\nidentifier = ["suffix=.db"]\ndefault-route = true\n'
        '[forward]\nserver = ["a:1"]\n[connect]\nserver = ["a:1"]\n',
    )
    assert (result.exit_code, result.stdout) == (0, "ok\n")


@pytest.mark.parametrize("section", ["server", "agent", "forward", "connect"])
def test_what_a_section_leaves_out_is_no_problem(file: Path, section: str) -> None:
    assert checked(file, f"[{section}]\n").exit_code == 0


def test_an_empty_file_is_ok(file: Path) -> None:
    assert checked(file, "").exit_code == 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[sever]\n", "1: sever: is an unknown section; did you mean server?"),
        ("[zzz]\n", "1: zzz: is an unknown section; taken: server, agent, forward, connect"),
        ("server = 1\n", "1: server: is a value; taken: a section [server]"),
        ('[server]\n\nlissten = "1"\n', "3: server.lissten: is an unknown key; did you mean listen?"),
        ("[server]\nlisten = 1\n", "2: server.listen: 1; taken: a text"),
        ("[agent]\nserver = 'a:1'\n", "2: agent.server: 'a:1'; taken: a list of texts"),
        ("[agent]\nserver = ['a:1', 2]\n", "2: agent.server: ['a:1', 2]; taken: a list of texts"),
        ("[server]\ninsecure = 1\n", "2: server.insecure: 1; taken: true or false"),
        ("[agent]\npriority = true\n", "2: agent.priority: True; taken: a whole number"),
    ],
)
def test_what_is_not_known_or_of_another_type_is_named_with_what_is_taken(file: Path, text: str, line: str) -> None:
    assert problem(file, text) == line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\ndial-timeout = 'ten'\n", ["2: server.dial-timeout: 'ten'", "500ms, 30s, 5m or 1h"]),
        ("[server]\nlog-level = 'loud'\n", ["2: server.log-level: 'loud'", "'warning'"]),
        ("[agent]\npriority = 100\n", ["2: agent.priority: 100", "0<=x<=99"]),
        ("[agent]\nidentifier = [\n'host=a',\n'db',\n]\n", ["2: agent.identifier: 'db'", "host=..."]),
        ("[connect]\nserver = ['a:0']\n", ["2: connect.server: 'a:0'", "1 to 65535"]),
    ],
)
def test_what_an_options_own_reader_refuses_is_named(file: Path, text: str, words: list[str]) -> None:
    line = problem(file, text)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nconnect = 'off'\nlisten = '0.0.0.0:1'\n", ["3: server.listen: --listen 0.0.0.0:1", "--insecure"]),
        ("[server]\ndial-timeout = '0s'\n", ["2: server.dial-timeout: ", "no time for any dial"]),
        ("[server]\nlame-duck = '2h'\n", ["2: server.lame-duck: ", "does not fit into --shutdown-budget 25s"]),
        ("[agent]\nidentifier = [" + "'suffix=.a'," * 300 + "]\npriority = 1\n", []),
        (
            "[agent]\npriority = 1\nidentifier = [" + ",".join(f"'suffix=.a{n:04}'" for n in range(300)) + "]\n",
            ["1: agent: 300 identifiers are longer than 2048 bytes together"],
        ),
    ],
)
def test_what_a_section_says_together_is_looked_at_by_its_command(file: Path, text: str, words: list[str]) -> None:
    result = checked(file, text)
    assert result.exit_code == (2 if words else 0)
    assert all(word in result.stdout for word in words), result.stdout


def test_every_problem_is_named(file: Path) -> None:
    result = checked(file, "[server]\nlissten = '1'\nlisten = 'x'\n[agents]\n[agent]\npriority = 'a'\nname = ' '\n")
    assert [line.removeprefix(f"{file}:").split(": ")[:2] for line in result.stdout.splitlines()] == [
        ["2", "server.lissten"],
        ["3", "server.listen"],
        ["4", "agents"],
        ["6", "agent.priority"],
        ["7", "agent.name"],
    ]


def test_what_is_not_toml_is_named_with_its_line(file: Path) -> None:
    assert problem(file, "[server]\nlisten = \n").startswith("2: not TOML: ")


def test_a_file_that_is_not_there_is_named(file: Path) -> None:
    result = CliRunner().invoke(cli.program, ["check", str(file)])
    assert (result.exit_code, result.stdout) == (2, f"{file}: No such file or directory\n")


def test_variables_do_not_count(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNNEL_SERVER_DIAL_TIMEOUT", "ten")
    monkeypatch.setenv("TUNNEL_SERVER_INSECURE", "true")
    assert problem(file, "[server]\nlisten = '0.0.0.0:1'\n").startswith("2: server.listen: ")


def test_problems_are_told_to_programs_as_well(file: Path) -> None:
    result = checked(file, "[sever]\n", "--json")
    text = "is an unknown section; did you mean server?"
    told = {"ok": False, "problems": [{"path": str(file), "line": 1, "key": "sever", "text": text}]}
    assert (result.exit_code, json.loads(result.stdout)) == (2, told)


def test_ok_is_told_to_programs_as_well(file: Path) -> None:
    result = checked(file, "", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"ok": True, "problems": []})


# -- the same opinion


_VALUES = st.sampled_from(
    ["'off'", "'0.0.0.0:1'", "'1'", "''", "1", "0", "101", "true", "'0s'", "'30s'", "'1h'", "['a:1']", "['1=a:1', 'x']",
     "[]", "['host=a']", "'default'", "'json'", "'deny'", "1.5", "'edge'"]
)  # fmt: skip


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run_server", "run_agent"):
        monkeypatch.setattr(programs, name, lambda _config: 0)
    monkeypatch.setattr(logs, "configure", lambda *_: None)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(("section", "words"), [("server", []), ("agent", ["--server", "a:1"])])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_ok_here_is_what_the_program_takes(
    file: Path, section: str, words: list[str], data: st.DataObject
) -> None:
    keys = st.sampled_from([*options.file_keys(cli.program.commands)[section], "x"])
    table = data.draw(st.dictionaries(keys, _VALUES, max_size=3))
    ok = checked(file, f"[{section}]\n" + "".join(f"{key} = {value}\n" for key, value in table.items())).exit_code == 0
    given_as_flags = [] if words and words[0].removeprefix("--") in table else words
    started = CliRunner().invoke(cli.program, ["--config", str(file), section, *given_as_flags])
    assert ok is (started.exit_code == 0)
