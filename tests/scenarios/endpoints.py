"""The two ends of a stream: targets that behave well or badly, and what clients do with a socket.

All of it is plain blocking sockets and threads, so that nothing here shares code, or a fault, with what is tested.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
from collections.abc import Callable, Iterator

TIMEOUT = 30.0  # seconds after which a socket that says nothing counts as hanging
MIB = 1024 * 1024


class Target:
    """A service on loopback. Each connection is served by ``serve(socket)`` in a thread of its own, then closed."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        with self._listener, contextlib.suppress(OSError):  # until close() shuts the listener down
            while True:
                sock, _ = self._listener.accept()
                thread = threading.Thread(target=self._connection, args=(sock,))
                self._open.add(sock)
                self._threads.append(thread)
                thread.start()

    def _connection(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):  # whoever serves and cares about a reset looks at it himself
            sock.settimeout(TIMEOUT)
            self._serve(sock)
        self._open.discard(sock)

    def close(self) -> None:
        """End everything, also connections that are being served."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()


NewTarget = Callable[[Callable[[socket.socket], None]], Target]


def echo(sock: socket.socket) -> None:
    """Give back what comes, until it ends."""
    while data := sock.recv(64 * 1024):
        sock.sendall(data)


def reset(sock: socket.socket) -> None:
    """Close with RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def read_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        assert chunk, f"ended after {len(data)} of {size} bytes"
        data += chunk
    return bytes(data)


def chunks(sock: socket.socket) -> Iterator[bytes]:
    """What comes, until it ends."""
    return iter(lambda: sock.recv(256 * 1024), b"")


def read_all(sock: socket.socket) -> bytes:
    return b"".join(chunks(sock))


def check_echo(sock: socket.socket, data: bytes = b"are you there?") -> None:
    """One round trip."""
    sock.sendall(data)
    assert read_exactly(sock, len(data)) == data


def connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), TIMEOUT)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def connect_head(host: str, port: int) -> bytes:
    return f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()


def read_head(sock: socket.socket) -> bytes:
    """A reply's head and not a byte more."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = sock.recv(1)
        assert byte, f"ended after {head!r}"
        head += byte
    return head


def read_refusal(sock: socket.socket) -> tuple[int, str]:
    """Status and text of a reply that ends the connection."""
    with http.client.HTTPResponse(sock) as reply:
        reply.begin()
        text = reply.read().decode()
    assert sock.recv(1) == b""
    return reply.status, text


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port on which nobody listens, and nobody will."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


class Blackhole:
    """A port whose system answers no connection attempt: its queue is full, until ``open_up``."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.port: int = self._listener.getsockname()[1]
        self._fillers: list[socket.socket] = []
        while self._taken():
            pass

    def _taken(self) -> bool:
        filler = socket.socket()
        self._fillers.append(filler)
        filler.settimeout(0.3)
        with contextlib.suppress(TimeoutError):
            filler.connect(("127.0.0.1", self.port))
            return True
        return False

    def open_up(self) -> socket.socket:
        """Listen again; the listener."""
        for filler in self._fillers:
            filler.close()
        self._listener.settimeout(TIMEOUT)
        self._listener.listen(1024)
        return self._listener

    def close(self) -> None:
        for filler in self._fillers:
            filler.close()
        self._listener.close()
