"""The operator's interface of real processes: where it is, what probes see while a program leaves, and its end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from endpoints import NewTarget, check_echo, echo
from programs import Program, StartProgram, eventually
from tunnels import NewTunnel

SERVER = ["server", "--listen", "127.0.0.1:0", "--connect", "127.0.0.1:0"]


def address(program: Program, use: str = "admin") -> str:
    where: str = program.wait_for("listening", use=use)["address"]
    return where


def ask(
    at: str, path: str, method: str = "GET", body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Status and content of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", timeout=30)
    connection.sock = _connected(at)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers or {})
        reply = connection.getresponse()
        content = reply.read()
    finally:
        connection.close()
    return reply.status, json.loads(content) if reply.headers.get_content_type() == "application/json" else content


def _connected(at: str) -> socket.socket:
    if at.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(at.removeprefix("unix:"))
        return sock
    host, _, port = at.rpartition(":")
    return socket.create_connection((host, int(port)), 30)


def refuses(at: str) -> bool:
    try:
        _connected(at).close()
    except OSError:
        return True
    return False


def above_info(program: Program) -> list[str]:
    return [event["event"] for event in program.log if event["level"] not in ("debug", "info")]


@pytest.mark.parametrize("name", ["server", "agent"])
def test_probes_see_a_program_leave_and_live_until_its_end(tunnel: NewTunnel, target: NewTarget, name: str) -> None:
    tunnel_ = tunnel()
    program = tunnel_.server if name == "server" else tunnel_.agent
    at = address(program)
    sock = tunnel_.open("connect", target(echo).port)
    check_echo(sock)
    assert ask(at, "/readyz")[0] == 200
    program.signal(signal.SIGTERM)
    program.wait_for("leaving", open=1)
    status, said = ask(at, "/readyz")
    assert (status, said["reasons"], said["open"]) == (503, ["draining"], 1)
    assert 0 < said["remaining_s"] <= 25
    assert ask(at, "/livez") == (200, {"alive": True})
    assert ask(at, "/metrics")[0] == 200
    check_echo(sock)
    sock.close()
    assert program.ended() == 0
    assert refuses(at)
    assert above_info(program) == []


def test_a_lame_duck_is_not_ready_and_still_serves(tunnel: NewTunnel, target: NewTarget) -> None:
    tunnel_ = tunnel("--lame-duck", "2s")
    port, at = target(echo).port, address(tunnel_.server)
    tunnel_.server.signal(signal.SIGTERM)
    tunnel_.server.wait_for("leaving")
    status, said = ask(at, "/readyz?verbose")
    assert (status, said["reasons"], said["state"]) == (503, ["draining"], "lame duck")
    assert ask(at, "/livez")[0] == 200
    with tunnel_.open("connect", port) as sock:  # it was not ready before anybody was refused
        check_echo(sock)
    assert tunnel_.server.ended() == 0


def test_an_operator_has_a_server_leave_over_http(start: StartProgram) -> None:
    server = start(*SERVER)
    status, said = ask(address(server), "/api/v1/drain", "PUT", {"exit": True, "reason": "new kernel"})
    assert (status, said["reasons"]) == (202, ["leaving"])
    assert server.ended() == 0
    assert server.said("asked", change="drain", reason="new kernel", exit=True)
    assert server.said("command", action="leave", text="new kernel")


def test_who_holds_a_connection_does_not_hold_the_exit_up(start: StartProgram) -> None:
    server = start(*SERVER)
    at = address(server)
    with _connected(at) as silent, _connected(at) as watching, _connected(at) as polling:
        watching.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert watching.recv(100).startswith(b"HTTP/1.1 200 ")
        rev = ask(at, "/api/v1/drain")[1]["rev"]
        polling.sendall(f"GET /api/v1/drain?wait=60s&since={rev} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
        assert silent.recv(1) == b""
        assert polling.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_health_listener_has_the_health_paths_alone(start: StartProgram) -> None:
    server = start(*SERVER, "--health", "0.0.0.0:0")
    at = f"127.0.0.1:{address(server, 'health').rpartition(':')[2]}"
    assert ask(at, "/livez", headers={"Host": "tunnel.svc"})[0] == 200
    assert ask(at, "/readyz")[1]["reasons"] == ["no_agent"]
    assert ask(at, "/api/v1/drain", "PUT", {"exit": True})[0] == 404
    assert server.running


def test_off_is_off(start: StartProgram) -> None:
    server = start(*SERVER, "--admin", "off")
    server.wait_for("ready")
    assert {event["use"] for event in server.said("listening")} == {"links", "connect"}


@pytest.mark.parametrize("flag", ["--admin", "--health"])
def test_a_port_in_use_that_was_asked_for_is_exit_1(start: StartProgram, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        server = start(*SERVER, flag, at)
        assert server.ended() == 1
    (event,) = server.said("cannot start")
    assert at in event["cause"]


def test_a_socket_file_is_its_owners_and_goes_with_the_program(start: StartProgram, tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    server = start(*SERVER, "--admin", f"unix:{path}")
    at = address(server)
    assert at == f"unix:{path}"
    assert ask(at, "/livez") == (200, {"alive": True})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert server.stop() == 0
    assert not path.exists()


def test_a_socket_file_that_a_killed_program_left_is_replaced(start: StartProgram, tmp_path: Path) -> None:
    arguments = [*SERVER, "--admin", f"unix:{tmp_path / 'admin.sock'}"]
    killed = start(*arguments)
    address(killed)
    killed.kill()
    assert (tmp_path / "admin.sock").exists()
    server = start(*arguments)
    assert ask(address(server), "/livez")[0] == 200
    second = start(*arguments)
    assert second.ended() == 1
    assert "another process listens there" in second.said("cannot start")[0]["cause"]
    assert ask(address(server), "/livez")[0] == 200


def test_a_token_is_needed_for_changes_and_never_shown(start: StartProgram, tmp_path: Path) -> None:
    file, secret = tmp_path / "tokens.toml", "s3cret" * 6
    file.write_text(f'[[token]]\nid = "ops"\nrole = "admin"\nsecret = "{secret}"\n')
    file.chmod(0o600)
    server = start(*SERVER, "--token-file", str(file), "--log-level", "debug")
    at = address(server)
    assert ask(at, "/api/v1/drain")[0] == 200
    assert ask(at, "/api/v1/ready", "PUT", {"ready": False})[0] == 401
    assert ask(at, "/api/v1/ready", "PUT", {"ready": False}, {"Authorization": f"Bearer {secret}"})[0] == 200
    assert server.stop() == 0
    assert "s3cret" not in str(server)
    file.chmod(0o644)
    refused = start(*SERVER, "--token-file", str(file))
    assert refused.ended() == 2
    assert "others than its owner may use it" in "".join(refused.noise)
    assert "s3cret" not in str(refused)
    refused.noise.clear()


def test_a_name_of_another_place_is_turned_away(start: StartProgram) -> None:
    server = start(*SERVER)
    status, said = ask(address(server), "/", headers={"Host": f"evil.example:{address(server).rpartition(':')[2]}"})
    assert (status, said["error"]["code"]) == (421, "misdirected")


def test_names_with_escapes_do_not_break_out_of_metrics(start: StartProgram) -> None:
    server = start(*SERVER)
    links = server.wait_for("listening", use="links")["address"]
    name = 'a"}\\{b="'
    start("agent", "--server", links, "--name", name)
    server.wait_for("agent linked", agent=name)
    status, text = ask(address(server), "/metrics")
    assert status == 200
    assert 'tunnel_drain_state{agent="a\\"}\\\\{b=\\""} 0.0' in text.decode().splitlines()


def test_an_operators_interface_leaves_no_descriptors(start: StartProgram) -> None:
    server = start(*SERVER)
    at = address(server)
    ask(at, "/metrics")
    before = server.descriptors()
    for _ in range(20):
        ask(at, "/api/v1/drain")
        with _connected(at) as watching:
            watching.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert watching.recv(1)
    eventually(lambda: server.descriptors() <= before, "as few descriptors as before")
    assert os.path.exists(f"/proc/{server.pid}")
