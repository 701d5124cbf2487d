"""SOCKS5 with real clients, through the example that serves it."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
from programs import Nginx, needs, run
from test_http import random_file
from tunnels import NewTunnel, StartSocks, Tunnel

LOGIN = "somebody:a password"


def curl(port: int) -> list[str]:
    return [needs("curl"), "-sS", "--fail", "--noproxy", "", "--socks5-hostname", f"127.0.0.1:{port}"]


def failure(*argv: str) -> tuple[int, str]:
    """The exit code of a program, and what it says on stderr."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.fixture
def login(tmp_path: Path) -> list[str]:
    """The example's options, for ``LOGIN``."""
    user, _, password = LOGIN.partition(":")
    file = tmp_path / "password"
    file.write_text(f"{password}\n")
    return ["--user", user, "--password-file", str(file)]


def test_curl_downloads_3_mb_from_nginx(shared_tunnel: Tunnel, socks: StartSocks, nginx: Nginx) -> None:
    expected = random_file(nginx.folder / "file", 3)
    content = run(*curl(socks(shared_tunnel)), nginx.url("file"))
    assert hashlib.sha256(content).hexdigest() == expected


def test_curl_says_who_it_is(shared_tunnel: Tunnel, socks: StartSocks, nginx: Nginx, login: list[str]) -> None:
    (nginx.folder / "file").write_text("content")
    port = socks(shared_tunnel, *login)
    assert run(*curl(port), "--proxy-user", LOGIN, nginx.url("file")) == b"content"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (["--proxy-user", "somebody:else"], "User was rejected"),
        (["--proxy-user", "nobody:a password"], "User was rejected"),
        ([], "No authentication method was acceptable"),
    ],
)
def test_who_does_not_say_so_is_not_served(
    shared_tunnel: Tunnel, socks: StartSocks, nginx: Nginx, login: list[str], said: list[str], words: str
) -> None:
    (nginx.folder / "file").write_text("content")
    code, text = failure(*curl(socks(shared_tunnel, *login)), *said, nginx.url("file"))
    assert code == 97  # of curl: the proxy's handshake failed
    assert words in text


def test_curl_is_told_that_a_port_is_closed(shared_tunnel: Tunnel, socks: StartSocks, refusing_port: int) -> None:
    code, text = failure(*curl(socks(shared_tunnel)), f"http://127.0.0.1:{refusing_port}/")
    assert code == 97
    assert "(5)" in text  # the reply that means: refused


def test_a_name_goes_to_the_agent_as_it_is(tunnel: NewTunnel, socks: StartSocks) -> None:
    tunnel_ = tunnel()
    code, text = failure(*curl(socks(tunnel_)), "http://nosuch.invalid/")
    assert code == 97
    assert "(4)" in text  # the reply that means: unreachable
    tunnel_.server.wait_for("dial failed", use="client", target="nosuch.invalid:80", agent="a0", code="dns")


def test_git_clones_a_repository(shared_tunnel: Tunnel, socks: StartSocks, nginx: Nginx, tmp_path: Path) -> None:
    git = ["env", "-u", "no_proxy", "-u", "NO_PROXY", "GIT_CONFIG_GLOBAL=/dev/null", needs("git")]
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    run(*git, "init", "--quiet", str(origin))
    for number in range(20):
        (origin / f"file {number}").write_text(f"{number}\n" * 1000)
        run(*git, "-C", str(origin), "add", ".")
        author = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
        run(*git, "-C", str(origin), *author, "commit", "--quiet", "--message", f"commit {number}")
    run(*git, "clone", "--quiet", "--bare", str(origin), str(nginx.folder / "origin.git"))
    run(*git, "-C", str(nginx.folder / "origin.git"), "update-server-info")  # then any file server will do
    proxy = f"http.proxy=socks5h://127.0.0.1:{socks(shared_tunnel)}"
    run(*git, "-c", proxy, "clone", "--quiet", nginx.url("origin.git"), str(clone))
    histories = [run(*git, "-C", str(folder), "log", "--format=raw", "--patch") for folder in (origin, clone)]
    assert histories[0] == histories[1]
    assert (clone / "file 19").read_text() == "19\n" * 1000
