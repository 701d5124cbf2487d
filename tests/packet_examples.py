"""Packets for tests: an example of each, and strategies for all that there can be."""

from __future__ import annotations

from hypothesis import strategies as st

from tunnel.packets import (
    MAX_U32,
    Auth,
    Challenge,
    Close,
    Credit,
    DialReq,
    DialRsp,
    Drain,
    DrainAck,
    DrainCmd,
    DrainStatus,
    Eof,
    GoAway,
    GoAwayAck,
    Hello,
    Packet,
    Ping,
    Pong,
    Undrain,
    UndrainAck,
    Welcome,
)

EXAMPLES: tuple[Packet, ...] = (
    Hello(1, {"role": "agent"}),
    Challenge({"nonce": bytes(32)}),
    Auth(bytes(range(32))),
    Welcome(1, {"role": "server"}),
    DialReq(1, "db.internal", 5432, 524288, 10000, {}),
    DialRsp(1, "ok", "", 524288),
    Eof(1),
    Close(1, "reset", "gone"),
    Credit(1, 262144),
    Ping(0, 7),
    Pong(0, 7),
    Drain(1, "soft", "signal", 25000, 3),
    DrainAck(1, "soft"),
    Undrain(2),
    UndrainAck(2),
    DrainCmd("00112233445566778899aabbccddeeff", "drain", "disk full", 60000, 1),
    DrainStatus("draining", 12, 1, 90000, 2, 3),
    GoAway("soft", 25000),
    GoAwayAck("soft"),
)
IDS = [type(packet).__name__ for packet in EXAMPLES]

u32 = st.integers(0, MAX_U32)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
_maps = st.dictionaries(st.text(), values, max_size=6)
packets: st.SearchStrategy[Packet] = st.one_of(
    st.builds(Hello, u32, _maps),
    st.builds(Challenge, _maps),
    st.builds(Auth, st.binary()),
    st.builds(Welcome, u32, _maps),
    st.builds(DialReq, u32, st.text(), u32, u32, u32, _maps),
    st.builds(DialRsp, u32, st.text(), st.text(), u32),
    st.builds(Eof, u32),
    st.builds(Close, u32, st.text(), st.text()),
    st.builds(Credit, u32, u32),
    st.builds(Ping, u32, u32),
    st.builds(Pong, u32, u32),
    st.builds(Drain, u32, st.text(), st.text(), u32, u32),
    st.builds(DrainAck, u32, st.text()),
    st.builds(Undrain, u32),
    st.builds(UndrainAck, u32),
    st.builds(DrainCmd, st.text(), st.text(), st.text(), u32, u32),
    st.builds(DrainStatus, st.text(), u32, u32, u32, u32, u32),
    st.builds(GoAway, st.text(), u32),
    st.builds(GoAwayAck, st.text()),
)
