"""HTTP CONNECT with real clients, and with clients that cut their bytes where nobody expects it."""

from __future__ import annotations

import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from endpoints import MIB, NewTarget, connect_head, echo, read_all, read_exactly, read_head
from programs import Nginx, needs, run
from tunnels import NewTunnel, Tunnel

ESTABLISHED = b"HTTP/1.1 200 Connection Established\r\n\r\n"


def random_file(path: Path, size: int) -> str:
    """Write so many MiB that no one can guess; their sha256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for _ in range(size):
            block = os.urandom(MIB)
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def curl(tunnel: Tunnel) -> list[str]:
    proxy = f"http://127.0.0.1:{tunnel.port('connect')}"
    return [needs("curl"), "-sS", "--fail", "--noproxy", "", "--proxytunnel", "--proxy", proxy]


def test_curl_downloads_300_mb_from_nginx(shared_tunnel: Tunnel, nginx: Nginx) -> None:
    file = nginx.folder / "big"
    try:
        expected = random_file(file, 300)
        digest = hashlib.sha256()
        with subprocess.Popen([*curl(shared_tunnel), nginx.url("big")], stdout=subprocess.PIPE) as process:
            assert process.stdout
            while block := process.stdout.read(MIB):
                digest.update(block)
        assert process.returncode == 0
    finally:
        file.unlink()
    assert digest.hexdigest() == expected


def test_curl_uploads_100_mb_to_nginx(shared_tunnel: Tunnel, nginx: Nginx, tmp_path: Path) -> None:
    file, stored = tmp_path / "upload", nginx.folder / "stored"
    try:
        expected = random_file(file, 100)
        run(*curl(shared_tunnel), "--upload-file", str(file), nginx.url("stored"))
        with stored.open("rb") as content:
            assert hashlib.file_digest(content, "sha256").hexdigest() == expected
    finally:
        file.unlink()
        stored.unlink(missing_ok=True)


def test_curl_makes_200_requests_in_parallel(shared_tunnel: Tunnel, nginx: Nginx, tmp_path: Path) -> None:
    for number in range(200):
        (nginx.folder / f"{number}").write_text(f"this is file {number}\n" * 1000)
    many = ["--parallel", "--parallel-immediate", "--parallel-max", "200", "--output", f"{tmp_path}/got-#1"]
    run(*curl(shared_tunnel), *many, nginx.url("[0-199]"))
    for number in range(200):
        assert (tmp_path / f"got-{number}").read_text() == (nginx.folder / f"{number}").read_text()


def test_a_head_may_be_cut_anywhere_and_what_follows_it_is_delivered_once(
    shared_tunnel: Tunnel, target: NewTarget
) -> None:
    target_ = target(echo)
    early = b"first bytes of the stream"
    request = connect_head("127.0.0.1", target_.port) + early
    for cut in range(len(request) + 1):
        with shared_tunnel.client("connect") as sock:
            sock.sendall(request[:cut])
            sock.sendall(request[cut:])
            assert read_exactly(sock, len(ESTABLISHED) + len(early)) == ESTABLISHED + early


def test_a_head_may_come_byte_by_byte(shared_tunnel: Tunnel, target: NewTarget) -> None:
    sock = shared_tunnel.client("connect")
    for byte in connect_head("127.0.0.1", target(echo).port) + b"x":
        sock.sendall(bytes([byte]))
    assert read_head(sock) == ESTABLISHED
    assert read_exactly(sock, 1) == b"x"


def test_a_target_that_speaks_first_is_never_heard_before_the_status_line(
    shared_tunnel: Tunnel, target: NewTarget
) -> None:
    target_ = target(lambda sock: sock.sendall(b"220 welcome\r\n"))

    def greeting(_: int) -> bytes:
        with shared_tunnel.client("connect") as sock:
            sock.sendall(connect_head("127.0.0.1", target_.port))
            return read_all(sock)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(greeting, range(2000))) == {ESTABLISHED + b"220 welcome\r\n"}


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 405),
        (b"CONNECT nowhere HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 20_000, 431),
    ],
)
def test_what_is_no_connect_is_answered_by_its_status(tunnel: NewTunnel, head: bytes, status: int) -> None:
    sock = tunnel(agents=0).client("connect")
    sock.sendall(head)
    assert read_head(sock).startswith(b"HTTP/1.1 %d " % status)
