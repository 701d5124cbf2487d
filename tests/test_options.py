"""Options: where their values come from, what is said of those that cannot be used, and what several commands have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import Result
from command_line import Programs, Type, agent, server, stand_in, started, typist

from tunnel import cli, early, logs, options
from tunnel.address import ListenAddress, Target
from tunnel.certificates import ClientTls
from tunnel.config import AdminConfig, AgentConfig, ClientConfig, Forward, ServerConfig, UnixAddress
from tunnel.errors import ConfigError


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    return stand_in(monkeypatch)


@pytest.fixture
def type_(monkeypatch: pytest.MonkeyPatch) -> Iterator[Type]:
    with typist(monkeypatch) as type_:
        yield type_


# -- where values come from


def test_every_flag_is_a_variable_too(programs: Programs, type_: Type) -> None:
    result = type_(
        "server",
        TUNNEL_SERVER_LISTEN="0.0.0.0:1",
        TUNNEL_SERVER_CONNECT="off",
        TUNNEL_SERVER_FORWARD="3=a:3 4=b:4",
        TUNNEL_SERVER_DIAL_TIMEOUT="5m",
        TUNNEL_SERVER_INSECURE="true",
        TUNNEL_SERVER_LOG_LEVEL="error",
    )
    assert server(programs, result) == ServerConfig(
        listen=ListenAddress("0.0.0.0", 1),
        connect=None,
        forwards=(Forward.parse("3=a:3"), Forward.parse("4=b:4")),
        dial_timeout=300.0,
        insecure=True,
    )


def test_every_key_of_a_file_is_a_flag(programs: Programs, type_: Type, tmp_path: Path) -> None:
    file = tmp_path / "tunnel.toml"
    file.write_text(
        '[server]\nlisten = "0.0.0.0:1"\nconnect = "off"\nforward = ["3=a:3", "4=b:4"]\ndial-timeout = "5m"\n'
        'insecure = true\nlog-level = "error"\nlog-format = "json"\n'
    )
    assert server(programs, type_(f"--config {file} server")) == ServerConfig(
        listen=ListenAddress("0.0.0.0", 1),
        connect=None,
        forwards=(Forward.parse("3=a:3"), Forward.parse("4=b:4")),
        dial_timeout=300.0,
        insecure=True,
    )


def test_a_required_flag_may_come_from_a_file_named_by_a_variable(
    programs: Programs, type_: Type, tmp_path: Path
) -> None:
    file = tmp_path / "tunnel.toml"
    file.write_text('[agent]\nserver = ["a:1"]\n')
    assert agent(programs, type_("agent", TUNNEL_CONFIG=str(file))).servers == (Target("a", 1),)


@pytest.mark.parametrize(
    ("line", "variables", "seconds"),
    [
        ("server --dial-timeout 1s", {"TUNNEL_SERVER_DIAL_TIMEOUT": "2s"}, 1.0),
        ("server", {"TUNNEL_SERVER_DIAL_TIMEOUT": "2s"}, 2.0),
        ("server", {}, 3.0),
    ],
)
def test_flag_goes_before_variable_and_variable_before_file(
    programs: Programs, type_: Type, tmp_path: Path, line: str, variables: dict[str, str], seconds: float
) -> None:
    file = tmp_path / "tunnel.toml"
    file.write_text('[server]\ndial-timeout = "3s"\n')
    assert server(programs, type_(f"--config {file} {line}", **variables)).dial_timeout == seconds


# -- what cannot be used, and other ends


def test_an_unknown_key_in_the_file_is_refused_with_a_suggestion(type_: Type, tmp_path: Path) -> None:
    file = tmp_path / "tunnel.toml"
    file.write_text('[server]\nlissten = "1"\n')
    result = type_(f"--config {file} server")
    assert result.exit_code == 2
    assert f"{file}:2: server.lissten: is an unknown key; did you mean listen?" in result.stderr


def test_a_config_that_the_program_refuses_ends_in_exit_2(programs: Programs, type_: Type) -> None:
    programs.end = ConfigError("no such place")
    result = type_("server")
    assert (result.exit_code, result.stderr) == (2, "Error: no such place\n")


def test_ctrl_c_before_the_program_handles_it_is_exit_130(programs: Programs, type_: Type) -> None:
    programs.end = KeyboardInterrupt()
    result = type_("server")
    assert (result.exit_code, result.output) == (130, "")


def test_ctrl_c_in_a_group_of_errors_is_exit_130_too(programs: Programs, type_: Type) -> None:
    programs.end = BaseExceptionGroup("of a nursery", [BaseExceptionGroup("of another", [KeyboardInterrupt()])])
    result = type_("connect a:3 --server a:1")
    assert (result.exit_code, result.output) == (130, "")


# -- the help


def test_the_help_names_flag_variable_and_default(type_: Type) -> None:
    text = " ".join(type_("server --help").output.split())
    assert "--listen HOST:PORT" in text
    assert "TUNNEL_SERVER_LISTEN; default: 127.0.0.1:7400" in text


def test_every_command_is_listed_once_in_the_help(type_: Type) -> None:
    text = type_("--help").output
    listed = [line.split()[0] for line in text.partition("Programs:")[2].splitlines() if line.startswith("  ")]
    assert sorted(listed) == sorted(cli.program.commands)
    assert listed == list(cli.program.commands)


# -- signals


@pytest.mark.parametrize("line", ["connect a:1 --server b:1", "demo"])
def test_a_command_that_takes_no_care_of_signals_lets_them_through(
    programs: Programs, type_: Type, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    released: list[int] = []
    monkeypatch.setattr(early, "release", lambda: released.append(len(programs.started)))
    assert type_(line).exit_code == 0
    assert released == [0]  # before it started


@pytest.mark.parametrize("line", ["server", "agent --server a:1", "forward 1=a:1 --server a:1"])
def test_a_program_that_lives_under_signals_keeps_them(
    programs: Programs, type_: Type, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    released: list[None] = []
    monkeypatch.setattr(early, "release", lambda: released.append(None))
    assert type_(line).exit_code == 0
    assert released == []


# -- an operator's interface


def admin(programs: Programs, result: Result) -> AdminConfig:
    config = started(programs, result)
    assert isinstance(config, ServerConfig | AgentConfig)
    return config.admin


@pytest.mark.parametrize(("line", "port"), [("server", 7402), ("agent --server a:1", 7403)])
def test_the_interface_is_on_loopback_unless_told_otherwise(
    programs: Programs, type_: Type, line: str, port: int
) -> None:
    assert admin(programs, type_(line)) == AdminConfig(ListenAddress("127.0.0.1", port), required=False)


@pytest.mark.parametrize("line", ["server", "agent --server a:1"])
@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--admin 127.0.0.1:7402", AdminConfig(ListenAddress("127.0.0.1", 7402))),
        ("--admin 127.0.0.1:7403", AdminConfig(ListenAddress("127.0.0.1", 7403))),
        ("--admin 0", AdminConfig(ListenAddress("127.0.0.1", 0))),
        ("--admin [::1]:9", AdminConfig(ListenAddress("::1", 9))),
        ("--admin unix:/run/t.sock", AdminConfig(UnixAddress("/run/t.sock"))),
        ("--admin off", AdminConfig()),
        ("--admin off --health 0.0.0.0:9", AdminConfig(health=ListenAddress("0.0.0.0", 9))),
        ("--admin off --health off", AdminConfig()),
    ],
)
def test_an_address_that_is_asked_for_is_required(
    programs: Programs, type_: Type, line: str, flags: str, wanted: AdminConfig
) -> None:
    assert admin(programs, type_(f"{line} {flags}")) == wanted


@pytest.mark.parametrize(("section", "rest"), [("server", ""), ("agent", 'server = ["a:1"]\n')])
def test_the_flags_are_variables_and_keys_too(
    programs: Programs, type_: Type, tmp_path: Path, section: str, rest: str
) -> None:
    file = tmp_path / "tunnel.toml"
    file.write_text(f'[{section}]\nadmin = "127.0.0.1:1"\ntoken-file = "/run/tokens"\n{rest}')
    result = type_(f"--config {file} {section}", **{f"TUNNEL_{section.upper()}_HEALTH": "127.0.0.1:2"})
    wanted = AdminConfig(ListenAddress("127.0.0.1", 1), required=True, health=ListenAddress("127.0.0.1", 2))
    config = started(programs, result)
    assert isinstance(config, ServerConfig | AgentConfig)
    assert (config.admin, config.token_file) == (wanted, "/run/tokens")


@pytest.mark.parametrize("line", ["server", "agent --server a:1"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--admin nowhere", ["--admin", "'nowhere'", "HOST:PORT"]),
        ("--admin unix:t.sock", ["--admin", "'unix:t.sock'", "unix:/PATH"]),
        ("--admin unix:", ["--admin", "'unix:'", "unix:/PATH"]),
        ("--health on", ["--health", "'on'", "HOST:PORT"]),
        ("--admin 0.0.0.0:7402", ["--admin 0.0.0.0:7402", "not a loopback address"]),
    ],
)
def test_what_cannot_be_used_is_named_and_ends_in_exit_2(
    programs: Programs, type_: Type, line: str, flags: str, words: list[str]
) -> None:
    result = type_(f"{line} {flags}")
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words), result.stderr
    assert programs.started == []


# -- logs


def test_what_is_logged_and_how_are_flags(programs: Programs, type_: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(logs, "configure", lambda level, fmt: said.append((level, fmt)))
    assert started(programs, type_("server --log-level error --log-format json"))
    assert said == [("error", "json")]


# -- TLS, of those that dial

DIALLING = ["agent", "forward 1=a:1", "connect a:1"]


def dials(programs: Programs, result: Result) -> ClientTls | None:
    assert result.exit_code == 0, result.output
    config = programs.started[0]
    assert isinstance(config, AgentConfig | ClientConfig)
    return config.tls


@pytest.mark.parametrize("line", DIALLING)
def test_links_are_plain_unless_told_otherwise(programs: Programs, type_: Type, line: str) -> None:
    assert dials(programs, type_(f"{line} --server a:1")) is None


@pytest.mark.parametrize("line", DIALLING)
@pytest.mark.parametrize(
    ("flags", "tls"),
    [
        ("--tls", ClientTls()),
        ("--tls --tls-ca a --tls-cert c --tls-key k --tls-name n.test", ClientTls("a", "c", "k", "n.test")),
    ],
)
def test_tls_is_as_the_flags_say(programs: Programs, type_: Type, line: str, flags: str, tls: ClientTls) -> None:
    assert dials(programs, type_(f"{line} --server a:1 {flags}")) == tls


@pytest.mark.parametrize("line", DIALLING)
@pytest.mark.parametrize("flag", ["--tls-ca a", "--tls-cert a", "--tls-key a", "--tls-name a"])
def test_what_is_about_tls_means_nothing_without_it(programs: Programs, type_: Type, line: str, flag: str) -> None:
    result = type_(f"{line} --server a:1 {flag}")
    assert (result.exit_code, programs.started) == (2, [])
    assert "mean nothing without --tls" in result.stderr


# -- sections of a file, seen from afar


@pytest.mark.parametrize(
    ("section", "key", "kind"),
    [
        ("server", "listen", str),
        ("server", "forward", list),
        ("server", "server-count", int),
        ("agent", "default-route", bool),
        ("agent", "server", list),
        ("forward", "tls", bool),
    ],
)
def test_a_key_has_the_type_of_its_flag(section: str, key: str, kind: type) -> None:
    assert options.file_keys(cli.program.commands)[section][key] is kind


def test_only_flags_are_keys() -> None:
    assert "target" not in options.file_keys(cli.program.commands)["connect"]


@pytest.mark.parametrize("section", options.SECTIONS)
def test_a_rehearsal_starts_nothing(
    programs: Programs, type_: Type, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    monkeypatch.setattr(logs, "configure", lambda *_: programs.started.append("logs"))
    options.rehearse(cli.program.commands[section], {})
    assert programs.started == []


@pytest.mark.parametrize(
    ("section", "table", "words"),
    [
        ("agent", {"server": ["a:0"]}, "1 to 65535"),
        ("agent", {"tls-ca": "x"}, "mean nothing without --tls"),
        ("server", {"lame-duck": "2h"}, "does not fit"),
    ],
)
def test_a_rehearsal_refuses_what_the_program_would(
    programs: Programs, type_: Type, section: str, table: dict[str, object], words: str
) -> None:
    with pytest.raises((click.UsageError, ConfigError), match=words):
        options.rehearse(cli.program.commands[section], table)
