"""What tests of links and of everything above them share: two links back to back, a peer made of raw frames, sockets.

Rules that hold here:

- Over ``memory`` everything is deterministic and the mock clock may be used; ``sockets`` are real loopback TCP.
- The server's link dials, the agent's link answers as its ``on_dial`` says; a test may replace that at any time.
- Nothing here asserts; whatever was opened is closed when the test is over.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Protocol

import pytest
import trio
from house import Held, House, open_house
from hypothesis import HealthCheck, settings
from raw_server import RawServer
from stream_transport import StreamTransport
from trio.testing import memory_stream_pair

from tunnel.frames import Decoder
from tunnel.handshake import AcceptingHandshake, DiallingHandshake
from tunnel.identity import Identity
from tunnel.limits import Limits, Timeouts
from tunnel.link import Link, refuse_dials
from tunnel.packets import VERSION, DialReq, Hello, Packet, Welcome
from tunnel.stream import TunnelStream
from tunnel.transport import SocketTransport, Transport

# A loaded machine is slow now and then, and the first example may have tables to load: neither is a fault.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_xdist_auto_num_workers() -> int:
    """Two for each processor: what tests of whole programs do is mostly to wait."""
    return 2 * (os.cpu_count() or 1)


def pytest_configure(config: pytest.Config) -> None:
    """Where Python keeps no bytecode, workers and programs by the hundred would compile the same again and again."""
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(config.rootpath / ".pytest_cache" / "bytecode"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have each worker begin with what takes long: tests that were given more time than others, then whole programs.

    A worker's first share is a run of the list; what is short comes last, for whoever has time left. Tests of whole
    programs stay with their module, which may have some that serve all of it.
    """
    workers: int = getattr(config, "workerinput", {}).get("workercount", 1)
    long, whole, short = [], defaultdict(list), []
    for item in items:
        if item.get_closest_marker("timeout"):
            long.append(item)
        elif item.path.parent.name == "scenarios":
            whole[item.path].append(item)
        else:
            short.append(item)
    hands = [long[number::workers] for number in range(workers)]
    for module in sorted(whole.values(), key=len, reverse=True):
        min(hands, key=len).extend(module)
    total, items[:] = len(items), []
    for number, hand in enumerate(hands):
        rest = max(0, (total - len(items)) // (workers - number) - len(hand))
        items += hand + short[:rest]
        del short[:rest]


SERVER, AGENT = Identity("server", "server"), Identity("agent", "agent")
_LIMITS, _TIMEOUTS = Limits(), Timeouts()

OnDial = Callable[[TunnelStream, DialReq], None]
Sockets = tuple[socket.socket, socket.socket]


class TcpPair(Protocol):
    """Makes two connected, non-blocking TCP sockets; ``buffers`` bytes in the kernel each way, if given."""

    def __call__(self, buffers: int | None = None) -> Sockets: ...


def _tcp_pair(buffers: int | None) -> Sockets:
    one = socket.socket()
    with socket.socket() as listener:
        if buffers:
            for sock in (one, listener):  # an accepted socket has its listener's
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffers)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        one.connect(listener.getsockname())
        other, _ = listener.accept()
    for sock in (one, other):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
    return one, other


@pytest.fixture
def tcp_pair() -> Iterator[TcpPair]:
    opened: list[socket.socket] = []

    def make(buffers: int | None = None) -> Sockets:
        pair = _tcp_pair(buffers)
        opened.extend(pair)
        return pair

    yield make
    for sock in opened:
        sock.close()


class LinkPair:
    """Two links that are linked to each other.

    Attributes:
        server, agent: the links; streams are dialled at ``server`` and arrive at ``agent``.
        on_dial: what the agent does with a dial; takes it and remembers it in ``dialled`` unless replaced.
    """

    def __init__(self, ends: tuple[Transport, Transport], limits: Limits, timeouts: Timeouts) -> None:
        self.dialled: deque[TunnelStream] = deque()
        self.on_dial: Callable[[TunnelStream, DialReq], None] = self.accept
        self.server = Link(ends[0], AcceptingHandshake(SERVER), limits=limits, timeouts=timeouts)
        self.agent = Link(
            ends[1],
            DiallingHandshake(AGENT),
            limits=limits,
            timeouts=timeouts,
            on_dial=self._dialled,
        )

    def _dialled(self, stream: TunnelStream, request: DialReq) -> None:
        self.on_dial(stream, request)

    def accept(self, stream: TunnelStream, request: DialReq) -> None:
        stream.core.accept()
        self.dialled.append(stream)

    async def open(self) -> tuple[TunnelStream, TunnelStream]:
        """One stream: the server's end and the agent's."""
        stream = await self.server.dial("target", 80, seconds=10)
        return stream, self.dialled.pop()

    async def idle(self) -> None:
        """Return when neither side has a stream."""
        await self.server.open_streams.wait_value(0)
        await self.agent.open_streams.wait_value(0)


class MakeLinks(Protocol):
    """Makes a ``LinkPair`` that runs until the test is over."""

    def __call__(
        self, kind: str = "memory", *, limits: Limits = ..., timeouts: Timeouts = ..., buffers: int | None = None
    ) -> Awaitable[LinkPair]: ...


@pytest.fixture
def make_links(nursery: trio.Nursery, tcp_pair: TcpPair) -> MakeLinks:
    async def make(
        kind: str = "memory",
        *,
        limits: Limits = _LIMITS,
        timeouts: Timeouts = _TIMEOUTS,
        buffers: int | None = None,
    ) -> LinkPair:
        ends: tuple[Transport, Transport]
        if kind == "memory":
            one, other = memory_stream_pair()
            ends = StreamTransport(one), StreamTransport(other)
        else:
            left, right = tcp_pair(buffers)
            ends = SocketTransport(left), SocketTransport(right)
        pair = LinkPair(ends, limits, timeouts)
        nursery.start_soon(pair.agent.run)
        await nursery.start(pair.server.run)
        while pair.agent.peer is None:
            await trio.lowlevel.checkpoint()
        return pair

    return make


@pytest.fixture(params=["memory", "sockets"])
def kind(request: pytest.FixtureRequest) -> str:
    """What the links of a test run over, for tests where that may matter."""
    return str(request.param)


@pytest.fixture
async def links(make_links: MakeLinks, kind: str) -> LinkPair:
    """Two links, over memory and over sockets."""
    return await make_links(kind)


@pytest.fixture
async def house(caplog: pytest.LogCaptureFixture) -> AsyncIterator[House]:
    """A whole tunnel in this process, of which nothing may be logged as an error."""
    async with open_house() as house:
        yield house
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


class RawPeer:
    """The far end of a link, without a link: sends whatever it is told, and decodes what it gets.

    Attributes:
        stream: the connection.
        data: payload that arrived, in order, with its stream.
    """

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self.stream = stream
        self.data: list[tuple[int, bytes]] = []
        self._packets: deque[Packet] = deque()
        self._decoder = Decoder(
            1 << 20, self._packets.append, lambda number, data: self.data.append((number, bytes(data)))
        )

    async def send(self, *what: Packet | bytes) -> None:
        await self.stream.send_all(b"".join(one if isinstance(one, bytes) else one.encode() for one in what))

    async def receive(self) -> bool:
        """Take what there is; False at the end of the connection."""
        try:
            data = await self.stream.receive_some(64 * 1024)
        except trio.BrokenResourceError:
            return False
        self._decoder.feed(data)
        return bool(data)

    async def next(self) -> Packet | None:
        """The next packet but DATA; None at the end of the connection."""
        while not self._packets:
            if not await self.receive():
                return None
        return self._packets.popleft()

    async def rest(self) -> list[Packet]:
        """All packets to the end of the connection."""
        found = []
        while packet := await self.next():
            found.append(packet)
        return found

    async def shake_hands(self, me: Identity) -> Packet | None:
        """Do what a peer with this identity does; the link's own HELLO or WELCOME."""
        if me.role == "server":
            theirs = await self.next()
            await self.send(Welcome(VERSION, me.to_info()))
            return theirs
        await self.send(Hello(VERSION, me.to_info()))
        return await self.next()


class RawLink:
    """One link, not yet running, and the raw peer at its other end."""

    def __init__(self, link: Link, peer: RawPeer) -> None:
        self.link = link
        self.peer = peer


class MakeRaw(Protocol):
    """Makes one link in a role, not yet running, with a raw peer at its other end."""

    def __call__(self, role: str, *, limits: Limits = ..., on_dial: OnDial = refuse_dials) -> RawLink: ...


@pytest.fixture
def make_raw(tcp_pair: TcpPair) -> MakeRaw:
    def make(role: str, *, limits: Limits = _LIMITS, on_dial: OnDial = refuse_dials) -> RawLink:
        near, far = memory_stream_pair()
        handshake = AcceptingHandshake(SERVER) if role == "server" else DiallingHandshake(AGENT)
        link = Link(StreamTransport(near), handshake, limits=limits, timeouts=Timeouts(), on_dial=on_dial)
        return RawLink(link, RawPeer(far))

    return make


def _stream_of(sock: socket.socket) -> trio.SocketStream:
    return trio.SocketStream(trio.socket.from_stdlib_socket(sock))


@pytest.fixture
def as_stream() -> Callable[[socket.socket], trio.SocketStream]:
    """Makes a trio stream of a plain socket."""
    return _stream_of


@pytest.fixture
def reset_socket() -> Callable[[trio.SocketStream], Awaitable[None]]:
    """Closes a socket so that its peer sees a reset."""

    async def reset(stream: trio.SocketStream) -> None:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await stream.aclose()

    return reset


@pytest.fixture
def was_reset() -> Callable[[BaseException], bool]:
    """Whether a stream broke because the peer reset the connection."""
    return lambda error: isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ECONNRESET


@pytest.fixture
async def raw(house: House) -> AsyncIterator[RawServer]:
    """A server made of frames that has read the HELLO of an agent."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        server = RawServer(listener)
        await house.nursery.start(server.agent.run)
        await server.accept()
        yield server
        server.stream.socket.close()
