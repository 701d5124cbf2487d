"""What is fuzzed: one function per parser, each from bytes to nothing, and what must hold whatever the bytes are.

Rules that hold here:

- Nothing leaves a target but an assertion that failed, or an error that the parser does not document: both are finds.
- The first bytes may choose how a target is set up; the rest is what a stranger would send, or a file would hold.
- A target keeps nothing from one call to the next, so that what was found can be run again by itself.

``test_fuzz.py`` runs them over the corpus and over what hypothesis makes up, ``run.py`` under a fuzzer that looks at
what is covered. This file must not know either of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import importlib.util
import io
import json
import os
import tempfile
import tomllib
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import trio
from stream_transport import StreamTransport
from trio.testing import MockClock, memory_stream_pair

from tunnel import check, packets
from tunnel.address import Identifier, ListenAddress, Target
from tunnel.config import (
    Forward,
    parse_admin_address,
    parse_agent_name,
    parse_destination,
    parse_duration,
    parse_strategies,
)
from tunnel.configfile import ConfigFile, load
from tunnel.core import State, Stream
from tunnel.credentials import Grant, Token, read_tokens
from tunnel.errors import ConfigError, HandshakeRefused, LinkClosed, RemoteProtocolError, TunnelError
from tunnel.frames import Decoder, data_header
from tunnel.handshake import AcceptingHandshake, DiallingHandshake, Handshake
from tunnel.http_connect import BadRequest, ConnectRequest, Head
from tunnel.identity import Identity, read_identity
from tunnel.limits import Limits, Timeouts
from tunnel.link import Link
from tunnel.options import file_keys
from tunnel.packets import Auth, Close, DialReq, Hello, Packet
from tunnel.patterns import Pattern, Rules
from tunnel.session import Session
from tunnel.stream import TunnelStream
from tunnel.users import read_users

Fuzzed = Callable[[bytes], None]

SECRET = b"correct-horse-battery-staple-0123456789"
RIGHT = b"right"
"""A proof that says this is replaced by the right one, which no fuzzer could guess."""
TOKENS = {
    "edge": Token("edge", "agent", SECRET, "tokens.toml", Grant(("edge-*",), (Identifier("suffix", ".svc.local"),))),
    "laptop": Token("laptop", "client", SECRET[::-1], "tokens.toml", Grant(targets=(Pattern("*"),))),
}
SERVER = Identity("server", "server", "ffeeddccbbaa99887766554433221100")
AGENT = Identity("agent", "edge-1", "00112233445566778899aabbccddeeff")
CLIENT = Identity("client", "laptop", "00112233445566778899aabbccddeeff")
PEERS = {"agent": AGENT, "client": CLIENT, "server": SERVER}
OWN_TOKENS = {"agent": TOKENS["edge"], "client": TOKENS["laptop"]}

KINDS: tuple[type[Packet], ...] = tuple(
    sorted(
        (
            kind
            for kind in vars(packets).values()
            if isinstance(kind, type) and issubclass(kind, Packet) and kind != Packet
        ),
        key=lambda kind: kind.type,
    )
)


class Draw:
    """Bytes as a source of choices; when they are used up, all choices are 0."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)
        self._left = len(data)

    def __bool__(self) -> bool:
        return self._left > 0

    def take(self, size: int) -> bytes:
        self._left -= size
        return self._data.read(size)

    def byte(self) -> int:
        return int.from_bytes(self.take(1))

    def number(self) -> int:
        """Small mostly; any of 32 bits after a byte from 240 on."""
        first = self.byte()
        return first if first < 240 else int.from_bytes(self.take(4))

    def text(self) -> str:
        words = ("ok", "", "refused", "denied", "protocol", "reset", "link_lost", "soft", "final", "drain", "a.b")
        first = self.byte()
        return words[first] if first < len(words) else self.take(first % 32).decode(errors="replace")

    def rest(self) -> bytes:
        return self.take(self._left)

    def pieces(self) -> Iterator[bytes]:
        """The rest, cut as its first byte says: whole, byte by byte, or in pieces of so many bytes."""
        size = self.byte() or max(1, self._left)
        while self:
            yield self.take(min(size, self._left))


def _drawn_packet(draw: Draw) -> Packet:
    kind = KINDS[draw.byte() % len(KINDS)]
    makers: dict[str, Callable[[], object]] = {
        "int": draw.number,
        "str": draw.text,
        "bytes": lambda: draw.take(draw.byte() % 40),
        "dict[str, Any]": lambda: {"agent": draw.text()} if draw.byte() % 2 else {},
    }
    return kind(*(makers[str(field.type)]() for field in fields(kind)))


# -- the decoder


class _Decoded:
    """What a decoder made of bytes: packets and payloads in order, payloads of a stream that touch as one."""

    def __init__(self, limit: int, strict: bool) -> None:
        self.seen: list[Packet | tuple[int, bytes]] = []
        self.failed = False
        self.decoder = Decoder(limit, self.seen.append, self._on_data)
        self.decoder.strict = strict

    def _on_data(self, stream: int, data: memoryview) -> None:
        assert len(data), "a payload without bytes"
        last = self.seen[-1] if self.seen else None
        if isinstance(last, tuple) and last[0] == stream:
            self.seen[-1] = (stream, last[1] + bytes(data))
        else:
            self.seen.append((stream, bytes(data)))

    def feed(self, data: bytes) -> None:
        try:
            self.decoder.feed(data)
        except RemoteProtocolError:
            self.failed = True


def _spelled_otherwise(data: bytes, limit: int) -> bytes:
    """The same with a longer stream number in each whole DATA, which then is not what is recognised at once."""
    spelled, at = b"", 0
    while at + 4 <= len(data):
        size = int.from_bytes(data[at : at + 4])
        frame = data[at : at + 4 + size]
        if len(frame) < 4 + size or not 0 < size <= limit - 4:
            break
        if frame[4:7] == b"\x93\x07\xce":
            frame = (size + 4).to_bytes(4) + b"\x93\x07\xcf" + bytes(4) + frame[7:]
        spelled += frame
        at += 4 + size
    return spelled + data[at:]


def decoder(data: bytes) -> None:
    """It decodes the same however the bytes come, and writes what it has read as something that reads the same."""
    draw = Draw(data)
    flags = draw.byte()
    limit, strict = (4096 if flags & 1 else Limits().body), bool(flags & 2)
    whole, cut = _Decoded(limit, strict), _Decoded(limit, strict)
    pieces = list(draw.pieces())
    whole.feed(b"".join(pieces))
    for piece in pieces:
        if not cut.failed:
            cut.feed(piece)
    assert (whole.seen, whole.failed) == (cut.seen, cut.failed)
    assert whole.decoder.unknown == cut.decoder.unknown
    assert len(cut.decoder.buffer()) > 0
    other = _Decoded(limit, strict)
    other.feed(_spelled_otherwise(b"".join(pieces), limit))
    assert (whole.seen, whole.failed) == (other.seen, other.failed)
    again = _Decoded(Limits().body * 2, strict)
    for packet in whole.seen:
        again.feed(
            packet.encode() if isinstance(packet, Packet) else data_header(packet[0], len(packet[1])) + packet[1]
        )
    assert (again.seen, again.failed) == (whole.seen, False)


# -- the handshake


class _Shaking:
    """One side of a handshake, and what the other says; it keeps its own account of what was said."""

    def __init__(self, side: Handshake, own: Token | None) -> None:
        self.side = side
        self._own = own
        self._proving: Token | None = own  # whose secret the peer has to know
        self._said = bytes(4)
        self.proven = False
        self.heard: list[bytes] = []  # frames, with the right proofs
        if isinstance(side, DiallingHandshake):
            self._say(side.first().encode()[4:])
        self.decoder = Decoder(Limits().body_before_auth, self._on_packet, self._on_data)
        self.decoder.strict = True

    def _say(self, body: bytes) -> None:
        self._said += len(body).to_bytes(4) + body

    def _expected(self) -> bytes:
        label = b"dialling" if isinstance(self.side, AcceptingHandshake) else b"accepting"
        secret = self._proving.secret if self._proving else b"?"
        return hmac.digest(secret, b"trio-tunnel " + label + b"\0" + hashlib.sha256(self._said).digest(), "sha256")

    def _on_data(self, _stream: int, _data: memoryview) -> None:
        raise RemoteProtocolError("DATA during the handshake")

    def _on_packet(self, packet: Packet) -> None:
        if self.side.peer is not None:
            return
        body = self.decoder.body
        if packet == Auth(RIGHT):
            packet = Auth(self._expected())
            body = packet.encode()[4:]
        if isinstance(packet, Hello) and isinstance(self.side, AcceptingHandshake):
            self._proving = _named(packet)
        self.heard.append(len(body).to_bytes(4) + body)
        proof = isinstance(packet, Auth) and self._proving is not None and packet.proof == self._expected()
        answers = self.side.receive(packet, body)
        self.proven = self.proven or proof
        self._say(body)
        for answer in answers:
            self._say(answer.encode()[4:])


def _named(hello: Hello) -> Token | None:
    auth = hello.info.get("auth")
    name = auth.get("token") if isinstance(auth, dict) else None
    return TOKENS.get(name) if isinstance(name, str) else None


def _new_side(flags: int) -> tuple[Handshake, Token | None]:
    with_token = bool(flags & 2)
    if flags & 1:
        return AcceptingHandshake(SERVER, tokens=(lambda: TOKENS) if with_token else None), None
    me = CLIENT if flags & 4 else AGENT
    own = OWN_TOKENS[me.role] if with_token else None
    return DiallingHandshake(me, own), own


def handshake(data: bytes) -> None:
    """Nobody is known before it has proved its token, nor as something else than that allows, nor a second time."""
    draw = Draw(data)
    flags = draw.byte()
    shaking = _Shaking(*_new_side(flags))
    try:
        shaking.decoder.feed(draw.rest())
    except (RemoteProtocolError, HandshakeRefused) as error:
        assert shaking.side.peer is None or isinstance(error, RemoteProtocolError)  # what came behind the handshake
        assert not any(token.secret.decode() in f"{error!r}{vars(error)}" for token in TOKENS.values())
    peer = shaking.side.peer
    if peer is None:
        return
    assert read_identity(peer.to_info(), peer.role) == (peer if peer.role == "agent" else _without_claims(peer))
    if flags & 2:
        assert shaking.proven, "known without a proof"
        _check_allowed(shaking.side)
        again = _Shaking(*_new_side(flags))
        with contextlib.suppress(RemoteProtocolError, HandshakeRefused):
            again.decoder.feed(b"".join(shaking.heard))
        assert again.side.peer is None, "known a second time for what was recorded"


def _without_claims(peer: Identity) -> Identity:
    return Identity(peer.role, peer.name, peer.instance, peer.features, peer.draining, peer.body_limit)


def _check_allowed(side: Handshake) -> None:
    if not isinstance(side, AcceptingHandshake) or side.peer is None:
        return
    assert side.token is not None
    assert side.token.role == side.peer.role
    assert side.peer.role != "agent" or side.peer.name.startswith("edge-")
    assert all(str(claim).endswith(".svc.local") for claim in side.peer.claims.identifiers)
    assert not side.peer.claims.default_route


# -- the session

_WINDOW, _MOST_WINDOW, _SPARE, _BUDGET = 64, 256, 512, 1024
_MOST_CREDIT = 1 << 31


class _Consumer:
    """A sink that takes what comes at once, keeps it, or resets the stream; and checks what it is told."""

    def __init__(self, stream: Stream, manner: int) -> None:
        self.stream = stream
        self.held = 0
        self.ended = self.was_reset = False
        self._manner = manner % 4

    def on_data(self, data: memoryview) -> None:
        assert len(data)
        assert not self.ended
        assert not self.was_reset
        self.held += len(data)
        assert self.held <= self.stream.window.size, "more than the window"
        if self._manner == 0:
            self.consume()
        elif self._manner == 1:
            self.stream.reset("reset", "not this")

    def consume(self) -> None:
        size, self.held = self.held, 0
        self.stream.consumed(size)

    def on_eof(self) -> None:
        assert not self.ended
        assert not self.was_reset
        self.ended = True

    def on_reset(self, code: str, text: str) -> None:
        assert not self.was_reset
        self.was_reset = True

    def on_credit(self) -> None:
        assert self.stream.credit


class _Harness:
    """A session, what its user does with it, and what must hold between any two steps."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self.steps = 0
        self._count = 0
        self._streams: list[Stream] = []
        self._consumers: dict[Stream, _Consumer] = {}
        self._queued = self._control_sent = 0
        self.session = Session(
            opener=bool(draw.byte() & 1),
            window=_WINDOW,
            most_window=_MOST_WINDOW,
            spare=_SPARE,
            budget=_BUDGET,
            on_dial=lambda stream, _request: self._streams.append(stream),
            on_control=lambda _packet: None,
            on_streams=self._on_streams,
        )
        self._checker = _Decoded(Limits().body, strict=False)

    def _on_streams(self, count: int) -> None:
        self._count = count

    def step(self) -> None:
        self.steps += 1
        steps = (self._packet, self._packet, self._packet, self._data, self._data, self._act, self._act, self._take)
        steps[self._draw.byte() % len(steps)]()
        self.check()

    def _packet(self) -> None:
        self.session.receive_packet(_drawn_packet(self._draw))

    def _data(self) -> None:
        number, size = self._draw.number(), self._draw.byte()
        self.session.receive_data(number, memoryview(bytes(size + 1)))

    def _take(self) -> None:
        self._checker.feed(b"".join(self.session.out.take(self._draw.number())))
        assert not self._checker.failed

    def _act(self) -> None:
        choice = self._draw.byte()
        if choice % 8 == 0 and self.session.opener:
            dialled = self.session.open("a.b", 1, 1, {}, lambda _error: None)
            self._streams.append(dialled)
        if not self._streams:
            return
        stream = self._streams[self._draw.byte() % len(self._streams)]
        answered = stream.state is not State.DIALLING or not self.session.opener  # who dials has a stream only then
        if choice % 8 == 1 and stream not in self._consumers and answered:
            self._consumers[stream] = _Consumer(stream, self._draw.byte())
            stream.attach(self._consumers[stream])
        elif choice % 8 == 2 and stream in self._consumers:
            self._consumers[stream].consume()
        elif choice % 8 == 3:
            stream.reset("cancelled", "given up")
        else:
            self._answer_or_send(stream, choice % 8)

    def _answer_or_send(self, stream: Stream, choice: int) -> None:
        if stream.state is State.DIALLING and not self.session.opener:
            stream.accept()
        elif stream.may_send and choice == 4:
            stream.send_eof()
        elif stream.may_send and stream.credit:
            stream.send(bytes(min(stream.credit, 1 + self._draw.byte())))

    def check(self) -> None:
        session, live = self.session, [stream for stream in self._streams if stream.state is not State.CLOSED]
        assert session.streams == self._count == len(live)
        assert session.out.queued >= 0
        assert session.out.passing == 0
        assert session.sent >= 0
        for stream in live:
            assert 0 <= stream.credit <= _MOST_CREDIT
            assert 0 <= stream.window.left <= stream.window.size <= _MOST_WINDOW
        assert sum(stream.window.grown for stream in live) <= _SPARE

    def end(self) -> None:
        self.session.end("link_lost", "the link is gone")
        self.check()
        assert self._count == 0
        for stream, consumer in self._consumers.items():
            assert consumer.ended or consumer.was_reset
            assert stream.state is State.CLOSED
        while self.session.out:
            self._take_all()
        assert self.session.out.queued == 0
        self._check_nothing_follows_close()
        answered = sum(len(each.encode()) for each in self._checker.seen if isinstance(each, Packet))
        assert answered <= 128 * self.steps, "answers that are larger than what they answer"

    def _check_nothing_follows_close(self) -> None:
        closed: set[int] = set()
        for each in self._checker.seen:
            number = each[0] if isinstance(each, tuple) else getattr(each, "stream", 0)
            assert number not in closed or isinstance(each, Close), f"{each} behind a CLOSE"
            if isinstance(each, Close) and each.code == "cancelled":
                closed.add(number)

    def _take_all(self) -> None:
        self._checker.feed(b"".join(self.session.out.take(1 << 20)))
        assert not self._checker.failed


def session(data: bytes) -> None:
    """Valid packets in any state: only ``RemoteProtocolError`` leaves, and all that can be counted stays bounded."""
    draw = Draw(data)
    harness = _Harness(draw)
    with contextlib.suppress(RemoteProtocolError):
        while draw:
            harness.step()
    harness.end()


# -- a whole link


class _Far:
    """Whoever is at the other end of a link: greets as it should, or not at all, and sends what it was told."""

    def __init__(self, stream: trio.abc.HalfCloseableStream, near: Handshake, role: str, token: Token | None) -> None:
        self._stream = stream
        self._greets = near is not None
        self._token = token
        self._role = role
        self.heard = _Decoded(Limits().body, strict=False)

    async def greet(self) -> None:
        """The handshake, as it should be."""
        me = PEERS[self._role]
        tokens = self._token and {self._token.id: self._token}
        side: Handshake = (
            AcceptingHandshake(me, tokens=(lambda: tokens) if tokens else None)
            if self._role == "server"
            else DiallingHandshake(me, self._token)
        )
        decoder = Decoder(Limits().body, lambda packet: answers.extend(side.receive(packet, decoder.body)), _no_data)
        decoder.strict = True
        first = side.first()
        answers: list[Packet] = [] if first is None else [first]
        while side.peer is None or answers:
            if answers:
                await self._stream.send_all(answers.pop(0).encode())
            else:
                decoder.feed(await self._stream.receive_some())

    async def say(self, pieces: Iterator[bytes]) -> None:
        """What it was told, and the end."""
        with contextlib.suppress(trio.BrokenResourceError):
            for piece in pieces:
                await self._stream.send_all(piece)
            await self._stream.send_eof()

    async def listen(self) -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            while data := await self._stream.receive_some():
                self.heard.feed(bytes(data))


def _no_data(_stream: int, _data: memoryview) -> None:
    raise AssertionError("DATA during the handshake")


class _User:
    """What a link's owner does with the streams that the peer asks for: takes every other one, echoes or keeps."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.linked = 0

    def on_linked(self) -> None:
        self.linked += 1

    def on_dial(self, stream: TunnelStream, request: DialReq) -> None:
        if request.port % 3 == 0:
            stream.core.accept()
            self._nursery.start_soon(self._echo, stream)
        elif request.port % 3 == 1:
            stream.core.accept()

    async def _echo(self, stream: TunnelStream) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await stream.receive_some():
                await stream.send_all(data)
            await stream.aclose()


async def _run_link(link: Link) -> None:
    with contextlib.suppress(HandshakeRefused, RemoteProtocolError, LinkClosed):
        await link.run()


async def _one_link(draw: Draw) -> None:
    flags = draw.byte()
    near, far = memory_stream_pair()
    side, own = _new_side(flags)
    role = ("client" if flags & 4 else "agent") if flags & 1 else "server"
    token = (OWN_TOKENS[role] if flags & 1 else own) if flags & 2 else None
    async with trio.open_nursery() as nursery:
        user, other = _User(nursery), _Far(far, side, role, token)
        limits = Limits(first_window=1024, window=4096, spare_window=8192)
        link = Link(
            StreamTransport(near),
            side,
            limits=limits,
            timeouts=Timeouts(),
            on_dial=user.on_dial,
            on_linked=user.on_linked,
        )
        nursery.start_soon(_run_link, link)
        if flags & 8:
            await other.greet()
        nursery.start_soon(other.listen)
        await other.say(draw.pieces())
        await link.ended.wait()
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    _check_ended(link, user, other, greeted=bool(flags & 8))


def _check_ended(link: Link, user: _User, other: _Far, *, greeted: bool) -> None:
    why = str(link.why)
    assert link.why is not None
    assert why
    assert "internal fault" not in why, why
    assert link.session.streams == link.open_streams.value == 0
    assert user.linked == (link.peer is not None)
    assert not greeted or link.peer is not None
    assert not other.heard.failed
    if isinstance(link.why, RemoteProtocolError):
        assert Close(0, "protocol", why) in other.heard.seen


def link(data: bytes) -> None:
    """A whole link, with or without its handshake: it ends, and says why, and what is around it hears of no error."""
    trio.run(_one_link, Draw(data), clock=MockClock(autojump_threshold=0))


# -- a CONNECT head

_LONGEST_HEAD = 512
CREDENTIALS = "Basic bWU6czNjcmV0"


def _fed(head: Head, pieces: list[bytes]) -> ConnectRequest | BadRequest | None:
    try:
        for number, piece in enumerate(pieces):
            request = head.feed(piece)
            if request is not None:
                return ConnectRequest(request.target, request.early + b"".join(pieces[number + 1 :]), request.agent)
    except BadRequest as error:
        _check_reply(head.reply(error.status, str(error)), error.status, asked_for_none=b"HEAD" in b"".join(pieces))
        return error
    return None


class _Socket(io.BytesIO):
    def makefile(self, *_: Any) -> _Socket:
        return self


def _check_reply(reply: bytes, status: int, *, asked_for_none: bool) -> None:
    without_body = asked_for_none and reply.endswith(b"\r\n\r\n")
    read = http.client.HTTPResponse(cast(Any, _Socket(reply)), method="HEAD" if without_body else "GET")
    read.begin()
    assert read.status == status
    assert 400 <= status < 600
    body = read.read().decode()
    assert without_body or (body.endswith("\n") and body[:-1].isprintable())


def connect_head(data: bytes) -> None:
    """The same request or a refusal however the bytes come; where users are wanted, none without its password."""
    draw = Draw(data)
    takes = (lambda shown: shown == CREDENTIALS) if draw.byte() & 1 else None
    pieces = list(draw.pieces())
    whole = _fed(Head(_LONGEST_HEAD, takes), [b"".join(pieces)] if pieces else [])
    cut = _fed(Head(_LONGEST_HEAD, takes), pieces)
    assert type(whole) is type(cut)
    if isinstance(whole, ConnectRequest):
        assert whole == cut
        assert b"".join(pieces).endswith(whole.early)
        assert Target.parse(str(whole.target)) == whole.target
        assert takes is None or CREDENTIALS.encode() in b"".join(pieces)
        assert whole.agent is None or parse_agent_name(whole.agent)


# -- SOCKS


@cache
def _socks() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "socks5_frontend.py"
    spec = importlib.util.spec_from_file_location("socks5_frontend", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Client:
    """A socket whose client has said all that it will; nothing on it ever waits."""

    def __init__(self, said: bytes) -> None:
        self._said = io.BytesIO(said)
        self.sent = b""

    async def receive_some(self, size: int) -> bytes:
        assert size > 0
        return self._said.read(size)

    async def send_all(self, data: bytes) -> None:
        self.sent += data

    @property
    def left(self) -> bytes:
        return self._said.read()


def _finish(coroutine: Coroutine[Any, Any, tuple[str, int]]) -> tuple[str, int]:
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast(tuple[str, int], done.value)
    raise AssertionError("it waits")


def socks(data: bytes) -> None:
    """The example's own parser: a host and a port or a refusal, and nothing is read beyond the request."""
    draw = Draw(data)
    login = hashlib.sha256(b"\x02me\x06s3cret").digest() if draw.byte() & 1 else None
    said = draw.rest()
    client = _Client(said)
    module = _socks()
    try:
        host, port = _finish(module.handshake(client, login))
    except module.Refusal as refusal:
        assert isinstance(refusal.args[0], bytes)
        assert len(refusal.args[0]) <= 10
        return
    assert said[0] == 5
    assert login is None or b"\x02me\x06s3cret" in said
    assert client.sent == (b"\x05\x02\x01\x00" if login else b"\x05\x00")
    assert said.endswith(port.to_bytes(2) + client.left)
    with contextlib.suppress(ConfigError):
        Target(host, port)


# -- names


def _reads_what_it_writes(parse: Callable[[str], object], text: str) -> Any:
    try:
        found = parse(text)
    except ConfigError as error:
        assert len(str(error)) < 2000
        return None
    assert parse(str(found)) == found
    return found


def names(data: bytes) -> None:
    """Whatever is taken is canonical: written down and read again it is the same."""
    text = data.decode(errors="replace")
    target = _reads_what_it_writes(Target.parse, text)
    for parse in (ListenAddress.parse, Identifier.parse, Forward.parse, parse_agent_name):
        _reads_what_it_writes(parse, text)
    pattern = _reads_what_it_writes(Pattern.parse, text)
    for other in (parse_admin_address, parse_destination, parse_duration, parse_strategies):
        with contextlib.suppress(ConfigError):
            other(text)
    if target is not None:
        exact = Pattern(target.host, target.port, target.port)
        assert exact.matches(target.host, target.port)
        with contextlib.suppress(TunnelError):
            Rules(deny=(exact,)).permitted(target, [target.host])
            raise AssertionError("a denied target is permitted")
    if pattern is not None and "*" not in pattern.host and "/" not in pattern.host:
        assert pattern.matches(pattern.host, pattern.first)
        assert not pattern.matches("other.example", pattern.first) or pattern.host == "other.example"


# -- files


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[str]:
    """A file of its owner alone that holds that."""
    descriptor, path = tempfile.mkstemp()
    try:
        os.write(descriptor, data)
        os.close(descriptor)
        yield path
    finally:
        Path(path).unlink()


@cache
def _commands() -> Any:
    from tunnel import cli

    return cli.program.commands


def config(data: bytes) -> None:
    """A file that is loaded has no problem; one that is not has one, on a line that it has."""
    keys = file_keys(_commands())
    with _file(data) as path:
        problems = check.problems(path, _commands(), keys, lambda _section, _table: None)
        lines = data.count(b"\n") + 1
        assert all(problem.line is None or 1 <= problem.line <= lines for problem in problems)
        try:
            load(path, keys)
        except ConfigError:
            assert problems
            return
        assert {problem.line for problem in problems} <= {*range(1, lines + 1)}
        assert list(ConfigFile(path).misfits(keys)) == []


def _secrets(data: bytes) -> set[str]:
    """What stands for a secret in a file, and for nothing else."""
    try:
        entries = [entry for entry in tomllib.loads(data.decode())["token"] if isinstance(entry, dict)]
    except (ValueError, KeyError, TypeError, RecursionError):
        return set()
    said = [(key, str(value)) for entry in entries for key, value in entry.items()]
    others = " ".join(value for key, value in said if key != "secret")
    return {value for key, value in said if key == "secret" and len(value) > 8 and value not in others}


def tokens(data: bytes) -> None:
    """What is taken is whole, and says so without its secret."""
    with _file(data) as path:
        try:
            found = read_tokens(path)
        except ConfigError as error:
            assert not [secret for secret in _secrets(data) if secret in str(error)]
            return
    assert found
    for token_id, token in found.items():
        assert token.id == token_id
        assert len(token.secret) >= 32
        assert token.role in ("agent", "client", "admin")
        assert token.is_shown(token.secret.decode())
        assert token.secret.decode() not in f"{token!r}{json.dumps(token.facts)}".replace(token.id, "")
        assert not token.grant.agents or token.role == "agent"


def users(data: bytes) -> None:
    """Whoever is in the file gets in with the password, and nobody without."""
    import base64

    with _file(data) as path:
        try:
            found = read_users(path)
        except ConfigError as error:
            assert "s3cret" not in str(error)
            return
    for line in data.decode().splitlines():
        entry = line.strip()
        if entry and not entry.startswith("#"):
            assert found.takes(f"Basic {base64.b64encode(entry.encode()).decode()}")
            assert not found.takes(f"Basic {base64.b64encode(entry.encode() + b'?').decode()}")
    with contextlib.suppress(UnicodeDecodeError):
        found.takes(data.decode())
    assert not found.takes("Basic Og==")


TARGETS: dict[str, Fuzzed] = {
    target.__name__: target
    for target in (decoder, handshake, session, link, connect_head, socks, names, config, tokens, users)
}
