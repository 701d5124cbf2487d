"""httpx on trio, as a client of both kinds of proxy: CONNECT to a TLS target, SOCKS to a plain one."""

from __future__ import annotations

import socket
import ssl
import threading

import httpx
import pytest
import trio
import trustme
from endpoints import NewTarget
from programs import Nginx
from tunnels import StartSocks, Tunnel

MANY = 200


async def get_all(urls: list[str], **options: object) -> list[tuple[int, str]]:
    """Status and body of each, all requested at once."""
    answers: dict[str, tuple[int, str]] = {}
    limits = httpx.Limits(max_connections=len(urls))

    async def get(url: str) -> None:
        response = await client.get(url)
        answers[url] = response.status_code, response.text

    client = httpx.AsyncClient(limits=limits, timeout=60, trust_env=False, **options)
    async with client, trio.open_nursery() as nursery:
        for url in urls:
            nursery.start_soon(get, url)
    return [answers[url] for url in urls]


def body(path: str) -> str:
    return f"this is {path}\n" * 1000


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


class TlsTarget:
    """Serves one request for each connection; answers none before there are so many at once."""

    def __init__(self, authority: trustme.CA, at_once: int) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(self._context)
        self._all_there = threading.Barrier(at_once, timeout=60)

    def serve(self, sock: socket.socket) -> None:
        with self._context.wrap_socket(sock, server_side=True) as secure:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += secure.recv(4096)
            self._all_there.wait()
            content = body(head.split()[1].decode()).encode()
            secure.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(content))
            secure.sendall(content)


async def test_httpx_makes_200_requests_at_once_through_connect(
    shared_tunnel: Tunnel, target: NewTarget, authority: trustme.CA
) -> None:
    port = target(TlsTarget(authority, MANY).serve).port
    context = ssl.create_default_context()
    authority.configure_trust(context)
    urls = [f"https://127.0.0.1:{port}/{number}" for number in range(MANY)]
    answers = await get_all(urls, proxy=f"http://127.0.0.1:{shared_tunnel.port('connect')}", verify=context)
    assert answers == [(200, body(f"/{number}")) for number in range(MANY)]


async def test_httpx_makes_200_requests_at_once_through_socks(
    shared_tunnel: Tunnel, socks: StartSocks, nginx: Nginx
) -> None:
    for number in range(MANY):
        (nginx.folder / f"{number}").write_text(body(f"/{number}"))
    urls = [nginx.url(f"{number}") for number in range(MANY)]
    answers = await get_all(urls, proxy=f"socks5://127.0.0.1:{socks(shared_tunnel)}")
    assert answers == [(200, body(f"/{number}")) for number in range(MANY)]
