"""The commands that operate what runs: what people type, and what does the work is told."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from stub_admin import StubAdmin, stub_admin

from tunnel import cli, operator_cli
from tunnel.address import Target
from tunnel.credentials import read_tokens
from tunnel.operator_cli import Drained
from tunnel.remote import AdminUrl, Remote

SERVER = Remote(AdminUrl(Target("127.0.0.1", 7402)))


@pytest.fixture
def stub() -> Iterator[StubAdmin]:
    with stub_admin() as stub:
        yield stub


def type_(line: str, **variables: str) -> Result:
    return CliRunner().invoke(cli.program, line.split(), env=variables)


class Work:
    """Stands in for what the commands lead to: remembers what it was told, and ends with ``code``."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[object, ...], dict[str, object]]] = []
        self.code = 0

    def do(self, name: str, *arguments: object, **options: object) -> int:
        self.told.append((name, arguments, options))
        return self.code


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    work = Work()
    for name in ("status", "agents", "drain", "undrain", "explain", "check"):
        monkeypatch.setattr(operator_cli, name, partial(work.do, name))
    return work


# -- what does the work is told


@pytest.mark.parametrize(
    ("line", "name", "arguments", "options"),
    [
        ("status", "status", [SERVER], {"watch": False, "as_json": False}),
        ("status --watch --json", "status", [SERVER], {"watch": True, "as_json": True}),
        ("agents", "agents", [SERVER], {"as_json": False}),
        ("agents --json", "agents", [SERVER], {"as_json": True}),
        ("undrain edge", "undrain", [Drained(SERVER, "edge")], {"as_json": False}),
        ("undrain --self --json", "undrain", [Drained(SERVER)], {"as_json": True}),
        ("explain DB:1", "explain", [SERVER, Target("db", 1), None], {"as_json": False}),
        ("explain db:1@edge --json", "explain", [SERVER, Target("db", 1), "edge"], {"as_json": True}),
    ],
)
def test_it_is_told_what_was_typed(
    work: Work, line: str, name: str, arguments: list[object], options: dict[str, object]
) -> None:
    assert type_(line).exit_code == 0
    assert work.told == [(name, tuple(arguments), options)]


@pytest.mark.parametrize(
    ("line", "drained", "reason", "options"),
    [
        ("drain edge", Drained(SERVER, "edge"), None, {}),
        ("drain --self", Drained(SERVER), None, {}),
        ("drain edge --reason rollout", Drained(SERVER, "edge"), "rollout", {}),
        ("drain edge --exit", Drained(SERVER, "edge"), None, {"leave": True}),
        ("drain edge --wait", Drained(SERVER, "edge"), None, {"wait": 600.0}),
        ("drain edge --wait --timeout 30s", Drained(SERVER, "edge"), None, {"wait": 30.0}),
        ("drain edge --json", Drained(SERVER, "edge"), None, {"as_json": True}),
    ],
)
def test_a_drain_is_told_what_was_typed(
    work: Work, line: str, drained: Drained, reason: str | None, options: dict[str, Any]
) -> None:
    assert type_(line).exit_code == 0
    assert work.told == [("drain", (drained, reason), {"leave": False, "wait": None, "as_json": False, **options})]


def test_the_program_is_the_one_that_was_named(work: Work) -> None:
    assert type_("agents --admin unix:/run/t.sock").exit_code == 0
    assert work.told[0][1] == (Remote(AdminUrl(path="/run/t.sock")),)


@pytest.mark.parametrize("line", ["drain edge", "check {file}"])
def test_how_it_ended_is_passed_on(work: Work, tmp_path: Path, line: str) -> None:
    work.code = 4
    assert type_(line.format(file=tmp_path / "none")).exit_code == 4


def test_a_drain_is_told_with_the_token(stub: StubAdmin, tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.touch(0o600)
    file.write_text(f'[[token]]\nid = "ops"\nrole = "admin"\nsecret = "{"s3cret" * 6}"\n')
    type_(f"drain edge --admin {stub.url} --token-file {file}")
    type_(f"undrain edge --admin {stub.url}", TUNNEL_UNDRAIN_TOKEN_FILE=str(file))
    assert [asked.headers["Authorization"] for asked in stub.asked] == [f"Bearer {'s3cret' * 6}"] * 2


@pytest.mark.parametrize("command", ["status", "agents", "drain", "undrain", "explain"])
def test_the_address_may_come_from_a_variable(stub: StubAdmin, command: str) -> None:
    words = {"drain": "edge", "undrain": "edge", "explain": "db:5432"}.get(command, "")
    type_(f"{command} {words}", **{f"TUNNEL_{command.upper()}_ADMIN": stub.url})
    assert len(stub.asked) == 1


# -- what cannot be used


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("drain", ["either AGENT, or --self"]),
        ("drain edge --self", ["either AGENT, or --self"]),
        ("drain edge --timeout 10", ["--timeout", "'10'", "500ms, 30s, 5m or 1h"]),
        ("drain edge --timeout 10s", ["--timeout means nothing without --wait"]),
        ("drain \x1b", ["AGENT", "'\\x1b'", "printable"]),
        ("undrain", ["AGENT"]),
        ("explain db", ["TARGET", "HOST:PORT"]),
        ("status --admin nowhere", ["--admin", "'nowhere'", "http://HOST:PORT"]),
        ("drain edge --token-file /nowhere", ["/nowhere", "No such file"]),
        ("check", ["FILE"]),
    ],
)
def test_what_cannot_be_used_is_named_and_ends_in_exit_2(line: str, words: list[str]) -> None:
    result = type_(line)
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words), result.stderr


# -- tokens


@pytest.mark.parametrize(
    ("line", "role", "allowed"),
    [
        (
            "--role agent --agent edge-* --identifier host=db",
            "agent",
            {"agents": ["edge-*"], "identifiers": ["host=db"]},
        ),
        ("--role client --target *.db:1 --target a:2", "client", {"targets": ["*.db:1", "a:2"]}),
        ("--role admin", "admin", {}),
    ],
)
def test_a_new_token_is_one_for_a_file(tmp_path: Path, line: str, role: str, allowed: dict[str, list[str]]) -> None:
    result = type_(f"token new one {line}")
    assert (result.exit_code, result.stderr) == (0, "")
    file = tmp_path / "tokens.toml"
    file.touch(0o600)
    file.write_text(result.stdout)
    token = read_tokens(file)["one"]
    grant = token.grant
    lists = {"agents": grant.agents, "identifiers": grant.identifiers, "targets": grant.targets}
    assert token.role == role
    assert {name: [*map(str, items)] for name, items in lists.items() if items} == allowed


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("one", ["Missing option", "--role"]),
        ("one --role guest", ["--role", "'guest'", "'agent', 'client', 'admin'"]),
        ("one --role client --agent edge", ["agents", "means nothing"]),
        ("--role admin", ["Missing argument", "ID"]),
    ],
)
def test_a_token_that_no_file_could_hold_ends_in_exit_2(line: str, words: list[str]) -> None:
    result = type_(f"token new {line}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert all(word in result.stderr for word in words), result.stderr
