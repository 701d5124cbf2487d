"""Listening: what is bound, what is accepted, and what becomes of the queue at the end."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tunnel import listen
from tunnel.address import ListenAddress
from tunnel.bounds import Bounds, Seat
from tunnel.limits import Limits
from tunnel.listen import BindError, Handler, accept, admitted, bind, bound_address, source_of

if TYPE_CHECKING:
    from conftest import TcpPair

LOOPBACK = ListenAddress("127.0.0.1", 0)


class Spawned:
    """A ``spawn`` that remembers the sockets, or refuses them."""

    def __init__(self, *, willing: bool = True) -> None:
        self.sockets: list[socket.socket] = []
        self.willing = willing
        self.refused = 0

    def __call__(self, handler: Handler, sock: socket.socket) -> bool:
        if self.willing:
            self.sockets.append(sock)
        else:
            self.refused += 1
        return self.willing


async def handler(sock: socket.socket) -> None:
    raise AssertionError("this is spawn's to call")


@pytest.fixture
def spawned() -> Iterator[Spawned]:
    spawned = Spawned()
    yield spawned
    for sock in spawned.sockets:
        sock.close()


@pytest.fixture
async def listener() -> socket.socket:
    (sock,) = await bind(LOOPBACK)
    return sock


@pytest.fixture
def clients() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for sock in made:
        sock.close()


def dial(listener: socket.socket, clients: list[socket.socket], count: int) -> None:
    clients.extend(socket.create_connection(listener.getsockname()) for _ in range(count))


class TestBind:
    async def test_port_0_is_a_real_port(self) -> None:
        (sock,) = await bind(LOOPBACK)
        with sock:
            address = bound_address(sock)
            assert address.host == "127.0.0.1"
            assert address.port > 0
            assert not sock.getblocking()

    async def test_an_ipv6_address(self) -> None:
        try:
            (sock,) = await bind(ListenAddress("::1", 0))
        except BindError:
            pytest.skip("this machine has no IPv6 loopback")
        with sock:
            assert str(bound_address(sock)).startswith("[::1]:")

    async def test_all_addresses_of_a_name_have_one_port(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _stands_for(monkeypatch, "127.0.0.1", "127.0.0.2")
        sockets = await bind(ListenAddress("both", 0))
        addresses = [bound_address(sock) for sock in sockets]
        for sock in sockets:
            sock.close()
        assert [address.host for address in addresses] == ["127.0.0.1", "127.0.0.2"]
        assert len({address.port for address in addresses}) == 1

    async def test_a_name_that_stands_for_one_address_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As ``localhost`` does where a hosts file has two lines for it."""
        _stands_for(monkeypatch, "127.0.0.1", "127.0.0.1")
        sockets = await bind(ListenAddress("twice", 0))
        for sock in sockets:
            sock.close()
        assert len(sockets) == 1

    async def test_a_taken_port_is_named(self, listener: socket.socket) -> None:
        address = bound_address(listener)
        with listener, pytest.raises(BindError, match=rf"cannot listen on {address}: Address already in use"):
            await bind(address)

    @pytest.mark.parametrize("host", ["192.0.2.1", "nosuch.invalid"])
    async def test_an_address_that_is_not_ours_is_named(self, host: str) -> None:
        with pytest.raises(BindError, match=f"cannot listen on {host}:7400: "):
            await bind(ListenAddress(host, 7400))

    async def test_a_failure_closes_what_was_bound(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _stands_for(monkeypatch, "127.0.0.1", "192.0.2.1")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with pytest.raises(BindError):
            await bind(ListenAddress("both", port))
        monkeypatch.undo()
        (sock,) = await bind(ListenAddress("127.0.0.1", port))
        sock.close()


def _stands_for(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    async def found(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

    monkeypatch.setattr(trio.socket, "getaddrinfo", found)


class TestAccept:
    async def test_a_connection_is_ready_for_its_handler(
        self, nursery: trio.Nursery, listener: socket.socket, spawned: Spawned, clients: list[socket.socket]
    ) -> None:
        nursery.start_soon(accept, listener, handler, spawned)
        dial(listener, clients, 1)
        await wait_all_tasks_blocked()
        (sock,) = spawned.sockets
        assert not sock.getblocking()
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getpeername() == clients[0].getsockname()

    async def test_many_are_accepted_at_once(
        self, nursery: trio.Nursery, listener: socket.socket, spawned: Spawned, clients: list[socket.socket]
    ) -> None:
        dial(listener, clients, 100)
        nursery.start_soon(accept, listener, handler, spawned)
        await wait_all_tasks_blocked()
        assert len(spawned.sockets) == 100

    async def test_the_queue_is_handed_over_at_the_end(
        self, listener: socket.socket, spawned: Spawned, clients: list[socket.socket]
    ) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept, listener, handler, spawned)
            await wait_all_tasks_blocked()
            dial(listener, clients, 50)
            nursery.cancel_scope.cancel()
        assert len(spawned.sockets) == 50
        assert listener.fileno() == -1

    async def test_none_that_was_handed_over_was_reset(
        self, listener: socket.socket, spawned: Spawned, clients: list[socket.socket]
    ) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept, listener, handler, spawned)
            await wait_all_tasks_blocked()
            dial(listener, clients, 50)
            nursery.cancel_scope.cancel()
        for sock in spawned.sockets:
            sock.sendall(b"x")
        assert [client.recv(1) for client in clients] == [b"x"] * 50

    async def test_what_nobody_wants_is_closed(
        self, nursery: trio.Nursery, listener: socket.socket, clients: list[socket.socket]
    ) -> None:
        spawned = Spawned(willing=False)
        nursery.start_soon(accept, listener, handler, spawned)
        dial(listener, clients, 3)
        await wait_all_tasks_blocked()
        assert spawned.refused == 3
        assert [client.recv(1) for client in clients] == [b""] * 3

    async def test_one_that_failed_in_the_queue_harms_no_other(
        self, nursery: trio.Nursery, listener: socket.socket, spawned: Spawned, clients: list[socket.socket]
    ) -> None:
        dial(listener, clients, 2)
        nursery.start_soon(accept, Scarce(listener, errno.ECONNABORTED, times=1), handler, spawned)
        await wait_all_tasks_blocked()
        assert len(spawned.sockets) == 2


class TestAdmitted:
    async def test_those_beyond_the_crowd_are_closed(
        self, nursery: trio.Nursery, listener: socket.socket, clients: list[socket.socket]
    ) -> None:
        bounds = Bounds(Limits(heads_per_source=2), trio.current_time)
        started: list[tuple[socket.socket, Seat]] = []

        def spawn(handler: Handler, sock: socket.socket, seat: Seat) -> bool:
            started.append((sock, seat))
            return True

        nursery.start_soon(accept, listener, handler, admitted(bounds.heads, spawn))
        dial(listener, clients, 3)
        await wait_all_tasks_blocked()
        assert clients[2].recv(1) == b""
        (one, seat), (other, _) = started
        seat.leave()
        dial(listener, clients, 1)
        await wait_all_tasks_blocked()
        assert len(started) == 3
        assert bounds.hits == {"heads_per_source": 1}
        for sock in (one, other, started[2][0]):
            sock.close()

    async def test_what_nobody_wants_has_no_seat(
        self, nursery: trio.Nursery, listener: socket.socket, clients: list[socket.socket]
    ) -> None:
        bounds = Bounds(Limits(), trio.current_time)
        nursery.start_soon(accept, listener, handler, admitted(bounds.heads, lambda *_: False))
        dial(listener, clients, 3)
        await wait_all_tasks_blocked()
        assert [client.recv(1) for client in clients] == [b""] * 3
        assert bounds.heads.inside == 0

    def test_the_source_is_the_address_alone(self, tcp_pair: TcpPair) -> None:
        assert source_of(tcp_pair()[0]) == "127.0.0.1"

    def test_one_that_has_gone_has_an_empty_source(self) -> None:
        with socket.socket() as sock:
            assert source_of(sock) == ""


class Scarce(socket.socket):
    """A listener whose first accepts fail with an error of the system."""

    def __init__(self, listener: socket.socket, code: int, times: int) -> None:
        super().__init__(fileno=os.dup(listener.fileno()))
        self.setblocking(False)
        self.code = code
        self.times = times
        listener.close()

    def accept(self) -> tuple[socket.socket, object]:
        if self.times:
            self.times -= 1
            raise OSError(self.code, os.strerror(self.code))
        return super().accept()


class TestShortage:
    @pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
    async def test_is_survived_and_said_once(
        self,
        autojump_clock: MockClock,
        nursery: trio.Nursery,
        spawned: Spawned,
        listener: socket.socket,
        clients: list[socket.socket],
        caplog: pytest.LogCaptureFixture,
        code: int,
    ) -> None:
        dial(listener, clients, 3)
        scarce = Scarce(listener, code, times=10)
        address = bound_address(scarce)
        nursery.start_soon(accept, scarce, handler, spawned)
        await trio.sleep(30)
        assert len(spawned.sockets) == 3
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert f'"cannot accept" address={address}' in record.getMessage()
        assert os.strerror(code) in record.getMessage()

    async def test_that_lasts_is_said_once_a_minute(
        self,
        autojump_clock: MockClock,
        spawned: Spawned,
        listener: socket.socket,
        clients: list[socket.socket],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        dial(listener, clients, 1)
        scarce = Scarce(listener, errno.EMFILE, times=1_000_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept, scarce, handler, spawned)
            await trio.sleep(150)
            nursery.cancel_scope.cancel()
        assert len(caplog.records) == 3

    async def test_does_not_spin(
        self, autojump_clock: MockClock, spawned: Spawned, listener: socket.socket, clients: list[socket.socket]
    ) -> None:
        dial(listener, clients, 1)
        scarce = Scarce(listener, errno.EMFILE, times=1_000_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept, scarce, handler, spawned)
            await trio.sleep(10)
            nursery.cancel_scope.cancel()
        assert 1_000_000 - scarce.times <= 10 / listen._PAUSE + 2
