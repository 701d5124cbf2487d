"""Peers that do not read, or read slowly: they stop themselves and nobody else, and cost no memory."""

from __future__ import annotations

import socket
import sys
import threading
import time

import pytest
from endpoints import MIB, NewTarget, check_echo, echo
from programs import eventually
from tunnels import NewTunnel, Tunnel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads memory in use from /proc")

BLOCK = b"\xa5" * MIB
ALLOWED = 30 * MIB  # more than the window and the queue of one stream, far less than what is sent


class Counter:
    """How many bytes went through a socket; ``stalled`` once they stay the same."""

    def __init__(self) -> None:
        self.count = 0
        self._last = -1

    def stalled(self) -> bool:
        time.sleep(0.5)
        last, self._last = self._last, self.count
        return 0 < last == self.count

    def send(self, sock: socket.socket, size: int) -> None:
        while self.count < size:
            self.count += sock.send(BLOCK[: size - self.count])

    def receive(self, sock: socket.socket) -> None:
        while size := len(sock.recv(MIB)):
            self.count += size


def growth(tunnel: Tunnel, before: list[int]) -> int:
    """Bytes by which the memory of the server or the agent grew, whichever is more."""
    return max(now - then for now, then in zip(tunnel.memory(), before, strict=True))


def test_a_firehose_that_nobody_reads_stops_nobody_else(tunnel: NewTunnel, target: NewTarget) -> None:
    sent = Counter()
    firehose = target(lambda sock: sent.send(sock, 1 << 60))
    tunnel_ = tunnel()
    other = tunnel_.open("connect", target(echo).port)
    check_echo(other)
    before = tunnel_.memory()
    tunnel_.open("connect", firehose.port)
    eventually(sent.stalled, "a firehose that is stopped")
    for _ in range(500):
        check_echo(other)
    check_echo(tunnel_.open("connect", target(echo).port))
    assert growth(tunnel_, before) < ALLOWED


def test_an_upload_that_nobody_reads_is_paused_and_not_killed(tunnel: NewTunnel, target: NewTarget) -> None:
    size = 200 * MIB
    sent, received = Counter(), Counter()
    read_now, done = threading.Event(), threading.Event()

    def wait_then_read(sock: socket.socket) -> None:
        read_now.wait(60)
        received.receive(sock)
        done.set()

    tunnel_ = tunnel()
    other = tunnel_.open("connect", target(echo).port)
    check_echo(other)
    before = tunnel_.memory()
    with tunnel_.open("connect", target(wait_then_read).port) as sock:
        uploading = threading.Thread(target=sent.send, args=(sock, size))
        uploading.start()
        eventually(sent.stalled, "an upload that is paused")
        assert sent.count < size
        for _ in range(500):
            check_echo(other)
        check_echo(tunnel_.open("connect", target(echo).port))
        assert growth(tunnel_, before) < ALLOWED
        read_now.set()
        uploading.join()
    assert done.wait(30)
    assert received.count == size


def test_a_slow_reader_costs_no_memory(tunnel: NewTunnel, target: NewTarget) -> None:
    size = 300 * MIB
    source = target(lambda sock: Counter().send(sock, size))
    tunnel_ = tunnel()
    check_echo(tunnel_.open("connect", target(echo).port))
    before = tunnel_.memory()
    sock = tunnel_.open("connect", source.port)
    received, most = 0, 0
    while data := sock.recv(128 * 1024):
        received += len(data)
        most = max(most, growth(tunnel_, before))
        time.sleep(0.001)  # this is what makes it slow
    assert received == size
    assert most < ALLOWED


def test_streams_that_echo_more_than_all_buffers_hold_make_progress(
    tunnel: NewTunnel, target: NewTarget, way: str
) -> None:
    size = 20 * MIB
    port = target(echo).port
    tunnel_ = tunnel(forward=port)
    socks = [tunnel_.open(way, port) for _ in range(12)]
    received = [Counter() for _ in socks]
    receiving = [
        threading.Thread(target=counter.receive, args=(sock,)) for counter, sock in zip(received, socks, strict=True)
    ]
    sending = [threading.Thread(target=send_and_end, args=(sock, size)) for sock in socks]
    for thread in receiving + sending:
        thread.start()
    for thread in receiving + sending:
        thread.join()
    assert [counter.count for counter in received] == [size] * 12


def send_and_end(sock: socket.socket, size: int) -> None:
    Counter().send(sock, size)
    sock.shutdown(socket.SHUT_WR)
