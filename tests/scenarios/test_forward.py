"""Forwarded ports with the real clients of protocols that are picky about what lies between."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from endpoints import MIB
from programs import Sshd, needs, run
from tunnels import NewTunnel


def test_redis_cli_stores_and_finds(tunnel: NewTunnel, redis: int) -> None:
    cli = [needs("redis-cli"), "-p", str(tunnel(forward=redis).port("forward"))]
    assert run(*cli, "set", "key", "some value") == b"OK\n"
    assert run(*cli, "get", "key") == b"some value\n"


def test_redis_benchmark_runs_to_its_end(tunnel: NewTunnel, redis: int) -> None:
    port = tunnel(forward=redis).port("forward")
    printed = run(needs("redis-benchmark"), "-p", str(port), "-n", "20000", "-c", "50", "-t", "set,get", "--csv")
    assert [line.split(b",")[0] for line in printed.splitlines()[1:]] == [b'"SET"', b'"GET"']


def test_ssh_runs_a_command(tunnel: NewTunnel, sshd: Sshd) -> None:
    port = tunnel(forward=sshd.port).port("forward")
    assert run(needs("ssh"), *sshd.options(), "-p", str(port), sshd.login, "echo through the tunnel") == (
        b"through the tunnel\n"
    )


def test_scp_copies_100_mb_there_and_back(tunnel: NewTunnel, sshd: Sshd, tmp_path: Path) -> None:
    scp = [needs("scp"), *sshd.options(), "-P", str(tunnel(forward=sshd.port).port("forward"))]
    here, there, back = (tmp_path / name for name in ("here", "there", "back"))
    here.write_bytes(os.urandom(100 * MIB))
    try:
        run(*scp, str(here), f"{sshd.login}:{there}")
        run(*scp, f"{sshd.login}:{there}", str(back))
        digests = {hashlib.sha256(path.read_bytes()).digest() for path in (here, there, back)}
    finally:
        for path in (here, there, back):
            path.unlink(missing_ok=True)
    assert len(digests) == 1


@pytest.mark.parametrize("direction", [[], ["--reverse"]], ids=["up", "down"])
def test_iperf3_moves_200_mb(tunnel: NewTunnel, iperf3: int, direction: list[str]) -> None:
    port = tunnel(forward=iperf3).port("forward")
    printed = run(needs("iperf3"), "-c", "127.0.0.1", "-p", str(port), "-n", "200M", "--json", *direction)
    end = json.loads(printed)["end"]
    assert end["sum_sent"]["bytes"] >= 200 * MIB
    assert end["sum_received"]["bytes"] >= 180 * MIB  # it stops counting while the last bytes are still in buffers
