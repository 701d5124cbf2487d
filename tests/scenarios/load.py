"""Clients that go on and on while programs come and go: short requests at a steady rate, and long downloads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from endpoints import chunks, connect, connect_head, read_exactly, read_head

ANSWER = b"pong"
PIECES, PIECE, PAUSE = 30, 32 * 1024, 0.1  # of a long download: so many pieces of so many bytes, with seconds between


def serve(sock: socket.socket) -> None:
    """The target of both: ``p`` is answered at once, ``l`` takes its time."""
    word = sock.recv(1)
    if word == b"p":
        sock.sendall(ANSWER)
    elif word == b"l":
        for number in range(PIECES):
            sock.sendall(bytes([number]) * PIECE)
            time.sleep(PAUSE)


def through_connect(door: Callable[[], int], target: int) -> socket.socket:
    """A connection to the target by CONNECT; a refusal is raised with its status line."""
    sock = connect(door())
    try:
        sock.sendall(connect_head("127.0.0.1", target))
        head = read_head(sock)
        if not head.startswith(b"HTTP/1.1 200 "):
            raise ConnectionError(head.split(b"\r\n")[0].decode())
    except BaseException:
        sock.close()
        raise
    return sock


class Load:
    """Short requests, at so many per second in all, each over a connection of its own.

    Attributes:
        done: how many were answered.
        failed: what became of the others.
        longest: seconds that the slowest took, be it answered or failed.
        gap: seconds between two answers at most.
    """

    def __init__(self, dial: Callable[[], socket.socket], per_second: float, threads: int = 8) -> None:
        self.done = 0
        self.failed: list[str] = []
        self.longest = self.gap = 0.0
        self._dial = dial
        self._every = threads / per_second
        self._last = time.monotonic()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                with self._dial() as sock:
                    sock.sendall(b"p")
                    assert read_exactly(sock, len(ANSWER)) == ANSWER
                failure = None
            except (OSError, AssertionError) as error:
                failure = repr(error)
            self._note(began, failure)
            due += self._every
            self._stop.wait(max(0.0, due - time.monotonic()))

    def _note(self, began: float, failure: str | None) -> None:
        with self._lock:
            now = time.monotonic()
            self.longest = max(self.longest, now - began)
            if failure is None:
                self.done += 1
                self.gap = max(self.gap, now - self._last)
                self._last = now
            else:
                self.failed.append(failure)

    def __str__(self) -> str:
        rest = f"longest {self.longest * 1000:.0f} ms, gap {self.gap * 1000:.0f} ms"
        return f"{self.done} answered, {len(self.failed)} failed, {rest}"

    def go_on(self, seconds: float) -> None:
        """Let it last; this is the load itself, not a wait for something."""
        time.sleep(seconds)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)


class Download:
    """One long download; ``outcome`` is ``whole``, or what happened instead."""

    def __init__(self, dial: Callable[[], socket.socket]) -> None:
        self.outcome = "never ended"
        self.started = threading.Event()
        self._dial = dial
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._dial() as sock:
                sock.sendall(b"l")
                self.started.set()
                data = b"".join(chunks(sock))
            wanted = b"".join(bytes([number]) * PIECE for number in range(PIECES))
            self.outcome = "whole" if data == wanted else f"{len(data)} bytes of {len(wanted)}"
        except OSError as error:
            self.outcome = repr(error)

    def join(self) -> str:
        self._thread.join(60)
        return self.outcome


@contextmanager
def downloads(dial: Callable[[], socket.socket], count: int) -> Iterator[list[Download]]:
    """So many long downloads, all begun; when the block ends they have ended."""
    running = [Download(dial) for _ in range(count)]
    for download in running:
        assert download.started.wait(30)
    yield running
    for download in running:
        download.join()
