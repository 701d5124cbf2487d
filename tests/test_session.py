"""The multiplexer: two sessions back to back, ids, what is legal, and the order of what is sent."""

from __future__ import annotations

import random
import re
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule
from sessions import ALL, LIMIT, WINDOW, Pair, Seen, Side, Sink, acceptor, decode

from tunnel.core import State, Stream
from tunnel.errors import (
    DialProtocolError,
    LinkLost,
    Refused,
    RefusedDraining,
    RemoteProtocolError,
)
from tunnel.frames import DATA_OVERHEAD
from tunnel.packets import (
    MAX_U32,
    Close,
    Credit,
    DialReq,
    DialRsp,
    Drain,
    DrainAck,
    Eof,
    Hello,
    Packet,
    Ping,
    Pong,
    Welcome,
)
from tunnel.session import Session


@pytest.fixture
def pair() -> Pair:
    return Pair()


# -- ids


def test_ids_grow_and_are_not_used_again(pair: Pair) -> None:
    ids = []
    for _ in range(3):
        near, _ = pair.open()
        ids.append(near.id)
        near.reset("reset", "gone")
        pair.pump()
    assert ids == [1, 2, 3]


@pytest.mark.parametrize("number", [0, 1, 4, 5])
def test_a_dial_with_an_id_that_did_not_grow_is_refused(number: int) -> None:
    side = Side(opener=False)
    side.receive(DialReq(5, "x", 1, WINDOW, 1, {}))
    side.dialled[0][0].refuse(Refused())
    with pytest.raises(RemoteProtocolError, match=f"DIAL_REQ for stream {number}; ids up to 5"):
        side.receive(DialReq(number, "x", 1, WINDOW, 1, {}))


def test_ids_may_have_gaps() -> None:
    side = Side(opener=False)
    side.receive(DialReq(5, "x", 1, WINDOW, 1, {}), DialReq(MAX_U32, "x", 1, WINDOW, 1, {}))
    assert [stream.id for stream, _ in side.dialled] == [5, MAX_U32]


def test_a_link_whose_ids_are_used_up_opens_no_more(pair: Pair) -> None:
    pair.opener.session._last_id = MAX_U32
    with pytest.raises(LinkLost):
        pair.opener.session.open("x", 1, 1, {}, lambda error: None)
    assert pair.opener.session.streams == 0


# -- packets that are not legal now


def test_a_dial_to_an_opener_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="DIAL_REQ"):
        Side(opener=True).receive(DialReq(1, "x", 1, WINDOW, 1, {}))


def test_an_answer_to_an_acceptor_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="DIAL_RSP"):
        acceptor().receive(DialRsp(1, "ok", "", WINDOW))


def test_a_second_answer_is_refused(pair: Pair) -> None:
    near, _ = pair.open()
    with pytest.raises(RemoteProtocolError, match="second answer"):
        pair.opener.receive(DialRsp(near.id, "ok", "", WINDOW))


def test_data_before_the_answer_is_refused(pair: Pair) -> None:
    near, far, _ = pair.dial()
    for side, stream in ((pair.opener, near), (pair.acceptor, far)):
        with pytest.raises(RemoteProtocolError, match="DIALLING"):
            side.session.receive_data(stream.id, memoryview(b"x"))


def test_eof_before_the_answer_is_refused(pair: Pair) -> None:
    near, far, _ = pair.dial()
    for side, stream in ((pair.opener, near), (pair.acceptor, far)):
        with pytest.raises(RemoteProtocolError, match="DIALLING"):
            side.receive(Eof(stream.id))


def test_data_after_eof_is_refused() -> None:
    side = acceptor()
    side.receive(Eof(1))
    with pytest.raises(RemoteProtocolError, match="REMOTE_EOF"):
        side.session.receive_data(1, memoryview(b"x"))


def test_a_second_eof_is_refused() -> None:
    side = acceptor()
    side.receive(Eof(1))
    with pytest.raises(RemoteProtocolError, match="REMOTE_EOF"):
        side.receive(Eof(1))


def test_a_peer_that_asks_and_never_reads_the_answers_is_refused() -> None:
    side = acceptor()
    with pytest.raises(RemoteProtocolError, match="bytes of answers are waiting to be read"):
        side.receive(*[Ping(0, 1)] * 1_000_000)


def test_a_peer_that_reads_the_answers_may_ask_on() -> None:
    side = acceptor()
    for _ in range(500):
        side.receive(*[Ping(0, 1)] * 1000)
        side.session.out.take(ALL)


def test_data_of_the_link_itself_is_refused() -> None:
    side = acceptor()
    with pytest.raises(RemoteProtocolError):
        side.session.receive_data(0, memoryview(b"x"))
    assert side.takes() == []


def test_a_second_hello_is_refused() -> None:
    side = acceptor()
    with pytest.raises(RemoteProtocolError):
        side.receive(Hello(1, {}))
    assert side.control == []


def test_a_second_welcome_is_handed_on() -> None:
    side = acceptor()
    side.receive(Welcome(1, {}))
    assert side.control == [Welcome(1, {})]


@pytest.mark.parametrize("packet", [Eof(9), Close(9, "reset", ""), Credit(9, 1)], ids=repr)
def test_what_is_late_for_a_stream_is_ignored(packet: Packet) -> None:
    side = acceptor()
    side.receive(packet)
    assert side.takes() == []


# -- dials


def test_a_late_answer_to_a_dial_that_was_given_up_is_ignored(pair: Pair) -> None:
    near, far, answers = pair.dial()
    near.reset("cancelled", "given up")
    far.accept()
    sink = Sink()
    far.attach(sink)
    pair.pump()
    assert (near.state, far.state, answers) == (State.CLOSED, State.CLOSED, [])
    assert sink.calls == [("reset", "cancelled", "given up")]


def test_bytes_sent_on_a_dial_that_was_given_up_are_dropped(pair: Pair) -> None:
    near, far, _ = pair.dial()
    near.reset("cancelled", "given up")
    far.accept()
    far.send(b"220 hello")
    far.send_eof()
    pair.pump()
    assert (pair.opener.session.streams, pair.acceptor.session.streams) == (0, 0)


def test_a_close_answers_a_dial(pair: Pair) -> None:
    _, far, answers = pair.dial()
    far.reset("refused_draining", "leaving")
    pair.pump()
    assert [type(error) for error in answers] == [RefusedDraining]


def test_an_answer_with_an_unknown_code_is_a_protocol_error(pair: Pair) -> None:
    near, _, answers = pair.dial()
    pair.opener.receive(DialRsp(near.id, "from_the_future", "because", 0))
    assert [(type(error), str(error)) for error in answers] == [(DialProtocolError, "because (from_the_future)")]


@pytest.mark.parametrize("ms", [0, MAX_U32, MAX_U32 + 1])
def test_any_time_for_a_dial_is_written_so_that_the_peer_takes_it(pair: Pair, ms: int) -> None:
    pair.opener.session.open("x", 1, ms, {}, lambda error: None)
    pair.pump()
    assert pair.acceptor.dialled[0][1].ms == min(ms, MAX_U32)


# -- the order of what is sent


def test_control_overtakes_data(pair: Pair) -> None:
    near, _ = pair.open()
    other, _ = pair.open()
    near.send(b"data")
    other.reset("reset", "gone")
    pair.opener.session.send_control(Ping(0, 1))
    pair.opener.session.open("x", 1, 1, {}, lambda error: None)
    kinds = [packet if isinstance(packet, tuple) else type(packet) for packet in pair.opener.takes()]
    assert kinds == [Close, Ping, DialReq, (near.id, b"data")]


def test_control_overtakes_data_that_did_not_fit_the_last_take(pair: Pair) -> None:
    near, _ = pair.open()
    near.send(b"one")
    near.send(b"two")
    assert pair.opener.takes(1) == [(1, b"one")]
    pair.opener.session.send_control(Ping(0, 1))
    assert pair.opener.takes(1) == [Ping(0, 1), (1, b"two")]


def test_an_answer_is_ahead_of_its_streams_data() -> None:
    side = Side(opener=False)
    side.receive(DialReq(1, "x", 1, WINDOW, 1, {}))
    stream = side.dialled[0][0]
    stream.accept()
    stream.send(b"220 hello")
    assert side.takes() == [DialRsp(1, "ok", "", WINDOW), (1, b"220 hello")]


def test_frames_of_streams_take_turns(pair: Pair) -> None:
    one, two, three = (pair.open()[0] for _ in range(3))
    for stream in (one, one, one, two, three, three):
        stream.send(b"x")
    assert [item[0] for item in pair.opener.takes() if isinstance(item, tuple)] == [1, 2, 3, 1, 3, 1]


def test_turns_go_on_from_take_to_take(pair: Pair) -> None:
    one, two = (pair.open()[0] for _ in range(2))
    for stream in (one, one, two, two):
        stream.send(b"x")
    taken = [pair.opener.takes(1) for _ in range(4)]
    assert taken == [[(1, b"x")], [(2, b"x")], [(1, b"x")], [(2, b"x")]]


def test_eof_is_behind_the_data_of_its_stream_only(pair: Pair) -> None:
    one, two = (pair.open()[0] for _ in range(2))
    one.send(b"a")
    one.send(b"b")
    one.send_eof()
    two.send(b"c")
    two.send_eof()
    assert pair.opener.takes() == [(1, b"a"), (2, b"c"), (1, b"b"), Eof(2), Eof(1)]


def test_data_of_a_stream_that_closed_is_still_sent(pair: Pair) -> None:
    near, far, near_sink, _ = pair.joined()
    near.send_eof()
    pair.pump()
    far.send(b"the last words")
    far.send_eof()
    assert far.state is State.CLOSED
    pair.pump()
    assert near_sink.calls == [b"the last words", "eof"]


def test_a_reset_drops_its_own_queue_and_keeps_the_others(pair: Pair) -> None:
    one, two = (pair.open()[0] for _ in range(2))
    one.send(b"a")
    two.send(b"b")
    one.send(b"c")
    one.reset("reset", "gone")
    assert pair.opener.takes() == [Close(1, "reset", "gone"), (2, b"b")]


def test_a_reset_from_the_peer_drops_the_queue_too(pair: Pair) -> None:
    one, two = (pair.open()[0] for _ in range(2))
    one.send(b"a")
    two.send(b"b")
    one.send_eof()
    pair.opener.receive(Close(1, "reset", "gone"))
    assert pair.opener.takes() == [(2, b"b")]


def test_a_take_ends_with_the_frame_that_reaches_its_limit(pair: Pair) -> None:
    near, _ = pair.open()
    for _ in range(5):
        near.send(bytes(100))
    assert len(pair.opener.takes(2 * (100 + DATA_OVERHEAD))) == 2
    assert len(pair.opener.takes(2 * (100 + DATA_OVERHEAD) + 1)) == 3


def test_a_take_is_never_more_buffers_than_a_gather_list_holds() -> None:
    pair = Pair(window=LIMIT)
    near, _ = pair.open()
    for _ in range(1000):
        near.send(b"x")
    for _ in range(100):
        near.send(bytes(8 * 1024))
    sizes = []
    while pair.opener.session.out:
        sizes.append(len(pair.opener.session.out.take(ALL)))
    assert max(sizes) <= 1024


# -- what is queued


def _check_queued(side: Side) -> None:
    """``queued`` is the DATA and EOF that taking everything gives. Takes everything."""
    queued = side.session.out.queued
    taken = side.takes()
    data = [len(item[1]) + DATA_OVERHEAD for item in taken if isinstance(item, tuple)]
    ends = [len(item.encode()) for item in taken if isinstance(item, Eof)]
    assert queued == sum(data) + sum(ends)
    assert side.session.out.queued == 0


@pytest.mark.parametrize("size", [1, 8 * 1024 - 1, 8 * 1024, 100_000])
def test_queued_counts_data_and_eof(size: int) -> None:
    pair = Pair(window=LIMIT)
    near, _ = pair.open()
    near.send(bytes(size))
    near.send_eof()
    _check_queued(pair.opener)


def test_queued_does_not_count_control(pair: Pair) -> None:
    pair.opener.session.send_control(Ping(0, 1))
    assert pair.opener.session.out.queued == 0
    assert pair.opener.session.out


@pytest.mark.parametrize("state", [State.OPEN, State.LOCAL_EOF])
@pytest.mark.parametrize("ours", [True, False])
def test_queued_forgets_what_a_reset_dropped(pair: Pair, ours: bool, state: State) -> None:
    one, two = (pair.open()[0] for _ in range(2))
    for stream in (one, two, one):
        stream.send(bytes(100))
    if state is State.LOCAL_EOF:
        one.send_eof()
    pair.opener.takes(1)
    if ours:
        one.reset("reset", "gone")
    else:
        pair.opener.receive(Close(1, "reset", "gone"))
    assert pair.opener.session.out.queued == 100 + DATA_OVERHEAD
    _check_queued(pair.opener)


def test_there_is_no_output_at_first(pair: Pair) -> None:
    assert not pair.opener.session.out
    assert pair.opener.session.out.take(ALL) == []


# -- streams that are not there


def _closes(side: Side, number: int, times: int = 3) -> list[Seen]:
    for _ in range(times):
        side.session.receive_data(number, memoryview(b"x"))
    return side.takes()


def test_data_for_an_unknown_stream_is_answered_by_one_close(pair: Pair) -> None:
    for side in (pair.opener, pair.acceptor):
        (close,) = _closes(side, 9)
        assert isinstance(close, Close)
        assert (close.stream, close.code) == (9, "unknown_stream")


def test_data_for_a_stream_that_ended_is_answered_by_one_close() -> None:
    side = acceptor()
    side.dialled[0][0].send_eof()
    side.receive(Eof(1))
    side.takes()
    assert [type(packet) for packet in _closes(side, 1)] == [Close]


def test_data_for_a_stream_that_the_peer_reset_is_answered_by_one_close() -> None:
    side = acceptor()
    side.receive(Close(1, "reset", "gone"))
    assert [type(packet) for packet in _closes(side, 1)] == [Close]


def test_data_for_a_stream_that_this_side_reset_was_answered_already() -> None:
    side = acceptor()
    side.dialled[0][0].reset("reset", "gone")
    assert _closes(side, 1) == [Close(1, "reset", "gone")]


def test_data_for_a_stream_that_is_not_there_goes_nowhere_else() -> None:
    side = acceptor()
    sink = Sink()
    side.dialled[0][0].attach(sink)
    _closes(side, 2)
    assert sink.calls == []


def test_the_memory_of_answered_streams_is_bounded(pair: Pair) -> None:
    for number in range(1, 5000):
        pair.acceptor.session.receive_data(number, memoryview(b"x"))
    assert len(pair.acceptor.session._closes) <= 1024


# -- the link itself


def test_a_ping_is_answered_ahead_of_data() -> None:
    side = acceptor()
    side.dialled[0][0].send(b"data")
    side.receive(Ping(0, 7))
    assert side.takes() == [Pong(0, 7), (1, b"data")]
    assert side.control == []


@pytest.mark.parametrize(
    "packet",
    [Close(0, "leaving", "goodbye"), Drain(1, "soft", "signal", 1, 0), DrainAck(1, "soft")],
    ids=repr,
)
def test_packets_about_the_link_are_passed_on(packet: Packet) -> None:
    side = acceptor()
    side.receive(packet)
    assert side.control == [packet]
    assert side.takes() == []


def test_the_end_resets_every_stream(pair: Pair) -> None:
    near, _, near_sink, _ = pair.joined()
    half, _, half_sink, _ = pair.joined()
    half.send_eof()
    late, _ = pair.open()
    dialling, _, answers = pair.dial()
    pair.opener.session.end("link_lost", "the peer closed the connection")
    assert {stream.state for stream in (near, half, late, dialling)} == {State.CLOSED}
    reset = ("reset", "link_lost", "the peer closed the connection")
    assert (near_sink.calls, half_sink.calls) == ([reset], [reset])
    assert [(type(error), str(error)) for error in answers] == [(LinkLost, "the peer closed the connection")]
    late_sink = Sink()
    late.attach(late_sink)
    assert late_sink.calls == [reset]
    assert (pair.opener.session.streams, pair.opener.counts[-1]) == (0, 0)


def test_the_end_drops_what_was_queued(pair: Pair) -> None:
    near, _ = pair.open()
    near.send(b"data")
    pair.opener.session.end("link_lost", "gone")
    assert (pair.opener.session.out.queued, pair.opener.takes()) == (0, [])


def test_the_end_of_an_acceptor_resets_its_dials(pair: Pair) -> None:
    _, far, _ = pair.dial()
    sink = Sink()
    far.attach(sink)
    pair.acceptor.session.end("link_lost", "gone")
    assert (far.state, sink.calls) == (State.CLOSED, [("reset", "link_lost", "gone")])


def test_a_sink_may_reset_another_stream_when_the_link_ends(pair: Pair) -> None:
    near, _ = pair.open()
    other, _ = pair.open()

    class Chain(Sink):
        def on_reset(self, code: str, text: str) -> None:
            other.reset(code, text)

    near.attach(Chain())
    pair.opener.session.end("link_lost", "gone")
    assert (near.state, other.state, pair.opener.session.streams) == (State.CLOSED, State.CLOSED, 0)


def test_reprs_show_state_and_counts(pair: Pair) -> None:
    near, _ = pair.open()
    near.send(b"x")
    assert repr(near) == "<Stream 1 OPEN credit=999 window_left=1000>"
    assert repr(pair.opener.session) == "<Session opener streams=1 queued=17 control=0>"


# -- anything, in any order


BLOB = random.Random(1).randbytes(64 * 1024)


class End:
    """What the model knows of one end of a stream."""

    def __init__(self, stream: Stream, side: Side) -> None:
        self.stream = stream
        self.side = side
        self.peer: End | None = None
        self.sink = Sink()
        self.attached = False
        self.was_reset = False
        self.sent = 0
        self.consumed = 0
        self.issued = 0  # credit in CREDIT packets that were taken from this end's session
        self.granted = 0  # credit in CREDIT packets that arrived here
        self.queue: deque[int] = deque()  # sizes of frames that wait

    @property
    def received(self) -> bytes:
        return b"".join(call for call in self.sink.calls if isinstance(call, bytes))

    def payload(self, size: int) -> bytes:
        start = (self.stream.id * 7919 + self.sent) % (len(BLOB) // 2)
        return BLOB[start : start + size]

    def attach(self) -> None:
        if not self.attached:
            self.attached = True
            self.stream.attach(self.sink)


class TwoSessions(RuleBasedStateMachine):
    """Random use of two sessions, with bytes delivered in random portions, against a model of what must be."""

    ends = Bundle("ends")

    def __init__(self) -> None:
        super().__init__()
        self.opener, self.acceptor = Side(opener=True), Side(opener=False)
        self.table: dict[tuple[Side, int], End] = {}
        self.wire: dict[Side, bytearray] = defaultdict(bytearray)
        self.sent: dict[End, bytearray] = defaultdict(bytearray)
        for side in (self.opener, self.acceptor):
            side.decoder.on_packet = self._recorded(side)

    def _recorded(self, side: Side) -> Callable[[Packet], None]:
        def receive(packet: Packet) -> None:
            end = self.table.get((side, getattr(packet, "stream", 0)))
            if end is not None and end.stream.state is not State.CLOSED:
                if isinstance(packet, Credit):
                    end.granted += packet.amount
                elif isinstance(packet, Close):
                    end.was_reset = True
                    end.queue.clear()
            side.session.receive_packet(packet)

        return receive

    def _side(self, opener: bool) -> Side:
        return self.opener if opener else self.acceptor

    def _other(self, side: Side) -> Side:
        return self.acceptor if side is self.opener else self.opener

    # -- what users do

    @initialize(target=ends)
    def some_are_open(self) -> Any:
        ends = [self.open(), self.open()]
        self._settle()
        ends += [self._answer(stream, ok=True) for stream, _ in self.acceptor.dialled]
        self._settle()
        ends[0].attach()
        ends[-1].attach()
        return multiple(*ends)

    @rule(target=ends)
    def open(self) -> End:
        stream = self.opener.session.open("x", 1, 1, {}, lambda error: None)
        end = self.table[self.opener, stream.id] = End(stream, self.opener)
        return end

    @precondition(lambda self: any(stream.state is State.DIALLING for stream, _ in self.acceptor.dialled))
    @rule(target=ends, choice=st.integers(0, 100), ok=st.sampled_from([True, True, True, False]))
    def answer(self, choice: int, ok: bool) -> Any:
        waiting = [stream for stream, _ in self.acceptor.dialled if stream.state is State.DIALLING]
        return self._answer(waiting[choice % len(waiting)], ok=ok)

    def _answer(self, stream: Stream, *, ok: bool) -> Any:
        near = self.table[self.opener, stream.id]
        far = self.table[self.acceptor, stream.id] = End(stream, self.acceptor)
        near.peer, far.peer = far, near
        if ok:
            stream.accept()
            return far
        stream.refuse(Refused())
        near.was_reset = far.was_reset = True
        return multiple()

    @rule(end=ends)
    def attach(self, end: End) -> None:
        if end.stream.state is not State.DIALLING:
            end.attach()

    @rule(end=ends, size=st.integers(1, WINDOW) | st.just(WINDOW))
    def send(self, end: End, size: int) -> None:
        size = min(size, end.stream.credit)
        if end.stream.may_send and size:
            data = end.payload(size)
            end.stream.send(data)
            self.sent[end] += data
            end.sent += size
            end.queue.append(size + DATA_OVERHEAD)

    @rule(end=ends)
    def send_eof(self, end: End) -> None:
        if end.stream.may_send:
            end.stream.send_eof()
            end.queue.append(len(Eof(end.stream.id).encode()))

    @rule(end=ends)
    def reset(self, end: End) -> None:
        if end.stream.state is not State.CLOSED:
            end.stream.reset("reset", "gone")
            end.was_reset = True
            end.queue.clear()

    @rule(end=ends, size=st.integers(1, WINDOW) | st.just(ALL))
    def consume(self, end: End, size: int) -> None:
        size = min(size, len(end.received) - end.consumed)
        if size:
            end.consumed += size
            end.stream.consumed(size)

    @rule(end=ends, size=st.integers(1, WINDOW) | st.just(WINDOW))
    def send_and_consume(self, end: End, size: int) -> None:
        self.send(end, size)
        self._settle()
        if end.peer is not None:
            self.consume(end.peer, ALL)

    # -- what the link does

    @rule(opener=st.booleans(), limit=st.integers(1, WINDOW), size=st.integers(1, WINDOW) | st.just(ALL))
    def carry(self, opener: bool, limit: int, size: int) -> None:
        self.take(opener, limit)
        self.deliver(opener, size)

    def take(self, opener: bool, limit: int) -> None:
        side = self._side(opener)
        data = b"".join(side.session.out.take(limit))
        self.wire[side] += data
        for item in decode(data):
            self._taken(side, item)

    def _taken(self, side: Side, item: Seen) -> None:
        if isinstance(item, tuple):
            assert self.table[side, item[0]].queue.popleft() == len(item[1]) + DATA_OVERHEAD
        elif isinstance(item, Eof):
            assert self.table[side, item.stream].queue.popleft() == len(item.encode())
        elif isinstance(item, Credit):
            self.table[side, item.stream].issued += item.amount

    def deliver(self, opener: bool, size: int) -> None:
        side = self._side(opener)
        data, self.wire[side] = bytes(self.wire[side][:size]), self.wire[side][size:]
        self._other(side).decoder.feed(data)

    # -- what must be

    @invariant()
    def queued_is_exact(self) -> None:
        for side in (self.opener, self.acceptor):
            assert side.session.out.queued == sum(sum(end.queue) for end in self.table.values() if end.side is side)

    @invariant()
    def credit_is_what_was_granted_and_not_used(self) -> None:
        for end in self.table.values():
            if end.stream.state not in (State.DIALLING, State.CLOSED):
                assert end.stream.credit == WINDOW + end.granted - end.sent >= 0
                assert end.consumed >= end.issued

    @invariant()
    def what_arrived_is_a_prefix_of_what_was_sent(self) -> None:
        for end in self.table.values():
            if end.peer is not None:
                assert self.sent[end.peer].startswith(end.received)

    @invariant()
    def nothing_comes_behind_the_end(self) -> None:
        for end in self.table.values():
            calls = [call for call in end.sink.calls if call != "credit"]
            assert re.fullmatch("d*e?r?", "".join({bytes: "d", str: "e", tuple: "r"}[type(call)] for call in calls))

    def teardown(self) -> None:
        self._settle()
        for stream, _ in self.acceptor.dialled:
            if stream.state is State.DIALLING:
                self._answer(stream, ok=True)
        self._settle()
        for end in self.table.values():
            end.attach()
            self.consume(end, ALL)
            self.send_eof(end)
        self._settle()
        self._check_all_arrived()

    def _settle(self) -> None:
        moved = True
        while moved:
            self.take(True, ALL)
            self.take(False, ALL)
            moved = any(self.wire.values())
            self.deliver(True, ALL)
            self.deliver(False, ALL)
        self.queued_is_exact()
        for end in self.table.values():
            if end.stream.state in (State.OPEN, State.LOCAL_EOF):
                assert (end.consumed - end.issued) * 2 < WINDOW

    def _check_all_arrived(self) -> None:
        assert (self.opener.session.streams, self.acceptor.session.streams) == (0, 0)
        for end in self.table.values():
            assert end.stream.state is State.CLOSED
            if end.peer is not None and not (end.was_reset or end.peer.was_reset):
                assert end.received == self.sent[end.peer]
                assert "eof" in end.sink.calls
                assert not any(isinstance(call, tuple) for call in end.sink.calls)


TestTwoSessions = TwoSessions.TestCase
TestTwoSessions.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


# -- what all first windows of a link may have

KIB = 1024


def first_windows(budget: int, count: int, window: int = 512 * KIB) -> tuple[Pair, list[tuple[Stream, Stream]]]:
    pair = Pair(window=window, budget=budget)
    return pair, [pair.open() for _ in range(count)]


def test_a_first_window_is_a_quarter_of_what_is_left_if_that_is_less() -> None:
    _, streams = first_windows(4096 * KIB, 7)
    wanted = [512, 512, 512, 512, 512, 384, 288]
    assert [near.window.size // KIB for near, _ in streams] == wanted
    assert [near.credit // KIB for near, _ in streams] == wanted


def test_a_first_window_is_16_kib_however_many_streams_there_are() -> None:
    _, streams = first_windows(1024 * KIB, 100)
    assert [near.credit for near, _ in streams[30:]] == [16 * KIB] * 70


def test_a_first_window_comes_back_with_the_end_of_its_stream() -> None:
    pair, streams = first_windows(1024 * KIB, 100)
    for near, _ in streams:
        near.reset("cancelled", "")
    pair.pump()
    assert [pair.opener.session.windows.budget, pair.acceptor.session.windows.budget] == [1024 * KIB] * 2
    assert pair.open()[0].credit == 256 * KIB


def test_a_dial_that_is_not_answered_has_nothing_at_its_acceptor() -> None:
    pair = Pair(window=512 * KIB, budget=1024 * KIB)
    streams = [pair.dial() for _ in range(10)]
    assert pair.acceptor.session.windows.budget == 1024 * KIB
    streams[0][1].accept()
    pair.pump()
    assert streams[0][0].credit == 256 * KIB


def test_a_stream_that_leads_on_has_nothing_of_its_own() -> None:
    pair = Pair(window=512 * KIB, budget=1024 * KIB)
    _, far, _ = pair.dial()
    far.accept(window=700 * KIB)
    near = pair.opener.session.open("a", 1, 10, {}, lambda _: None, 700 * KIB)
    pair.pump()
    assert (far.window.lent, near.window.lent) == (0, 0)


def test_a_first_window_that_is_less_than_it_could_be_is_told() -> None:
    bitten: list[str] = []
    session = Session(
        opener=True,
        window=100 * KIB,
        budget=500 * KIB,
        on_dial=lambda _stream, _request: None,
        on_control=lambda _packet: None,
        on_streams=lambda _count: None,
        on_bound=bitten.append,
    )
    windows = [session.open("a", 1, 10, {}, lambda _: None).window.size // KIB for _ in range(3)]
    assert windows == [100, 100, 75]
    assert bitten == ["link_window"]
