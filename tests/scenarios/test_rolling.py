"""Agents and servers replaced one by one under load: no request fails, no download is cut short.

``ROLL_SECONDS=30 ROLL_RATE=200 pytest -n0 -s tests/scenarios/test_rolling.py`` takes its time, and prints its figures.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from endpoints import NewTarget, connect
from load import Load, downloads, serve, through_connect
from programs import Program, Service, StartProgram, eventually, free_port, needs
from tunnels import NewTunnel

RATE, LONG = float(os.environ.get("ROLL_RATE", "100")), 10  # requests per second, and downloads at the same time
SECONDS = float(os.environ.get("ROLL_SECONDS", "3"))  # that the load goes on for at least


def above_info(program: Program) -> list[str]:
    return [event["event"] for event in program.log if event["level"] not in ("debug", "info")]


def test_agents_rolled_one_by_one_lose_nothing(tunnel: NewTunnel, target: NewTarget, start: StartProgram) -> None:
    tunnel_ = tunnel("--connect", "127.0.0.1:0", agents=3)
    dial = partial(through_connect, lambda: tunnel_.port("connect"), target(serve).port)
    links = tunnel_.port("links")
    with contextlib.closing(Load(dial, RATE)) as load, downloads(dial, LONG) as long:
        for number, old in enumerate(tunnel_.agents):
            start("agent", "--server", f"127.0.0.1:{links}", "--name", f"new{number}")
            tunnel_.server.wait_for("agent linked", agent=f"new{number}")
            old.signal(signal.SIGTERM)
            assert old.ended() == 0
            assert above_info(old) == []
            load.go_on(SECONDS / 3)
    print(load)  # noqa: T201
    assert [download.outcome for download in long] == ["whole"] * LONG
    assert load.failed == []
    assert load.done > 100
    assert tunnel_.server.said("fallback to a draining agent") == []


def test_dials_to_the_only_agent_that_drains_are_all_answered(tunnel: NewTunnel, target: NewTarget) -> None:
    tunnel_ = tunnel()
    dial = partial(through_connect, lambda: tunnel_.port("connect"), target(serve).port)
    with contextlib.closing(Load(dial, RATE)) as load, downloads(dial, 1) as long:
        tunnel_.agent.signal(signal.SIGTERM)
        assert tunnel_.agent.ended() == 0
        seen = len(load.failed)
        eventually(lambda: len(load.failed) > seen + 20, "dials that nobody can serve any more")
    assert [download.outcome for download in long] == ["whole"]
    # an answer, not a time-out: that would be a 504, or none at all
    assert {failure for failure in load.failed if "503" not in failure} == set()


_HAPROXY = """
defaults
  mode tcp
  timeout connect 1s
  timeout client 1m
  timeout server 1m
  timeout check 1s
  retries 5
  option redispatch 1
  option httpchk GET /readyz
listen front
  bind 127.0.0.1:{port}
  balance roundrobin
  server s0 127.0.0.1:{doors[0]} check port {probes[0]} inter 100ms fall 1 rise 1
  server s1 127.0.0.1:{doors[1]} check port {probes[1]} inter 100ms fall 1 rise 1
"""


class Pair:
    """Two servers, each with one port for links, one that leads to the target, and one for the balancer's probes."""

    def __init__(self, start: StartProgram, target: int) -> None:
        self._start = start
        self._target = target
        self.links = [free_port(), free_port()]
        self.doors = [free_port(), free_port()]
        self.probes = [free_port(), free_port()]
        self.programs = [self._serve(0), self._serve(1)]

    def _serve(self, number: int) -> Program:
        server = self._start(
            *("server", "--listen", f"127.0.0.1:{self.links[number]}", "--connect", "off", "--lame-duck", "500ms"),
            *("--forward", f"127.0.0.1:{self.doors[number]}=127.0.0.1:{self._target}"),
            *("--health", f"127.0.0.1:{self.probes[number]}"),
        )
        server.wait_for("listening", use="forward")
        return server

    def replace(self, number: int) -> Program:
        """Stop one, and start another on the same ports; the one that was stopped."""
        old = self.programs[number]
        old.signal(signal.SIGTERM)
        assert old.ended() == 0
        self.programs[number] = self._serve(number)
        return old


@pytest.fixture
def pair(start: StartProgram, target: NewTarget) -> Pair:
    return Pair(start, target(serve).port)


@pytest.fixture
def balancer(tmp_path: Path, pair: Pair) -> Iterator[int]:
    """The port of a haproxy in front of both."""
    program, port = needs("haproxy"), free_port()
    config = tmp_path / "haproxy.cfg"
    config.write_text(_HAPROXY.format(port=port, doors=pair.doors, probes=pair.probes))
    service = Service([program, "-db", "-f", str(config)], tmp_path / "haproxy.log")
    try:
        service.wait_for_port(port)
        yield port
    finally:
        service.stop()


def answers(dial: Callable[[], socket.socket]) -> bool:
    with dial() as sock:
        sock.sendall(b"p")
        return sock.recv(1) != b""


@pytest.mark.timeout(240)
def test_servers_rolled_behind_a_balancer_lose_nothing(pair: Pair, balancer: int, start: StartProgram) -> None:
    servers = [part for port in pair.links for part in ("--server", f"127.0.0.1:{port}")]
    agents = [start("agent", *servers, "--name", f"a{number}") for number in range(2)]
    for agent in agents:
        agent.wait_for("linked", nth=2)
    dial = partial(connect, balancer)
    eventually(lambda: answers(dial), "a balancer that has seen that both are ready")
    with contextlib.closing(Load(dial, RATE)) as load, downloads(dial, LONG) as long:
        for number in range(2):
            old = pair.replace(number)
            assert above_info(old) == []
            for agent in agents:
                agent.wait_for("linked", nth=3 + number)
            load.go_on(SECONDS / 2)
    print(load)  # noqa: T201
    assert [download.outcome for download in long] == ["whole"] * LONG
    assert load.failed == []
    assert load.done > 100
