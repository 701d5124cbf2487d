"""Connecting: which addresses are tried, what each failure is called, and that nothing stays open."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tunnel import turns
from tunnel.connect import Connector
from tunnel.errors import Denied, DialTimeout, DnsError, Refused, Unreachable
from tunnel.patterns import Pattern, Rules

V4, V6 = socket.AF_INET, socket.AF_INET6
Found = list[tuple[int, int, int, str, tuple[Any, ...]]]


def _has_v6() -> bool:
    try:
        with socket.socket(V6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_v6 = pytest.mark.skipif(not _has_v6(), reason="this machine has no IPv6 loopback")
needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors through /proc")


def listening(host: str = "127.0.0.1", port: int = 0, backlog: int = 10) -> socket.socket:
    sock = socket.socket(V6 if ":" in host else V4)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    sock.listen(backlog)
    return sock


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listening() as sock:
        yield sock


@pytest.fixture
def port(listener: socket.socket) -> int:
    """Where someone listens, on 127.0.0.1."""
    return int(listener.getsockname()[1])


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Where no one listens; taken, so that no one else will."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@pytest.fixture
def blackhole() -> Iterator[tuple[str, int]]:
    """An address that never answers: its accept queue is full."""
    with listening("127.0.0.2", backlog=0) as sock:
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(sock.getsockname())
        yield sock.getsockname()
        for one in waiting:
            one.close()


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> None:
    """Make every name stand for these addresses."""
    found: Found = [(V6 if ":" in host else V4, socket.SOCK_STREAM, 6, "", (host, port)) for host, port in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


async def arrives(connector: Connector, host: str, port: int) -> tuple[Any, ...]:
    """Connect; where that led."""
    with await connector.connect(host, port) as sock:
        assert not sock.getblocking()
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        return tuple(sock.getpeername()[:2])


class TestArriving:
    async def test_at_an_ipv4_address(self, port: int) -> None:
        assert await arrives(Connector(), "127.0.0.1", port) == ("127.0.0.1", port)

    @needs_v6
    async def test_at_an_ipv6_address(self) -> None:
        with listening("::1") as sock:
            port = sock.getsockname()[1]
            assert await arrives(Connector(), "::1", port) == ("::1", port)

    async def test_at_a_name(self, port: int) -> None:
        assert await arrives(Connector(), "localhost", port) == ("127.0.0.1", port)

    async def test_at_the_second_address_when_the_first_refuses(
        self, monkeypatch: pytest.MonkeyPatch, port: int, closed_port: int
    ) -> None:
        resolving(monkeypatch, ("127.0.0.1", closed_port), ("127.0.0.1", port))
        assert await arrives(Connector(), "two", 80) == ("127.0.0.1", port)

    async def test_at_the_second_address_when_the_first_is_silent(
        self, monkeypatch: pytest.MonkeyPatch, port: int, blackhole: tuple[str, int]
    ) -> None:
        resolving(monkeypatch, blackhole, ("127.0.0.1", port))
        assert await arrives(Connector(), "two", 80) == ("127.0.0.1", port)

    async def test_at_the_last_of_many(self, monkeypatch: pytest.MonkeyPatch, port: int, closed_port: int) -> None:
        resolving(monkeypatch, *[("127.0.0.1", closed_port)] * 20, ("127.0.0.1", port))
        assert await arrives(Connector(), "many", 80) == ("127.0.0.1", port)

    async def test_literal_addresses_need_no_resolver(self, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
        def fail(*_: object, **__: object) -> Found:
            raise AssertionError("resolved")

        monkeypatch.setattr(socket, "getaddrinfo", fail)
        await arrives(Connector(), "127.0.0.1", port)


class TestFailures:
    async def test_no_one_listens(self, closed_port: int) -> None:
        with pytest.raises(Refused, match=f"127.0.0.1 port {closed_port}"):
            await Connector().connect("127.0.0.1", closed_port)

    async def test_no_such_name(self) -> None:
        with pytest.raises(DnsError, match=r"nosuch\.invalid"):
            await Connector().connect("nosuch.invalid", 80)

    @pytest.mark.parametrize("name", ["a" * 64 + ".invalid", "x..invalid"])
    async def test_a_name_that_no_resolver_takes(self, name: str) -> None:
        with pytest.raises(DnsError):
            await Connector().connect(name, 80)

    async def test_all_addresses_refuse(self, monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
        resolving(monkeypatch, ("127.0.0.1", closed_port), ("127.0.0.2", closed_port))
        with pytest.raises(Refused):
            await Connector().connect("two", 80)

    async def test_different_failures_are_all_named(self, monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
        resolving(monkeypatch, ("127.0.0.1", closed_port), ("255.255.255.255", 80))
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1.*255\.255\.255\.255|255\.255\.255\.255.*127\.0\.0\.1"):
            await Connector().connect("two", 80)

    async def test_no_route(self) -> None:
        with pytest.raises(Unreachable):
            await Connector().connect("255.255.255.255", 80)

    async def test_the_system_gives_up_waiting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: 110 if os.name == "posix" else 10060)
        with pytest.raises(DialTimeout):
            await Connector().connect("127.0.0.1", 80)

    async def test_a_family_that_this_machine_lacks(self, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
        """It fails like an address, so that the others are tried."""
        found: Found = [(-7, socket.SOCK_STREAM, 6, "", ("?", 1)), (V4, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        assert await arrives(Connector(), "two", 80) == ("127.0.0.1", port)

    async def test_a_connection_to_oneself_is_a_refusal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A port that the system gives out can be the very one that is being connected to."""
        connect = socket.socket.connect_ex

        def from_the_same_port(sock: socket.socket, address: tuple[str, int]) -> int:
            sock.bind(address)
            return connect(sock, address)

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        monkeypatch.setattr(socket.socket, "connect_ex", from_the_same_port)
        with pytest.raises(Refused):
            await Connector().connect("127.0.0.1", port)


def _never(*_: object, **__: object) -> Found:
    raise AssertionError("resolved, or connected")


class TestRules:
    """A port where someone listens is not reached: that would be no ``Denied``."""

    @staticmethod
    def denying(*patterns: str) -> Connector:
        return Connector(rules=Rules(deny=tuple(map(Pattern.parse, patterns))))

    @staticmethod
    def allowing(*patterns: str) -> Connector:
        return Connector(rules=Rules(allow=tuple(map(Pattern.parse, patterns))))

    @pytest.mark.parametrize("spelling", ["db.internal", "DB.Internal."])
    async def test_a_denied_name_is_not_looked_up(self, monkeypatch: pytest.MonkeyPatch, spelling: str) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", _never)
        with pytest.raises(Denied, match=r"db\.internal:80: denied by \*\.internal"):
            await self.denying("*.internal").connect(spelling, 80)

    async def test_a_name_that_no_rule_could_allow_is_not_looked_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", _never)
        with pytest.raises(Denied, match="no rule allows it"):
            await self.allowing("web.internal").connect("db.internal", 80)

    @pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1"])
    async def test_a_denied_address_is_not_connected_to(self, port: int, host: str) -> None:
        with pytest.raises(Denied, match=r"denied by 127\.0\.0\.0/8"):
            await self.denying("127.0.0.0/8").connect(host, port)

    @pytest.mark.parametrize("found", ["127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1"])
    async def test_a_name_does_not_lead_to_a_denied_address(
        self, monkeypatch: pytest.MonkeyPatch, port: int, found: str
    ) -> None:
        resolving(monkeypatch, (found, port))
        with pytest.raises(Denied, match=r"harmless\.example:80: it is .* denied by 127\.0\.0\.0/8"):
            await self.denying("127.0.0.0/8").connect("harmless.example", 80)

    async def test_of_several_addresses_those_that_are_denied_are_not_tried(
        self, monkeypatch: pytest.MonkeyPatch, port: int
    ) -> None:
        with listening("127.0.0.2", port):
            resolving(monkeypatch, ("127.0.0.2", port), ("127.0.0.1", port))
            assert await arrives(self.denying("127.0.0.2"), "two", port) == ("127.0.0.1", port)

    async def test_a_name_that_is_not_allowed_leads_to_an_allowed_address(
        self, monkeypatch: pytest.MonkeyPatch, port: int
    ) -> None:
        with listening("127.0.0.2", port):
            resolving(monkeypatch, ("127.0.0.2", port), ("127.0.0.1", port))
            assert await arrives(self.allowing("127.0.0.1"), "two", port) == ("127.0.0.1", port)

    async def test_an_allowed_name_leads_to_any_of_its_addresses(self, port: int) -> None:
        assert await arrives(self.allowing("localhost"), "localhost", port) == ("127.0.0.1", port)

    async def test_a_host_that_they_cannot_read_is_denied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", _never)
        with pytest.raises(Denied, match="dotted quad"):
            await self.denying("127.0.0.0/8").connect("127.1", 80)

    async def test_they_are_not_asked_where_an_address_is_resolved_and_connected_to_by_itself(self, port: int) -> None:
        connector = self.denying("*")
        (address,) = await connector.resolve("127.0.0.1", port)
        with await connector.connect_to(address) as sock:
            assert sock.getpeername() == ("127.0.0.1", port)


def descriptors() -> int:
    """How many are open, that of this run's poller among them."""
    gc.collect()  # pollers of runs that are over
    turns.of_this_run()
    return len(os.listdir("/proc/self/fd"))


@needs_proc
class TestNothingStaysOpen:
    async def test_when_a_connect_is_cancelled(self, blackhole: tuple[str, int]) -> None:
        before = descriptors()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Connector().connect, *blackhole)
            await wait_all_tasks_blocked()
            assert descriptors() == before + 1
            nursery.cancel_scope.cancel()
        assert descriptors() == before

    async def test_when_connects_to_several_addresses_are_cancelled(
        self, monkeypatch: pytest.MonkeyPatch, blackhole: tuple[str, int]
    ) -> None:
        resolving(monkeypatch, blackhole, blackhole, blackhole)
        before = descriptors()
        with trio.move_on_after(0.4):  # two have begun
            await Connector().connect("three", 80)
        assert descriptors() == before

    async def test_when_one_of_several_addresses_answers(
        self, monkeypatch: pytest.MonkeyPatch, port: int, blackhole: tuple[str, int], closed_port: int
    ) -> None:
        resolving(monkeypatch, blackhole, ("127.0.0.1", closed_port), ("127.0.0.1", port))
        await arrives(Connector(), "three", 80)
        before = descriptors()
        await arrives(Connector(), "three", 80)
        assert descriptors() == before

    async def test_when_the_caller_is_cancelled_as_it_succeeds(
        self, monkeypatch: pytest.MonkeyPatch, port: int
    ) -> None:
        resolving(monkeypatch, ("127.0.0.1", port), ("127.0.0.2", port))
        before = descriptors()
        connect = socket.socket.connect_ex

        def cancel_and_connect(sock: socket.socket, address: tuple[str, int]) -> int:
            scope.cancel()
            return connect(sock, address)

        monkeypatch.setattr(socket.socket, "connect_ex", cancel_and_connect)
        with trio.CancelScope() as scope:
            await Connector().connect("two", 80)
        assert scope.cancelled_caught
        assert descriptors() == before

    async def test_when_no_one_listens(self, closed_port: int) -> None:
        before = descriptors()
        for _ in range(20):
            with pytest.raises(Refused):
                await Connector().connect("127.0.0.1", closed_port)
        assert descriptors() == before


class TestStalledResolver:
    @pytest.fixture
    def stalled(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
        """Names are not resolved until this is set."""
        go_on = threading.Event()

        def stall(*_: object, **__: object) -> Found:
            go_on.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "try again")

        monkeypatch.setattr(socket, "getaddrinfo", stall)
        yield go_on
        go_on.set()

    async def test_does_not_delay_literal_addresses(self, stalled: threading.Event, port: int) -> None:
        connector = Connector(lookups=1)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(connector.connect, "stalled.example", 80)
            await wait_all_tasks_blocked()
            await arrives(connector, "127.0.0.1", port)
            nursery.cancel_scope.cancel()

    async def test_does_not_delay_other_work_in_threads(self, stalled: threading.Event) -> None:
        connector = Connector(lookups=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connector.connect, "stalled.example", 80)
            await wait_all_tasks_blocked()
            assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
            nursery.cancel_scope.cancel()

    async def test_is_abandoned_when_the_caller_gives_up(self, stalled: threading.Event) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(Connector().connect, "stalled.example", 80)
                await wait_all_tasks_blocked()
                scope.cancel()
        assert not stalled.is_set()

    async def test_that_fails_in_the_end_is_a_dns_error(self, stalled: threading.Event) -> None:
        async def fail() -> None:
            with pytest.raises(DnsError, match="try again"):
                await Connector().connect("stalled.example", 80)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            await wait_all_tasks_blocked()
            stalled.set()
