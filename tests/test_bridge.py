"""The bridge: a client's stream led on through an agent's by a server in the middle, over memory and over loopback.

Both ends are plain links, so that what a test sees is what the server between them does. Where an end must not behave
like a link, it is a ``Raw`` one; over ``lockstep`` streams what such an end has not read is still in the server.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import trio
from house import House, open_house, receive_all, receive_exactly
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stream_transport import StreamTransport
from trio.testing import (
    MemoryReceiveStream,
    MemorySendStream,
    MockClock,
    check_half_closeable_stream,
    lockstep_stream_pair,
    memory_stream_pair,
    memory_stream_pump,
    wait_all_tasks_blocked,
)

from tunnel import outbox
from tunnel import secure as secure_module
from tunnel.bounds import Seat
from tunnel.connect import Connector
from tunnel.core import State, Stream
from tunnel.errors import CUT, DialError, LinkLost, Refused, StreamReset
from tunnel.frames import Decoder, data_header
from tunnel.handshake import DiallingHandshake
from tunnel.identity import Identity
from tunnel.limits import Limits, Timeouts
from tunnel.link import Link, refuse_dials
from tunnel.packets import VERSION, Close, Credit, DialReq, DialRsp, Eof, GoAway, Hello, Packet, Ping, Pong
from tunnel.server import Server
from tunnel.stream import TunnelStream
from tunnel.transport import SocketTransport, Transport

Two = tuple[TunnelStream, TunnelStream]
MIB = 1024 * 1024
WINDOW = Limits().first_window
BLOB = random.Random(1).randbytes(MIB)


class Raw:
    """One end of a link made of frames: does nothing by itself.

    Attributes:
        data: payload that arrived, by stream.
    """

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self.data: dict[int, bytearray] = defaultdict(bytearray)
        self._stream = stream
        self._packets: deque[Packet] = deque()
        self._decoder = Decoder(MIB, self._packets.append, lambda number, data: self.data[number].extend(data))

    async def send(self, *what: Packet | bytes) -> None:
        await self._stream.send_all(b"".join(one if isinstance(one, bytes) else one.encode() for one in what))

    async def next(self) -> Packet:
        """The next packet that is not DATA."""
        while not self._packets:
            self._decoder.feed(await self._stream.receive_some())
        return self._packets.popleft()


def a_seat(server: Server) -> Seat:
    seat = server.bounds.handshakes.enter("memory")
    assert seat
    return seat


class Tunnel:
    """A server, and links to it. Clients' links can ``dial``; the streams arrive at the agents' links.

    Attributes:
        server: the real one; over ``memory``, what it thinks are sockets are not.
        client: the first client's link.
        agents: links by the agent's name.
        arrived: streams that came to each agent.
        on_dial: what the agents do with a dial; takes it unless replaced.
    """

    client: Link

    def __init__(self, nursery: trio.Nursery, server: Server, kind: str) -> None:
        self.server = server
        self.agents: dict[str, Link] = {}
        self.arrived: dict[str, deque[TunnelStream]] = defaultdict(deque)
        self.on_dial: Callable[[TunnelStream, DialReq], None] = lambda stream, request: stream.core.accept()
        self._nursery = nursery
        self._kind = kind

    async def add_client(self, limits: Limits = Limits()) -> Link:  # noqa: B008  # it is frozen
        return await self._add(Identity("client", "client", body_limit=limits.body), limits, refuse_dials)

    async def add_agent(self, name: str = "one", limits: Limits = Limits()) -> Link:  # noqa: B008
        def dialled(stream: TunnelStream, request: DialReq) -> None:
            self.on_dial(stream, request)
            self.arrived[name].append(stream)

        me = Identity("agent", name, body_limit=limits.body)
        link = self.agents[name] = await self._add(me, limits, dialled)
        await self.of(link).open_streams.wait_value(0)
        return link

    async def _add(self, me: Identity, limits: Limits, on_dial: Callable[[TunnelStream, DialReq], None]) -> Link:
        transport = await self._connect()
        link = Link(transport, DiallingHandshake(me), limits=limits, timeouts=Timeouts(), on_dial=on_dial)
        return await self._nursery.start(link.run)

    async def _connect(self) -> Transport:
        if self._kind == "memory":
            near, far = memory_stream_pair()
            self._nursery.start_soon(self.server._link, far, a_seat(self.server))
            return StreamTransport(near)
        address = self.server.addresses["links"][0]
        return SocketTransport(await Connector().connect(address.host, address.port))

    async def raw(self, role: str, name: str = "raw") -> tuple[Raw, Link]:
        """A raw end and the server's, over a stream that holds nothing: what it does not read, the server keeps."""
        near, far = lockstep_stream_pair()
        self._nursery.start_soon(self.server._link, far, a_seat(self.server))
        me, raw = Identity(role, name), Raw(near)
        await raw.send(Hello(VERSION, me.to_info()))
        await raw.next()
        return raw, self._end(me.instance)

    def of(self, link: Link) -> Link:
        """The server's end of a link."""
        return self._end(link._handshake.me.instance)

    def _end(self, instance: str) -> Link:
        (found,) = [link for link in self.server._links if link.peer is not None and link.peer.instance == instance]
        return found

    async def dial(self, agent: str = "one", client: Link | None = None) -> TunnelStream:
        """The client's end of a new stream through an agent."""
        return await (client or self.client).dial("target", 80, seconds=10, options={"agent": agent})

    async def open(self, agent: str = "one", client: Link | None = None) -> Two:
        """A stream: the client's end and the agent's."""
        return await self.dial(agent, client), self.arrived[agent].pop()

    def queued(self) -> int:
        """Bytes of DATA that the server holds for its links, but for what their transports have."""
        return sum(link.session.out.queued for link in self.server._links)

    async def idle(self) -> None:
        """Return when no link has a stream."""
        for link in (self.client, *self.agents.values(), *self.server._links):
            await link.open_streams.wait_value(0)
        await self.server.life.open.wait_value(0)


@pytest.fixture
async def memory(house: House, monkeypatch: pytest.MonkeyPatch) -> Tunnel:
    """A server with a client and an agent, over memory."""
    monkeypatch.setattr(secure_module, "SocketTransport", StreamTransport)
    return await _furnished(Tunnel(house.nursery, await house.serve(), "memory"))


@pytest.fixture
async def loopback(house: House) -> Tunnel:
    """The same over real sockets."""
    return await _furnished(Tunnel(house.nursery, await house.serve(), "loopback"))


async def _furnished(tunnel: Tunnel) -> Tunnel:
    tunnel.client = await tunnel.add_client()
    await tunnel.add_agent()
    return tunnel


@pytest.fixture(params=["memory", "loopback"])
def tunnel(request: pytest.FixtureRequest) -> Tunnel:
    """A server with a client and an agent, over each."""
    return request.getfixturevalue(request.param)


async def echo(stream: TunnelStream) -> None:
    async for data in stream:
        await stream.send_all(data)


async def flood(stream: TunnelStream) -> None:
    while True:
        await stream.send_all(bytes(64 * 1024))


async def exchange(near: TunnelStream, far: TunnelStream, words: bytes = b"hello") -> bool:
    """Whether what is said arrives, each way."""
    await near.send_all(words)
    heard = await receive_exactly(far, len(words))
    await far.send_all(words)
    return heard == words == await receive_exactly(near, len(words))


async def reset_of(stream: TunnelStream) -> tuple[str, str]:
    """Code and text, when it has been reset."""
    with pytest.raises(trio.BrokenResourceError) as caught:
        await stream.wait_ended()
    cause = caught.value.__cause__
    assert isinstance(cause, StreamReset)
    return cause.code, cause.text


# -- bytes


async def test_bytes_arrive_in_order_both_ways_at_once(tunnel: Tunnel) -> None:
    near, far = await tunnel.open()

    async def carry(source: TunnelStream, sink: TunnelStream, data: bytes) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(source.send_all, data)
            assert await receive_exactly(sink, len(data)) == data

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carry, near, far, BLOB)
        nursery.start_soon(carry, far, near, BLOB[::-1])


async def test_a_stream_has_other_numbers_on_the_next_link(tunnel: Tunnel) -> None:
    await tunnel.open()
    near, far = await tunnel.open(client=await tunnel.add_client())
    assert (near.core.id, far.core.id) == (1, 2)
    assert await exchange(near, far)


async def test_streams_of_equal_numbers_on_two_agents_do_not_mix(tunnel: Tunnel) -> None:
    await tunnel.add_agent("two")
    one, two = await tunnel.open("one"), await tunnel.open("two")
    assert one[1].core.id == two[1].core.id
    for source, words in zip((*one, *two), (b"1->", b"<-1", b"2->", b"<-2"), strict=True):
        await source.send_all(words * 1000)
        await source.send_eof()
    heard = [await receive_all(stream) for stream in (one[1], one[0], two[1], two[0])]
    assert heard == [b"1->" * 1000, b"<-1" * 1000, b"2->" * 1000, b"<-2" * 1000]


async def test_streams_of_equal_numbers_from_two_clients_do_not_mix(tunnel: Tunnel) -> None:
    one, two = await tunnel.open(), await tunnel.open(client=await tunnel.add_client())
    assert one[0].core.id == two[0].core.id
    assert await exchange(*one, b"first" * 1000)
    assert await exchange(*two, b"other" * 1000)


async def test_what_an_agent_sends_along_with_its_answer_comes_first(tunnel: Tunnel) -> None:
    def greet(stream: TunnelStream, request: DialReq) -> None:
        stream.core.accept()
        stream.core.send(b"welcome")

    tunnel.on_dial = greet
    near, far = await tunnel.open()
    await far.send_all(b" in")
    assert await receive_exactly(near, 10) == b"welcome in"


async def test_a_target_that_has_said_all_when_it_answers_is_heard(tunnel: Tunnel) -> None:
    def greet_and_end(stream: TunnelStream, request: DialReq) -> None:
        stream.core.accept()
        stream.core.send(b"welcome")
        stream.core.send_eof()

    tunnel.on_dial = greet_and_end
    near, far = await tunnel.open()
    assert await receive_all(near) == b"welcome"
    await near.send_all(b"thanks")
    await near.send_eof()
    assert await receive_all(far) == b"thanks"
    await tunnel.idle()


@pytest.mark.parametrize("up", [True, False])
async def test_a_long_send_arrives_whole(tunnel: Tunnel, up: bool) -> None:
    near, far = await tunnel.open()
    source, sink = (near, far) if up else (far, near)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(source.send_all, BLOB * 8)
        assert await receive_exactly(sink, 8 * MIB) == BLOB * 8


@pytest.mark.parametrize("up", [True, False])
async def test_frames_are_no_longer_than_the_next_peer_takes(tunnel: Tunnel, up: bool) -> None:
    small = Limits(body=4096)
    client = await tunnel.add_client(Limits() if up else small)
    await tunnel.add_agent("two", small if up else Limits())
    near, far = await tunnel.open("two", client)
    source, sink = (near, far) if up else (far, near)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(source.send_all, BLOB)
        assert await receive_exactly(sink, MIB) == BLOB


# -- ends


async def test_a_client_that_ends_its_direction_gets_a_long_answer(tunnel: Tunnel) -> None:
    near, far = await tunnel.open()
    await near.send_all(b"question")
    await near.send_eof()
    assert await receive_all(far) == b"question"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(far.send_all, BLOB)
        assert await receive_exactly(near, MIB) == BLOB
    await far.send_eof()
    assert await receive_all(near) == b""
    await tunnel.idle()


async def test_a_target_that_ends_its_direction_gets_a_long_upload(tunnel: Tunnel) -> None:
    near, far = await tunnel.open()
    await far.send_eof()
    assert await receive_all(near) == b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.send_all, BLOB * 10)
        assert await receive_exactly(far, 10 * MIB) == BLOB * 10
    await near.send_eof()
    assert await receive_all(far) == b""
    await tunnel.idle()


@pytest.mark.parametrize("by_client", [True, False])
async def test_a_reset_arrives_with_its_code_and_text(tunnel: Tunnel, by_client: bool) -> None:
    near, far = await tunnel.open()
    one, other = (near, far) if by_client else (far, near)
    one.reset("reset", "the cat did it")
    assert await reset_of(other) == ("reset", "the cat did it")
    await tunnel.idle()


@pytest.mark.parametrize("by_client", [True, False])
async def test_a_reset_arrives_after_the_ends_of_both_were_under_way(tunnel: Tunnel, by_client: bool) -> None:
    near, far = await tunnel.open()
    one, other = (near, far) if by_client else (far, near)
    await other.send_eof()
    assert await receive_all(one) == b""
    one.reset("reset", "after all")
    assert await reset_of(other) == ("reset", "after all")
    await tunnel.idle()


@pytest.mark.parametrize("by_client", [True, False])
async def test_a_reset_by_who_has_sent_its_end_arrives_all_the_same(tunnel: Tunnel, by_client: bool) -> None:
    near, far = await tunnel.open()
    one, other = (near, far) if by_client else (far, near)
    await one.send_eof()
    assert await receive_all(other) == b""
    one.reset("reset", "after all")
    assert await reset_of(other) == ("reset", "after all")
    await tunnel.idle()


async def test_a_reset_ends_no_other_stream(tunnel: Tunnel) -> None:
    (near, _), others = await tunnel.open(), await tunnel.open()
    near.reset("reset", "gone")
    assert await exchange(*others)


async def test_a_target_that_resets_as_it_answers_is_a_reset(tunnel: Tunnel) -> None:
    def accept_and_reset(stream: TunnelStream, request: DialReq) -> None:
        stream.core.accept()
        stream.core.send(b"lost")
        stream.core.reset("reset", "changed its mind")

    tunnel.on_dial = accept_and_reset
    assert await reset_of(await tunnel.dial()) == ("reset", "changed its mind")
    await tunnel.idle()


async def test_a_server_that_is_cut_resets_both_ends(tunnel: Tunnel) -> None:
    near, far = await tunnel.open()
    tunnel.server.life.cut()
    assert await reset_of(near) == (CUT, "the server is leaving, and the time is over")
    assert await reset_of(far) == (CUT, "the server is leaving, and the time is over")


@pytest.mark.parametrize("clogged", [True, False])
async def test_trios_checker(loopback: Tunnel, clogged: bool) -> None:
    async def full() -> Two:
        near, far = await loopback.open()
        await _fill(near)
        await _fill(far)
        return near, far

    await check_half_closeable_stream(loopback.open, full if clogged else None)


async def test_trios_checker_the_other_way_round(memory: Tunnel) -> None:
    async def swapped() -> Two:
        near, far = await memory.open()
        return far, near

    await check_half_closeable_stream(swapped, None)
    await memory.idle()


async def _fill(stream: TunnelStream) -> None:
    while stream.core.credit:
        await stream.send_all(bytes(min(stream.core.credit, 64 * 1024)))


# -- credit


async def test_each_end_has_the_window_of_the_other(tunnel: Tunnel) -> None:
    client = await tunnel.add_client(Limits(first_window=1000))
    await tunnel.add_agent("two", Limits(first_window=2000))
    near, far = await tunnel.open("two", client)
    assert (near.core.credit, far.core.credit) == (2000, 1000)


@pytest.mark.parametrize("up", [True, False])
async def test_the_server_keeps_nothing_when_nobody_reads(tunnel: Tunnel, up: bool) -> None:
    near, far = await tunnel.open()
    source, sink = (near, far) if up else (far, near)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(source.send_all, BLOB)
        while sink.core.window.left:  # all that may come has come
            await wait_all_tasks_blocked()
        assert (source.core.credit, tunnel.queued()) == (0, 0)
        assert await receive_exactly(sink, MIB) == BLOB


@pytest.mark.parametrize("up", [True, False])
async def test_the_window_grows_where_the_bytes_are_read(tunnel: Tunnel, up: bool) -> None:
    near, far = await tunnel.open()
    source, sink = (near, far) if up else (far, near)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(source.send_all, BLOB * 8)
        await receive_exactly(sink, 8 * MIB)
    assert sink.core.window.size > WINDOW


async def _raw_ends(tunnel: Tunnel) -> tuple[Raw, Raw]:
    """A raw client and a raw agent, and a stream between them: 5 on the one link, 1 on the other."""
    (client, _), (agent, _) = await tunnel.raw("client"), await tunnel.raw("agent")
    await client.send(DialReq(5, "target", 80, WINDOW, 1000, {"agent": "raw"}))
    assert await agent.next() == DialReq(1, "target", 80, WINDOW, 1000, {})
    await agent.send(DialRsp(1, "ok", "", WINDOW))
    assert await client.next() == DialRsp(5, "ok", "", WINDOW)
    return client, agent


@pytest.mark.parametrize("packet", [Ping(5, 7), Pong(5, 7), Credit(5, 7)], ids=lambda packet: type(packet).__name__)
async def test_what_is_about_a_window_passes_to_the_other_end(memory: Tunnel, packet: Packet) -> None:
    client, agent = await _raw_ends(memory)
    there = replace(packet, stream=1)
    await client.send(packet)
    assert await agent.next() == there
    await agent.send(there)
    assert await client.next() == packet


@pytest.mark.parametrize("late", [True, False])
async def test_credit_that_comes_while_a_dial_is_pending_is_not_lost(memory: Tunnel, late: bool) -> None:
    client, _ = await memory.raw("client")
    agent, _ = await memory.raw("agent")
    await client.send(DialReq(1, "target", 80, 10, 1000, {"agent": "raw"}), *([] if late else [Credit(1, 100)]))
    dial = await agent.next()
    assert isinstance(dial, DialReq)
    if late:
        await client.send(Credit(1, 100))
        await wait_all_tasks_blocked()
    await agent.send(DialRsp(dial.stream, "ok", "", 1000))
    await client.next()
    more = await agent.next() if late else None
    assert dial.window + (more.amount if isinstance(more, Credit) else 0) == 110


async def test_credit_that_comes_behind_the_agents_answer_is_not_lost(memory: Tunnel) -> None:
    client, _ = await memory.raw("client")
    agent, _ = await memory.raw("agent")
    await client.send(DialReq(1, "target", 80, 10, 1000, {"agent": "raw"}))
    dial = await agent.next()
    await agent.send(DialRsp(dial.stream, "ok", "", 0), Credit(dial.stream, 100))
    answer = await client.next()
    assert isinstance(answer, DialRsp)
    more = await client.next() if not answer.window else None
    assert answer.window + (more.amount if isinstance(more, Credit) else 0) == 100


async def test_a_stream_that_is_not_read_holds_up_no_other(tunnel: Tunnel, nursery: trio.Nursery) -> None:
    (near, far), others = await tunnel.open(), await tunnel.open()
    nursery.start_soon(flood, far)
    while near.core.window.left:
        await wait_all_tasks_blocked()
    for _ in range(20):
        assert await exchange(*others)
        assert tunnel.queued() <= WINDOW


async def test_a_client_that_does_not_read_its_link_holds_up_no_other(memory: Tunnel, nursery: trio.Nursery) -> None:
    raw, of_raw = await memory.raw("client")
    await raw.send(DialReq(1, "target", 80, 300_000, 1000, {}))
    await raw.next()
    nursery.start_soon(flood, memory.arrived["one"].pop())
    await wait_all_tasks_blocked()
    others = await memory.open()
    for _ in range(20):
        assert await exchange(*others)
    assert 0 < of_raw.session.out.queued < 300_000 + 20 * 16  # what it may be sent, in frames


async def test_what_passes_holds_up_no_sender_of_the_servers_own(memory: Tunnel) -> None:
    """Streams of front-ends share the agent's link; they wait for what they have queued themselves."""
    _, of_raw, near = await _stuck_agent(memory, 4 * MIB)
    await near.send_all(BLOB * 2)
    await wait_all_tasks_blocked()
    assert of_raw.session.out.queued > Limits().high_water
    assert not of_raw.outflow.congested


# -- links that do not take what comes


@pytest.fixture
def little_control(monkeypatch: pytest.MonkeyPatch) -> int:
    """Links are clogged by this many bytes."""
    monkeypatch.setattr(outbox, "_MAX_CONTROL", 1000)
    return 1000


async def _stuck_agent(tunnel: Tunnel, window: int = WINDOW) -> tuple[Raw, Link, TunnelStream]:
    """An agent that reads nothing after its answer, the server's end of its link, and the client's of the stream.

    Something is on its way to the agent already, so that all that follows stays in the server.
    """
    raw, of_raw = await tunnel.raw("agent")
    opened: list[TunnelStream] = []

    async def dial() -> None:
        opened.append(await tunnel.dial("raw"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial)
        request = await raw.next()
        assert isinstance(request, DialReq)
        await raw.send(DialRsp(request.stream, "ok", "", window))
    await opened[0].send_all(b"x")
    await wait_all_tasks_blocked()
    return raw, of_raw, opened[0]


def _say(stream: TunnelStream, packet: Packet, times: int) -> None:
    for _ in range(times):
        stream.core.session.send_control(packet)
    stream.outlet.flush()


async def test_a_clogged_agent_costs_a_client_that_stream_only(memory: Tunnel, little_control: int) -> None:
    _, _, near = await _stuck_agent(memory)
    others = await memory.open()
    _say(near, Ping(near.core.id, 1), 2 * little_control)
    assert await reset_of(near) == ("protocol", "the next link does not take what comes for it")
    assert await exchange(*others)


async def test_a_clogged_client_costs_an_agent_that_stream_only(memory: Tunnel, little_control: int) -> None:
    raw, _ = await memory.raw("client")
    await raw.send(DialReq(1, "target", 80, WINDOW, 1000, {}))
    await raw.next()
    far, others = memory.arrived["one"].pop(), await memory.open()
    await far.send_all(b"x")
    await wait_all_tasks_blocked()
    _say(far, Ping(far.core.id, 1), 2 * little_control)
    assert await reset_of(far) == ("protocol", "the next link does not take what comes for it")
    assert await exchange(*others)


async def test_an_agent_that_a_client_has_clogged_keeps_its_link(memory: Tunnel, little_control: int) -> None:
    """It only reads slowly. What waits for it is not of its making, and its other streams are not that client's."""
    raw, _, near = await _stuck_agent(memory)
    _say(near, Ping(near.core.id, 1), 2 * little_control)
    await reset_of(near)
    await raw.send(Ping(0, 2))
    while (packet := await raw.next()) != Pong(0, 2):
        assert packet in (Ping(1, 1), Close(1, "protocol", "the next link does not take what comes for it"))


async def test_a_dial_over_a_link_that_takes_nothing_fails_and_the_link_lives(
    memory: Tunnel, little_control: int
) -> None:
    raw, of_raw, _ = await _stuck_agent(memory)
    while not of_raw.session.out.crowded:
        of_raw.session.send_control(Ping(0, 3))
    with pytest.raises(LinkLost, match="does not take what comes for it"):
        await of_raw.dial("raw", 7, seconds=1)
    await raw.send(Ping(0, 2))
    while await raw.next() != Pong(0, 2):
        pass
    assert of_raw.why is None


async def test_a_client_that_gives_more_credit_than_a_window_is_reset(tunnel: Tunnel) -> None:
    """Or it could read nothing, and have the server keep whatever the target sends."""
    near, far = await tunnel.open()
    near.core.session.send_control(Credit(near.core.id, Limits().window))
    near.outlet.flush()
    assert await reset_of(near) == ("protocol", f"credit for more than {Limits().window} bytes")
    assert (await reset_of(far))[0] == "protocol"


# -- links that are lost


async def test_a_client_that_is_lost_is_a_reset_at_the_target(tunnel: Tunnel) -> None:
    _, far = await tunnel.open()
    tunnel.client.drop("lost")
    assert await reset_of(far) == ("link_lost", "the peer closed the connection")
    await tunnel.idle()


async def test_a_client_that_says_goodbye_is_a_reset_at_the_target(tunnel: Tunnel) -> None:
    _, far = await tunnel.open()
    await tunnel.client.close("leaving", "the client is leaving")
    assert await reset_of(far) == ("link_lost", "the peer said: the client is leaving (leaving)")
    await tunnel.idle()


async def test_a_client_that_is_lost_after_the_targets_end_is_a_reset_too(tunnel: Tunnel) -> None:
    near, far = await tunnel.open()
    await far.send_eof()
    assert await receive_all(near) == b""
    tunnel.client.drop("lost")
    assert (await reset_of(far))[0] == "link_lost"


async def test_an_agent_that_is_lost_is_a_reset_at_its_clients_streams_alone(tunnel: Tunnel) -> None:
    await tunnel.add_agent("two")
    (near, _), others = await tunnel.open("one"), await tunnel.open("two")
    tunnel.agents["one"].drop("lost")
    assert await reset_of(near) == ("link_lost", "the peer closed the connection")
    assert await exchange(*others)


async def test_an_agent_that_is_lost_after_a_clients_end_is_a_reset_too(tunnel: Tunnel) -> None:
    near, far = await tunnel.open()
    await near.send_eof()
    assert await receive_all(far) == b""
    tunnel.agents["one"].drop("lost")
    assert (await reset_of(near))[0] == "link_lost"


async def _sent_and_lost(tunnel: Tunnel) -> tuple[Raw, Link]:
    """An agent that has read nothing of what a client sent and ended before it was lost, and the server's end."""
    raw, of_raw, near = await _stuck_agent(tunnel)
    await near.send_all(BLOB[:300_000])
    await near.send_eof()
    await wait_all_tasks_blocked()
    tunnel.client.drop("lost")
    await wait_all_tasks_blocked()
    assert of_raw.session.out.queued
    return raw, of_raw


async def test_what_a_client_sent_and_ended_is_delivered_when_it_is_lost(memory: Tunnel) -> None:
    raw, of_raw = await _sent_and_lost(memory)
    assert await raw.next() == Eof(1)
    assert raw.data[1] == b"x" + BLOB[:300_000]
    await raw.send(Eof(1))
    await memory.idle()
    assert of_raw.why is None
    assert not of_raw.session.out


async def test_what_is_for_a_client_that_was_lost_is_not_queued_for_it(memory: Tunnel) -> None:
    raw, _ = await _sent_and_lost(memory)
    (span,) = memory.server._bridge._spans
    gone = span.client.core.session.out
    waiting = str(gone)
    await raw.send(Ping(1, 7), Credit(1, 10), Pong(1, 7))
    assert await raw.next() == Eof(1)
    assert str(gone) == waiting
    await raw.send(Eof(1))
    await memory.idle()


async def test_a_target_that_answers_a_client_that_was_lost_is_reset(memory: Tunnel) -> None:
    raw, _ = await _sent_and_lost(memory)
    assert await raw.next() == Eof(1)
    await raw.send(data_header(1, 1) + b"x")
    assert await raw.next() == Close(1, "closed", "the client has gone")
    await memory.idle()


async def test_a_target_that_resets_a_client_that_was_lost_leaves_nothing(memory: Tunnel) -> None:
    raw, of_raw = await _sent_and_lost(memory)
    await raw.send(Close(1, "reset", "gone"))
    await memory.idle()
    assert not of_raw.session.out.queued


async def test_an_agent_that_is_lost_after_its_client_leaves_nothing(tunnel: Tunnel) -> None:
    near, far = await tunnel.open()
    await near.send_eof()
    assert await receive_all(far) == b""
    for link in (tunnel.client, tunnel.agents["one"]):
        link.drop("lost")
        await link.ended.wait()
    await tunnel.idle()


async def test_a_server_that_is_cut_gives_up_what_a_lost_client_had_sent(memory: Tunnel) -> None:
    raw, _ = await _sent_and_lost(memory)
    memory.server.life.cut()
    await wait_all_tasks_blocked()
    assert isinstance(await raw.next(), GoAway)
    assert await raw.next() == Close(1, CUT, "the server is leaving, and the time is over")


async def test_what_a_client_sent_and_ended_is_delivered_when_it_is_lost_over_sockets(loopback: Tunnel) -> None:
    near, far = await loopback.open()
    await near.send_all(BLOB[:WINDOW])
    await near.send_eof()
    await loopback.client.outflow.all_sent()
    await loopback.client.close("leaving", "the client is leaving")
    assert await receive_all(far) == BLOB[:WINDOW]
    await far.send_eof()
    await loopback.idle()


# -- anything, in any order


class End:
    """One end of a stream, its sink, and what is known of it."""

    def __init__(self, core: Stream, link: Link) -> None:
        self.core = core
        self.link = link
        self.sent = 0
        self.received = bytearray()
        self.unread = 0
        self.calls: list[str] = []

    def on_data(self, data: memoryview) -> None:
        assert not self.calls
        self.received += data
        self.unread += len(data)

    def on_eof(self) -> None:
        self.calls.append("eof")

    def on_reset(self, code: str, text: str) -> None:
        self.calls.append("reset")

    def on_credit(self) -> None: ...


class Game:
    """A server between a client and two agents, over pipes that carry only when they are told to."""

    def __init__(self, nursery: trio.Nursery, server: Server) -> None:
        self.nursery = nursery
        self.server = server
        self.pipes: list[tuple[MemorySendStream, MemoryReceiveStream]] = []
        self.names: list[str] = []  # hosts, one for each stream
        self.nears: dict[str, End] = {}
        self.fars: dict[str, End] = {}
        self.unanswered: deque[tuple[TunnelStream, str]] = deque()
        self.refused: set[str] = set()
        self.reset: set[str] = set()  # streams that a player has reset, or that a lost link has
        self.lost: list[Link] = []
        self.links: list[Link] = []

    async def set_up(self) -> None:
        for me, on_dial in (
            (Identity("client", "client"), refuse_dials),
            (Identity("agent", "0"), self._dialled),
            (Identity("agent", "1"), self._dialled),
        ):
            link = Link(StreamTransport(self._pipe()), DiallingHandshake(me), limits=TIGHT, timeouts=Timeouts(),
                        on_dial=on_dial)  # fmt: skip
            self.links.append(link)
            self.nursery.start_soon(link.run)
        await self.settle()
        assert len(self.server._links) == 3

    def _pipe(self) -> trio.abc.HalfCloseableStream:
        up, down = (MemorySendStream(), MemoryReceiveStream()), (MemorySendStream(), MemoryReceiveStream())
        self.pipes += up, down
        self.nursery.start_soon(self.server._link, trio.StapledStream(down[0], up[1]), a_seat(self.server))
        return trio.StapledStream(up[0], down[1])

    def _dialled(self, stream: TunnelStream, request: DialReq) -> None:
        self.unanswered.append((stream, request.host))

    # -- what players do

    def open(self, which: int, size: int) -> None:
        name = f"stream{len(self.names)}"
        self.names.append(name)
        client = self.links[0]

        def answered(error: DialError | None) -> None:
            if error is None:
                end = self.nears[name] = End(stream, client)
                stream.attach(end)

        if client.why is None:
            stream = client.session.open(name, 1, 10_000, {"agent": str(which % 2)}, answered)
            client.flush()

    def answer(self, which: int, size: int) -> None:
        self.unanswered = deque(one for one in self.unanswered if one[0].core.state is State.DIALLING)
        if not self.unanswered:
            return
        stream, name = self.unanswered.popleft()
        if size % 7 == 0:
            self.refused.add(name)
            stream.refuse(Refused())
            return
        stream.core.accept()
        end = self.fars[name] = End(stream.core, stream.outlet)
        end.core.attach(end)
        end.link.flush()

    def _end(self, which: int) -> tuple[str, End] | None:
        ends = [*self.nears.items(), *self.fars.items()]
        return ends[which % len(ends)] if ends else None

    def send(self, which: int, size: int) -> None:
        if found := self._end(which):
            name, end = found
            size = min(size, end.core.credit)
            if end.core.may_send and size:
                end.core.send(self.said(name, end, size, end.sent))
                end.sent += size
                end.link.flush()

    def said(self, name: str, end: End, size: int, start: int = 0) -> bytes:
        """What this end says, from ``start`` on: other bytes than any other end."""
        offset = (self.names.index(name) * 2 + (end.link is self.links[0])) * 7919 + start
        return (BLOB[offset % MIB :] + BLOB)[:size]

    def eof(self, which: int, size: int) -> None:
        if (found := self._end(which)) and found[1].core.may_send:
            found[1].core.send_eof()
            found[1].link.flush()

    def cut_off(self, which: int, size: int) -> None:
        if found := self._end(which):
            self.reset.add(found[0])
            found[1].core.reset("reset", "gone")
            found[1].link.flush()

    def read(self, which: int, size: int) -> None:
        if found := self._end(which):
            end = found[1]
            size = min(size, end.unread)
            end.unread -= size
            end.core.consumed(size)
            end.link.flush()

    def lose(self, which: int, size: int) -> None:
        link = self.links[which % 3]
        self.lost.append(link)
        link.drop("lost")

    def carry(self, which: int, size: int) -> None:
        self._carry(self.pipes[which % len(self.pipes)], size)

    def _carry(self, pipe: tuple[MemorySendStream, MemoryReceiveStream], size: int | None) -> bool:
        try:
            return memory_stream_pump(*pipe, max_bytes=size)
        except trio.BrokenResourceError:
            return False

    # -- what becomes of it

    async def settle(self) -> None:
        """Carry everything until nobody has anything to say."""
        ended: set[int] = set()
        moved = True
        while moved:
            await wait_all_tasks_blocked()
            moved = False
            for number, pipe in enumerate(self.pipes):
                if number not in ended and self._carry(pipe, None):
                    moved = True
                    if pipe[0]._outgoing._closed:
                        ended.add(number)

    async def finish(self) -> None:
        """Bring every stream to its end."""
        for _ in range(3):
            await self.settle()
            while self.unanswered:
                self.answer(0, 1)
            await self.settle()
            for number in range(len(self.nears) + len(self.fars)):
                self.read(number, MIB)
                self.eof(number, 0)
        await self.settle()

    def check(self) -> None:
        ends = [*self.server._links, *self.links]
        assert [link.session.streams for link in ends] == [0] * len(ends)
        assert self.server.life.open.value == 0
        for link in self.links:
            assert (link.why is None) is (link not in self.lost), link.why
        assert len(self.server._links) == 3 - len(set(self.lost))
        for name in self.nears.keys() & self.fars.keys():
            self._check_one(name, self.nears[name], self.fars[name])
            self._check_one(name, self.fars[name], self.nears[name])

    def _check_one(self, name: str, source: End, sink: End) -> None:
        assert sink.received == self.said(name, source, len(sink.received))
        assert len(sink.received) <= source.sent
        if sink.calls == ["eof"]:
            assert len(sink.received) == source.sent
        else:
            assert sink.calls in (["reset"], ["eof", "reset"])
            assert name in self.reset or self.lost


TIGHT = Limits(first_window=1000, window=4000, spare_window=6000)
_MOVES = ["open", "answer", "send", "send", "send", "eof", "read", "read", "carry", "carry", "carry", "wait", "settle",
          "cut_off", "lose"]  # fmt: skip
_STEPS = st.lists(st.tuples(st.sampled_from(_MOVES), st.integers(0, 20), st.integers(1, 1000)), max_size=60)


@settings(max_examples=150)
@given(_STEPS)
@example([("open", 0, 1), ("settle", 0, 0), ("answer", 0, 1), ("settle", 0, 0), ("send", 0, 900), ("eof", 0, 0),
          ("settle", 0, 0), ("lose", 0, 0), ("settle", 0, 0), ("send", 1, 5)])  # fmt: skip
def test_whatever_happens_no_byte_is_wrong_and_nothing_is_left(steps: list[tuple[str, int, int]]) -> None:
    async def play() -> None:
        async with open_house() as house:
            game = Game(house.nursery, await house.serve(connect=None, limits=TIGHT))
            await game.set_up()
            for move, which, size in steps:
                if move == "wait":
                    await wait_all_tasks_blocked()
                elif move == "settle":
                    await game.settle()
                else:
                    getattr(game, move)(which, size)
            await game.finish()
            game.check()

    with mock.patch.object(secure_module, "SocketTransport", StreamTransport):
        trio.run(play, clock=MockClock())
