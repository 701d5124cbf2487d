"""Every fuzz target over its corpus, and over what hypothesis makes up: anything, and what is nearly right.

What a fuzzer finds goes into ``corpus/TARGET`` when its cause is mended; see ``run.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import fuzz_targets
import pytest
from fuzz_targets import KINDS, RIGHT, TARGETS
from hypothesis import given, settings
from hypothesis import strategies as st

from tunnel.frames import data_header
from tunnel.handshake import welcome
from tunnel.packets import MAX_U32, Auth, Hello, Packet

CORPUS = Path(__file__).parent / "corpus"
CASES = [path for name in TARGETS for path in sorted((CORPUS / name).iterdir())]


@pytest.mark.parametrize("case", CASES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_is_in_the_corpus_holds(case: Path) -> None:
    TARGETS[case.parent.name](case.read_bytes())


def test_every_target_has_a_corpus() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.binary(max_size=200))
@settings(max_examples=20)
def test_any_bytes_hold(name: str, data: bytes) -> None:
    TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
@settings(max_examples=20)
def test_a_changed_case_of_the_corpus_holds(name: str, data: st.DataObject) -> None:
    cases = [path.read_bytes() for path in CASES if path.parent.name == name]
    case, other = data.draw(st.sampled_from(cases)), data.draw(st.sampled_from(cases))
    start, end = data.draw(st.integers(0, len(case))), data.draw(st.integers(0, len(case)))
    middle = data.draw(st.binary(max_size=4) | st.integers(0, len(other)).map(lambda at: other[at : at + 20]))
    TARGETS[name](case[:start] + middle + case[end:])


# -- packets that are valid, in an order that need not be

NUMBERS = st.integers(0, 4) | st.sampled_from([1023, 1024, 65535, 1 << 31, MAX_U32]) | st.integers(0, MAX_U32)
TEXTS = st.sampled_from(["ok", "refused", "", "reset", "soft", "final", "db.internal"]) | st.text(max_size=20)
ENTRIES: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from(["agent", "role", "name", "instance", "limits", "auth", "nonce", "servers", "identifiers"]),
    st.none() | st.booleans() | NUMBERS | TEXTS | st.binary(max_size=40) | st.lists(TEXTS, max_size=3),
    max_size=5,
)
BY_TYPE: dict[object, st.SearchStrategy[object]] = {
    "int": NUMBERS,
    "str": TEXTS,
    "bytes": st.sampled_from([RIGHT, bytes(32)]) | st.binary(max_size=40),
    "dict[str, Any]": ENTRIES,
}


def _any_of(kind: type[Packet]) -> st.SearchStrategy[bytes]:
    build = cast(Callable[..., Packet], kind)
    return st.builds(build, *(BY_TYPE[field.type] for field in fields(kind))).map(Packet.encode)


DATA = st.builds(lambda stream, size: data_header(stream, size) + bytes(size), st.integers(0, 4), st.integers(1, 2000))
GREETINGS = st.sampled_from(
    [
        *(Hello(1, {**peer.to_info(), "auth": {"token": token, "nonce": bytes(32)}}).encode()
          for peer in fuzz_targets.PEERS.values() for token in ("edge", "laptop", "none")),
        *(Hello(1, peer.to_info()).encode() for peer in fuzz_targets.PEERS.values()),
        welcome(fuzz_targets.SERVER, 1).encode(),
        Auth(RIGHT).encode(),
    ]
)  # fmt: skip
FRAMES = st.lists(st.one_of(GREETINGS, DATA, *map(_any_of, KINDS)), max_size=12).map(b"".join)


@given(flags=st.integers(0, 3), piece=st.integers(0, 40), said=FRAMES)
@settings(max_examples=40)
def test_packets_are_decoded_however_they_come(flags: int, piece: int, said: bytes) -> None:
    fuzz_targets.decoder(bytes((flags, piece)) + said)


@given(flags=st.integers(0, 7), said=FRAMES)
@settings(max_examples=40)
def test_valid_packets_in_any_order_prove_nothing(flags: int, said: bytes) -> None:
    fuzz_targets.handshake(bytes((flags,)) + said)


@given(flags=st.integers(0, 15), piece=st.integers(0, 40), said=FRAMES)
@settings(max_examples=30)
def test_valid_packets_in_any_order_end_a_link_at_worst(flags: int, piece: int, said: bytes) -> None:
    fuzz_targets.link(bytes((flags, piece)) + said)


@given(data=st.binary(min_size=60, max_size=600))
@settings(max_examples=40)
def test_valid_packets_in_any_order_leave_a_session_bounded(data: bytes) -> None:
    fuzz_targets.session(data)


# -- texts that are nearly right

HOSTS = st.sampled_from(
    ["db.internal", "127.0.0.1", "[::1]", "::ffff:10.0.0.1", "*", "*.a.b", "10.0.0.0/8", "bücher.de"]
)
JOINTS = st.sampled_from(
    [":", "=", "@", ".", "/", "-", "%", "[", "]", "80", "65536", "host=", "cidr=", "suffix=", "\uff10", "xn--"]
)


@given(text=st.lists(HOSTS | JOINTS | st.text(max_size=3), max_size=6).map("".join))
@settings(max_examples=40)
def test_names_that_are_nearly_right_hold(text: str) -> None:
    fuzz_targets.names(text.encode(errors="replace"))


LINES = st.sampled_from(
    [
        "CONNECT a.b:80 HTTP/1.1",
        "GET / HTTP/1.1",
        "Host: a",
        "Content-Length: 0",
        "Content-Length: 5",
        "Transfer-Encoding: chunked",
        "Tunnel-Agent: edge-1",
        f"Proxy-Authorization: {fuzz_targets.CREDENTIALS}",
        "",
    ]
)


@given(flags=st.integers(0, 1), piece=st.integers(0, 40), lines=st.lists(LINES | st.text(max_size=20), max_size=8))
@settings(max_examples=40)
def test_heads_that_are_nearly_right_hold(flags: int, piece: int, lines: list[str]) -> None:
    fuzz_targets.connect_head(bytes((flags, piece)) + "\r\n".join(lines).encode(errors="replace"))


TOML = st.sampled_from(
    [
        "[server]", "[[token]]", "[agent]", 'listen = "127.0.0.1:0"', 'id = "edge"', 'role = "agent"', "x = {",
        'role = "client"',
        f'secret = "{fuzz_targets.SECRET.decode()}"', 'agents = ["edge-*"]', "priority = 100", "x = [", "]", '"""', "{",
        'targets = ["*.a.b:1-9"]', 'identifiers = ["cidr=10.0.0.0/8"]', "server.listen = 1", "d = 1979-05-27",
    ]
)  # fmt: skip


@pytest.mark.parametrize("name", ["config", "tokens"])
@given(lines=st.lists(TOML | st.text(max_size=10), max_size=8))
@settings(max_examples=40)
def test_files_that_are_nearly_right_hold(name: str, lines: list[str]) -> None:
    TARGETS[name]("\n".join(lines).encode(errors="replace"))
