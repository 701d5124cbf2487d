"""Links: how they begin, stay alive and end; that one stream, or one peer, never harms another."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import msgpack
import pytest
import trio
from stream_transport import StreamTransport
from trio.testing import MockClock, lockstep_stream_pair, memory_stream_pair, wait_all_tasks_blocked

from tunnel import deadlines
from tunnel.core import State
from tunnel.errors import DialError, HandshakeRefused, LinkClosed, LinkLost, LinkStopped, Refused, RemoteProtocolError
from tunnel.frames import data_header
from tunnel.handshake import AcceptingHandshake, DiallingHandshake, welcome
from tunnel.identity import Identity
from tunnel.limits import Limits, Timeouts
from tunnel.link import Link
from tunnel.packets import VERSION, Close, Credit, DialReq, DialRsp, Drain, Eof, Hello, Packet, Ping, Pong, Welcome
from tunnel.stream import TunnelStream
from tunnel.transport import Buffer, SocketTransport

if TYPE_CHECKING:
    from conftest import LinkPair, MakeLinks, MakeRaw, RawLink, TcpPair

SERVER, AGENT, CLIENT = Identity("server", "server"), Identity("agent", "agent"), Identity("client", "client")
OTHER_ROLE = {"server": AGENT, "agent": SERVER}
WINDOW = Limits().first_window
HOURS = 2 * 3600


async def outcome(link: Link) -> Exception | None:
    """How a link that was never linked ended."""
    try:
        await link.run()
    except (HandshakeRefused, LinkClosed, RemoteProtocolError) as error:
        return error
    return None


async def echo(stream: TunnelStream) -> None:
    async for data in stream:
        await stream.send_all(data)
    await stream.send_eof()


async def exchange(stream: TunnelStream, data: bytes) -> bytes:
    await stream.send_all(data)
    received = bytearray()
    while len(received) < len(data):
        received += await stream.receive_some()
    return bytes(received)


class TestHandshake:
    async def test_both_sides_know_each_other(self, links: LinkPair) -> None:
        for mine, theirs in ((links.server, links.agent), (links.agent, links.server)):
            assert mine.peer == theirs._handshake.me

    async def test_a_welcome_that_comes_while_it_says_that_it_waited_too_long_is_too_late(
        self, autojump_clock: MockClock, nursery: trio.Nursery
    ) -> None:
        near, far = lockstep_stream_pair()
        link = Link(StreamTransport(near), DiallingHandshake(AGENT), limits=Limits(), timeouts=Timeouts())

        async def peer() -> None:
            await far.receive_some()
            await trio.sleep(Timeouts().handshake + 0.5)  # its CLOSE is not read
            await far.send_all(welcome(SERVER, 1).encode())

        nursery.start_soon(peer)
        with pytest.raises(LinkClosed, match="longer than"):
            await nursery.start(link.run)
        assert link.peer is None

    async def test_a_goodbye_that_is_cancelled_before_the_handshake_is_done_ends_the_link(
        self, nursery: trio.Nursery
    ) -> None:
        near, _far = lockstep_stream_pair()  # which takes nothing that is not read
        link = Link(StreamTransport(near), DiallingHandshake(AGENT), limits=Limits(), timeouts=Timeouts())

        async def run() -> None:
            with pytest.raises(LinkStopped):
                await link.run()

        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            scope.cancel()
            await link.close("leaving", "bye")
        assert isinstance(link.why, LinkStopped)
        await link.ended.wait()

    async def test_a_welcome_in_the_moment_the_time_is_over_is_in_time_or_too_late(
        self, autojump_clock: MockClock, nursery: trio.Nursery
    ) -> None:
        """trio chooses at random which of two tasks runs first; whichever it is, the other one sees it."""
        for _ in range(20):
            near, _far = memory_stream_pair()
            link = Link(StreamTransport(near), DiallingHandshake(AGENT), limits=Limits(), timeouts=Timeouts())
            word = welcome(SERVER, 1).encode()
            over = trio.current_time() + Timeouts().handshake
            deadlines.of_this_run().at(over, partial(link._decoder.feed, word))
            try:
                await nursery.start(link.run)
            except LinkClosed:
                assert link.peer is None
            else:
                assert link.peer is not None
                link.drop("over")

    @pytest.mark.parametrize("role", ["server", "agent"])
    async def test_a_silent_peer_is_given_up(self, make_raw: MakeRaw, autojump_clock: MockClock, role: str) -> None:
        raw = make_raw(role)
        error = await outcome(raw.link)
        assert isinstance(error, LinkClosed)
        assert "the handshake took longer than 10 s" in str(error)
        *_, last = await raw.peer.rest()
        assert last == Close(0, "timeout", str(error))

    async def test_dripped_bytes_do_not_prolong_it(self, make_raw: MakeRaw, autojump_clock: MockClock) -> None:
        raw = make_raw("server")

        async def drip() -> None:
            for byte in Hello(VERSION, AGENT.to_info()).encode():
                await raw.peer.send(bytes([byte]))
                await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drip)
            assert "the handshake took longer" in str(await outcome(raw.link))
            nursery.cancel_scope.cancel()

    async def test_a_refusal_is_raised_as_the_server_said_it(self, make_raw: MakeRaw) -> None:
        raw = make_raw("agent")
        await raw.peer.send(Close(0, "denied", "not today"))
        error = await outcome(raw.link)
        assert isinstance(error, HandshakeRefused)
        assert (error.code, error.text) == ("denied", "not today")

    @pytest.mark.parametrize("role", ["server", "agent"])
    async def test_a_wrong_version_is_named_to_both_sides(self, make_raw: MakeRaw, role: str) -> None:
        raw = make_raw(role)
        info = OTHER_ROLE[role].to_info()
        await raw.peer.send(Hello(99, info) if role == "server" else Welcome(99, info))
        error = await outcome(raw.link)
        told = (await raw.peer.rest())[-1]
        assert isinstance(told, Close)
        for text in (str(error), told.text):
            assert "version 99" in text
            assert str(VERSION) in text.replace("99", "")

    async def test_a_refused_agent_hears_the_reason(self, tcp_pair: TcpPair) -> None:
        left, right = tcp_pair()
        limits, timeouts = Limits(), Timeouts()
        server = Link(SocketTransport(left), AcceptingHandshake(SERVER), limits=limits, timeouts=timeouts)
        me = Identity("agent", "agent", "not an instance id")
        agent = Link(SocketTransport(right), DiallingHandshake(me), limits=limits, timeouts=timeouts)
        errors: list[Exception | None] = []

        async def note(link: Link) -> None:
            errors.append(await outcome(link))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(note, server)
            nursery.start_soon(note, agent)
        assert {type(error) for error in errors} == {RemoteProtocolError, HandshakeRefused}
        assert all("32 hexadecimal digits" in str(error) for error in errors)

    async def test_a_peer_that_leaves_during_it(self, make_raw: MakeRaw) -> None:
        raw = make_raw("server")
        await raw.peer.stream.aclose()
        assert isinstance(await outcome(raw.link), LinkClosed)

    async def test_cancelling_it_closes_the_connection(self, make_raw: MakeRaw) -> None:
        raw = make_raw("server")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raw.link.run)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert raw.link.ended.is_set()
        assert await raw.peer.next() is None

    async def test_frames_right_behind_the_hello_are_served(self, nursery: trio.Nursery, make_raw: MakeRaw) -> None:
        raw = make_raw("server")
        await raw.peer.send(Hello(VERSION, AGENT.to_info()), Ping(0, 7))
        nursery.start_soon(raw.link.run)
        assert {type(await raw.peer.next()) for _ in range(2)} == {Welcome, Pong}


class TestKeepalive:
    @pytest.fixture
    async def silent(self, nursery: trio.Nursery, make_raw: MakeRaw) -> RawLink:
        """A linked server's link whose peer says nothing more."""
        raw = make_raw("server")
        nursery.start_soon(raw.link.run)
        await raw.peer.shake_hands(AGENT)
        return raw

    async def test_a_silent_peer_is_dropped(self, autojump_clock: MockClock, silent: RawLink) -> None:
        await silent.link.ended.wait()
        assert str(silent.link.why) == "nothing was heard for 15 s"

    async def test_it_is_asked_before_it_is_dropped(self, autojump_clock: MockClock, silent: RawLink) -> None:
        packets = await silent.peer.rest()
        assert [type(packet) for packet in packets] == [Ping] * 3

    async def test_its_streams_are_reset_with_the_reason(
        self, autojump_clock: MockClock, nursery: trio.Nursery, silent: RawLink
    ) -> None:
        nursery.start_soon(silent.peer.send, DialRsp(1, "ok", "", 100))
        stream = await silent.link.dial("target", 80, seconds=10)
        with pytest.raises(trio.BrokenResourceError, match="nothing was heard"):
            await stream.receive_some()

    async def test_its_pending_dials_are_lost(self, autojump_clock: MockClock, silent: RawLink) -> None:
        with pytest.raises(LinkLost, match="nothing was heard"):
            await silent.link.dial("target", 80, seconds=100)

    async def test_anything_heard_counts(self, autojump_clock: MockClock, silent: RawLink) -> None:
        for _ in range(100):
            await trio.sleep(14)
            await silent.peer.send(Pong(0, 1))
        assert silent.link.why is None

    async def test_a_part_of_a_frame_counts(self, autojump_clock: MockClock, silent: RawLink) -> None:
        for byte in Ping(0, 1).encode():
            await trio.sleep(14)
            await silent.peer.send(bytes([byte]))
        assert silent.link.why is None

    async def test_an_idle_link_lives_for_hours(self, autojump_clock: MockClock, make_links: MakeLinks) -> None:
        links = await make_links()
        await trio.sleep(HOURS)
        assert links.server.why is links.agent.why is None

    async def test_an_idle_stream_lives_for_hours(self, autojump_clock: MockClock, make_links: MakeLinks) -> None:
        one, other = await (await make_links()).open()
        await trio.sleep(HOURS)
        await one.send_all(b"still there")
        assert await other.receive_some() == b"still there"

    async def test_a_half_closed_stream_lives_for_hours(self, autojump_clock: MockClock, make_links: MakeLinks) -> None:
        one, other = await (await make_links()).open()
        await one.send_eof()
        assert await other.receive_some() == b""
        await trio.sleep(HOURS)
        await other.send_all(b"the answer")
        assert await one.receive_some() == b"the answer"

    async def test_a_one_way_stream_lives_for_hours(self, autojump_clock: MockClock, make_links: MakeLinks) -> None:
        one, other = await (await make_links()).open()
        for number in range(HOURS // 60):
            await trio.sleep(60)
            await other.send_all(b"%05d" % number)
            assert await one.receive_some() == b"%05d" % number

    async def test_a_stream_that_nobody_reads_lives_for_hours(
        self, autojump_clock: MockClock, make_links: MakeLinks, nursery: trio.Nursery
    ) -> None:
        one, other = await (await make_links()).open()
        nursery.start_soon(other.send_all, bytes(WINDOW * 2))
        await trio.sleep(HOURS)
        assert len(await one.receive_some()) > 0


class TestEnd:
    async def test_a_goodbye_is_heard(self, links: LinkPair) -> None:
        await links.agent.close("leaving", "the agent is leaving")
        await links.server.ended.wait()
        assert str(links.server.why) == "the peer said: the agent is leaving (leaving)"
        assert str(links.agent.why) == "the agent is leaving"

    async def test_a_goodbye_overtakes_data(self, make_links: MakeLinks, nursery: trio.Nursery) -> None:
        links = await make_links("sockets", buffers=8192)
        one, _ = await links.open()
        nursery.start_soon(_until_broken, one.send_all, bytes(1 << 22))
        await wait_all_tasks_blocked()
        await links.server.close("leaving", "enough")
        await links.agent.ended.wait()
        assert "enough" in str(links.agent.why)

    async def test_closing_twice_says_it_once(self, nursery: trio.Nursery, make_raw: MakeRaw) -> None:
        raw = make_raw("server")
        nursery.start_soon(raw.link.run)
        await raw.peer.shake_hands(AGENT)
        async with trio.open_nursery() as closing:
            closing.start_soon(raw.link.close, "leaving", "bye")
            closing.start_soon(raw.link.close, "leaving", "bye")
        assert await raw.peer.rest() == [Close(0, "leaving", "bye")]

    async def test_closing_does_not_wait_for_a_peer_that_reads_nothing(
        self, tcp_pair: TcpPair, nursery: trio.Nursery, as_stream: Callable[..., trio.SocketStream]
    ) -> None:
        link, _ = await _linked_to_a_wall(tcp_pair, nursery, as_stream)
        with trio.fail_after(10):
            await link.close("leaving", "bye")
            await link.ended.wait()

    @pytest.mark.parametrize("seconds", [0.0, 0.4, 1.0])
    async def test_closing_takes_no_longer_than_it_may(
        self, autojump_clock: MockClock, nursery: trio.Nursery, seconds: float
    ) -> None:
        near, far = lockstep_stream_pair()
        link = Link(StreamTransport(near), AcceptingHandshake(SERVER), limits=Limits(), timeouts=Timeouts())
        nursery.start_soon(link.run)
        await far.send_all(Hello(VERSION, AGENT.to_info()).encode())
        await far.receive_some()  # WELCOME, and nothing more is read
        await wait_all_tasks_blocked()
        began = trio.current_time()
        await link.close("leaving", "bye", seconds=seconds)
        await link.ended.wait()
        assert trio.current_time() - began == seconds

    async def test_the_end_of_the_connection_ends_both(self, links: LinkPair) -> None:
        await links.agent._transport.aclose()
        await links.server.ended.wait()
        await links.agent.ended.wait()
        assert links.server.why
        assert links.agent.why

    async def test_dialling_on_an_ended_link_fails_at_once(self, links: LinkPair) -> None:
        await links.server.close("leaving", "bye")
        with pytest.raises(LinkLost, match="bye"):
            await links.server.dial("target", 80, seconds=10)

    async def test_a_dial_in_flight_is_lost_with_the_link(self, links: LinkPair, nursery: trio.Nursery) -> None:
        links.on_dial = lambda stream, request: nursery.start_soon(links.agent.close, "leaving", "bye")
        with pytest.raises(LinkLost, match="bye"):
            await links.server.dial("target", 80, seconds=10)
        await links.idle()

    async def test_cancelling_run_resets_the_streams(self, make_raw: MakeRaw, nursery: trio.Nursery) -> None:
        raw = make_raw("server")
        async with trio.open_nursery() as running:
            running.start_soon(raw.link.run)
            await raw.peer.shake_hands(AGENT)
            await raw.peer.send(DialRsp(1, "ok", "", 100))
            stream = await raw.link.dial("target", 80, seconds=10)
            running.cancel_scope.cancel()
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        assert raw.link.ended.is_set()
        assert raw.link.open_streams.value == 0


async def _until_broken(call: Callable[..., object], *args: object) -> None:
    with contextlib.suppress(trio.BrokenResourceError):
        await call(*args)  # type: ignore[misc]


async def _linked_to_a_wall(
    tcp_pair: TcpPair, nursery: trio.Nursery, as_stream: Callable[..., trio.SocketStream], high_water: int = 64 * 1024
) -> tuple[Link, trio.SocketStream]:
    """A link with one open stream whose peer reads no more, until more is queued than should be."""
    left, right = tcp_pair(8192)
    limits = Limits(high_water=high_water)
    link = Link(SocketTransport(left), AcceptingHandshake(SERVER), limits=limits, timeouts=Timeouts())
    far = as_stream(right)
    await far.send_all(Hello(VERSION, AGENT.to_info()).encode())
    await nursery.start(link.run)
    nursery.start_soon(far.send_all, DialRsp(1, "ok", "", 1 << 26).encode())
    stream = (await link.dial("target", 80, seconds=10)).core
    while not link.outflow.congested:
        stream.send(bytes(16 * 1024))
        link.flush()
    return link, far


class TestCongestion:
    async def test_whoever_waits_for_room_is_called_when_a_reset_empties_the_queue(
        self, tcp_pair: TcpPair, nursery: trio.Nursery, as_stream: Callable[..., trio.SocketStream]
    ) -> None:
        link, far = await _linked_to_a_wall(tcp_pair, nursery, as_stream)
        called = trio.Event()
        link.outflow.when_room(called.set)
        for stream in list(link.session._streams.values()):
            stream.reset("cancelled", "")
        while not called.is_set():
            await far.receive_some()

    async def test_whoever_waits_for_room_is_called_when_the_link_ends(
        self, tcp_pair: TcpPair, nursery: trio.Nursery, as_stream: Callable[..., trio.SocketStream]
    ) -> None:
        link, far = await _linked_to_a_wall(tcp_pair, nursery, as_stream)
        called = trio.Event()
        link.outflow.when_room(called.set)
        await far.aclose()
        with trio.fail_after(10):
            await called.wait()

    async def test_a_sender_pauses_at_the_high_water_mark(
        self, tcp_pair: TcpPair, nursery: trio.Nursery, as_stream: Callable[..., trio.SocketStream]
    ) -> None:
        link, far = await _linked_to_a_wall(tcp_pair, nursery, as_stream, high_water=256 * 1024)
        stream = TunnelStream(next(iter(link.session._streams.values())), link.outflow)
        nursery.start_soon(_until_broken, stream.send_all, bytes(8 << 20))
        await wait_all_tasks_blocked()
        assert link.session.out.queued < 256 * 1024 + 80 * 1024
        await far.aclose()
        await link.ended.wait()

    async def test_control_packets_overtake_queued_data(
        self, tcp_pair: TcpPair, nursery: trio.Nursery, as_stream: Callable[..., trio.SocketStream]
    ) -> None:
        _, far = await _linked_to_a_wall(tcp_pair, nursery, as_stream, high_water=4 << 20)
        await far.send_all(Ping(0, 9).encode())
        await wait_all_tasks_blocked()
        received, before = Pong(0, 9).encode(), bytearray()
        while received not in before:
            before += await far.receive_some()
        assert len(before) < 2 << 20


class TestDials:
    async def test_a_refusal_is_the_typed_error(self, links: LinkPair) -> None:
        links.on_dial = lambda stream, request: stream.core.refuse(Refused("no one listens"))
        with pytest.raises(Refused, match="no one listens"):
            await links.server.dial("target", 80, seconds=10)
        await links.idle()

    async def test_the_request_says_what_was_asked(self, links: LinkPair) -> None:
        requests: list[DialReq] = []

        def note(stream: TunnelStream, request: DialReq) -> None:
            requests.append(request)
            stream.core.accept()

        links.on_dial = note
        await links.server.dial("db.internal", 5432, seconds=1.234, options={"agent": "a"})
        asked = requests[0]
        assert (asked.host, asked.port, asked.ms, asked.options) == ("db.internal", 5432, 1234, {"agent": "a"})

    async def test_a_cancelled_dial_leaves_nothing(self, links: LinkPair) -> None:
        held: list[TunnelStream] = []
        links.on_dial = lambda stream, request: held.append(stream)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_dial, links)
                await links.agent.open_streams.wait_value(1)
                scope.cancel()
        await links.idle()
        assert held[0].core.state is State.CLOSED
        assert held[0].core.why == ("cancelled", "the dial was given up")

    async def test_a_dial_that_is_too_slow_leaves_nothing(self, autojump_clock: MockClock, links: LinkPair) -> None:
        held: list[TunnelStream] = []
        links.on_dial = lambda stream, request: held.append(stream)
        began = trio.current_time()
        with pytest.raises(trio.TooSlowError):
            await links.server.dial("target", 80, seconds=3)
        assert trio.current_time() - began == pytest.approx(3)
        await links.idle()
        assert held[0].core.why == ("cancelled", "the dial was given up")

    async def test_a_dial_that_is_answered_in_the_moment_its_time_is_over_was_answered(
        self, autojump_clock: MockClock, links: LinkPair, caplog: pytest.LogCaptureFixture
    ) -> None:
        links.on_dial = lambda stream, request: None
        over = trio.current_time() + 3
        deadlines.of_this_run().at(over, lambda: links.server.session.receive_packet(DialRsp(1, "ok", "", 100)))
        stream = await links.server.dial("target", 80, seconds=over - trio.current_time())
        assert stream.core.state is State.OPEN
        assert caplog.records == []

    async def test_a_dial_may_be_cancelled_in_the_moment_its_time_is_over(
        self, autojump_clock: MockClock, links: LinkPair, caplog: pytest.LogCaptureFixture
    ) -> None:
        links.on_dial = lambda stream, request: None
        for _ in range(10):
            with contextlib.suppress(trio.TooSlowError), trio.move_on_after(3):
                await links.server.dial("target", 80, seconds=3)
        await links.idle()
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []

    async def test_a_dial_that_was_answered_in_time_is_not_too_late_afterwards(
        self, autojump_clock: MockClock, links: LinkPair
    ) -> None:
        links.on_dial = lambda stream, request: stream.core.accept()
        stream = await links.server.dial("target", 80, seconds=3)
        await trio.sleep(5)
        assert stream.core.state is State.OPEN

    async def test_answers_that_cross_the_cancel_leave_nothing(self, links: LinkPair) -> None:
        scope = trio.CancelScope()
        answered: list[TunnelStream] = []

        def answer_and_cancel(stream: TunnelStream, request: DialReq) -> None:
            stream.core.accept()
            answered.append(stream)
            scope.cancel()

        links.on_dial = answer_and_cancel
        for _ in range(1000):
            scope = trio.CancelScope()
            with scope:
                await links.server.dial("target", 80, seconds=10)
            assert scope.cancelled_caught
        await links.idle()
        assert len(answered) == 1000
        assert {stream.core.why for stream in answered} == {("cancelled", "the dial was given up")}

    async def test_a_cancel_right_behind_the_answer_gives_the_stream(self, links: LinkPair) -> None:
        """The answer came first, so the caller has a stream, and sees the cancellation at its next step."""
        scope = trio.CancelScope()

        def cancel_when_answered(stream: TunnelStream, request: DialReq) -> None:
            stream.core.accept()
            mine = links.server.session._streams[stream.core.id]
            tell = mine._answer

            def tell_and_cancel(error: DialError | None) -> None:
                assert tell
                tell(error)
                scope.cancel()

            mine.on_answer(tell_and_cancel)

        links.on_dial = cancel_when_answered
        with scope:
            stream = await links.server.dial("target", 80, seconds=10)
        assert stream.core.state is State.OPEN
        assert not scope.cancelled_caught

    async def test_a_thousand_streams_come_and_go(self, links: LinkPair) -> None:
        """Every other one is given up before its answer, which comes all the same."""
        held: list[TunnelStream] = []
        number = count()

        def every_other(stream: TunnelStream, request: DialReq) -> None:
            if next(number) % 2:
                held.append(stream)
            else:
                stream.core.accept()
                nursery.start_soon(stream.aclose)

        async def use() -> None:
            stream = await links.server.dial("target", 80, seconds=10)
            await stream.send_all(b"x")
            await stream.aclose()

        links.on_dial = every_other
        async with trio.open_nursery() as nursery:
            for _ in range(1000):
                nursery.start_soon(_until_broken, use)
            await wait_all_tasks_blocked()
            while len(held) < 500:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
            for stream in held[::2]:
                if stream.core.state is State.DIALLING:
                    stream.core.accept()
            links.agent.flush()
        await links.idle()
        links.on_dial = links.accept
        one, _ = await links.open()
        assert one.core.id == 1001
        assert not links.server.session.out

    async def test_streams_are_counted(self, links: LinkPair) -> None:
        ends = [await links.open() for _ in range(3)]
        assert links.server.open_streams.value == links.agent.open_streams.value == 3
        ends[1][0].reset("reset", "done")
        await links.agent.open_streams.wait_value(2)
        assert links.server.open_streams.value == 2

    async def test_a_peer_that_may_not_ask_is_told_so(self, nursery: trio.Nursery, make_raw: MakeRaw) -> None:
        raw = make_raw("server")
        nursery.start_soon(raw.link.run)
        await raw.peer.shake_hands(CLIENT)
        await raw.peer.send(DialReq(1, "target", 80, 100, 1000, {}))
        last = (await raw.peer.rest())[-1]
        assert isinstance(last, Close)
        assert (last.stream, last.code) == (0, "protocol")
        assert "takes none" in last.text
        assert raw.link.open_streams.value == 0


async def _dial(links: LinkPair) -> None:
    await links.server.dial("target", 80, seconds=10)


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def _some_bytes(seed: int) -> bytes:
    return random.Random(seed).randbytes(5000)


GARBAGE = {
    "length of 4 GiB": b"\xff\xff\xff\xff",
    "length of zero": b"\0\0\0\0",
    "length over the limit": struct.pack(">I", (1 << 20) + 1),
    "not msgpack": frame(b"\xc1"),
    "not an array": frame(b"\x01"),
    "an empty array": frame(b"\x90"),
    "type is a text": frame(msgpack.packb(["DIAL_REQ"])),
    "arrays nested a little": frame(b"\x93\x01" + b"\x91" * 100 + b"\x90\x80"),
    "arrays nested deep": frame(b"\x93\x01" + b"\x91" * 1000 + b"\x90\x80"),
    "arrays nested deeper": frame(b"\x91" * 4000 + b"\x90"),
    "maps nested deep": frame(b"\x93\x01" + b"\x81\xa1k" * 900 + b"\x80\x80"),
    "an array with a huge count": frame(b"\xdd\xff\xff\xff\xff"),
    "a map with a huge count": frame(b"\x93\x01\x01\xdf\xff\xff\xff\xff"),
    "a text with a huge size": frame(b"\x92\x01\xdb\xff\xff\xff\xff"),
    "a text that is not UTF-8": frame(b"\x93\x01\x01\x81\xa1\xff\x01"),
    "a key that is a number": frame(b"\x93\x01\x01\x81\x01\x01"),
    "a key that is an array": frame(b"\x93\x01\x01\x81\x91\x01\x01"),
    "too few fields": frame(msgpack.packb([1])),
    "more than one value": frame(msgpack.packb([1, 1, {}]) + b"\x01"),
    "DATA with a wrong size": frame(b"\x93\x07\xce\0\0\0\1\xc6\0\0\0\x09x"),
    **{f"random bytes {seed}": _some_bytes(seed) for seed in range(8)},
}


class TestNonsense:
    @pytest.mark.parametrize("role", ["server", "agent"])
    @pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
    async def test_before_the_handshake(self, make_raw: MakeRaw, role: str, garbage: bytes) -> None:
        raw = make_raw(role)
        await raw.peer.send(garbage)
        error = await outcome(raw.link)
        assert isinstance(error, RemoteProtocolError)
        last = (await raw.peer.rest())[-1]
        assert last == Close(0, "protocol", str(error))

    @pytest.mark.parametrize("role", ["server", "agent"])
    @pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
    async def test_after_the_handshake(
        self, make_raw: MakeRaw, make_links: MakeLinks, role: str, garbage: bytes
    ) -> None:
        beside = await make_links()
        last, why = await _answer_to(make_raw(role), OTHER_ROLE[role], garbage)
        assert last == Close(0, "protocol", why)
        one, other = await beside.open()
        await one.send_all(b"unharmed")
        assert await other.receive_some() == b"unharmed"

    @pytest.mark.parametrize("field", ["role", "name", "instance", "features", "draining", "servers"])
    @pytest.mark.parametrize("role", ["server", "agent"])
    async def test_an_identity_with_a_nested_entry(self, make_raw: MakeRaw, role: str, field: str) -> None:
        raw = make_raw(role)
        kind = Hello if role == "server" else Welcome
        info = {**OTHER_ROLE[role].to_info(), field: _nested(950)}
        await raw.peer.send(_frame_of(kind, VERSION, info))
        await raw.peer.stream.send_eof()
        await outcome(raw.link)
        assert raw.link.ended.is_set()

    @pytest.mark.parametrize("role", ["server", "agent"])
    async def test_a_long_reason_still_arrives(self, make_raw: MakeRaw, role: str) -> None:
        """Before the handshake a peer takes only short frames."""
        raw = make_raw(role)
        info = {**OTHER_ROLE[role].to_info(), "name": "\x01" * 3000}
        await raw.peer.send(Hello(VERSION, info) if role == "server" else Welcome(VERSION, info))
        error = await outcome(raw.link)
        assert len(str(error).encode()) < 2000

    @pytest.mark.parametrize("role", ["server", "agent"])
    async def test_a_body_that_only_a_linked_peer_may_send(self, make_raw: MakeRaw, role: str) -> None:
        raw = make_raw(role)
        await raw.peer.send(struct.pack(">I", 4097))
        assert "4097 bytes" in str(await outcome(raw.link))

    async def test_unknown_packets_are_counted_and_ignored(self, nursery: trio.Nursery, make_raw: MakeRaw) -> None:
        raw = make_raw("server")
        nursery.start_soon(raw.link.run)
        await raw.peer.shake_hands(AGENT)
        await raw.peer.send(frame(msgpack.packb([99, "future"])), Ping(0, 3))
        assert await raw.peer.next() == Pong(0, 3)
        assert raw.link._decoder.unknown == 1

    async def test_control_packets_are_handed_on(self, make_links: MakeLinks) -> None:
        links = await make_links()
        heard: list[Packet] = []
        links.server._on_control = heard.append
        links.agent.session.send_control(Drain(1, "soft", "test", 1000, 0))
        links.agent.flush()
        await wait_all_tasks_blocked()
        assert heard == [Drain(1, "soft", "test", 1000, 0)]

    @pytest.mark.parametrize(
        "packet",
        [
            Hello(VERSION, AGENT.to_info()),
            Welcome(VERSION, AGENT.to_info()),
            DialReq(1, "target", 80, 100, 1000, {}),
            Eof(1),
            Credit(1, 0),
            Credit(1, 0xFFFFFFFF),
        ],
        ids=["HELLO", "WELCOME", "DIAL_REQ", "EOF while dialling", "CREDIT of nothing", "CREDIT of too much"],
    )
    async def test_what_a_server_may_not_be_sent_now(self, make_raw: MakeRaw, packet: Packet) -> None:
        """Stream 1 is being dialled."""
        raw = make_raw("server")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raw.link.run)
            await raw.peer.shake_hands(AGENT)
            nursery.start_soon(_lost_dial, raw.link)
            await raw.peer.next()
            await raw.peer.send(packet)
            with trio.fail_after(3):
                await raw.link.ended.wait()
        last = (await raw.peer.rest())[-1]
        assert last == Close(0, "protocol", str(raw.link.why))

    @pytest.mark.parametrize(
        "packets",
        [
            [Hello(VERSION, SERVER.to_info())],
            [DialRsp(1, "ok", "", 100)],
            [DialReq(0, "target", 80, 100, 1000, {})],
            [DialReq(1, "target", 80, 100, 1000, {})],
            [Eof(1), Eof(1)],
            [Eof(1), data_header(1, 1) + b"x"],
            [data_header(1, WINDOW + 1) + bytes(WINDOW + 1)],
        ],
        ids=[
            "HELLO", "DIAL_RSP", "DIAL_REQ 0", "DIAL_REQ twice", "EOF twice", "DATA behind EOF",
            "DATA over credit",
        ],
    )  # fmt: skip
    async def test_what_an_agent_may_not_be_sent_now(self, make_raw: MakeRaw, packets: list[Packet | bytes]) -> None:
        """Stream 1 is open."""
        raw = make_raw("agent", on_dial=lambda stream, request: stream.core.accept())
        last, why = await _answer_to(raw, SERVER, DialReq(1, "target", 80, 100, 1000, {}), *packets)
        assert last == Close(0, "protocol", why)

    @pytest.mark.parametrize("seed", range(20))
    async def test_valid_packets_in_any_order_do_no_more_than_end_the_link(self, make_raw: MakeRaw, seed: int) -> None:
        """And what is cut, changed or repeated among them; whatever happens, ``run`` returns."""
        dice = random.Random(seed)
        raw = make_raw("agent", on_dial=lambda stream, request: stream.core.accept())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raw.link.run)
            await raw.peer.shake_hands(SERVER)
            try:
                for _ in range(200):
                    await raw.peer.send(_mutant(dice))
                await raw.peer.stream.send_eof()
            except trio.BrokenResourceError:
                pass
        assert raw.link.why


def _nested(depth: int) -> object:
    value: object = []
    for _ in range(depth):
        value = [value]
    return value


def _frame_of(kind: type[Packet], version: int, info: dict[str, object]) -> bytes:
    """The frame, by a packer without a nesting limit of its own."""
    entries = b"".join(msgpack.packb(key) + _pack_deep(value) for key, value in info.items())
    return frame(b"\x93" + bytes([kind.type, version, 0x80 + len(info)]) + entries)


def _pack_deep(value: object) -> bytes:
    depth = 0
    while isinstance(value, list) and len(value) == 1:
        value, depth = value[0], depth + 1
    packed: bytes = msgpack.packb(value)
    return b"\x91" * depth + packed


def _mutant(dice: random.Random) -> bytes:
    stream = dice.randint(0, 6)
    packets = [
        DialReq(stream, "t", 80, dice.choice((0, 100)), 9, {}),
        Eof(stream),
        Close(stream or 1, "reset", "x"),
        Credit(stream, dice.choice((1, 1000))),
        Ping(0, stream),
        Pong(0, stream),
        Drain(1, "soft", "x", 1, 1),
    ]
    data = bytearray(dice.choice([*(packet.encode() for packet in packets), data_header(stream, 5) + b"hello"]))
    if dice.random() < 0.02:
        data[dice.randrange(4, len(data))] = dice.randrange(256)
    return bytes(data)


async def _lost_dial(link: Link) -> None:
    with pytest.raises(LinkLost):
        await link.dial("target", 80, seconds=10)


async def _answer_to(raw: RawLink, me: Identity, *what: Packet | bytes) -> tuple[Packet, str]:
    """The last packet of a link that was sent this after its handshake, and why it ended. Nothing may be raised."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(raw.link.run)
        await raw.peer.shake_hands(me)
        await raw.peer.send(*what)
        with trio.fail_after(3):
            await raw.link.ended.wait()
    return (await raw.peer.rest())[-1], str(raw.link.why)


class TestIsolation:
    async def test_a_stream_that_nobody_reads_stalls_no_other(self, links: LinkPair, nursery: trio.Nursery) -> None:
        unread, firehose = await links.open()
        nursery.start_soon(firehose.send_all, bytes(64 << 20))
        one, other = await links.open()
        nursery.start_soon(echo, other)
        for _ in range(200):
            assert await exchange(one, b"x" * 1000) == b"x" * 1000
        assert len(unread.core._held or b"") <= WINDOW
        assert links.agent.session.out.queued <= Limits().high_water

    async def test_a_reader_that_never_reads_pauses_its_sender(self, links: LinkPair, nursery: trio.Nursery) -> None:
        one, _ = await links.open()
        nursery.start_soon(one.send_all, bytes(16 << 20))
        while one.core.credit:
            await wait_all_tasks_blocked()
        assert one.core.state is State.OPEN
        again, fresh = await links.open()
        nursery.start_soon(echo, fresh)
        assert await exchange(again, b"beside it") == b"beside it"

    async def test_a_reset_stream_harms_no_other(self, links: LinkPair, nursery: trio.Nursery) -> None:
        one, other = await links.open()
        nursery.start_soon(echo, other)
        for _ in range(20):
            doomed, _ = await links.open()
            await doomed.send_all(bytes(100_000))
            doomed.reset("reset", "gone")
            assert await exchange(one, b"y" * 100) == b"y" * 100

    async def test_two_streams_share_a_slow_link_fairly(self, make_links: MakeLinks, nursery: trio.Nursery) -> None:
        links = await make_links("sockets", buffers=8192)
        received = [0, 0]

        async def drain(index: int, stream: TunnelStream) -> None:
            async for data in stream:
                received[index] += len(data)
                if min(received) > 1 << 20:
                    done.set()

        done = trio.Event()
        for index in range(2):
            one, other = await links.open()
            nursery.start_soon(drain, index, one)
            nursery.start_soon(other.send_all, bytes(64 << 20))
        await done.wait()
        assert max(received) < 2 * min(received)


class TestTinyBuffers:
    @pytest.fixture
    async def narrow(self, make_links: MakeLinks) -> LinkPair:
        return await make_links("sockets", buffers=8192)

    async def test_20_mb_both_ways(self, narrow: LinkPair) -> None:
        ends = await narrow.open()
        data = [os.urandom(1 << 20) for _ in ends]
        digests = [hashlib.sha256() for _ in ends]

        async def send(index: int) -> None:
            for _ in range(20):
                await ends[index].send_all(data[index])
            await ends[index].send_eof()

        async def receive(index: int) -> None:
            async for chunk in ends[index]:
                digests[index].update(chunk)

        async with trio.open_nursery() as nursery:
            for index in range(2):
                nursery.start_soon(send, index)
                nursery.start_soon(receive, index)
        assert [digest.digest() for digest in digests] == [hashlib.sha256(one * 20).digest() for one in reversed(data)]
        await narrow.idle()

    async def test_twelve_echoes_of_more_than_all_buffers_hold(self, narrow: LinkPair) -> None:
        size = WINDOW * 3
        totals = [0] * 12

        async def receive(index: int, stream: TunnelStream) -> None:
            async for chunk in stream:
                totals[index] += len(chunk)

        async def send(stream: TunnelStream) -> None:
            await stream.send_all(bytes(size))
            await stream.send_eof()

        async with trio.open_nursery() as nursery:
            for index in range(12):
                one, other = await narrow.open()
                nursery.start_soon(echo, other)
                nursery.start_soon(receive, index, one)
                nursery.start_soon(send, one)
        assert totals == [size] * 12
        await narrow.idle()


async def _never_sent(_: object) -> None:
    await trio.sleep_forever()


async def test_a_peer_that_closes_upon_a_goodbye_does_not_change_why(make_raw: MakeRaw, nursery: trio.Nursery) -> None:
    raw = make_raw("server")
    nursery.start_soon(raw.link.run)
    await raw.peer.send(Hello(VERSION, AGENT.to_info()))
    await raw.peer.next()
    raw.link._transport.send = _never_sent  # type: ignore[method-assign]  # the goodbye is still on its way out
    nursery.start_soon(raw.link.close, "leaving", "this side is leaving")
    await wait_all_tasks_blocked()
    await raw.peer.stream.aclose()
    await raw.link.ended.wait()
    assert repr(raw.link.why) == repr(LinkStopped("this side is leaving"))


async def test_a_fault_of_a_sink_ends_its_link_alone(links: LinkPair, caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(TunnelStream):
        def on_data(self, data: memoryview) -> None:
            raise KeyError("a bug")

    near, far = await links.open()
    Faulty(far.core, far.outlet)._attach()
    await near.send_all(b"x")
    await links.agent.ended.wait()
    await links.server.ended.wait()
    assert "internal fault" in str(links.server.why)
    assert "fault in a link" in caplog.text


async def test_a_fault_in_sending_ends_its_link_alone(make_links: MakeLinks, caplog: pytest.LogCaptureFixture) -> None:
    links = await make_links("memory")

    async def fault(_: object) -> None:
        raise KeyError("a bug")

    links.agent._transport.send = fault  # type: ignore[method-assign]
    links.agent.session.send_control(Ping(0, 1))
    links.agent.flush()
    await links.agent.ended.wait()
    await links.server.ended.wait()
    assert "internal fault" in str(links.agent.why)
    assert "fault in a link" in caplog.text


# -- bounds


def flood(count: int, packet: Callable[[int], Packet]) -> bytes:
    return b"".join(packet(number).encode() for number in range(1, count + 1))


def a_ping(number: int) -> Packet:
    return Ping(0, number % 1000)


def a_dial(number: int) -> Packet:
    return DialReq(number, "a", 1, 1000, 1000, {})


def refuse(stream: TunnelStream, request: DialReq) -> None:
    stream.core.refuse(Refused("no"))


async def linked(raw: RawLink, nursery: trio.Nursery, me: Identity) -> Link:
    nursery.start_soon(raw.link.run)
    await raw.peer.shake_hands(me)
    return raw.link


async def until_read(raw: RawLink) -> float:
    """The time when everything so far has been read and waited for: that is so when a second PING is answered."""
    for token in (0xFFFE, 0xFFFF):
        await raw.peer.send(Ping(0, token))
        while await raw.peer.next() != Pong(0, token):
            pass
    return trio.current_time()


@pytest.mark.parametrize(
    ("packet", "count", "seconds", "bound"), [(a_ping, 5000, 3, "ping_rate"), (a_dial, 10_000, 3, "dial_rate")]
)
async def test_a_flood_is_read_as_slowly_as_it_may_come(
    autojump_clock: MockClock,
    nursery: trio.Nursery,
    make_raw: MakeRaw,
    packet: Callable[[int], Packet],
    count: int,
    seconds: float,
    bound: str,
) -> None:
    raw = make_raw("server", on_dial=refuse)
    link = await linked(raw, nursery, CLIENT)
    await raw.peer.send(flood(count, packet))
    assert await until_read(raw) == pytest.approx(seconds, rel=0.01)
    assert link._bounds.hits.keys() == {bound}
    assert link.why is None


@pytest.mark.parametrize(("packet", "count"), [(a_ping, 2000), (a_dial, 4000)])
async def test_what_is_no_flood_is_read_at_once(
    autojump_clock: MockClock, nursery: trio.Nursery, make_raw: MakeRaw, packet: Callable[[int], Packet], count: int
) -> None:
    raw = make_raw("server", on_dial=refuse)
    link = await linked(raw, nursery, CLIENT)
    await raw.peer.send(flood(count, packet))
    await raw.peer.send(Credit(1, 1), Close(9999, "cancelled", ""), Eof(1))
    await wait_all_tasks_blocked()
    assert trio.current_time() == 0
    assert not link._bounds.hits


async def test_a_long_flood_does_not_make_a_link_count_as_silent(
    autojump_clock: MockClock, nursery: trio.Nursery, make_raw: MakeRaw
) -> None:
    raw = make_raw("server")
    link = await linked(raw, nursery, CLIENT)
    await raw.peer.send(flood(50_000, a_ping))
    await trio.sleep(40)
    assert link.why is None
    await trio.sleep(60)
    assert "nothing was heard" in str(link.why)


async def test_a_server_is_not_read_more_slowly(
    autojump_clock: MockClock, nursery: trio.Nursery, make_raw: MakeRaw
) -> None:
    raw = make_raw("agent", on_dial=refuse)
    link = await linked(raw, nursery, SERVER)
    await raw.peer.send(flood(10_000, a_ping), flood(10_000, a_dial))
    assert await until_read(raw) == 0
    assert not link._bounds.hits


async def test_a_ping_with_each_frame_is_free(
    autojump_clock: MockClock, nursery: trio.Nursery, make_raw: MakeRaw
) -> None:
    raw = make_raw("server")
    link = await linked(raw, nursery, AGENT)
    opened: list[TunnelStream] = []

    async def dial() -> None:
        opened.append(await link.dial("a", 1, seconds=10))

    nursery.start_soon(dial)
    request = await raw.peer.next()
    assert isinstance(request, DialReq)
    await raw.peer.send(DialRsp(1, "ok", "", 1 << 30))
    await wait_all_tasks_blocked()
    for _ in range(20):
        for _ in range(900):
            opened[0].core.send(b"x")
        link.flush()
        await wait_all_tasks_blocked()
        await raw.peer.send(flood(900, lambda number: Ping(1, 0)))
        await wait_all_tasks_blocked()
    assert trio.current_time() == 0
    assert not link._bounds.hits


async def test_a_peer_that_takes_nothing_although_much_waits_for_it_is_ended(
    nursery: trio.Nursery,
) -> None:
    near, far = lockstep_stream_pair()
    link = Link(
        StreamTransport(near), AcceptingHandshake(SERVER), limits=Limits(link_queue=100_000), timeouts=Timeouts()
    )
    nursery.start_soon(link.run)
    await far.send_all(Hello(VERSION, AGENT.to_info()).encode())
    await far.receive_some(10_000)
    opened: list[TunnelStream] = []

    async def dial() -> None:
        opened.append(await link.dial("a", 1, seconds=10))

    nursery.start_soon(dial)
    await far.receive_some(10_000)
    await far.send_all(DialRsp(1, "ok", "", 1 << 30).encode())
    await wait_all_tasks_blocked()
    opened[0].core.send(bytes(600_000))
    link.outflow.end_turn()  # that much is in the transport's hands
    for _ in range(2):
        opened[0].core.send(bytes(50_000))
        assert link.why is None
        link.outflow.end_turn()
    assert str(link.why) == "the peer does not take the 100032 bytes that wait for it"
    assert link._bounds.hits == {"link_queue": 1}
    await link.ended.wait()
    assert link.session.out.queued == 0


async def test_who_exceeds_its_credit_is_counted(nursery: trio.Nursery, make_raw: MakeRaw) -> None:
    raw = make_raw("agent", limits=Limits(first_window=1), on_dial=lambda stream, _request: stream.core.accept())
    link = await linked(raw, nursery, SERVER)
    await raw.peer.send(a_dial(1), data_header(1, 2) + b"xx")
    await link.ended.wait()
    assert link._bounds.hits == {"credit": 1}


class TestTurns:
    async def test_what_many_tasks_queue_in_one_turn_goes_out_at_once(
        self, make_links: MakeLinks, nursery: trio.Nursery
    ) -> None:
        links = await make_links("sockets")
        sent: list[int] = []
        send_now = links.server._transport.send_now

        def count(buffers: Sequence[Buffer]) -> Sequence[Buffer]:
            sent.append(sum(map(len, buffers)))
            return send_now(buffers)

        links.server._transport.send_now = count  # type: ignore[method-assign]
        for _ in range(20):
            nursery.start_soon(links.open)
        await links.server.open_streams.wait_value(20)
        await wait_all_tasks_blocked()
        assert len(sent) == 1

    async def test_a_goodbye_does_not_wait_for_the_turn_to_end(self, links: LinkPair) -> None:
        stream, other = await links.open()
        stream.core.send(b"last words")
        await links.server.close("leaving", "gone")
        await links.agent.ended.wait()
        assert "gone" in str(links.agent.why)
        assert other.core.received == len(b"last words")

    async def test_what_is_queued_counts_as_sending_until_the_turn_has_ended(self, links: LinkPair) -> None:
        stream, _ = await links.open()
        stream.core.send(b"data")
        assert links.server.outflow.sending
        await links.server.outflow.all_sent()
        assert not links.server.outflow.sending
