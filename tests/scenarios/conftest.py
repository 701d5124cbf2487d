"""Fixtures for whole processes. What a test opened is closed in this order: clients, targets, then our programs.

Our programs are ended by SIGTERM and must exit with 0, and no log may hold a traceback, whatever the test was about.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from endpoints import Blackhole, NewTarget, Target, closed_port
from programs import Nginx, Program, Service, Sshd, StartProgram, Stdio, eventually, free_port, needs, run
from tunnels import NewTunnel, StartForward, StartSocks, StartStdio, Tunnel

EXAMPLES = Path(__file__).parents[2] / "examples"


def _check(program: Program, *, killed: bool) -> None:
    code = program.stop()
    print(program)  # noqa: T201  # pytest shows it when the test failed
    assert killed or code == 0, f"exit code {code}"
    assert program.noise == []
    assert [event for event in program.log if "exception" in event] == []


@pytest.fixture
def start() -> Iterator[StartProgram]:
    """Starts one of our programs. One that has ended before the test has may have ended in any way."""
    started: list[Program] = []

    def start(*arguments: str) -> Program:
        started.append(Program(*arguments))
        return started[-1]

    yield start
    with contextlib.ExitStack() as stack:
        for program in started:  # the last started ends first: agents before their server
            stack.callback(_check, program, killed=not program.running)


@pytest.fixture
def target(start: StartProgram) -> Iterator[NewTarget]:
    """Starts a target that serves each connection with a function."""
    with contextlib.ExitStack() as stack:

        def target(serve: Callable[[socket.socket], None]) -> Target:
            new = Target(serve)
            stack.callback(new.close)
            return new

        yield target


@pytest.fixture
def refusing_port() -> Iterator[int]:
    with closed_port() as port:
        yield port


@pytest.fixture
def blackhole() -> Iterator[Blackhole]:
    with contextlib.closing(Blackhole()) as hole:
        yield hole


@pytest.fixture
def tunnel(start: StartProgram, target: NewTarget) -> Iterator[NewTunnel]:
    """Starts a server with ``agents`` agents linked, and a forward to a port on loopback if one is given."""
    with contextlib.ExitStack() as clients:

        def tunnel(*options: str, forward: int | None = None, agents: int = 1) -> Tunnel:
            ports = ["--listen", "127.0.0.1:0", "--connect", "127.0.0.1:0"]
            if forward is not None:
                ports += ["--forward", f"127.0.0.1:0=127.0.0.1:{forward}"]
            new = Tunnel(start("server", *ports, *options), [], clients)
            new.port("connect" if forward is None else "forward")  # the last that it opens
            for number in range(agents):
                new.agents.append(start("agent", "--server", f"127.0.0.1:{new.port('links')}", "--name", f"a{number}"))
            for number in range(agents):
                new.server.wait_for("agent linked", agent=f"a{number}")
            return new

        yield tunnel


@pytest.fixture(scope="session")
def _one_for_all() -> Iterator[Tunnel]:
    server = Program("server", "--listen", "127.0.0.1:0", "--connect", "127.0.0.1:0")
    agent = Program("agent", "--server", f"127.0.0.1:{server.port('links')}", "--name", "a0")
    server.wait_for("agent linked")
    yield Tunnel(server, [agent], contextlib.ExitStack())
    _check(agent, killed=False)
    _check(server, killed=False)


@pytest.fixture
def shared_tunnel(_one_for_all: Tunnel) -> Iterator[Tunnel]:
    """A server with one agent, for tests that only go through: many share it, and each leaves nothing behind."""
    before = _one_for_all.descriptors()
    with contextlib.ExitStack() as clients:
        yield replace(_one_for_all, clients=clients)
    eventually(lambda: _one_for_all.descriptors() == before, f"as many descriptors as before: {before}")


@pytest.fixture
def forward(start: StartProgram) -> StartForward:
    """Starts ``tunnel forward`` with targets on loopback, each on a port that the system chooses."""

    def forward(tunnel: Tunnel, *targets: object) -> Program:
        program = start("forward", *(f"127.0.0.1:0=127.0.0.1:{target}" for target in targets), "--server", tunnel.links)
        program.port("forward", nth=len(targets))
        return program

    return forward


@pytest.fixture
def stdio(target: NewTarget) -> Iterator[StartStdio]:
    """Starts ``tunnel connect`` to a port on loopback, or to a whole target."""
    with contextlib.ExitStack() as stack:

        def stdio(tunnel: Tunnel, target: int | str, **streams: object) -> Stdio:
            whole = f"127.0.0.1:{target}" if isinstance(target, int) else target
            return stack.enter_context(contextlib.closing(Stdio(whole, tunnel.links, **streams)))

        yield stdio


@pytest.fixture
def socks(start: StartProgram, tmp_path: Path) -> Iterator[StartSocks]:
    """Starts the example that serves SOCKS5; its port. It must end like our own programs."""
    with contextlib.ExitStack() as stack:

        def socks(tunnel: Tunnel, *options: str) -> int:
            file = str(EXAMPLES / "socks5_frontend.py")
            argv = [sys.executable, file, "--listen", "127.0.0.1:0", "--server", tunnel.links, *options]
            service = Service(argv, tmp_path / "socks.log")
            stack.callback(_check_example, service)
            service.wait_until(lambda: "listening on" in service.printed())
            found = re.search(r"^listening on 127\.0\.0\.1:(\d+)$", service.printed(), re.MULTILINE)
            assert found, service.printed()
            return int(found[1])

        yield socks


def _check_example(service: Service) -> None:
    code = service.stop()
    assert code == 0, f"exit code {code}: {service.printed()}"
    assert "Traceback" not in service.printed()


@pytest.fixture(params=["connect", "forward"])
def way(request: pytest.FixtureRequest) -> str:
    """Each way in."""
    way: str = request.param
    return way


# -- programs of others


_NGINX = """
daemon off; master_process off; pid {place}/pid; error_log stderr;
events {{ worker_connections 1024; }}
http {{
    access_log off; client_max_body_size 0;
    client_body_temp_path {place}/bodies; proxy_temp_path {place}/p; fastcgi_temp_path {place}/f;
    uwsgi_temp_path {place}/u; scgi_temp_path {place}/s;
    server {{ listen 127.0.0.1:{port}; location / {{ root {place}/www; dav_methods PUT; }} }}
}}
"""


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[Nginx]:
    program, port = needs("nginx"), free_port()
    folder = tmp_path / "www"
    folder.mkdir()
    config = tmp_path / "nginx.conf"
    config.write_text(_NGINX.format(place=tmp_path, port=port))
    service = Service([program, "-c", str(config), "-e", "stderr"], tmp_path / "nginx.log")
    try:
        service.wait_for_port(port)
        yield Nginx(port, folder)
    finally:
        service.stop()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[int]:
    """The port of a redis that keeps nothing."""
    program, port = needs("redis-server"), free_port()
    argv = [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(tmp_path), "--save", ""]
    service = Service(argv, tmp_path / "redis.log")
    try:
        service.wait_for_port(port)
        yield port
    finally:
        service.stop()


_SSHD = """
ListenAddress 127.0.0.1:{port}
HostKey {place}/host
AuthorizedKeysFile {place}/client.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
Subsystem sftp internal-sftp
"""


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    program, keygen, port = needs("sshd"), needs("ssh-keygen"), free_port()
    for name in ("host", "client"):
        run(keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # it insists on that empty folder when run by root
    config = tmp_path / "sshd.conf"
    config.write_text(_SSHD.format(place=tmp_path, port=port))
    service = Service([program, "-D", "-e", "-f", str(config)], tmp_path / "sshd.log")
    try:
        service.wait_until(lambda: "Server listening" in service.printed())
        yield Sshd(port, tmp_path / "client")
    finally:
        service.stop()


@pytest.fixture
def iperf3(tmp_path: Path) -> Iterator[int]:
    """The port of an iperf3 server."""
    program, port = needs("iperf3"), free_port()
    service = Service([program, "-s", "-B", "127.0.0.1", "-p", str(port), "--forceflush"], tmp_path / "iperf3.log")
    try:
        service.wait_until(lambda: "Server listening" in service.printed())
        yield port
    finally:
        service.stop()
