"""Links that come and go: late servers, restarts, agents that die or fall silent."""

from __future__ import annotations

import contextlib
import signal
import socket
import time

import pytest
from endpoints import NewTarget, check_echo, echo
from programs import Program, StartProgram, eventually, free_port
from tunnels import NewTunnel, Tunnel


def start_server(start: StartProgram, port: int) -> Program:
    server = start("server", "--listen", f"127.0.0.1:{port}", "--connect", "127.0.0.1:0")
    server.wait_for("listening", use="connect")
    return server


def start_agent(start: StartProgram, port: int) -> Program:
    return start("agent", "--server", f"127.0.0.1:{port}", "--name", "a0")


def check_all_reset(socks: list[socket.socket]) -> None:
    for sock in socks:
        with pytest.raises(ConnectionResetError):
            sock.recv(1)


def test_an_agent_may_start_before_its_server(start: StartProgram) -> None:
    port = free_port()
    agent = start_agent(start, port)
    failure = agent.wait_for("link failed")
    assert failure["attempt"] == 1
    assert "refused" in failure["cause"].lower()
    server = start_server(start, port)
    agent.wait_for("linked", server=f"127.0.0.1:{port}")
    server.wait_for("agent linked", agent="a0", agents=1)


@pytest.mark.timeout(240)
def test_an_agent_comes_back_once_each_time_its_server_restarts(start: StartProgram, target: NewTarget) -> None:
    port, echo_port = free_port(), target(echo).port
    agent = start_agent(start, port)
    for round_ in range(8):
        server = start_server(start, port)
        agent.wait_for("linked", nth=round_ + 1)
        server.wait_for("agent linked", agents=1)
        with contextlib.ExitStack() as clients:
            stay_linked(Tunnel(server, [agent], clients), echo_port)
        assert len(server.said("agent linked")) == 1
        server.kill() if round_ % 2 else server.stop()


def stay_linked(tunnel: Tunnel, port: int) -> None:
    """Use the link for longer than it takes to count as stable, so that the next reconnect starts afresh."""
    end = time.monotonic() + 1.2
    with tunnel.open("connect", port) as sock:
        while time.monotonic() < end:
            check_echo(sock)


def test_a_killed_agents_streams_are_reset(tunnel: NewTunnel, target: NewTarget) -> None:
    tunnel_, port = tunnel(), target(echo).port
    socks = [tunnel_.open("connect", port) for _ in range(10)]
    for sock in socks:
        check_echo(sock)
        sock.settimeout(5)  # far less than it takes to notice a silent link
    tunnel_.agent.kill()
    check_all_reset(socks)
    tunnel_.server.wait_for("agent gone", agents=0)


def test_an_agent_that_falls_silent_is_dropped_and_its_streams_are_reset(tunnel: NewTunnel, target: NewTarget) -> None:
    tunnel_, port = tunnel(), target(echo).port
    socks = [tunnel_.open("connect", port) for _ in range(10)]
    for sock in socks:
        check_echo(sock)
    tunnel_.agent.signal(signal.SIGSTOP)
    gone = tunnel_.server.wait_for("agent gone", agents=0)
    assert "nothing was heard" in gone["cause"]
    check_all_reset(socks)
    assert tunnel_.refused(port)[0] == 503
    tunnel_.agent.signal(signal.SIGCONT)
    tunnel_.server.wait_for("agent linked", nth=2, agents=1)
    check_echo(tunnel_.open("connect", port))


def test_a_dead_agents_streams_are_reset_and_anothers_go_on(tunnel: NewTunnel, target: NewTarget) -> None:
    tunnel_, port = tunnel(agents=2), target(echo).port
    socks = [tunnel_.open("connect", port) for _ in range(20)]
    for sock in socks:
        check_echo(sock)
    tunnel_.agent.kill()
    tunnel_.server.wait_for("agent gone", agent="a0", agents=1)
    alive = 0
    for sock in socks:
        try:
            check_echo(sock)
            alive += 1
        except (ConnectionResetError, BrokenPipeError):
            pass
    assert 0 < alive < 20
    check_echo(tunnel_.open("connect", port))


@pytest.mark.timeout(240)
def test_an_agent_that_is_killed_again_and_again_leaves_nothing_behind(
    tunnel: NewTunnel, target: NewTarget, start: StartProgram
) -> None:
    tunnel_, port = tunnel(agents=0), target(echo).port
    before = tunnel_.server.descriptors()
    for round_ in range(30):
        agent = start_agent(start, tunnel_.port("links"))
        tunnel_.server.wait_for("agent linked", nth=round_ + 1, agents=1)
        with tunnel_.open("connect", port) as sock:
            check_echo(sock)
            agent.kill()
        tunnel_.server.wait_for("agent gone", nth=round_ + 1, agents=0)
    eventually(lambda: tunnel_.server.descriptors() == before, f"as many descriptors as at first: {before}")
