"""The SOCKS example's connections: what its clients get, whatever they, the targets and the tunnel do.

Its own ``serve`` runs in this process, before a real server and a real agent unless a test says otherwise.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import trio
from house import (
    Held,
    House,
    Service,
    Talk,
    echo,
    expect,
    firehose,
    greet,
    receive_all,
    reset,
    talks,
    through,
)
from trio.testing import memory_stream_pair, wait_all_tasks_blocked
from trio_util import AsyncValue

import tunnel
from tunnel.connect import Attempt, Connector

if TYPE_CHECKING:
    from conftest import MakeLinks


def load(name: str) -> ModuleType:
    """An example as a module: ``examples`` is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


socks = load("socks5_frontend")

NAME, IPV4, IPV6 = 3, 1, 4
GREETING, NO_LOGIN = b"\x05\x01\x00", b"\x05\x00"
WITH_LOGIN, LOGIN = b"\x05\x02\x00\x02", b"\x05\x02"
RIGHT, WRONG = b"\x01\x00", b"\x01\x01"


# -- what a client says, does and hears


Leave = Callable[[trio.SocketStream], None]


def close(stream: trio.SocketStream) -> None:
    stream.socket.close()


def address(kind: int, host: bytes, port: int) -> bytes:
    size = bytes((len(host),)) if kind == NAME else b""
    return bytes((kind,)) + size + host + port.to_bytes(2)


def request(kind: int, host: bytes, port: int, command: int = 1) -> bytes:
    return bytes((5, command, 0)) + address(kind, host, port)


def to(target: tunnel.Target) -> bytes:
    """A request for a target, by name where it has one."""
    try:
        return request(IPV4, socket.inet_aton(target.host), target.port)
    except OSError:
        return request(NAME, target.host.encode(), target.port)


def credentials(user: bytes = b"ann", password: bytes = b"s3cret", version: int = 1) -> bytes:
    return bytes((version, len(user))) + user + bytes((len(password),)) + password


def reply(code: int) -> bytes:
    return b"\x05" + bytes((code,)) + b"\x00\x01" + bytes(6)


SUCCESS = reply(0)
MIB = bytes(range(256)) * 4096


# -- who is there


class Front:
    """The example's connections, on a port of their own.

    Attributes:
        open: how many there are; can be waited for.
        scope: ends them all.
    """

    def __init__(self, client: Any, login: bytes | None) -> None:
        self.open: AsyncValue[int] = AsyncValue(0)
        self.scope = trio.CancelScope()
        self._client, self._login = client, login
        self._clients: list[trio.SocketStream] = []
        self._port = 0

    async def run(self, *, task_status: trio.TaskStatus[Front]) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self._port = listener.socket.getsockname()[1]
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(trio.serve_listeners, self._serve, [listener])
                task_status.started(self)

    async def _serve(self, local: trio.SocketStream) -> None:
        self.open.value += 1
        try:
            await socks.serve(self._client, self._login, local)
        finally:
            self.open.value -= 1

    async def call(self, words: bytes = b"") -> trio.SocketStream:
        """A client that has said this, and heard nothing yet."""
        stream = await trio.open_tcp_stream("127.0.0.1", self._port)
        self._clients.append(stream)
        await stream.send_all(words)
        return stream

    async def connect(self, target: tunnel.Target) -> trio.SocketStream:
        """A client with a stream to a target."""
        stream = await self.call(GREETING + to(target))
        await expect(stream, NO_LOGIN + SUCCESS)
        return stream

    async def all_of(self, words: bytes) -> bytes:
        """What a client that says this hears, to the end."""
        return await receive_all(await self.call(words))

    def close(self) -> None:
        for stream in self._clients:
            stream.socket.close()


StartFront = Callable[..., Awaitable[Front]]


@pytest.fixture
async def start_front(nursery: trio.Nursery) -> AsyncIterator[StartFront]:
    """Starts the example's connections over any client of the tunnel."""
    started: list[Front] = []

    async def start(client: Any, login: bytes | None = None) -> Front:
        started.append(await nursery.start(Front(client, login).run))
        return started[-1]

    yield start
    for front in started:
        front.close()


@pytest.fixture
async def agent(house: House) -> tunnel.Agent:
    """A server and an agent."""
    await house.serve()
    return await house.agent()


@pytest.fixture
async def client(house: House, agent: tunnel.Agent) -> AsyncIterator[tunnel.Client]:
    async with tunnel.open_client(str(house.server.addresses["links"][0])) as client:
        yield client


@pytest.fixture
async def front(start_front: StartFront, client: tunnel.Client) -> Front:
    """What most tests talk to: nobody has to log in."""
    return await start_front(client)


@pytest.fixture
async def guarded(start_front: StartFront, client: tunnel.Client) -> Front:
    """The same for those who know the password."""
    return await start_front(client, hashlib.sha256(credentials()[1:]).digest())


@pytest.fixture
async def echoes(house: House) -> Service:
    return await house.service(echo)


@pytest.fixture
async def asked(monkeypatch: pytest.MonkeyPatch, echoes: Service, agent: tunnel.Agent) -> list[str]:
    """The hosts that the agent was to connect to, which it takes for the echo."""
    hosts: list[str] = []
    begin = Connector.begin

    def note(connector: Connector, host: str, port: int) -> Attempt | None:
        if connector is not agent.dials._connector:
            return begin(connector, host, port)
        hosts.append(host)
        return begin(connector, "127.0.0.1", echoes.target.port)

    monkeypatch.setattr(Connector, "begin", note)
    return hosts


class OnlyDials:
    """A client whose dials end as they are told to."""

    def __init__(self, dial: Callable[[str, int], Awaitable[Any]]) -> None:
        self.dial = dial


def memory_pair() -> tuple[Any, Any]:
    """Two ends of a connection in memory, which stand for sockets."""
    return memory_stream_pair()


async def never(host: str, port: int) -> None:
    await trio.sleep_forever()


async def talk_after_the_end(stream: trio.SocketStream) -> None:
    await receive_all(stream)
    await stream.send_all(bytes(64))
    await trio.sleep_forever()


async def be_silent(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


# -- the handshake


async def test_a_handshake_in_two_segments_split_anywhere_is_served(front: Front, echoes: Service) -> None:
    whole = GREETING + to(echoes.target)
    for position in range(1, len(whole)):
        async with await front.call(whole[:position]) as stream:
            await wait_all_tasks_blocked()
            await stream.send_all(whole[position:])
            await expect(stream, NO_LOGIN + SUCCESS)
            assert await talks(stream)


async def test_a_handshake_with_login_split_anywhere_is_served(guarded: Front, echoes: Service) -> None:
    whole = WITH_LOGIN + credentials() + request(NAME, b"127.0.0.1", echoes.target.port)
    for position in range(1, len(whole)):
        async with await guarded.call(whole[:position]) as stream:
            await wait_all_tasks_blocked()
            await stream.send_all(whole[position:])
            await expect(stream, LOGIN + RIGHT + SUCCESS)
            assert await talks(stream)


async def test_data_in_the_segment_of_the_handshake_arrives_once_and_first(front: Front, echoes: Service) -> None:
    early = bytes(range(256)) * 8
    stream = await front.call(GREETING + to(echoes.target) + early)
    await stream.send_all(b"later")
    await stream.send_eof()
    assert await receive_all(stream) == NO_LOGIN + SUCCESS + early + b"later"


async def test_data_sent_while_the_dial_is_pending_arrives_once(front: Front, held: Held, echoes: Service) -> None:
    stream = await front.call(GREETING + to(through(echoes.target)))
    await held.arrived.wait_value(1)
    await stream.send_all(b"impatient")
    await stream.send_eof()
    await wait_all_tasks_blocked()
    held.open.set()
    assert await receive_all(stream) == NO_LOGIN + SUCCESS + b"impatient"


async def test_a_target_that_speaks_first_is_never_heard_before_the_reply(front: Front, house: House) -> None:
    service = await house.service(greet)
    for _ in range(200):
        async with await front.call(GREETING + to(service.target)) as stream:
            await expect(stream, NO_LOGIN + SUCCESS + b"welcome\n")


@pytest.mark.parametrize("words", [b"", b"\x05", GREETING, GREETING + b"\x05\x01\x00\x03\x09half"])
async def test_a_client_that_ends_in_the_middle_of_its_handshake_leaves_nothing(front: Front, words: bytes) -> None:
    stream = await front.call(words)
    await stream.send_eof()
    assert await receive_all(stream) in (b"", NO_LOGIN)
    await front.open.wait_value(0)


async def test_a_handshake_that_drips_ends_at_the_total_deadline(autojump_clock: trio.testing.MockClock) -> None:
    local, far = memory_pair()

    async def drip() -> None:
        for byte in GREETING + to(tunnel.Target("drip.test", 80)):
            with suppress(trio.BrokenResourceError):  # it has ended
                await far.send_all(bytes((byte,)))
            await trio.sleep(socks.HANDSHAKE / 5)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(socks.serve, OnlyDials(never), None, local)
        nursery.start_soon(drip)
        assert await receive_all(far) == NO_LOGIN


async def test_a_stream_has_no_deadline(make_links: MakeLinks, autojump_clock: trio.testing.MockClock) -> None:
    links = await make_links()
    local, far = memory_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(socks.serve, OnlyDials(partial(links.server.dial, seconds=10)), None, local)
        await far.send_all(GREETING + to(tunnel.Target("idle.test", 80)))
        await expect(far, NO_LOGIN + SUCCESS)
        await trio.sleep(10_000)
        await far.send_all(b"still there")
        assert await links.dialled.pop().receive_some() == b"still there"
        nursery.cancel_scope.cancel()


# -- where it leads


async def test_a_name_is_resolved_by_the_agent_alone(
    front: Front, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved: list[object] = []
    getaddrinfo = socket.getaddrinfo

    def resolver(host: str, *args: Any, **kwargs: Any) -> Any:
        resolved.append(host)
        return getaddrinfo(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    assert await talks(await front.connect(tunnel.Target("db.internal", 5432)))
    assert asked == ["db.internal"]
    assert "db.internal" not in resolved


@pytest.mark.parametrize(
    ("words", "host"),
    [
        (request(IPV4, bytes((192, 0, 2, 1)), 80), "192.0.2.1"),
        (request(IPV6, bytes.fromhex("20010db8") + bytes(11) + b"\x01", 80), "2001:db8::1"),
        (request(NAME, b"2001:db8::1", 80), "2001:db8::1"),
        (request(NAME, b"DB.Internal.", 80), "db.internal"),
        (request(NAME, "bücher.test".encode(), 80), "xn--bcher-kva.test"),
        (request(NAME, b".".join([b"a" * 49] * 5), 80), ".".join(["a" * 49] * 5)),
    ],
)
async def test_each_kind_of_address_reaches_the_agent(front: Front, asked: list[str], words: bytes, host: str) -> None:
    stream = await front.call(GREETING + words)
    await expect(stream, NO_LOGIN + SUCCESS)
    assert await talks(stream)
    assert asked == [host]


@pytest.mark.parametrize(
    ("host", "port"),
    [
        (b"", 80),
        (b"a" * 255, 80),
        (b".".join([b"a" * 63] * 4), 80),
        (b"\xff" * 255, 80),
        (b"a\x00b", 80),
        (b"a\r\nb", 80),
        (b"127.1", 80),
        (b"a.test", 0),
    ],
)
async def test_what_is_no_host_or_no_port_is_a_general_failure(front: Front, host: bytes, port: int) -> None:
    assert await front.all_of(GREETING + request(NAME, host, port)) == NO_LOGIN + reply(1)


# -- what is refused


@pytest.mark.parametrize("more", [0, 300_000])
@pytest.mark.parametrize(
    ("words", "heard"),
    [
        (GREETING + request(IPV4, bytes(4), 80, command=2), NO_LOGIN + reply(7)),
        (GREETING + request(IPV4, bytes(4), 80, command=3), NO_LOGIN + reply(7)),
        (GREETING + request(IPV4, bytes(4), 80, command=0), NO_LOGIN + reply(7)),
        (GREETING + request(2, b"", 80), NO_LOGIN + reply(8)),
        (GREETING + request(0, bytes(4), 80), NO_LOGIN + reply(8)),
        (GREETING + b"\x04" + request(IPV4, bytes(4), 80)[1:], NO_LOGIN),
        (b"\x05\x00", b"\x05\xff"),
        (b"\x05\x01\x02", b"\x05\xff"),
        (b"\x05\xff" + bytes(range(1, 256)), b"\x05\xff"),
        (b"\x04\x01\x00\x50\x00\x00\x00\x01a.test\x00", b""),
        (b"GET / HTTP/1.1\r\n\r\n", b""),
    ],
    ids=["bind", "udp", "command", "type", "type 0", "version", "none", "login only", "all but none", "socks4", "http"],
)
async def test_what_is_not_served_is_answered_and_closed_cleanly(
    front: Front, words: bytes, heard: bytes, more: int
) -> None:
    stream = await front.call(words + bytes(more))
    assert await receive_all(stream) == heard
    await stream.aclose()
    await front.open.wait_value(0)


async def test_a_refused_client_that_stays_is_closed_all_the_same(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socks, "LINGER", 0.05)
    stream = await front.call(b"\x05\x00")
    await expect(stream, b"\x05\xff")
    await front.open.wait_value(0)


# -- login


async def test_the_right_password_is_served(guarded: Front, echoes: Service) -> None:
    stream = await guarded.call(b"\x05\x01\x02" + credentials() + to(echoes.target))
    await expect(stream, LOGIN + RIGHT + SUCCESS)
    assert await talks(stream)


@pytest.mark.parametrize(
    "words",
    [
        credentials(password=b"S3cret"),
        credentials(password=b"s3cret\n"),
        credentials(password=b""),
        credentials(user=b"bob"),
        credentials(user=b""),
        credentials(user=b"an", password=b"ns3cret"),
        credentials(user=b"x" * 255, password=b"y" * 255),
        credentials(version=5),
    ],
)
async def test_wrong_credentials_are_refused(guarded: Front, echoes: Service, words: bytes) -> None:
    assert await guarded.all_of(WITH_LOGIN + words + to(echoes.target)) == LOGIN + WRONG
    assert not echoes.opened.value


async def test_who_offers_no_login_is_refused(guarded: Front, echoes: Service) -> None:
    assert await guarded.all_of(GREETING + to(echoes.target)) == b"\x05\xff"
    assert not echoes.opened.value


# -- dials that fail


async def test_a_closed_port_is_5_and_logged(front: Front, house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "socks5")
    target = house.closed_port()
    assert await front.all_of(GREETING + to(target)) == NO_LOGIN + reply(5)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "socks5"]
    assert f"port={target.port}" in line
    assert "Connection refused" in line


async def test_a_closed_port_is_5_whatever_the_client_has_sent_already(front: Front, house: House) -> None:
    words = GREETING + to(house.closed_port()) + bytes(300_000)
    assert await front.all_of(words) == NO_LOGIN + reply(5)


CODES = {
    tunnel.Refused: 5,
    tunnel.Unreachable: 4,
    tunnel.DnsError: 4,
    tunnel.DialTimeout: 6,
    tunnel.Denied: 2,
    tunnel.NoBackend: 1,
    tunnel.NoServer: 1,
    tunnel.RefusedDraining: 1,
    tunnel.TooMany: 1,
    tunnel.LinkLost: 1,
    tunnel.DialProtocolError: 1,
}


@pytest.mark.parametrize("kind", tunnel.DialError.__subclasses__())
async def test_each_dial_error_has_its_reply(start_front: StartFront, kind: type[tunnel.DialError]) -> None:
    async def fail(host: str, port: int) -> None:
        raise kind("so it is")

    front = await start_front(OnlyDials(fail))
    assert await front.all_of(GREETING + to(tunnel.Target("a.test", 80))) == NO_LOGIN + reply(CODES[kind])


async def test_without_a_server_dials_fail_until_there_is_one(house: House, start_front: StartFront) -> None:
    address = house.closed_port()
    async with tunnel.open_client(str(address)) as client:
        front = await start_front(client)
        service = await house.service(echo)
        assert await front.all_of(GREETING + to(service.target)) == NO_LOGIN + reply(1)
        house.close()
        await house.serve(listen=tunnel.ListenAddress(address.host, address.port))
        await house.agent()
        assert await talks(await front.connect(service.target))


async def test_a_fault_in_one_connection_ends_that_one_alone(
    start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    async def dial(host: str, port: int) -> None:
        if host == "fault.test":
            raise RuntimeError("a fault")
        await trio.sleep_forever()

    front = await start_front(OnlyDials(dial))
    other = await front.call(GREETING + to(tunnel.Target("a.test", 80)))
    await expect(other, NO_LOGIN)
    assert await front.all_of(GREETING + to(tunnel.Target("fault.test", 80))) == NO_LOGIN
    await front.open.wait_value(1)
    assert [record.getMessage() for record in caplog.records] == ["fault in a connection"]


# -- how streams end


async def test_a_client_that_ends_its_direction_gets_all_of_the_answer(front: Front, house: House) -> None:
    heard: list[bytes] = []

    async def answer_at_the_end(stream: trio.SocketStream) -> None:
        heard.append(await receive_all(stream))
        await wait_all_tasks_blocked()
        await stream.send_all(MIB)

    stream = await front.connect((await house.service(answer_at_the_end)).target)
    await stream.send_all(b"all of it")
    await stream.send_eof()
    assert await receive_all(stream) == MIB
    assert heard == [b"all of it"]


async def test_a_target_that_ends_its_direction_still_hears_the_client(front: Front, house: House) -> None:
    heard: list[bytes] = []

    async def end_first(stream: trio.SocketStream) -> None:
        await stream.send_eof()
        heard.append(await receive_all(stream))

    service = await house.service(end_first)
    stream = await front.connect(service.target)
    assert await receive_all(stream) == b""
    await stream.send_all(MIB)
    await stream.aclose()
    await service.open.wait_value(0)
    assert heard == [MIB]


async def test_a_target_that_resets_is_a_reset_at_the_client(front: Front, house: House) -> None:
    async def send_and_reset(stream: trio.SocketStream) -> None:
        await stream.send_all(MIB)
        reset(stream)

    stream = await front.connect((await house.service(send_and_reset)).target)
    with pytest.raises(trio.BrokenResourceError):
        await receive_all(stream)


@pytest.mark.parametrize("talk", [echo, firehose])
async def test_a_client_that_resets_is_a_reset_at_the_target(front: Front, house: House, talk: Talk) -> None:
    ends: list[str] = []

    async def note_the_end(stream: trio.SocketStream) -> None:
        try:
            await talk(stream)
            ends.append("end")
        except trio.BrokenResourceError:
            ends.append("reset")

    service = await house.service(note_the_end)
    stream = await front.connect(service.target)
    await service.opened.wait_value(1)
    reset(stream)
    await service.open.wait_value(0)
    assert ends == ["reset"]


async def test_a_connection_that_is_cut_is_a_reset_at_both_ends(front: Front, house: House) -> None:
    service = await house.service(echo)
    stream = await front.connect(service.target)
    front.scope.cancel()
    with pytest.raises(trio.BrokenResourceError):
        await stream.receive_some()
    await service.open.wait_value(0)


async def test_a_connection_that_goes_on_after_a_signal_is_cut_at_the_deadline(
    house: House, agent: tunnel.Agent, echoes: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    say, said = trio.open_memory_channel[str](1)
    monkeypatch.setattr(socks, "GRACE", 0.05)
    monkeypatch.setattr(socks.click, "echo", say.send_nowait)

    async def main() -> None:
        servers = (tunnel.Target.parse(str(house.server.addresses["links"][0])),)
        codes.append(await socks.main(tunnel.ListenAddress("127.0.0.1", 0), servers, None))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(main)
        where = tunnel.Target.parse((await said.receive()).removeprefix("listening on "))
        async with await trio.open_tcp_stream(where.host, where.port) as stream:
            await stream.send_all(GREETING + to(echoes.target))
            await expect(stream, NO_LOGIN + SUCCESS)
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some()
    assert codes == [3]


@pytest.mark.parametrize("talk", [talk_after_the_end, be_silent])
@pytest.mark.parametrize("leave", [close, reset])
async def test_a_dial_that_succeeds_when_its_client_has_left_is_undone(
    front: Front, client: tunnel.Client, agent: tunnel.Agent, held: Held, house: House, leave: Leave, talk: Talk
) -> None:
    service = await house.service(talk)
    stream = await front.call(GREETING + to(through(service.target)))
    await expect(stream, NO_LOGIN)
    await held.arrived.wait_value(1)
    leave(stream)
    held.open.set()
    await service.opened.wait_value(1)
    with trio.fail_after(10):
        await front.open.wait_value(0)
    await agent.life.open.wait_value(0)
    for link in (*agent.sync.links.values(), client.link):
        assert link is not None
        assert not link.open_streams.value


async def test_a_client_that_resets_after_its_end_is_a_reset_at_a_silent_target(
    front: Front, agent: tunnel.Agent, house: House
) -> None:
    stream = await front.connect((await house.service(be_silent)).target)
    await stream.send_eof()
    await wait_all_tasks_blocked()
    reset(stream)
    with trio.fail_after(10):
        await front.open.wait_value(0)
    await agent.life.open.wait_value(0)


async def test_a_client_that_resets_while_its_target_takes_nothing_is_a_reset_at_the_target(
    front: Front, agent: tunnel.Agent, house: House
) -> None:
    stream = await front.connect((await house.service(be_silent)).target)

    async def send_for_ever() -> None:
        with suppress(trio.ClosedResourceError):
            while True:
                await stream.send_all(MIB)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_for_ever)
        await wait_all_tasks_blocked(0.05)
        reset(stream)
    with trio.fail_after(10):
        await front.open.wait_value(0)
    await agent.life.open.wait_value(0)


async def test_connections_that_end_normally_log_nothing(
    front: Front, echoes: Service, caplog: pytest.LogCaptureFixture
) -> None:
    stream = await front.connect(echoes.target)
    caplog.set_level(logging.DEBUG, "socks5")
    assert await talks(stream)
    await stream.send_eof()
    assert await receive_all(stream) == b""
    await front.open.wait_value(0)
    assert not [record for record in caplog.records if record.name == "socks5"]
