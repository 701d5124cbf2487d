"""Those who mean no good, many or fast: whoever is beside them notices nothing, and nothing is left of them."""

from __future__ import annotations

import contextlib
import random
import resource
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import msgpack
import pytest
from endpoints import MIB, NewTarget, check_echo, connect, echo, read_exactly
from programs import Program, StartProgram, eventually
from tunnels import NewTunnel, Tunnel

IDLE = 5000
SOURCES = [f"127.0.0.{number}" for number in range(2, 22)]  # so that no address has too many
MAY_GROW = 150 * MIB


@pytest.fixture
def descriptors() -> Iterator[int]:
    """As many as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Strangers:
    """Connections that never finish a handshake; every tenth sends a byte now and then."""

    def __init__(self, port: int) -> None:
        self._poll = select.poll()
        self._open: dict[int, socket.socket] = {}
        self._slow: list[tuple[socket.socket, Iterator[int]]] = []
        for number in range(IDLE):
            sock = socket.create_connection(("127.0.0.1", port), 30, (SOURCES[number % len(SOURCES)], 0))
            sock.setblocking(False)
            self._open[sock.fileno()] = sock
            self._poll.register(sock, select.POLLIN)
            if number % 10 == 0:
                self._slow.append((sock, iter(struct.pack(">I", 4000) + bytes(4000))))

    def __len__(self) -> int:
        return len(self._open)

    def look(self) -> None:
        """Drip, and count those out that were closed."""
        for sock, rest in self._slow:
            with contextlib.suppress(OSError):
                sock.send(bytes([next(rest)]))
        for fd, _ in self._poll.poll(10):
            with contextlib.suppress(ConnectionResetError):
                if self._open[fd].recv(1000):
                    continue
            self._poll.unregister(fd)
            self._open.pop(fd).close()

    def close(self) -> None:
        for sock in self._open.values():
            sock.close()


def bitten(program: Program) -> dict[str, int]:
    """How many lines the log has about each bound."""
    names = [event["bound"] for event in program.said("bound")]
    return {name: names.count(name) for name in names}


def check_all_is_well(tunnel: Tunnel, beside: socket.socket, port: int) -> None:
    """A stream that is open, and one that is not yet."""
    check_echo(beside)
    with tunnel.open("connect", port) as sock:
        check_echo(sock)


def test_thousands_who_say_nothing_or_little_are_gone_at_the_deadline(
    tunnel: NewTunnel, target: NewTarget, start: StartProgram, descriptors: int
) -> None:
    if descriptors < IDLE + 1000:
        pytest.skip(f"{descriptors} descriptors are not enough")
    port = target(echo).port
    whole = tunnel()
    beside = whole.open("connect", port)
    before = whole.server.memory()
    with contextlib.closing(Strangers(whole.port("links"))) as strangers:
        assert len(strangers) == IDLE

        def all_gone() -> bool:
            strangers.look()
            check_all_is_well(whole, beside, port)
            assert whole.server.memory() - before < MAY_GROW
            return not len(strangers)

        eventually(all_gone, "the end of all strangers", 60)
    assert bitten(whole.server) == {"unauthenticated": 1, "handshake_time": 1}
    start("agent", "--server", whole.links, "--name", "late")
    whole.server.wait_for("agent linked", agent="late")


# -- floods


def frame(*values: object) -> bytes:
    body = msgpack.packb(values)
    return struct.pack(">I", len(body)) + body


def link_to(port: int) -> socket.socket:
    """A client's link, made by hand."""
    sock = connect(port)
    sock.sendall(frame(1, 1, {"role": "client", "name": "flood", "instance": f"{random.getrandbits(128):032x}"}))
    (size,) = struct.unpack(">I", read_exactly(sock, 4))
    assert msgpack.unpackb(read_exactly(sock, size))[0] == 4
    return sock


def pings(first: int) -> bytes:
    return frame(11, 0, 7) * 1000


def dials(port: int) -> Callable[[int], bytes]:
    """Each is given up at once."""

    def some(first: int) -> bytes:
        numbers = range(first * 1000 + 1, first * 1000 + 1001)
        return b"".join(
            frame(5, n, "127.0.0.1", port, 1000, 10_000, {}) + frame(9, n, "cancelled", "") for n in numbers
        )

    return some


@contextlib.contextmanager
def flooding(sock: socket.socket, some: Callable[[int], bytes], *, reads: bool) -> Iterator[None]:
    """Send as much as goes, until the end of the block."""

    def send() -> None:
        with contextlib.suppress(OSError):
            for number in range(100_000):
                sock.sendall(some(number))

    def read() -> None:
        with contextlib.suppress(OSError):
            while sock.recv(64 * 1024):
                pass

    threads = [threading.Thread(target=each) for each in ((send, read) if reads else (send,))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        sock.close()


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "reads nothing"])
@pytest.mark.parametrize("what", ["ping_rate", "dial_rate"])
def test_a_flood_harms_nobody_else(tunnel: NewTunnel, target: NewTarget, what: str, reads: bool) -> None:
    port = target(echo).port
    whole = tunnel()
    beside = whole.open("connect", port)
    before = whole.memory()
    some = pings if what == "ping_rate" else dials(port)
    with flooding(link_to(whole.port("links")), some, reads=reads):
        whole.server.wait_for("bound", bound=what)
        for _ in range(20):
            check_all_is_well(whole, beside, port)
        after = whole.memory()
    assert max(now - then for now, then in zip(after, before, strict=True)) < MAY_GROW
    assert bitten(whole.server)[what] == 1
    assert whole.agent.said("link lost") == []
    check_all_is_well(whole, beside, port)


# -- descriptors


def test_a_program_takes_as_many_descriptors_as_it_may_have(start: StartProgram) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        server = start("server", "--listen", "127.0.0.1:0", "--connect", "127.0.0.1:0")
        server.wait_for("descriptors")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (said,) = server.said("descriptors")
    assert (said["soft"], said["hard"]) == (min(hard, 1 << 20), hard)
    server.wait_for("ready")


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux changes the limits of another process")
def test_a_server_without_descriptors_goes_on_and_serves_again_when_there_are_some(
    tunnel: NewTunnel, target: NewTarget
) -> None:
    port = target(echo).port
    whole = tunnel(forward=port)
    server = whole.server
    beside = whole.open("connect", port)
    limit = server.descriptors() + 20
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (limit, limit))
    with contextlib.ExitStack() as crowd:
        for _ in range(40):
            crowd.enter_context(connect(whole.port("connect")))
        server.wait_for("cannot accept")
        for _ in range(100):
            check_echo(beside)
    eventually(lambda: server.descriptors() < limit - 10, "free descriptors")
    for way in ("connect", "forward"):
        check_echo(whole.open(way, port))
    assert len(server.said("cannot accept")) == 1
