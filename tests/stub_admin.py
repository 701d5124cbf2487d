"""An admin API that says what a test wants, and remembers what it was asked.

It shares no code with the real one: plain ``http.server``, a thread for each connection.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

Reply = tuple[int, object]


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


class StubAdmin:
    """See above. ``asked`` are the requests so far; ``url`` is where it listens."""

    def __init__(self, path: Path | None = None) -> None:
        self.asked: list[Asked] = []
        self._replies: dict[tuple[str, str], list[Reply | Callable[[], Reply]]] = {}
        self._server = _server(self, path)
        self.url = f"unix:{path}" if path else f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def says(self, method: str, path: str, *replies: Reply | Callable[[], Reply]) -> None:
        """Answer like this, one after the other; the last again and again. Text is sent as it is."""
        self._replies[method, path] = list(replies)

    def reply(self, asked: Asked) -> Reply:
        self.asked.append(asked)
        replies = self._replies.get((asked.method, asked.path))
        if not replies:
            return refusal(404, "not_found", "there is no such path")
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        return reply() if callable(reply) else reply

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def refusal(status: int, code: str, text: str) -> Reply:
    return status, {"error": {"code": code, "text": text}}


@contextmanager
def stub_admin(path: Path | None = None) -> Iterator[StubAdmin]:
    stub = StubAdmin(path)
    try:
        yield stub
    finally:
        stub.close()


def _server(stub: StubAdmin, path: Path | None) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked = Asked(
                self.command, url.path, dict(parse_qsl(url.query)), dict(self.headers), json.loads(body or "null")
            )
            status, content = stub.reply(asked)
            self.send_response(status)
            self.end_headers()
            self.wfile.write((content if isinstance(content, str) else json.dumps(content)).encode())

        do_PUT = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

        def address_string(self) -> str:
            return "somebody"

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_UNIX if path else socket.AF_INET

        def server_bind(self) -> None:
            self.socket.bind(self.server_address)
            self.server_address = self.socket.getsockname()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Who has gone before the answer is no error; a word about it would be among those of the command."""
            if not isinstance(sys.exception(), ConnectionError):
                super().handle_error(request, client_address)

    return Server(str(path) if path else ("127.0.0.1", 0), Handler)  # type: ignore[arg-type]
