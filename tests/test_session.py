"""The multiplexer: two sessions back to back, every transition, credit to the byte, and the order of what is sent."""

from __future__ import annotations

import random
import re
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from tunnel.errors import (
    DialError,
    DialProtocolError,
    LinkLost,
    LocalProtocolError,
    Refused,
    RefusedDraining,
    RemoteProtocolError,
)
from tunnel.frames import (
    DATA_OVERHEAD,
    MAX_U32,
    Close,
    Credit,
    Decoder,
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
from tunnel.session import Session, State, Stream

WINDOW = 1000
LIMIT = 1024 * 1024
ALL = 1 << 40

Seen = Packet | tuple[int, bytes]


class Sink:
    """Remembers every call; data in a row is one entry."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_data(self, data: memoryview) -> None:
        if self.calls and isinstance(self.calls[-1], bytes):
            self.calls[-1] += bytes(data)
        else:
            self.calls.append(bytes(data))

    def on_eof(self) -> None:
        self.calls.append("eof")

    def on_reset(self, code: str, text: str) -> None:
        self.calls.append(("reset", code, text))

    def on_credit(self) -> None:
        self.calls.append("credit")


class Side:
    """One session, with everything it says remembered."""

    def __init__(
        self, *, opener: bool, window: int = WINDOW, most_window: int = 0, spare: int = 0, budget: int = 1 << 40
    ) -> None:
        self.dialled: list[tuple[Stream, DialReq]] = []
        self.control: list[Packet] = []
        self.counts: list[int] = []
        self.session = Session(
            opener=opener,
            window=window,
            most_window=most_window,
            spare=spare,
            budget=budget,
            on_dial=lambda stream, request: self.dialled.append((stream, request)),
            on_control=self.control.append,
            on_streams=self.counts.append,
        )
        self.decoder = Decoder(LIMIT, self.session.receive_packet, self.session.receive_data)

    def receive(self, *packets: Packet) -> None:
        for packet in packets:
            self.session.receive_packet(packet)

    def takes(self, limit: int = ALL) -> list[Seen]:
        """What it sends now, decoded."""
        return _decode(b"".join(self.session.out.take(limit)))


def _decode(data: bytes) -> list[Seen]:
    seen: list[Seen] = []
    Decoder(LIMIT, seen.append, lambda stream, payload: seen.append((stream, bytes(payload)))).feed(data)
    return seen


class Pair:
    """An opener and an acceptor, and the two ways between them."""

    def __init__(self, **windows: int) -> None:
        self.opener = Side(opener=True, **windows)
        self.acceptor = Side(opener=False, **windows)

    def pump(self) -> None:
        """Carry everything both ways until nobody has anything to send."""
        while self._carry(self.opener, self.acceptor) + self._carry(self.acceptor, self.opener):
            pass

    def _carry(self, source: Side, sink: Side) -> int:
        data = b"".join(source.session.out.take(ALL))
        sink.decoder.feed(data)
        return len(data)

    def dial(self) -> tuple[Stream, Stream, list[DialError | None]]:
        """Both ends of a stream in DIALLING state, and where the answer will be."""
        answers: list[DialError | None] = []
        near = self.opener.session.open("db.internal", 5432, 10_000, {}, answers.append)
        self.pump()
        return near, self.acceptor.dialled[-1][0], answers

    def open(self) -> tuple[Stream, Stream]:
        """Both ends of an open stream, without sinks."""
        near, far, answers = self.dial()
        far.accept()
        self.pump()
        assert answers == [None]
        return near, far

    def joined(self) -> tuple[Stream, Stream, Sink, Sink]:
        """Both ends of an open stream, and their sinks."""
        near, far = self.open()
        sinks = Sink(), Sink()
        near.attach(sinks[0])
        far.attach(sinks[1])
        return near, far, *sinks


@pytest.fixture
def pair() -> Pair:
    return Pair()


def _acceptor(**windows: int) -> Side:
    """An acceptor with one open stream, number 1, whose peer takes WINDOW bytes."""
    side = Side(opener=False, **windows)
    side.receive(DialReq(1, "x", 1, WINDOW, 1, {}))
    side.dialled[0][0].accept()
    side.takes()
    return side


# -- the states of a stream


def test_opening_sends_a_dial(pair: Pair) -> None:
    stream = pair.opener.session.open("db.internal", 5432, 10_000, {"later": 1}, lambda error: None)
    assert stream.state is State.DIALLING
    assert pair.opener.takes() == [DialReq(1, "db.internal", 5432, WINDOW, 10_000, {"later": 1})]


def test_a_dial_makes_a_stream_on_the_other_side(pair: Pair) -> None:
    near, far, answers = pair.dial()
    assert (near.state, far.state, answers) == (State.DIALLING, State.DIALLING, [])
    assert pair.acceptor.dialled == [(far, DialReq(near.id, "db.internal", 5432, WINDOW, 10_000, {}))]


def test_dialling_becomes_open_when_accepted(pair: Pair) -> None:
    near, far, answers = pair.dial()
    far.accept()
    assert (near.state, far.state, answers) == (State.DIALLING, State.OPEN, [])
    pair.pump()
    assert (near.state, far.state, answers) == (State.OPEN, State.OPEN, [None])


def test_dialling_becomes_closed_when_refused(pair: Pair) -> None:
    near, far, answers = pair.dial()
    far.refuse(Refused("no one listens"))
    pair.pump()
    assert (near.state, far.state) == (State.CLOSED, State.CLOSED)
    assert [(type(error), str(error)) for error in answers] == [(Refused, "no one listens")]


def test_open_becomes_local_eof_and_remote_eof(pair: Pair) -> None:
    near, far, near_sink, far_sink = pair.joined()
    near.send_eof()
    pair.pump()
    assert (near.state, far.state) == (State.LOCAL_EOF, State.REMOTE_EOF)
    assert (near_sink.calls, far_sink.calls) == ([], ["eof"])


def test_the_second_eof_closes_both_sides(pair: Pair) -> None:
    near, far, near_sink, far_sink = pair.joined()
    near.send_eof()
    pair.pump()
    far.send_eof()
    assert (near.state, far.state) == (State.LOCAL_EOF, State.CLOSED)
    pair.pump()
    assert near.state is State.CLOSED
    assert (near_sink.calls, far_sink.calls) == (["eof"], ["eof"])


def test_eofs_that_cross_close_both_sides(pair: Pair) -> None:
    near, far, near_sink, far_sink = pair.joined()
    near.send_eof()
    far.send_eof()
    assert (near.state, far.state) == (State.LOCAL_EOF, State.LOCAL_EOF)
    pair.pump()
    assert (near.state, far.state) == (State.CLOSED, State.CLOSED)
    assert (near_sink.calls, far_sink.calls) == (["eof"], ["eof"])


def _reach(pair: Pair, state: State) -> tuple[Stream, Stream]:
    """A stream whose near end is in ``state``."""
    if state is State.DIALLING:
        return pair.dial()[:2]
    near, far = pair.open()
    if state is State.LOCAL_EOF:
        near.send_eof()
    elif state is State.REMOTE_EOF:
        far.send_eof()
    pair.pump()
    assert near.state is state
    return near, far


_LIVE = [State.DIALLING, State.OPEN, State.LOCAL_EOF, State.REMOTE_EOF]


@pytest.mark.parametrize("state", _LIVE)
@pytest.mark.parametrize("by_opener", [True, False])
def test_a_reset_closes_both_sides_from_any_state(pair: Pair, state: State, by_opener: bool) -> None:
    near, far = _reach(pair, state)
    one, other = (near, far) if by_opener else (far, near)
    sink = Sink()
    other.attach(sink)
    sink.calls.clear()
    one.reset("reset", "gone")
    pair.pump()
    assert (one.state, other.state) == (State.CLOSED, State.CLOSED)
    if state is not State.DIALLING or by_opener:
        assert sink.calls == [("reset", "reset", "gone")]


@pytest.mark.parametrize("state", _LIVE)
def test_resets_that_cross_close_both_sides(pair: Pair, state: State) -> None:
    near, far = _reach(pair, state)
    near.reset("reset", "gone")
    far.reset("reset", "gone")
    pair.pump()
    assert (near.state, far.state) == (State.CLOSED, State.CLOSED)


@pytest.mark.parametrize("state", _LIVE)
def test_both_tables_are_empty_after_a_reset(pair: Pair, state: State) -> None:
    near, _ = _reach(pair, state)
    near.reset("reset", "gone")
    pair.pump()
    assert (pair.opener.session.streams, pair.acceptor.session.streams) == (0, 0)


def test_the_number_of_streams_is_told_whenever_it_changes(pair: Pair) -> None:
    near, far = pair.open()
    pair.open()[0].reset("reset", "gone")
    near.send_eof()
    far.send_eof()
    pair.pump()
    assert pair.opener.counts == pair.acceptor.counts == [1, 2, 1, 0]


def test_a_reset_of_a_closed_stream_does_nothing(pair: Pair) -> None:
    near, far = pair.open()
    near.reset("reset", "gone")
    pair.pump()
    near.reset("reset", "again")
    far.reset("reset", "again")
    assert not pair.opener.session.out
    assert not pair.acceptor.session.out


# -- what a caller may not do


@pytest.mark.parametrize("state", [State.DIALLING, State.LOCAL_EOF])
def test_sending_is_illegal_without_an_open_direction(pair: Pair, state: State) -> None:
    near, _ = _reach(pair, state)
    assert not near.may_send
    with pytest.raises(LocalProtocolError):
        near.send(b"x")
    with pytest.raises(LocalProtocolError):
        near.send_eof()


def test_sending_is_illegal_after_the_end(pair: Pair) -> None:
    near, _ = pair.open()
    near.reset("reset", "gone")
    with pytest.raises(LocalProtocolError):
        near.send(b"x")
    with pytest.raises(LocalProtocolError):
        near.send_eof()


def test_sending_nothing_is_illegal(pair: Pair) -> None:
    near, _ = pair.open()
    with pytest.raises(LocalProtocolError):
        near.send(b"")


def test_sending_more_than_the_credit_is_illegal_and_sends_nothing(pair: Pair) -> None:
    near, _ = pair.open()
    near.send(bytes(WINDOW - 1))
    with pytest.raises(LocalProtocolError):
        near.send(b"xx")
    assert (near.credit, pair.opener.session.out.queued) == (1, WINDOW - 1 + DATA_OVERHEAD)


def test_only_the_acceptor_answers(pair: Pair) -> None:
    near, _, _ = pair.dial()
    with pytest.raises(LocalProtocolError):
        near.accept()
    with pytest.raises(LocalProtocolError):
        near.refuse(Refused())


def test_a_dial_is_answered_once(pair: Pair) -> None:
    _, far = pair.open()
    with pytest.raises(LocalProtocolError):
        far.accept()
    with pytest.raises(LocalProtocolError):
        far.refuse(Refused())


def test_a_dial_that_was_given_up_cannot_be_answered(pair: Pair) -> None:
    near, far, _ = pair.dial()
    near.reset("cancelled", "given up")
    pair.pump()
    with pytest.raises(LocalProtocolError):
        far.accept()


def test_an_acceptor_does_not_open_streams(pair: Pair) -> None:
    with pytest.raises(LocalProtocolError):
        pair.acceptor.session.open("x", 1, 1, {}, lambda error: None)


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
        _acceptor().receive(DialRsp(1, "ok", "", WINDOW))


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
    side = _acceptor()
    side.receive(Eof(1))
    with pytest.raises(RemoteProtocolError, match="REMOTE_EOF"):
        side.session.receive_data(1, memoryview(b"x"))


def test_a_second_eof_is_refused() -> None:
    side = _acceptor()
    side.receive(Eof(1))
    with pytest.raises(RemoteProtocolError, match="REMOTE_EOF"):
        side.receive(Eof(1))


def test_a_peer_that_asks_and_never_reads_the_answers_is_refused() -> None:
    side = _acceptor()
    with pytest.raises(RemoteProtocolError, match="bytes of answers are waiting to be read"):
        side.receive(*[Ping(0, 1)] * 1_000_000)


def test_a_peer_that_reads_the_answers_may_ask_on() -> None:
    side = _acceptor()
    for _ in range(500):
        side.receive(*[Ping(0, 1)] * 1000)
        side.session.out.take(ALL)


def test_data_of_the_link_itself_is_refused() -> None:
    side = _acceptor()
    with pytest.raises(RemoteProtocolError):
        side.session.receive_data(0, memoryview(b"x"))
    assert side.takes() == []


def test_a_second_hello_is_refused() -> None:
    side = _acceptor()
    with pytest.raises(RemoteProtocolError):
        side.receive(Hello(1, {}))
    assert side.control == []


def test_a_second_welcome_is_handed_on() -> None:
    side = _acceptor()
    side.receive(Welcome(1, {}))
    assert side.control == [Welcome(1, {})]


@pytest.mark.parametrize("packet", [Eof(9), Close(9, "reset", ""), Credit(9, 1)], ids=repr)
def test_what_is_late_for_a_stream_is_ignored(packet: Packet) -> None:
    side = _acceptor()
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


# -- credit


def test_each_side_starts_with_the_window_of_the_other() -> None:
    opener, acceptor = Side(opener=True, window=300), Side(opener=False, window=500)
    near = opener.session.open("x", 1, 1, {}, lambda error: None)
    assert near.credit == 0
    acceptor.decoder.feed(b"".join(opener.session.out.take(ALL)))
    far = acceptor.dialled[0][0]
    far.accept()
    opener.decoder.feed(b"".join(acceptor.session.out.take(ALL)))
    assert (near.credit, far.credit) == (500, 300)


def test_a_window_of_nothing_waits_for_credit(pair: Pair) -> None:
    side = Side(opener=False)
    side.receive(DialReq(1, "x", 1, 0, 1, {}))
    stream, sink = side.dialled[0][0], Sink()
    stream.accept()
    stream.attach(sink)
    assert stream.may_send
    with pytest.raises(LocalProtocolError):
        stream.send(b"x")
    side.receive(Credit(1, 5))
    assert (stream.credit, sink.calls) == (5, ["credit"])


def test_more_than_the_credit_ends_the_link() -> None:
    side = _acceptor()
    side.session.receive_data(1, memoryview(bytes(WINDOW - 1)))
    with pytest.raises(RemoteProtocolError, match="with credit for 1"):
        side.session.receive_data(1, memoryview(b"xx"))


def test_credit_that_was_not_returned_cannot_be_used_again() -> None:
    side = _acceptor()
    side.session.receive_data(1, memoryview(bytes(WINDOW)))
    side.dialled[0][0].consumed(WINDOW // 2 - 1)
    with pytest.raises(RemoteProtocolError, match="with credit for 0"):
        side.session.receive_data(1, memoryview(b"x"))


def test_credit_goes_back_at_half_a_window() -> None:
    side = _acceptor()
    stream = side.dialled[0][0]
    side.session.receive_data(1, memoryview(bytes(WINDOW)))
    stream.consumed(WINDOW // 2 - 1)
    assert side.takes() == []
    stream.consumed(1)
    assert side.takes() == [Credit(1, WINDOW // 2)]
    stream.consumed(WINDOW // 2)
    assert side.takes() == [Credit(1, WINDOW // 2)]


def test_of_a_large_window_credit_goes_back_a_mib_at_a_time() -> None:
    side = _acceptor(window=16 << 20)
    stream = side.dialled[0][0]
    side.session.receive_data(1, memoryview(bytes(4 << 20)))
    stream.consumed((1 << 20) - 1)
    assert side.takes() == []
    stream.consumed(1)
    assert side.takes() == [Credit(1, 1 << 20)]


def test_bytes_that_nobody_consumed_give_no_credit(pair: Pair) -> None:
    near, _, _, far_sink = pair.joined()
    near.send(bytes(WINDOW))
    pair.pump()
    assert (near.credit, far_sink.calls) == (0, [bytes(WINDOW)])


def test_credit_is_told_only_when_there_was_none(pair: Pair) -> None:
    near, far, near_sink, _ = pair.joined()
    near.send(bytes(WINDOW // 2))
    pair.pump()
    far.consumed(WINDOW // 2)
    pair.pump()
    assert (near.credit, near_sink.calls) == (WINDOW, [])
    near.send(bytes(WINDOW))
    pair.pump()
    far.consumed(WINDOW)
    pair.pump()
    assert (near.credit, near_sink.calls) == (WINDOW, ["credit"])


def test_no_credit_is_given_for_a_direction_that_has_ended() -> None:
    side = _acceptor()
    side.session.receive_data(1, memoryview(bytes(WINDOW)))
    side.receive(Eof(1))
    side.dialled[0][0].consumed(WINDOW)
    assert side.takes() == []


def test_credit_is_given_while_only_our_direction_has_ended() -> None:
    side = _acceptor()
    side.dialled[0][0].send_eof()
    side.session.receive_data(1, memoryview(bytes(WINDOW)))
    side.dialled[0][0].consumed(WINDOW)
    assert Credit(1, WINDOW) in side.takes()


def test_late_credit_for_a_direction_that_has_ended_is_not_told(pair: Pair) -> None:
    near, far, near_sink, _ = pair.joined()
    near.send(bytes(WINDOW))
    near.send_eof()
    pair.acceptor.decoder.feed(b"".join(pair.opener.session.out.take(WINDOW)))
    far.consumed(WINDOW)
    pair.pump()
    assert near_sink.calls == []


@pytest.mark.parametrize("amount", [0, 1 << 31, MAX_U32])
def test_a_credit_of_nothing_or_too_much_is_refused(amount: int) -> None:
    side = _acceptor()
    with pytest.raises(RemoteProtocolError, match=f"CREDIT of {amount} for stream 1"):
        side.receive(Credit(1, amount))


def test_credit_may_reach_its_bound_and_not_pass_it() -> None:
    side = _acceptor()
    side.receive(Credit(1, (1 << 31) - WINDOW))
    assert side.dialled[0][0].credit == 1 << 31
    with pytest.raises(RemoteProtocolError):
        side.receive(Credit(1, 1))


# -- windows that grow


def _growing(most: int = 4 * WINDOW, spare: int = ALL) -> tuple[Side, Stream]:
    """An acceptor whose windows grow, with one open stream; its sink has taken the first half of a window."""
    side = Side(opener=False, most_window=most, spare=spare)
    side.receive(DialReq(1, "x", 1, WINDOW, 1, {}))
    stream = side.dialled[0][0]
    stream.accept()
    side.takes()
    side.session.receive_data(1, memoryview(bytes(WINDOW // 2)))
    return side, stream


def test_a_window_that_its_peer_used_up_while_the_sink_waited_doubles() -> None:
    side, stream = _growing()
    stream.consumed(WINDOW // 2)
    assert side.takes() == [Credit(1, WINDOW // 2), Ping(1, 0)]
    side.session.receive_data(1, memoryview(bytes(WINDOW // 2)))
    side.receive(Pong(1, 0))
    assert side.takes() == [Credit(1, WINDOW)]
    assert stream.window.size == 2 * WINDOW


def test_a_window_whose_peer_had_credit_left_stays() -> None:
    side, stream = _growing()
    stream.consumed(WINDOW // 2)
    side.takes()
    side.session.receive_data(1, memoryview(bytes(WINDOW // 2 - 1)))
    side.receive(Pong(1, 0))
    assert side.takes() == []
    assert stream.window.size == WINDOW


def test_a_window_whose_sink_is_behind_is_not_looked_at() -> None:
    side, stream = _growing()
    side.session.receive_data(1, memoryview(b"x"))
    stream.consumed(WINDOW // 2)
    assert side.takes() == [Credit(1, WINDOW // 2)]


def _use_up(side: Side, stream: Stream) -> None:
    """Arrive and be consumed, so that the window has every reason to grow."""
    half = (stream.window.size + 1) // 2
    side.session.receive_data(stream.id, memoryview(bytes(half)))
    stream.consumed(half)
    side.session.receive_data(stream.id, memoryview(bytes(stream.window.size - half)))
    side.receive(Pong(stream.id, 0))
    stream.consumed(stream.window.size - half)
    side.takes()


def test_a_window_grows_up_to_its_limit() -> None:
    side = Side(opener=False, most_window=3 * WINDOW, spare=ALL)
    side.receive(DialReq(1, "x", 1, WINDOW, 1, {}))
    stream = side.dialled[0][0]
    stream.accept()
    windows = []
    for _ in range(3):
        stream.window.unreturned, stream.window.left = 0, stream.window.size
        _use_up(side, stream)
        windows.append(stream.window.size)
    assert windows == [2 * WINDOW, 3 * WINDOW, 3 * WINDOW]


def test_windows_grow_within_what_the_link_has_to_spare_and_give_it_back() -> None:
    side, stream = _growing(spare=WINDOW // 4)
    stream.consumed(WINDOW // 2)
    side.session.receive_data(1, memoryview(bytes(WINDOW // 2)))
    side.receive(Pong(1, 0))
    assert stream.window.size == WINDOW + WINDOW // 4
    assert side.session.windows.spare == 0
    stream.reset("cancelled", "")
    assert side.session.windows.spare == WINDOW // 4


def test_one_window_is_looked_at_at_a_time() -> None:
    side, stream = _growing()
    side.receive(DialReq(2, "x", 1, WINDOW, 1, {}))
    other = side.dialled[1][0]
    other.accept()
    stream.consumed(WINDOW // 2)
    side.session.receive_data(2, memoryview(bytes(WINDOW // 2)))
    other.consumed(WINDOW // 2)
    assert [packet for packet in side.takes() if isinstance(packet, Ping)] == [Ping(1, 0)]


def test_a_stream_that_ended_meanwhile_gets_nothing() -> None:
    side, stream = _growing()
    stream.consumed(WINDOW // 2)
    side.session.receive_data(1, memoryview(bytes(WINDOW // 2)))
    stream.reset("cancelled", "")
    side.takes()
    side.receive(Pong(1, 0))
    assert side.takes() == []


@pytest.mark.parametrize("number", [0, 1, 7])
def test_an_answer_that_nobody_asked_for_changes_nothing(number: int) -> None:
    side, stream = _growing()
    side.receive(Pong(number, 0))
    assert side.takes() == []
    assert stream.window.size == WINDOW


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, WINDOW), st.booleans()), max_size=60))
def test_growing_windows_neither_lose_nor_invent_credit(steps: list[tuple[int, int, bool]]) -> None:
    pair = Pair(most_window=8 * WINDOW, spare=10 * WINDOW)
    ends = [pair.joined()[:2] for _ in range(3)]
    behind = [0, 0, 0]
    for number, size, keeps_up in steps:
        near, far = ends[number]
        for _ in range(4):
            if part := min(size, near.credit):
                near.send(bytes(part))
                behind[number] += part
        pair.pump()
        if keeps_up:
            far.consumed(behind[number])
            behind[number] = 0
        pair.pump()
    for (near, far), late in zip(ends, behind, strict=True):
        assert near.credit == far.window.left == far.window.size - far.window.unreturned - late
        assert WINDOW <= far.window.size <= 8 * WINDOW
    assert sum(far.window.size - WINDOW for _, far in ends) + pair.acceptor.session.windows.spare == 10 * WINDOW


# -- sinks that come late


def test_bytes_are_held_for_a_sink_that_comes_late(pair: Pair) -> None:
    near, far = pair.open()
    for part in (b"one", b"two"):
        near.send(part)
        pair.pump()
    sink = Sink()
    far.attach(sink)
    near.send(b"three")
    pair.pump()
    assert sink.calls == [b"onetwothree"]


def test_eof_comes_behind_what_was_held(pair: Pair) -> None:
    near, far = pair.open()
    near.send(b"one")
    near.send_eof()
    pair.pump()
    sink = Sink()
    far.attach(sink)
    assert sink.calls == [b"one", "eof"]


def test_a_stream_that_closed_is_still_given_to_a_late_sink(pair: Pair) -> None:
    near, far = pair.open()
    far.send_eof()
    near.send(b"one")
    near.send_eof()
    pair.pump()
    sink = Sink()
    far.attach(sink)
    assert (far.state, sink.calls) == (State.CLOSED, [b"one", "eof"])


def test_a_reset_comes_behind_what_was_held_and_is_no_eof(pair: Pair) -> None:
    near, far = pair.open()
    near.send(b"one")
    pair.pump()
    near.reset("reset", "gone")
    pair.pump()
    sink = Sink()
    far.attach(sink)
    assert sink.calls == [b"one", ("reset", "reset", "gone")]


def test_a_reset_after_eof_is_told_to_a_late_sink(pair: Pair) -> None:
    near, far = pair.open()
    near.send_eof()
    pair.pump()
    near.reset("reset", "gone")
    pair.pump()
    sink = Sink()
    far.attach(sink)
    assert sink.calls == [("reset", "reset", "gone")]


def test_a_stream_that_this_side_reset_does_not_look_ended(pair: Pair) -> None:
    near, _ = pair.open()
    near.reset("cancelled", "given up")
    sink = Sink()
    near.attach(sink)
    assert "eof" not in sink.calls


def test_what_was_held_counts_as_credit_only_when_consumed(pair: Pair) -> None:
    near, far = pair.open()
    near.send(bytes(WINDOW))
    pair.pump()
    far.attach(Sink())
    pair.pump()
    assert near.credit == 0
    far.consumed(WINDOW)
    pair.pump()
    assert near.credit == WINDOW


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
    side = _acceptor()
    side.dialled[0][0].send_eof()
    side.receive(Eof(1))
    side.takes()
    assert [type(packet) for packet in _closes(side, 1)] == [Close]


def test_data_for_a_stream_that_the_peer_reset_is_answered_by_one_close() -> None:
    side = _acceptor()
    side.receive(Close(1, "reset", "gone"))
    assert [type(packet) for packet in _closes(side, 1)] == [Close]


def test_data_for_a_stream_that_this_side_reset_was_answered_already() -> None:
    side = _acceptor()
    side.dialled[0][0].reset("reset", "gone")
    assert _closes(side, 1) == [Close(1, "reset", "gone")]


def test_data_for_a_stream_that_is_not_there_goes_nowhere_else() -> None:
    side = _acceptor()
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
    side = _acceptor()
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
    side = _acceptor()
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
        for item in _decode(data):
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


# -- streams that lead on to another link


def _leading_on() -> tuple[Side, Stream, Sink, list[Packet]]:
    """An acceptor with one open stream that leads on, its sink, and what was handed onward."""
    side = _acceptor()
    stream, sink, onward = side.dialled[0][0], Sink(), []
    stream.lead_on(onward.append)
    stream.attach(sink)
    return side, stream, sink, onward


@pytest.mark.parametrize("packet", [Credit(1, 10), Ping(1, 7), Pong(1, 7)], ids=lambda packet: type(packet).__name__)
def test_what_is_about_a_window_is_handed_onward_and_goes_nowhere_else(packet: Packet) -> None:
    side, _, sink, onward = _leading_on()
    side.receive(packet)
    assert (onward, sink.calls, side.takes(), side.control) == ([packet], [], [], [])


def test_bytes_and_ends_are_not_handed_onward() -> None:
    side, _, sink, onward = _leading_on()
    side.session.receive_data(1, memoryview(b"data"))
    side.receive(Eof(1), Close(1, "reset", "gone"))
    assert (onward, sink.calls) == ([], [b"data", "eof", ("reset", "reset", "gone")])


def test_packets_of_other_streams_are_not_handed_onward() -> None:
    side, _, _, onward = _leading_on()
    side.receive(Ping(0, 7), Ping(2, 7), Pong(0, 7), Pong(2, 7), Credit(2, 10))
    assert (onward, side.takes()) == ([], [Pong(0, 7)])


def test_credit_that_is_handed_onward_may_be_used_here() -> None:
    side, stream, _, _ = _leading_on()
    side.receive(Credit(1, 10))
    assert stream.credit == WINDOW + 10


def test_credit_from_nothing_is_handed_onward_and_not_told_to_the_sink() -> None:
    side, stream, sink, onward = _leading_on()
    stream.send(bytes(WINDOW))
    side.receive(Credit(1, 10))
    assert (onward, sink.calls) == ([Credit(1, 10)], [])


@pytest.mark.parametrize("amount", [0, 1 << 31])
def test_credit_that_is_refused_is_not_handed_onward(amount: int) -> None:
    side, _, _, onward = _leading_on()
    with pytest.raises(RemoteProtocolError):
        side.receive(Credit(1, amount))
    assert onward == []


# -- PING and PONG of a stream


def test_a_ping_of_a_stream_is_answered_with_its_number_and_token() -> None:
    side = _acceptor()
    side.receive(Ping(1, 7))
    assert side.takes() == [Pong(1, 7)]


def test_a_ping_of_a_stream_that_is_not_there_is_ignored() -> None:
    side = _acceptor()
    side.receive(Ping(2, 7))
    assert side.takes() == []


def _probed_and_another() -> tuple[Side, Stream, Stream]:
    """Two streams with half a window taken; the first is being looked at."""
    side, first = _growing()
    side.receive(DialReq(2, "x", 1, WINDOW, 1, {}))
    second = side.dialled[1][0]
    second.accept()
    side.session.receive_data(2, memoryview(bytes(WINDOW // 2)))
    first.consumed(WINDOW // 2)
    assert Ping(1, 0) in side.takes()
    return side, first, second


def _by_our_reset(side: Side, stream: Stream) -> None:
    stream.reset("cancelled", "")


def _by_their_reset(side: Side, stream: Stream) -> None:
    side.receive(Close(1, "cancelled", ""))


def _by_both_ends(side: Side, stream: Stream) -> None:
    stream.send_eof()
    side.receive(Eof(1))


def _by_their_end(side: Side, stream: Stream) -> None:
    """No byte will come any more, so there is no window to look at, and perhaps nobody who answers."""
    side.receive(Eof(1))


@pytest.mark.parametrize("ends", [_by_our_reset, _by_their_reset, _by_both_ends, _by_their_end])
def test_a_stream_that_ends_while_it_is_looked_at_makes_way_for_others(ends: Callable[[Side, Stream], None]) -> None:
    side, first, second = _probed_and_another()
    ends(side, first)
    side.takes()
    second.consumed(WINDOW // 2)
    assert side.takes() == [Credit(2, WINDOW // 2), Ping(2, 0)]


def test_the_answer_for_a_stream_that_made_way_does_not_count_for_another() -> None:
    side, first, second = _probed_and_another()
    first.reset("cancelled", "")
    second.consumed(WINDOW // 2)
    side.session.receive_data(2, memoryview(bytes(WINDOW // 2)))
    side.receive(Pong(1, 0))
    assert second.window.size == WINDOW
    side.receive(Pong(2, 0))
    assert second.window.size == 2 * WINDOW


# -- windows of a stream's own


@pytest.mark.parametrize("window", [0, 1, 5 * WINDOW])
def test_a_dial_can_offer_a_window_of_its_own(pair: Pair, window: int) -> None:
    near = pair.opener.session.open("x", 1, 1, {}, lambda error: None, window)
    pair.pump()
    far, request = pair.acceptor.dialled[0]
    assert (near.window.size, request.window, far.credit) == (window, window, window)


@pytest.mark.parametrize("window", [0, 1, 5 * WINDOW])
def test_an_answer_can_offer_a_window_of_its_own(pair: Pair, window: int) -> None:
    near, far, _ = pair.dial()
    far.accept(window)
    pair.pump()
    assert (far.window.size, near.credit) == (window, window)


@pytest.mark.parametrize("by_opener", [True, False])
def test_a_window_of_its_own_is_what_the_peer_is_held_to(pair: Pair, by_opener: bool) -> None:
    near = pair.opener.session.open("x", 1, 1, {}, lambda error: None, 10)
    pair.pump()
    pair.acceptor.dialled[0][0].accept(10)
    pair.pump()
    side = pair.opener if by_opener else pair.acceptor
    side.session.receive_data(near.id, memoryview(bytes(10)))
    with pytest.raises(RemoteProtocolError):
        side.session.receive_data(near.id, memoryview(b"x"))


def test_a_window_of_its_own_is_one_streams_alone(pair: Pair) -> None:
    pair.opener.session.open("x", 1, 1, {}, lambda error: None, 10)
    near, far = pair.open()
    assert (near.credit, far.credit) == (WINDOW, WINDOW)


# -- whose bytes are queued


def _queues(side: Side) -> tuple[int, int]:
    return side.session.out.own_queued, side.session.out.passing


def test_what_a_stream_that_leads_on_has_queued_is_passing() -> None:
    side, stream, _, _ = _leading_on()
    stream.send(bytes(100))
    stream.send_eof()
    assert _queues(side) == (0, 100 + DATA_OVERHEAD + len(Eof(1).encode()))


def test_what_any_other_stream_has_queued_is_our_own() -> None:
    side = _acceptor()
    side.dialled[0][0].send(bytes(100))
    assert _queues(side) == (100 + DATA_OVERHEAD, 0)


class Queues:
    """What should be queued on a side whose streams 1 and 3 lead on, and 2 and 4 do not."""

    def __init__(self) -> None:
        self.side = Side(opener=False)
        self.sizes: dict[int, deque[int]] = {number: deque() for number in range(1, 5)}
        self.streams: dict[int, Stream] = {}
        for number in self.sizes:
            self.side.receive(DialReq(number, "x", 1, LIMIT, 1, {}))
            stream = self.streams[number] = self.side.dialled[-1][0]
            if number % 2:
                stream.lead_on(_nowhere)
            stream.accept()

    def take(self, number: int, size: int) -> None:
        for item in self.side.takes(size):
            if isinstance(item, tuple):
                assert self.sizes[item[0]].popleft() == len(item[1]) + DATA_OVERHEAD
            elif isinstance(item, Eof):
                assert self.sizes[item.stream].popleft() == len(item.encode())

    def send(self, number: int, size: int) -> None:
        stream = self.streams[number]
        if stream.may_send and size <= stream.credit:
            stream.send(bytes(size))
            self.sizes[number].append(size + DATA_OVERHEAD)

    def end(self, number: int, size: int) -> None:
        if self.streams[number].may_send:
            self.streams[number].send_eof()
            self.sizes[number].append(len(Eof(number).encode()))
            if size % 2:
                self.side.receive(Eof(number))

    def reset(self, number: int, size: int) -> None:
        if self.streams[number].state is not State.CLOSED:
            self.sizes[number].clear()
            if size % 2:
                self.streams[number].reset("reset", "gone")
            else:
                self.side.receive(Close(number, "reset", "gone"))

    def check(self) -> None:
        own, passing = (sum(sum(self.sizes[number]) for number in numbers) for numbers in ((2, 4), (1, 3)))
        assert _queues(self.side) == (own, passing)


_STEP = st.tuples(
    st.sampled_from([Queues.send, Queues.send, Queues.send, Queues.take, Queues.end, Queues.reset]),
    st.integers(1, 4),
    st.integers(1, 20_000),
)


@given(st.lists(_STEP, max_size=60))
def test_own_and_passing_bytes_are_exact_whatever_happens(
    steps: list[tuple[Callable[[Queues, int, int], None], int, int]],
) -> None:
    queues = Queues()
    for step, number, size in steps:
        step(queues, number, size)
        queues.check()
    queues.take(0, ALL)
    assert _queues(queues.side) == (0, 0)


def _nowhere(packet: Packet) -> None: ...


def test_a_probe_that_is_never_answered_makes_way_in_the_end() -> None:
    side, stream = _growing()
    side.receive(DialReq(2, "x", 1, WINDOW, 1, {}))
    other = side.dialled[1][0]
    other.accept()
    stream.consumed(WINDOW // 2)
    probes: list[Ping] = []
    for _ in range(100):
        side.session.receive_data(2, memoryview(bytes(WINDOW // 2)))
        other.consumed(WINDOW // 2)
        probes += [packet for packet in side.takes() if isinstance(packet, Ping)]
    assert probes[:2] == [Ping(1, 0), Ping(2, 0)]


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
