"""Several servers behind a load balancer that chooses at random, and agents that link to each of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from endpoints import NewTarget, check_echo, connect, connect_head, echo, read_head
from programs import Program, Service, StartProgram, eventually, free_port, needs

SERVERS, AGENTS = 3, 4

_HAPROXY = """
defaults
  mode tcp
  timeout connect 5s
  timeout client 1m
  timeout server 1m
  retries 0
listen links
  bind 127.0.0.1:{port}
  balance random
  option redispatch
"""


@pytest.fixture
def ports() -> list[int]:
    return [free_port() for _ in range(SERVERS)]


@pytest.fixture
def balancer(tmp_path: Path, ports: list[int]) -> Iterator[int]:
    """The port of a haproxy that leads to one of the servers, whichever."""
    program, port = needs("haproxy"), free_port()
    servers = "".join(f"  server s{number} 127.0.0.1:{server}\n" for number, server in enumerate(ports))
    config = tmp_path / "haproxy.cfg"
    config.write_text(_HAPROXY.format(port=port) + servers)
    service = Service([program, "-db", "-f", str(config)], tmp_path / "haproxy.log")
    try:
        service.wait_for_port(port)
        yield port
    finally:
        service.stop()


def start_server(start: StartProgram, port: int) -> Program:
    server = start(
        "server", "--listen", f"127.0.0.1:{port}", "--connect", "127.0.0.1:0", "--server-count", str(SERVERS)
    )
    server.wait_for("listening", use="connect")
    return server


def linked(server: Program) -> set[str]:
    """The agents that are linked to it now."""
    names = [f"a{number}" for number in range(AGENTS)]
    return {n for n in names if len(server.said("agent linked", agent=n)) > len(server.said("agent gone", agent=n))}


class Dialler:
    """Dials an echo through a server again and again, and counts what failed."""

    def __init__(self, server: Program, port: int) -> None:
        self._door = int(server.wait_for("listening", use="connect")["address"].rpartition(":")[2])
        self._port = port
        self._stop = threading.Event()
        self.done = 0
        self.failed: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            try:
                with connect(self._door) as sock:
                    sock.sendall(connect_head("127.0.0.1", self._port))
                    assert read_head(sock).startswith(b"HTTP/1.1 200 ")
                    check_echo(sock)
            except (OSError, AssertionError) as error:
                self.failed.append(repr(error))
            self.done += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)


@pytest.mark.timeout(240)
def test_each_agent_links_to_each_server_and_a_new_one_is_found(
    start: StartProgram, target: NewTarget, ports: list[int], balancer: int
) -> None:
    servers = [start_server(start, port) for port in ports]
    agents = [start("agent", "--server", f"127.0.0.1:{balancer}", "--name", f"a{number}") for number in range(AGENTS)]
    for server in servers:
        eventually(lambda server=server: len(linked(server)) == AGENTS, "all agents linked to each server")
    with contextlib.closing(Dialler(servers[1], target(echo).port)) as dialler:
        servers[0].kill()
        for agent in agents:
            agent.wait_for("link lost")
        servers[0] = start_server(start, ports[0])
        eventually(lambda: len(linked(servers[0])) == AGENTS, "all agents linked to the new server")
        seen = dialler.done
        eventually(lambda: dialler.done > seen + 5, "dials go on")
    assert dialler.failed == []
    for agent in agents:
        assert len(agent.said("linked")) == SERVERS + 1
