"""Config: what is safe, and how long is long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunnel.address import ListenAddress, Target
from tunnel.config import AgentConfig, ClientConfig, Forward, ServerConfig, check_exposed, parse_duration
from tunnel.errors import ConfigError
from tunnel.limits import Timeouts


def check(config: ServerConfig) -> None:
    """As the program does."""
    check_exposed(config.exposed(), config.insecure)


def test_the_defaults_are_not_exposed() -> None:
    assert ServerConfig().exposed() == []
    check(ServerConfig())


def test_each_option_that_others_can_reach_is_named() -> None:
    everywhere = ListenAddress("0.0.0.0", 7400)
    config = ServerConfig(
        listen=everywhere,
        connect=ListenAddress("::", 7401),
        forwards=(Forward.parse("1=a:1"), Forward.parse("192.0.2.1:2=b:2")),
    )
    assert config.exposed() == [
        "--listen 0.0.0.0:7400",
        "--connect [::]:7401",
        "--forward 192.0.2.1:2=b:2",
    ]


def test_an_exposed_server_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"--listen 0\.0\.0\.0:1: .*nobody has to prove.*--insecure"):
        check(ServerConfig(listen=ListenAddress("0.0.0.0", 1)))


@pytest.mark.parametrize(
    ("exposed", "cure"),
    [
        ({"listen": ListenAddress("0.0.0.0", 1)}, "on loopback, set --token-file for --listen, or say"),
        ({"connect": ListenAddress("0.0.0.0", 1)}, "on loopback, set --connect-auth for --connect, or say"),
        ({"forwards": (Forward.parse("0.0.0.0:1=a:1"),)}, "on loopback, or say"),
        (
            {"listen": ListenAddress("0.0.0.0", 1), "connect": ListenAddress("0.0.0.0", 1)},
            "on loopback, set --token-file for --listen, set --connect-auth for --connect, or say",
        ),
    ],
)
def test_the_way_out_is_one_that_helps(exposed: dict[str, Any], cure: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(ServerConfig(**exposed))
    assert cure in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AgentConfig(servers=cast(Any, ("127.0.0.1:7400",)), name="edge"),
        lambda: ClientConfig(servers=cast(Any, ("127.0.0.1:7400",))),
        lambda: ServerConfig(listen=cast(Any, "127.0.0.1:7400")),
        lambda: ServerConfig(connect=cast(Any, "127.0.0.1:7400")),
    ],
)
def test_a_text_in_place_of_an_address_is_refused_with_what_makes_one(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"'127.0.0.1:7400' is not a .*parse\('127.0.0.1:7400'\)"):
        make()


def test_an_exposed_server_may_be_insecure_on_purpose() -> None:
    check(ServerConfig(listen=ListenAddress("0.0.0.0", 1), insecure=True))


def test_no_front_end_is_no_exposure() -> None:
    assert ServerConfig(connect=None).exposed() == []


@pytest.mark.parametrize("name", ["a", "node-1.example", "Zürich", "x" * 128])
def test_an_agent_name_is_printable(name: str) -> None:
    assert AgentConfig((Target("server", 7400),), name).name == name


@pytest.mark.parametrize("name", ["", "a b", "a\tb", "a\n", "\x1b[2J", "a\u00a0b", "\u202e", "x" * 129])
def test_what_is_no_agent_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="agent name; taken"):
        AgentConfig((Target("server", 7400),), name)


def test_an_agent_needs_a_server() -> None:
    with pytest.raises(ConfigError, match="no server is given; taken: one or more HOST:PORT"):
        AgentConfig((), "edge-1")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("30s", 30.0), ("1.5s", 1.5), ("5m", 300.0), ("1h", 3600.0), ("0s", 0.0), ("0.5h", 1800.0)],
)
def test_a_duration_is_a_number_and_its_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ten",
        "10",
        "-5s",
        "+5s",
        "10 s",
        "10 parsecs",
        "5S",
        "1d",
        "1e3s",
        ".5s",
        "5.s",
        "inf",
        "٣s",
        "1s\n",
        "9" * 400 + "s",
    ],
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a duration; taken: .*500ms, 30s, 5m or 1h"):
        parse_duration(text)


@given(st.text() | st.from_regex(r"[0-9.]{1,30}(ms|s|m|h|d)"))
def test_no_text_is_an_infinite_or_negative_duration(text: str) -> None:
    try:
        assert 0 <= parse_duration(text) < 1e13
    except ConfigError:
        return


def test_a_lame_duck_that_does_not_fit_into_the_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--lame-duck 10\.5s does not fit into --shutdown-budget 10s"):
        ServerConfig(lame_duck=10.5, timeouts=Timeouts(shutdown=10.0))


@pytest.mark.parametrize(("lame_duck", "budget"), [(0.0, 0.0), (10.0, 10.0)])
def test_a_lame_duck_may_take_the_whole_budget(lame_duck: float, budget: float) -> None:
    assert ServerConfig(lame_duck=lame_duck, timeouts=Timeouts(shutdown=budget)).lame_duck == lame_duck
