"""One stream: every transition, credit to the byte, windows that grow, and what its sink is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import ALL, LIMIT, WINDOW, Pair, Side, Sink, acceptor

from tunnel.core import State, Stream
from tunnel.errors import (
    LocalProtocolError,
    Refused,
    RemoteProtocolError,
)
from tunnel.frames import DATA_OVERHEAD
from tunnel.packets import MAX_U32, Close, Credit, DialReq, Eof, Packet, Ping, Pong


@pytest.fixture
def pair() -> Pair:
    return Pair()


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
    side = acceptor()
    side.session.receive_data(1, memoryview(bytes(WINDOW - 1)))
    with pytest.raises(RemoteProtocolError, match="with credit for 1"):
        side.session.receive_data(1, memoryview(b"xx"))


def test_credit_that_was_not_returned_cannot_be_used_again() -> None:
    side = acceptor()
    side.session.receive_data(1, memoryview(bytes(WINDOW)))
    side.dialled[0][0].consumed(WINDOW // 2 - 1)
    with pytest.raises(RemoteProtocolError, match="with credit for 0"):
        side.session.receive_data(1, memoryview(b"x"))


def test_credit_goes_back_at_half_a_window() -> None:
    side = acceptor()
    stream = side.dialled[0][0]
    side.session.receive_data(1, memoryview(bytes(WINDOW)))
    stream.consumed(WINDOW // 2 - 1)
    assert side.takes() == []
    stream.consumed(1)
    assert side.takes() == [Credit(1, WINDOW // 2)]
    stream.consumed(WINDOW // 2)
    assert side.takes() == [Credit(1, WINDOW // 2)]


def test_of_a_large_window_credit_goes_back_a_mib_at_a_time() -> None:
    side = acceptor(window=16 << 20)
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
    side = acceptor()
    side.session.receive_data(1, memoryview(bytes(WINDOW)))
    side.receive(Eof(1))
    side.dialled[0][0].consumed(WINDOW)
    assert side.takes() == []


def test_credit_is_given_while_only_our_direction_has_ended() -> None:
    side = acceptor()
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
    side = acceptor()
    with pytest.raises(RemoteProtocolError, match=f"CREDIT of {amount} for stream 1"):
        side.receive(Credit(1, amount))


def test_credit_may_reach_its_bound_and_not_pass_it() -> None:
    side = acceptor()
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


def test_each_window_is_looked_at_by_itself() -> None:
    side, stream = _growing()
    side.receive(DialReq(2, "x", 1, WINDOW, 1, {}))
    other = side.dialled[1][0]
    other.accept()
    stream.consumed(WINDOW // 2)
    side.session.receive_data(2, memoryview(bytes(WINDOW // 2)))
    other.consumed(WINDOW // 2)
    assert [packet for packet in side.takes() if isinstance(packet, Ping)] == [Ping(1, 0), Ping(2, 0)]
    side.session.receive_data(2, memoryview(bytes(WINDOW // 2)))
    side.receive(Pong(1, 0), Pong(2, 0))
    assert (stream.window.size, other.window.size) == (WINDOW, 2 * WINDOW)


def _by_our_reset(side: Side, stream: Stream) -> None:
    stream.reset("cancelled", "")


def _by_their_reset(side: Side, stream: Stream) -> None:
    side.receive(Close(1, "cancelled", ""))


def _by_both_ends(side: Side, stream: Stream) -> None:
    stream.send_eof()
    side.receive(Eof(1))


def _by_their_end(side: Side, stream: Stream) -> None:
    """No byte will come any more."""
    side.receive(Eof(1))


@pytest.mark.parametrize("ends", [_by_our_reset, _by_their_reset, _by_both_ends, _by_their_end])
def test_a_stream_that_ended_meanwhile_gets_nothing(ends: Callable[[Side, Stream], None]) -> None:
    side, stream = _growing()
    stream.consumed(WINDOW // 2)
    side.session.receive_data(1, memoryview(bytes(WINDOW // 2)))
    ends(side, stream)
    side.takes()
    side.receive(Pong(1, 0))
    assert side.takes() == []
    assert stream.window.size == WINDOW


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


# -- streams that lead on to another link


def _leading_on() -> tuple[Side, Stream, Sink, list[Packet]]:
    """An acceptor with one open stream that leads on, its sink, and what was handed onward."""
    side = acceptor()
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
    side = acceptor()
    side.receive(Ping(1, 7))
    assert side.takes() == [Pong(1, 7)]


def test_a_ping_of_a_stream_that_is_not_there_is_ignored() -> None:
    side = acceptor()
    side.receive(Ping(2, 7))
    assert side.takes() == []


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
    side = acceptor()
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
