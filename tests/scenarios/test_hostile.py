"""Hostile peers at the links port of a real server that wants tokens, beside an agent and a client that are honest.

Whatever they say in whatever state, it is refused with its reason, or ignored, as the protocol has it; the honest
client's streams go on, nothing fails inside the server, and it does not grow. Floods have tests of their own.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from endpoints import MIB, TIMEOUT, Target, check_echo, connect, connect_head, echo, read_head, read_refusal
from programs import Program, eventually
from prometheus_client.parser import text_string_to_metric_families

from tunnel import packets
from tunnel.address import Identifier
from tunnel.config import Claims
from tunnel.credentials import Token, new_token, read_tokens
from tunnel.frames import Decoder, data_header
from tunnel.handshake import DiallingHandshake
from tunnel.identity import Identity
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

SAME = 32 * MIB  # what a server may grow by while all this happens
Said = Packet | bytes


def data(stream: int, payload: bytes = b"hello") -> bytes:
    return data_header(stream, len(payload)) + payload


def body(*items: object) -> bytes:
    """A frame that holds whatever one likes."""
    return raw_body(msgpack.packb(items))


def raw_body(content: bytes) -> bytes:
    return len(content).to_bytes(4) + content


class Raw:
    """A socket to the links port that says whatever it is told.

    Attributes:
        heard: all packets so far that nobody has taken; DATA as stream and payload.
        spoken: what it said.
    """

    def __init__(self, port: int) -> None:
        self.sock = connect(port)
        self.heard: deque[Packet | tuple[int, bytes]] = deque()
        self.spoken: list[bytes] = []
        self.decoder = Decoder(MIB, self.heard.append, lambda stream, part: self.heard.append((stream, bytes(part))))

    def say(self, *what: Said) -> None:
        frames = [one if isinstance(one, bytes) else one.encode() for one in what]
        self.spoken += frames
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has been shown the door already
            self.sock.sendall(b"".join(frames))

    def next(self) -> Packet | tuple[int, bytes] | None:
        """What comes next; None at the end of the connection."""
        while not self.heard:
            received = self.sock.recv(64 * 1024)
            if not received:
                return None
            self.decoder.feed(received)
        return self.heard.popleft()

    def answers(self) -> list[Packet | tuple[int, bytes]]:
        """All that was answered until now: what comes before the answer to a PING that is sent now."""
        self.say(Ping(0, 4711))
        found: list[Packet | tuple[int, bytes]] = []
        while (packet := self.next()) != Pong(0, 4711):
            assert packet is not None, f"the link has ended: {found}"
            if not isinstance(packet, Ping):  # of the server's own
                found.append(packet)
        return found

    def refusal(self) -> Close:
        """The last word of the other side, behind which is nothing but the end."""
        while isinstance(packet := self.next(), Ping | Credit):
            pass
        assert isinstance(packet, Close), packet
        assert packet.stream == 0
        assert self.next() is None
        return packet

    def shake_hands(self, me: Identity, token: Token) -> None:
        side = DiallingHandshake(me, token)
        self.decoder.strict = True
        self.say(side.first())
        while side.peer is None:
            packet = self.next()
            assert isinstance(packet, Packet), packet
            self.say(*side.receive(packet, self.decoder.body))
        self.decoder.strict = False


class Site:
    """A server with tokens, an honest agent and an honest client; and those who are not."""

    def __init__(self, folder: Path) -> None:
        self.tokens: dict[str, Token] = {}
        self.target, self.denied = Target(echo), socket.create_server(("127.0.0.1", 0))
        self.denied.setblocking(False)
        secret = self.denied.getsockname()[1]
        edge = self._new(folder, "edge", "agent", agents=["edge-*"], identifiers=["ipv4=127.0.0.1", "host=localhost"])
        mine = self._new(folder, "mine", "client", targets=[f"127.0.0.1:{self.target.port}"])
        others = [
            self._new(folder, "other", "agent", agents=["other-*"], identifiers=["suffix=.other"]),
            self._new(folder, "theirs", "client", targets=["127.0.0.1", "localhost", "*.other", "0.0.0.0"]),
        ]
        whole = self._write(folder / "server", "".join(Path(path).read_text() for path in (edge, mine, *others)))
        self.server = Program(
            "server",
            "--listen",
            "127.0.0.1:0",
            "--connect",
            "127.0.0.1:0",
            "--token-file",
            whole,
            "--log-level",
            "debug",
        )
        self.links = self.server.port("links")
        to = ("--server", f"127.0.0.1:{self.links}", "--token-file")
        rules = ("--deny", f"127.0.0.0/8:{secret}", "--allow", "127.0.0.0/8", "--allow", "localhost")
        claims = ("--name", "edge-1", "--identifier", "ipv4=127.0.0.1", "--identifier", "host=localhost")
        self.agent = Program("agent", *claims, *rules, *to, edge)
        self.agent.wait_for("linked")
        self.client = Program("forward", f"127.0.0.1:0=127.0.0.1:{self.target.port}", *to, mine)
        self.honest = [connect(self.client.port("forward")), connect(self.server.port("connect"))]
        self.honest[1].sendall(connect_head("127.0.0.1", self.target.port))
        assert read_head(self.honest[1]).startswith(b"HTTP/1.1 200 ")
        self._opened: list[Raw] = []
        self.check()
        self.before = self.server.memory()

    def _write(self, path: Path, text: str) -> str:
        path.touch(0o600)
        path.write_text(text)
        return str(path)

    def _new(self, folder: Path, token_id: str, role: str, **lists: list[str]) -> str:
        path = self._write(folder / token_id, new_token(token_id, role, lists))
        self.tokens |= read_tokens(path)
        return path

    @property
    def denied_port(self) -> int:
        port: int = self.denied.getsockname()[1]
        return port

    def stranger(self) -> Raw:
        self._opened.append(Raw(self.links))
        return self._opened[-1]

    def challenged(self, role: str = "agent") -> Raw:
        raw = self.stranger()
        raw.say(DiallingHandshake(peer(role), self.tokens[TOKEN_OF[role]]).first())
        assert isinstance(raw.next(), Challenge)
        return raw

    def linked(self, role: str, **facts: Any) -> Raw:
        raw = self.stranger()
        raw.shake_hands(peer(role, **facts), self.tokens[TOKEN_OF[role]])
        return raw

    def check(self) -> None:
        """The server is there, and what honest people have goes on."""
        for sock in self.honest:
            check_echo(sock)
        assert self.server.running
        assert self.agent.said("link lost") == []
        assert self.client.said("link lost") == []
        assert [event for event in self.server.log if "exception" in event or event["event"].startswith("fault")] == []

    def hang_up(self) -> None:
        while self._opened:
            self._opened.pop().sock.close()

    def close(self) -> None:
        grown = self.server.memory() - self.before
        for sock in self.honest:
            sock.close()
        programs = (self.client, self.agent, self.server)
        codes = [program.stop() for program in programs]
        self.target.close()
        self.denied.close()
        assert codes == [0, 0, 0]
        assert [program.noise for program in programs] == [[], [], []]
        assert grown < SAME


TOKEN_OF = {"agent": "other", "client": "theirs"}


def peer(role: str, **facts: Any) -> Identity:
    return replace(Identity(role, f"{'other' if role == 'agent' else 'laptop'}-1"), **facts)


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("hostile"))
    yield site
    site.close()


@pytest.fixture
def site(shared_site: Site) -> Iterator[Site]:
    """The same for all tests; what is honest is looked at after each."""
    yield shared_site
    shared_site.hang_up()
    shared_site.check()
    with pytest.raises(BlockingIOError):
        shared_site.denied.accept()


# -- each packet in each state

PACKETS: dict[str, Said] = {
    "HELLO": Hello(1, peer("agent").to_info()),
    "CHALLENGE": Challenge({"nonce": bytes(32)}),
    "AUTH": Auth(bytes(32)),
    "WELCOME": Welcome(1, Identity("server", "server").to_info()),
    "DIAL_REQ": DialReq(1, "10.0.0.1", 80, 1000, 1000, {}),
    "DIAL_RSP": DialRsp(1, "ok", "", 1000),
    "DATA": data(1),
    "DATA of the link": data(0),
    "EOF": Eof(1),
    "EOF of the link": Eof(0),
    "CLOSE": Close(1, "reset", "x"),
    "CREDIT": Credit(1, 0),
    "CREDIT of the link": Credit(0, MAX_U32),
    "PING": Ping(0, 9),
    "PING of a stream": Ping(1, 9),
    "PONG": Pong(0, 9),
    "DRAIN": Drain(1, "soft", "x", 1000, 0),
    "DRAIN final": Drain(MAX_U32, "final", "x", 0, 0),
    "DRAIN of a phase that is none": Drain(1, "\x1b[2J", "x", 1000, 0),
    "DRAIN_ACK": DrainAck(1, "final"),
    "UNDRAIN": Undrain(2),
    "UNDRAIN_ACK": UndrainAck(1),
    "DRAIN_CMD": DrainCmd("0" * 32, "drain", "x", 0, 1),
    "DRAIN_STATUS": DrainStatus("drained", 0, 0, 0, 1, 1),
    "GOAWAY": GoAway("final", 0),
    "GOAWAY_ACK": GoAwayAck("final"),
    "a type that is none": body(99, 1),
    "fields that are missing": body(5, 1),
    "fields of another type": body(5, "1", 2, 3, 4, 5, 6),
    "a number that is too large": body(10, 1, MAX_U32 + 1),
    "something else": b"GET / HTTP/1.1\r\n\r\n",
}
NO_FRAMES = ("fields that are missing", "fields of another type", "a number that is too large", "something else")
GREETINGS = ("HELLO", "CHALLENGE", "AUTH", "WELCOME")
ANSWERED: dict[str, Packet] = {
    "DATA": Close(1, "unknown_stream", "no stream 1 is open on this link"),
    "PING": Pong(0, 9),
    "DRAIN": DrainAck(1, "soft"),
    "DRAIN final": DrainAck(MAX_U32, "final"),
    "DRAIN of a phase that is none": DrainAck(1, "\x1b[2J"),
    "UNDRAIN": UndrainAck(2),
}
ASKED = ("client", "DIAL_REQ")  # which has tests of its own below
REFUSED = {
    "agent": {*GREETINGS, *NO_FRAMES, "DATA of the link", "DIAL_REQ"},
    "client": {*GREETINGS, *NO_FRAMES, "DATA of the link", "DIAL_RSP"},
}


@pytest.mark.parametrize("name", [name for name in PACKETS if name != "HELLO"])
def test_before_hello_anything_else_is_refused(site: Site, name: str) -> None:
    raw = site.stranger()
    raw.say(PACKETS[name])
    assert raw.refusal().code == "protocol"


@pytest.mark.parametrize("name", [name for name in PACKETS if name != "AUTH"])
def test_after_challenge_anything_but_a_proof_is_refused(site: Site, name: str) -> None:
    raw = site.challenged()
    raw.say(PACKETS[name])
    assert raw.refusal().code == "protocol"


@pytest.mark.parametrize(
    ("role", "name"), [(role, name) for role in REFUSED for name in PACKETS if name in REFUSED[role]]
)
def test_on_a_link_what_breaks_a_rule_is_refused(site: Site, role: str, name: str) -> None:
    raw = site.linked(role)
    raw.say(PACKETS[name])
    assert raw.refusal().code == "protocol"


@pytest.mark.parametrize(
    ("role", "name"),
    [(role, name) for role in REFUSED for name in PACKETS if (role, name) != ASKED and name not in REFUSED[role]],
)
def test_on_a_link_anything_else_is_answered_or_ignored(site: Site, role: str, name: str) -> None:
    raw = site.linked(role)
    raw.say(PACKETS[name])
    assert raw.answers() == ([ANSWERED[name]] if name in ANSWERED else [])


@pytest.mark.parametrize("role", ["agent", "client"])
def test_a_goodbye_is_not_answered_and_nothing_behind_it_counts(site: Site, role: str) -> None:
    raw = site.linked(role)
    raw.say(Close(0, "leaving", "bye"), DialReq(1, "127.0.0.1", site.target.port, 1000, 1000, {}), Ping(0, 1))
    assert raw.next() is None


def test_a_client_is_no_agent_whatever_it_says(site: Site) -> None:
    raw = site.linked("client")
    raw.say(Drain(1, "final", "x", 0, 0), DrainStatus("drained", 0, 0, 0, 1, 1), DrainCmd("edge-1", "drain", "", 0, 1))
    raw.answers()
    with connect(site.server.port("connect")) as sock:
        sock.sendall(connect_head("127.0.0.1", site.target.port))
        assert read_head(sock).startswith(b"HTTP/1.1 200 ")
        check_echo(sock)


# -- streams


def dialled(site: Site, window: int = 1000) -> Raw:
    """A client with one stream to the echo, which has credit."""
    raw = site.linked("client")
    raw.say(DialReq(1, "127.0.0.1", site.target.port, window, 5000, {}))
    answer = raw.next()
    assert isinstance(answer, DialRsp)
    assert answer.code == "ok"
    return raw


@pytest.mark.parametrize(
    "said",
    [
        [DialReq(1, "127.0.0.1", 1, 1, 1, {})],
        [DialReq(0, "127.0.0.1", 1, 1, 1, {})],
        [Credit(1, 0)],
        [Credit(1, MAX_U32)],
        [Eof(1), data(1)],
        [Eof(1), Eof(1)],
        [DialReq(MAX_U32, "10.0.0.1", 1, 1, 1, {}), DialReq(2, "10.0.0.1", 1, 1, 1, {})],
        [DialReq(2, "127.0.0.1", 1, 1, 60_000, {}), data(2)],
        [data(1, bytes(MIB // 2))] * 32,
    ],
    ids=["an id again", "id 0", "no credit", "too much credit", "data behind the end", "the end twice",
         "ids that shrink", "data before the answer", "more than the window"],
)  # fmt: skip
def test_a_client_that_breaks_a_rule_of_streams_loses_its_link(site: Site, said: list[Said]) -> None:
    raw = dialled(site)
    raw.say(*said)
    while not isinstance(packet := raw.next(), Close) or packet.stream:
        assert packet is not None
    assert packet.code == "protocol"


def test_more_credit_than_a_stream_may_have_costs_that_stream(site: Site) -> None:
    raw = dialled(site)
    raw.say(Credit(1, 20 * MIB))
    (closed,) = raw.answers()
    assert isinstance(closed, Close)
    assert (closed.stream, closed.code) == (1, "protocol")


def hostile_agent(site: Site, **facts: Any) -> Raw:
    claims = Claims((Identifier.parse("suffix=.other"),))
    return site.linked("agent", claims=claims, **facts)


def asked(site: Site, agent: Raw) -> tuple[socket.socket, DialReq]:
    """A dial by CONNECT that arrives at the hostile agent."""
    sock = connect(site.server.port("connect"))
    sock.sendall(connect_head("db.other", 1))
    request = agent.next()
    assert isinstance(request, DialReq)
    return sock, request


@pytest.mark.parametrize(
    "said",
    [
        lambda stream: [data(stream)],
        lambda stream: [Eof(stream)],
        lambda stream: [DialRsp(stream, "ok", "", 1), DialRsp(stream, "ok", "", 1)],
        lambda stream: [DialRsp(stream, "ok", "", MAX_U32)],
        lambda stream: [DialRsp(stream, "ok", "", 1), Credit(stream, MAX_U32)],
        lambda stream: [DialRsp(stream, "ok", "", 1), Credit(stream, 0)],
        lambda stream: [DialRsp(stream, "ok", "", 1), Eof(stream), data(stream)],
        lambda stream: [DialRsp(stream, "ok", "", 1), *[data(stream, bytes(MIB // 2))] * 32],
    ],
    ids=["data before the answer", "the end before the answer", "two answers", "a window of all", "too much credit",
         "no credit", "data behind the end", "more than the window"],
)  # fmt: skip
def test_an_agent_that_breaks_a_rule_of_streams_loses_its_link(site: Site, said: Callable[[int], list[Said]]) -> None:
    agent = hostile_agent(site)
    sock, request = asked(site, agent)
    with sock:
        agent.say(*said(request.stream))
        assert agent.refusal().code == "protocol"


@pytest.mark.parametrize(
    ("answer", "status"),
    [(("refused", "no"), 502), (("?" * 100, "\r\nSet-Cookie: x\r\n\r\n\x1b[2J"), 502), (("ok\n", ""), 502)],
    ids=["a refusal", "a code and a text of its own", "nearly ok"],
)
def test_an_agents_answer_is_one_line_of_printable_text_to_the_client(
    site: Site, answer: tuple[str, str], status: int
) -> None:
    agent = hostile_agent(site)
    sock, request = asked(site, agent)
    with sock:
        agent.say(DialRsp(request.stream, *answer, 0))
        found, text = read_refusal(sock)
    assert found == status
    assert text.removesuffix("\n").isprintable()


LONG = "x" * (MIB - 40)  # nearly all that a frame holds


def bridged(site: Site, streams: int, **limits: Any) -> tuple[Raw, Raw]:
    """A client with so many streams to a hostile agent."""
    agent, client = hostile_agent(site), site.linked("client", **limits)
    for number in range(1, streams + 1):
        client.say(DialReq(number, "db.other", 1, 1000, 10_000, {}))
        request = agent.next()
        assert isinstance(request, DialReq)
        agent.say(DialRsp(request.stream, "ok", "", 1000))
        assert client.next() == DialRsp(number, "ok", "", 1000)
    return agent, client


@pytest.mark.parametrize("said", [lambda _: Close(0, LONG, ""), lambda _: Close(0, "bye", LONG)], ids=["code", "text"])
def test_a_long_farewell_is_not_passed_on_to_each_stream_in_full(site: Site, said: Callable[[int], Packet]) -> None:
    agent, client = bridged(site, streams=40)
    agent.say(said(0))
    told = [client.next() for _ in range(40)]
    assert sum(len(packet.encode()) for packet in told if isinstance(packet, Close)) < MIB


@pytest.mark.parametrize(
    "said",
    [
        lambda stream: DialRsp(stream, "refused", LONG, 0),
        lambda stream: DialRsp(stream, LONG, "", 0),
        lambda stream: Close(stream, "reset", LONG),
        lambda stream: Close(stream, LONG, "reset"),
    ],
    ids=["the text of an answer", "the code of an answer", "the text of a reset", "the code of a reset"],
)
def test_a_long_text_does_not_cost_the_client_its_link(site: Site, said: Callable[[int], Packet]) -> None:
    agent, client = bridged(site, streams=1, body_limit=4096)
    client.decoder.limit = 4096
    client.say(DialReq(2, "db.other", 1, 1000, 10_000, {}))
    request = agent.next()
    assert isinstance(request, DialReq)
    agent.say(said(request.stream))
    answer = client.next()
    assert isinstance(answer, DialRsp)
    assert answer.code != "ok"
    client.say(Ping(0, 1))
    assert client.next() == Pong(0, 1)


# -- who it is


def recorded(site: Site, role: str) -> list[bytes]:
    raw = site.linked(role)
    raw.sock.close()
    return raw.spoken


@pytest.mark.parametrize("role", ["agent", "client"])
@pytest.mark.parametrize("at_once", [False, True], ids=["step by step", "at once"])
def test_a_recorded_handshake_is_refused(site: Site, role: str, at_once: bool) -> None:
    hello, proof = recorded(site, role)
    raw = site.stranger()
    if at_once:
        raw.say(hello, proof)
        assert isinstance(raw.next(), Challenge)
    else:
        raw.say(hello)
        assert isinstance(raw.next(), Challenge)
        raw.say(proof)
    refusal = raw.refusal()
    assert (refusal.code, refusal.text) == ("auth", "the token is not known here, or its secret is another one")


def test_a_servers_proof_is_none_of_a_peers(site: Site) -> None:
    heard = site.stranger()
    prove(heard, DiallingHandshake(peer("agent"), site.tokens["other"]))
    theirs = heard.next()
    assert isinstance(theirs, Auth)
    raw = site.challenged()
    raw.say(theirs)
    assert raw.refusal().code == "auth"


@pytest.mark.parametrize("token_id", ["nobody", "", "x" * 1000, "edge\x1b[2J"])
def test_a_token_that_there_is_not_is_refused_like_a_wrong_secret(site: Site, token_id: str) -> None:
    raw = site.stranger()
    raw.say(Hello(1, {**peer("agent").to_info(), "auth": {"token": token_id, "nonce": bytes(32)}}))
    assert isinstance(raw.next(), Challenge)
    raw.say(Auth(bytes(32)))
    refusal = raw.refusal()
    assert (refusal.code, refusal.text) == ("auth", "the token is not known here, or its secret is another one")


@pytest.mark.parametrize(
    "auth",
    [
        1,
        [],
        {},
        {"token": "edge"},
        {"token": 1, "nonce": bytes(32)},
        {"token": "edge", "nonce": bytes(31)},
        {"token": "edge", "nonce": "x" * 32},
    ],
    ids=["a number", "a list", "nothing", "no nonce", "no text", "a short nonce", "a nonce that is a text"],
)
def test_what_is_no_auth_is_refused(site: Site, auth: object) -> None:
    raw = site.stranger()
    raw.say(Hello(1, {**peer("agent").to_info(), "auth": auth}))
    assert raw.refusal().code == "protocol"


def test_who_names_no_token_is_refused(site: Site) -> None:
    raw = site.stranger()
    raw.say(Hello(1, peer("client").to_info()))
    refusal = raw.refusal()
    assert (refusal.code, refusal.text) == ("auth", "a token is wanted here, and none was named")


def present(raw: Raw, side: DiallingHandshake) -> Close:
    """The refusal of somebody who proves his token."""
    prove(raw, side)
    return raw.refusal()


def prove(raw: Raw, side: DiallingHandshake) -> None:
    raw.decoder.strict = True
    raw.say(side.first())
    challenge = raw.next()
    assert isinstance(challenge, Challenge)
    raw.say(*side.receive(challenge, raw.decoder.body))


def claiming(*texts: str, **facts: Any) -> dict[str, Any]:
    return {"claims": Claims(tuple(map(Identifier.parse, texts)), **facts)}


@pytest.mark.parametrize(
    ("facts", "token_id", "text"),
    [
        ({"name": "edge-1"}, "other", "an agent called edge-1"),
        (claiming("ipv4=127.0.0.1"), "other", "may not claim ipv4=127.0.0.1"),
        (claiming("cidr=0.0.0.0/0"), "other", "may not claim cidr=0.0.0.0/0"),
        (claiming("host=localhost", "host=db.other"), "other", "may not claim host=localhost"),
        (claiming("suffix=.notother"), "other", "may not claim suffix=.notother"),
        (claiming(default_route=True), "other", "may not claim the default route"),
        ({}, "theirs", "for the role client, not agent"),
    ],
    ids=["the name", "the address", "a network around it", "the name of its host", "a suffix that ends alike",
         "the default route", "the role"],
)  # fmt: skip
def test_nobody_is_another_agent_with_a_token_of_his_own(
    site: Site, facts: dict[str, Any], token_id: str, text: str
) -> None:
    refusal = present(site.stranger(), DiallingHandshake(peer("agent", **facts), site.tokens[token_id]))
    assert refusal.code == "auth"
    assert text in refusal.text


def test_nobody_takes_the_place_of_another_process(site: Site) -> None:
    raw = site.stranger()
    instance = site.server.wait_for("agent linked", agent="edge-1")["instance"]
    side = DiallingHandshake(peer("agent", instance=instance), site.tokens["other"])
    assert present(raw, side).code == "auth"


# -- what it may ask for


@pytest.mark.parametrize(
    ("host", "denied_by"),
    [
        ("10.0.0.1", "the token"),
        ("::ffff:10.0.0.1", "the token"),
        ("::", "the token"),
        ("::1", "the token"),
        ("ip6-localhost", "the token"),
        ("other", "the token"),
        ("xother", "the token"),
        ("127.0.0.1", "the agent"),
        ("::ffff:127.0.0.1", "the agent"),
        ("::FFFF:7F00:1", "the agent"),
        ("localhost", "the agent"),
        ("LOCALHOST.", "the agent"),
        ("0.0.0.0", "the agent"),
    ],
)
def test_a_target_is_denied_by_name_and_by_address(site: Site, host: str, denied_by: str) -> None:
    raw = site.linked("client")
    raw.say(DialReq(1, host, site.denied_port, 1000, 5000, {"agent": "edge-1"}))
    answer = raw.next()
    assert isinstance(answer, DialRsp)
    assert answer.code == "denied"
    assert ("token theirs" in answer.text) == (denied_by == "the token")


@pytest.mark.parametrize(
    "request_",
    [
        DialReq(1, "127.1", 80, 1, 1000, {}),
        DialReq(1, "0x7f.0.0.1", 80, 1, 1000, {}),
        DialReq(1, "2130706433", 80, 1, 1000, {}),
        DialReq(1, "127.0.0.1%lo", 80, 1, 1000, {}),
        DialReq(1, "::1%lo", 80, 1, 1000, {}),
        DialReq(1, "", 80, 1, 1000, {}),
        DialReq(1, "127.0.0.1\0.other", 80, 1, 1000, {}),
        DialReq(1, "a\r\nb.other", 80, 1, 1000, {}),
        DialReq(1, "x" * 100_000, 80, 1, 1000, {}),
        DialReq(1, "127.0.0.1", 0, 1, 1000, {}),
        DialReq(1, "127.0.0.1", 65_536, 1, 1000, {}),
        DialReq(1, "127.0.0.1", 80, 1, 1000, {"agent": 1}),
        DialReq(1, "127.0.0.1", 80, 1, 1000, {"agent": "edge-1\n"}),
        DialReq(1, "127.0.0.1", 80, MAX_U32 // 2, 1000, {}),
    ],
    ids=lambda request: f"{request.host:.20}:{request.port}:{request.window}:{request.options}",
)
def test_a_dial_that_makes_no_sense_is_answered_and_ends_nothing(site: Site, request_: DialReq) -> None:
    raw = site.linked("client")
    raw.say(request_)
    answer = raw.next()
    assert isinstance(answer, DialRsp)
    assert answer.code == "protocol"
    assert len(answer.text) < 1000
    assert raw.answers() == []


# -- frames that are no frames


def nested(depth: int) -> bytes:
    return raw_body(b"\x91" * (depth - 1) + b"\x90")


HUGE: dict[str, bytes] = {
    "the greatest length": b"\xff\xff\xff\xff",
    "no length": b"\0\0\0\0",
    "arrays within arrays": nested(4096),
    "maps within maps": raw_body(b"\x92\x01" + b"\x81\xa1a" * 1000 + b"\xc0"),
    "an array of all": raw_body(b"\xdd\xff\xff\xff\xff"),
    "a map of all": raw_body(b"\x92\x01\xdf\xff\xff\xff\xff"),
    "bytes of all": raw_body(b"\x92\x03\xc6\xff\xff\xff\xff"),
    "a text of all": raw_body(b"\x92\x03\xdb\xff\xff\xff\xff"),
    "a map of 1025": body(1, 1, {str(number): 0 for number in range(1025)}),
    "an extension": raw_body(b"\x93\x01\x01" + b"\xc7\x04\xff1234"),
    "a key that is none": raw_body(b"\x93\x01\x01\x81\x90\xc0"),
    "a text that is none": raw_body(b"\x93\x09\x00\xa2\xff\xfe"),
    "something behind it": raw_body(b"\x91\x08\x00"),
    "DATA longer than its frame": raw_body(b"\x93\x07\xce\0\0\0\x01\xc6\0\x0f\xff\xff" + b"x"),
}
HUGE_LATER: dict[str, bytes] = HUGE | {
    "arrays within arrays to the end": nested(MIB),
    "one more than the limit": (MIB + 1).to_bytes(4),
    "DATA of more than the limit": data_header(1, MIB),
    "a map of a million": raw_body(b"\x93\x01\x01\xdf\0\x0f\0\0" + b"\xa1a\xc0" * 1000),
}
BEFORE: dict[str, bytes] = HUGE | {"one more than the limit": (4097).to_bytes(4)}


@pytest.mark.parametrize("name", BEFORE)
def test_a_frame_that_is_none_is_refused_before_the_handshake(site: Site, name: str) -> None:
    raw = site.stranger()
    raw.say(BEFORE[name])
    assert raw.refusal().code == "protocol"


@pytest.mark.parametrize("role", ["agent", "client"])
@pytest.mark.parametrize("name", HUGE_LATER)
def test_a_frame_that_is_none_is_refused_on_a_link(site: Site, role: str, name: str) -> None:
    raw = site.linked(role)
    raw.say(HUGE_LATER[name])
    assert raw.refusal().code == "protocol"


def test_a_million_items_of_an_unknown_packet_leave_nothing_behind(site: Site) -> None:
    raw, before = site.linked("client"), site.server.memory()
    for _ in range(10):
        raw.say(body(99, *([0] * 1000 for _ in range(1000))))
        assert raw.answers() == []
    assert site.server.memory() < before + SAME


# -- what is shown

NASTY = 'x\n2026-01-01T00:00:00.000Z error FORGED\r\n{"event": "FORGED"}\x1b[2J\x1b]0;FORGED\x07\u202e\u2028\x00\x9b'
NASTY_NAME = "other-\"}\\{FORGED='"  # which is printable, and so is a name


@contextlib.contextmanager
def logging_server(folder: Path, log_format: str) -> Iterator[tuple[Any, Callable[[], bytes]]]:
    """A server without tokens, whose log is read as bytes; and what gives that, once it has ended."""
    path = folder / "log"
    flags = ["--listen", "127.0.0.1:0", "--connect", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "debug"]
    with path.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tunnel", "server", *flags, "--log-format", log_format],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
        )

    def port(use: str) -> int:
        pattern = rf'listening"?,? .*{use}.*127\.0\.0\.1:(\d+)'
        eventually(lambda: re.search(pattern, path.read_text()), f"listening for {use}")
        found = re.search(pattern, path.read_text())
        assert found
        return int(found[1])

    def ended() -> bytes:
        process.terminate()
        assert process.wait(TIMEOUT) == 0
        return path.read_bytes()

    try:
        yield port, ended
    finally:
        process.kill()
        process.wait()


def _speak_nastily(port: Callable[[str], int]) -> str:
    """Say it wherever there is a text; the metrics while the agent that did is there."""
    nasty_name = Raw(port("links"))
    nasty_name.say(Hello(1, {**peer("agent").to_info(), "name": NASTY}))
    nasty_name.refusal()
    agent, client = Raw(port("links")), Raw(port("links"))
    agent.say(Hello(1, peer("agent", name=NASTY_NAME).to_info()))
    assert isinstance(agent.next(), Welcome)
    client.say(Hello(1, peer("client").to_info()))
    assert isinstance(client.next(), Welcome)
    client.say(DialReq(1, NASTY, 1, 1, 1000, {}), DialReq(2, "a", 1, 1, 1000, {"agent": NASTY}))
    assert isinstance(client.next(), DialRsp)
    assert isinstance(client.next(), DialRsp)
    for code in ("refused", NASTY):
        with connect(port("connect")) as sock:
            sock.sendall(connect_head("db", 1))
            request = agent.next()
            assert isinstance(request, DialReq)
            agent.say(DialRsp(request.stream, code, NASTY, 0))
            read_refusal(sock)
    with connect(port("connect")) as sock:
        sock.sendall(b"CONNECT \x1b[2J:1 HTTP/1.1\r\nHost: x\r\nTunnel-Agent: \xe2\x80\xae\r\n\r\n")
        read_refusal(sock)
    agent.say(Drain(1, NASTY, NASTY, 1, 1), DrainStatus(NASTY, 1, 1, 1, 1, 1))
    agent.answers()
    with urllib.request.urlopen(f"http://127.0.0.1:{port('admin')}/metrics") as reply:
        metrics: str = reply.read().decode()
    agent.say(Close(0, NASTY, NASTY))
    assert agent.next() is None
    for raw in (nasty_name, agent, client):
        raw.sock.close()
    return metrics


@pytest.mark.parametrize("log_format", ["logfmt", "json"])
def test_what_is_said_breaks_out_of_no_line(tmp_path: Path, log_format: str) -> None:
    with logging_server(tmp_path, log_format) as (port, ended):
        metrics = _speak_nastily(port)
        log = ended().decode()
    lines = log.removesuffix("\n").split("\n")
    assert all(line.isprintable() for line in lines)
    assert any("FORGED" in line for line in lines)
    for line in lines:
        if log_format == "json":
            assert json.loads(line)["event"] != "FORGED"
        else:
            assert re.match(r"\d{4}-\d\d-\d\dT\S+Z (debug|info|warning) [a-z\"]", line)
            assert not re.match(r"\S+ \S+ FORGED", line)
    agents = {
        sample.labels.get("agent") for family in text_string_to_metric_families(metrics) for sample in family.samples
    }
    assert NASTY_NAME in agents
    assert agents <= {NASTY_NAME, None}
    assert all(line.isprintable() for line in metrics.split("\n"))


def test_a_long_text_is_no_long_line_in_the_log(site: Site) -> None:
    agent = hostile_agent(site, name="other-long")
    agent.say(Close(0, "bye", LONG))
    assert agent.next() is None
    assert len(json.dumps(site.server.wait_for("agent gone", agent="other-long"))) < 16 * 1024


def test_every_packet_is_among_those_that_are_tried() -> None:
    kinds = {kind for kind in vars(packets).values() if isinstance(kind, type) and issubclass(kind, Packet)} - {Packet}
    assert kinds <= {type(packet) for packet in PACKETS.values()}
