"""How the programs start and end: signals, exit codes, and what they say about it."""

from __future__ import annotations

import signal
import socket
import time

import pytest
from endpoints import NewTarget, check_echo, echo
from programs import Program, StartProgram, eventually
from tunnels import NewTunnel, Tunnel

NUMBERS = [signal.SIGTERM, signal.SIGINT]
LOOPBACK = ["--listen", "127.0.0.1:0", "--connect", "127.0.0.1:0"]


def above_info(program: Program) -> list[str]:
    return [event["event"] for event in program.log if event["level"] not in ("debug", "info")]


def named(tunnel: Tunnel, name: str) -> Program:
    return tunnel.server if name == "server" else tunnel.agent


@pytest.mark.parametrize("name", ["server", "agent"])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_ends_an_idle_program(tunnel: NewTunnel, name: str, number: int) -> None:
    program = named(tunnel(), name)
    program.signal(number)
    assert program.ended() == 0
    assert above_info(program) == []


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_ends_an_agent_that_has_no_server(start: StartProgram, refusing_port: int, number: int) -> None:
    agent = start("agent", "--server", f"127.0.0.1:{refusing_port}")
    agent.wait_for("link failed")
    agent.signal(number)
    assert agent.ended() == 0


@pytest.mark.parametrize("name", ["server", "agent"])
def test_a_leaving_program_waits_for_an_open_stream(tunnel: NewTunnel, target: NewTarget, name: str) -> None:
    tunnel_ = tunnel()
    program = named(tunnel_, name)
    sock = tunnel_.open("connect", target(echo).port)
    check_echo(sock)
    program.signal(signal.SIGTERM)
    program.wait_for("leaving", open=1)
    check_echo(sock, b"\xa5" * 1_000_000)
    assert program.running
    sock.close()
    assert program.ended() == 0


def test_a_leaving_server_takes_no_new_client(tunnel: NewTunnel, target: NewTarget) -> None:
    tunnel_ = tunnel()
    port = tunnel_.port("connect")
    with tunnel_.open("connect", target(echo).port) as sock:
        check_echo(sock)
        tunnel_.server.signal(signal.SIGTERM)
        tunnel_.server.wait_for("leaving")
        eventually(lambda: refuses(port), "a listener that is closed")
    assert tunnel_.server.ended() == 0


def refuses(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize("name", ["server", "agent"])
def test_a_second_signal_cuts_open_streams(tunnel: NewTunnel, target: NewTarget, name: str) -> None:
    tunnel_ = tunnel()
    program = named(tunnel_, name)
    sock = tunnel_.open("connect", target(echo).port)
    check_echo(sock)
    program.signal(signal.SIGTERM)
    program.wait_for("leaving", open=1)
    time.sleep(0.6)  # two signals within half a second count as one: this is what is tested, not a wait for something
    assert program.running
    program.signal(signal.SIGTERM)
    assert program.ended() == 4
    assert program.said("second signal, cutting", streams=1)
    with pytest.raises(ConnectionResetError):
        sock.recv(1)


def test_signals_in_a_burst_count_as_one(tunnel: NewTunnel, target: NewTarget) -> None:
    tunnel_ = tunnel()
    sock = tunnel_.open("connect", target(echo).port)
    check_echo(sock)
    tunnel_.agent.signal(signal.SIGTERM)
    tunnel_.agent.signal(signal.SIGINT)
    tunnel_.agent.wait_for("leaving", open=1)
    check_echo(sock)
    sock.close()
    assert tunnel_.agent.ended() == 0


@pytest.mark.parametrize("name", ["server", "agent"])
@pytest.mark.parametrize("number", NUMBERS)
def test_repeats_until_the_process_is_gone_do_not_take_its_exit_code_away(
    tunnel: NewTunnel, name: str, number: int
) -> None:
    program = named(tunnel(), name)
    program.signal(number)
    program.wait_for("exit", code=0)
    while program.running:
        program.signal(number)
        time.sleep(0.001)  # not to keep it from ending
    assert program.ended() == 0


def test_a_normal_life_prints_nothing_above_info(tunnel: NewTunnel, target: NewTarget) -> None:
    tunnel_, port = tunnel(), target(echo).port
    for _ in range(20):
        with tunnel_.open("connect", port) as sock:
            check_echo(sock)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1) == b""
    assert above_info(tunnel_.server) == []
    assert tunnel_.agent.stop() == 0
    assert above_info(tunnel_.agent) == []
    assert above_info(tunnel_.server) in ([], ["no active backend left"])  # which is true, and worth a warning
    assert tunnel_.server.stop() == 0


def test_a_server_that_others_could_reach_does_not_start_unless_told_so(start: StartProgram) -> None:
    server = start("server", "--listen", "0.0.0.0:0", "--connect", "off")
    assert server.ended() == 2
    text = " ".join(server.noise)
    server.noise.clear()
    assert "--listen 0.0.0.0:0" in text
    assert "--insecure" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["server", "--listen", "nowhere"], ["--listen", "nowhere", "HOST:PORT"]),
        (["server", "--connect", "127.0.0.1:65536"], ["--connect", "65536"]),
        (["server", "--forward", "5432"], ["--forward", "LISTEN=TARGET"]),
        (["agent", "--server", "127.0.0.1"], ["--server", "HOST:PORT"]),
    ],
)
def test_an_address_that_cannot_be_used_is_named(start: StartProgram, arguments: list[str], words: list[str]) -> None:
    program = start(*arguments)
    assert program.ended() == 2
    text = " ".join(program.noise)
    program.noise.clear()
    assert all(word in text for word in words), text


def test_a_port_in_use_is_named(start: StartProgram) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        server = start("server", "--listen", address, "--connect", "off")
        assert server.ended() == 1
    (event,) = server.said("cannot start")
    assert address in event["cause"]
