"""HTTP CONNECT: what is served, what is refused with which status, and that every reply is one reply to anybody."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable
from http.client import HTTPResponse

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tunnel.address import Target
from tunnel.errors import DIAL_ERRORS
from tunnel.http_connect import ESTABLISHED, BadRequest, ConnectRequest, Head
from tunnel.limits import Limits

LIMIT = Limits().head
HEAD = b"CONNECT db.internal:5432 HTTP/1.1\r\nHost: db.internal:5432\r\nUser-Agent: test\r\n\r\n"
TARGET = Target("db.internal", 5432)
CLIENT_HELLO = b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03" + b"\r\n\r\nGET / HTTP/1.1\r\n\r\n" + bytes(range(256))


def _head(authority: str | bytes = "x:1", *headers: str, method: str = "CONNECT", version: str = "1.1") -> bytes:
    target = authority if isinstance(authority, bytes) else authority.encode()
    lines = [method.encode() + b" " + target + b" HTTP/" + version.encode(), b"Host: x"]
    return b"\r\n".join([*lines, *(header.encode() for header in headers), b"", b""])


def _long_head(size: int) -> bytes:
    return _head("x:1", "A: " + "a" * (size - len(_head("x:1", "A: "))))


def _request(*pieces: bytes) -> ConnectRequest:
    head = Head(LIMIT)
    for piece in pieces[:-1]:
        assert head.feed(piece) is None
    request = head.feed(pieces[-1])
    assert request is not None
    return request


def _feed(head: Head, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        assert head.feed(piece) is None


def _refusal(*pieces: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        _feed(Head(LIMIT), pieces)
    return caught.value


def _answer(*pieces: bytes) -> bytes:
    """The reply that a refused head gets."""
    head = Head(LIMIT)
    with pytest.raises(BadRequest) as caught:
        _feed(head, pieces)
    return head.reply(caught.value.status, str(caught.value))


def _read_with_h11(reply: bytes, method: str) -> tuple[h11.Response, bytes]:
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="x:1", headers=[("Host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(reply)
    client.receive_data(b"")
    response, body = client.next_event(), b""
    assert isinstance(response, h11.Response)
    while isinstance(event := client.next_event(), h11.Data):
        body += event.data
    assert isinstance(event, h11.EndOfMessage)
    assert isinstance(client.next_event(), h11.ConnectionClosed)
    return response, body


class _Socket:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _read_with_http_client(reply: bytes, method: str) -> tuple[HTTPResponse, bytes]:
    response = HTTPResponse(_Socket(reply), method=method)  # type: ignore[arg-type]
    response.begin()
    body = response.read()
    return response, body


def _check_reply(reply: bytes, status: int, method: str = "CONNECT") -> bytes:
    """The body of a reply, which two readers understand alike."""
    ours, body = _read_with_h11(reply, method)
    theirs, same_body = _read_with_http_client(reply, method)
    assert (ours.status_code, theirs.status) == (status, status)
    assert ours.reason.decode() == theirs.reason != ""
    assert body == same_body
    names = [name for name, _ in ours.headers]
    assert sorted(names) == sorted({b"content-type", b"content-length", b"connection"} | ({b"allow"} & {*names}))
    assert theirs.getheader("Connection") == "close"
    return body


# -- heads and early bytes


def test_a_whole_head_is_a_request() -> None:
    assert _request(HEAD) == ConnectRequest(TARGET, b"")


@pytest.mark.parametrize("cut", range(1, len(HEAD)))
def test_a_head_may_be_split_anywhere(cut: int) -> None:
    assert _request(HEAD[:cut], HEAD[cut:]) == ConnectRequest(TARGET, b"")


def test_a_head_may_arrive_byte_by_byte() -> None:
    assert _request(*(HEAD[place : place + 1] for place in range(len(HEAD)))).target == TARGET


def test_bytes_behind_the_head_are_kept() -> None:
    assert _request(HEAD + CLIENT_HELLO) == ConnectRequest(TARGET, CLIENT_HELLO)


@given(st.lists(st.integers(1, len(HEAD) - 1), max_size=5), st.binary(max_size=300))
@example([len(HEAD) - 1], CLIENT_HELLO)
def test_early_bytes_are_exactly_those_behind_the_head(cuts: list[int], early: bytes) -> None:
    edges = [0, *sorted(set(cuts))]
    pieces = [HEAD[start:end] for start, end in itertools.pairwise(edges)]
    assert _request(*pieces, HEAD[edges[-1] :] + early) == ConnectRequest(TARGET, early)


def test_early_bytes_do_not_count_as_head() -> None:
    early = bytes(4 * LIMIT)
    assert _request(HEAD + early).early == early


def test_a_body_of_length_zero_is_no_body() -> None:
    assert _request(_head("x:1", "Content-Length: 0") + b"early").early == b"early"


def test_http_1_0_is_served_without_a_host() -> None:
    assert _request(b"CONNECT x:1 HTTP/1.0\r\n\r\nearly") == ConnectRequest(Target("x", 1), b"early")


# -- authorities


@pytest.mark.parametrize(
    ("authority", "target"),
    [
        ("[::1]:80", "[::1]:80"),
        ("[0:0:0:0:0:0:0:1]:80", "[::1]:80"),
        ("[::ffff:192.0.2.1]:80", "192.0.2.1:80"),
        ("DB.Internal:80", "db.internal:80"),
        ("db.internal.:80", "db.internal:80"),
        ("xn--bcher-kva.example:80", "xn--bcher-kva.example:80"),
        ("XN--BCHER-KVA.example.:80", "xn--bcher-kva.example:80"),
        ("192.0.2.1:65535", "192.0.2.1:65535"),
    ],
)
def test_every_spelling_of_an_authority_is_one_target(authority: str, target: str) -> None:
    assert str(_request(_head(authority)).target) == target


@pytest.mark.parametrize(
    "authority",
    [
        "::1:80",
        "x",
        "x:",
        ":80",
        "x:0",
        "x:65536",
        "x:-1",
        "x:http",
        "[::1]",
        "[::1%25eth0]:80",
        "127.1:80",
        "user@x:80",
        "x:80/",
        "http://x:80/",
        "/",
        "*",
        "bücher.example:80",
        b"\xff:80",
        "x y:80",
        "a..b:80",
        "x" * 64 + ":80",
    ],
)
def test_what_is_no_target_is_a_bad_request(authority: str | bytes) -> None:
    assert _refusal(_head(authority)).status == 400


# -- refusals


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "connect", "PRI"])
def test_another_method_is_not_allowed(method: str) -> None:
    reply = _answer(_head("/", method=method))
    assert method.encode() in _check_reply(reply, 405, method)
    assert _read_with_http_client(reply, method)[0].getheader("Allow") == "CONNECT"


def test_head_is_not_allowed_and_gets_no_body() -> None:
    reply = _answer(_head("/", method="HEAD"))
    assert reply.endswith(b"\r\n\r\n")
    assert _check_reply(reply, 405, "HEAD") == b""
    assert _read_with_http_client(reply, "HEAD")[0].getheader("Allow") == "CONNECT"


@pytest.mark.parametrize("header", ["Content-Length: 5", "Transfer-Encoding: chunked", "Content-Length: -1"])
def test_a_connect_with_a_body_is_a_bad_request(header: str) -> None:
    assert _refusal(_head("x:1", header)).status == 400


def test_a_connect_with_two_lengths_is_a_bad_request() -> None:
    assert _refusal(_head("x:1", "Content-Length: 0", "Content-Length: 5")).status == 400


def test_an_encoding_that_nobody_knows_is_answered() -> None:
    assert _check_reply(_answer(_head("x:1", "Transfer-Encoding: gzip")), 501)


@pytest.mark.parametrize(
    "head",
    [
        b"CONNECT x:1 HTTP/1.1\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"CONNECT x:1\r\n\r\n",
        b"CONNECT  x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost : x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\n Host: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n",
        b"\r\n\r\n",
        b"\r\n",
        CLIENT_HELLO,
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"\x05\x01\x00",
        b"\x00" * 20,
        b"\xff\xff\xff\xff\r\n\r\n",
    ],
)
def test_what_is_no_http_is_a_bad_request(head: bytes) -> None:
    reply = _answer(head, b"")
    assert _check_reply(reply, 400)


@pytest.mark.parametrize("pieces", [[b""], [HEAD[:10], b""], [HEAD[:-1], b""]], ids=["nothing", "some", "most"])
def test_an_end_before_the_whole_head_is_a_bad_request(pieces: list[bytes]) -> None:
    assert _check_reply(_answer(*pieces), 400)


# -- the limit


def _in_pieces(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


_piece_sizes = pytest.mark.parametrize("size", [1, 1000, LIMIT, 10 * LIMIT])


@_piece_sizes
def test_a_head_as_long_as_the_limit_is_taken(size: int) -> None:
    assert _request(*_in_pieces(_long_head(LIMIT), size)).target == Target("x", 1)


@_piece_sizes
@pytest.mark.parametrize("length", [LIMIT + 1, 2 * LIMIT])
def test_a_head_over_the_limit_is_refused_however_it_arrives(length: int, size: int) -> None:
    assert _check_reply(_answer(*_in_pieces(_long_head(length), size)), 431)


def test_a_head_without_an_end_is_refused_at_the_limit() -> None:
    assert _refusal(b"CONNECT " + b"x" * LIMIT).status == 431


# -- replies


def test_the_reply_to_a_request_that_is_served_has_no_body() -> None:
    response, _ = _read_with_http_client(ESTABLISHED + b"the target speaks", "CONNECT")
    assert response.status == 200
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="CONNECT", target="x:1", headers=[("Host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(ESTABLISHED + b"the target speaks")
    assert isinstance(client.next_event(), h11.Response)
    assert client.next_event() is h11.PAUSED
    assert client.trailing_data == (b"the target speaks", False)


_STATUSES = sorted({kind.http_status for kind in DIAL_ERRORS.values()})


@pytest.mark.parametrize("status", _STATUSES)
def test_a_failed_dial_is_answered_with_its_status_and_text(status: int) -> None:
    head = Head(LIMIT)
    assert head.feed(HEAD + CLIENT_HELLO)
    assert _check_reply(head.reply(status, "refused: no one listens"), status) == b"refused: no one listens\n"


def test_a_request_that_takes_too_long_is_answered() -> None:
    head = Head(LIMIT)
    assert head.feed(HEAD[:-2]) is None
    assert _check_reply(head.reply(408, "too slow"), 408) == b"too slow\n"


def test_a_client_that_says_nothing_is_answered_too() -> None:
    assert _check_reply(Head(LIMIT).reply(408, "too slow"), 408) == b"too slow\n"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@given(text=st.text(max_size=200))
@example(text="x\r\n\r\nHTTP/1.1 200 OK\r\n\r\n")
@example(text="x\r\nSet-Cookie: a=b\r\n\x00\x1b[31m\u2028é\U0001f600")
def test_no_text_of_the_far_side_breaks_a_reply(version: str, text: str) -> None:
    head = Head(LIMIT)
    assert head.feed(_head(version=version))
    shown = "".join(char if char.isprintable() else "?" for char in text)
    assert _check_reply(head.reply(502, text), 502) == f"{shown}\n".encode()


def test_a_long_text_of_the_far_side_is_cut() -> None:
    head = Head(LIMIT)
    assert head.feed(_head())
    assert len(_check_reply(head.reply(502, "x" * 100_000), 502)) < 2000


@given(st.binary(max_size=60), st.booleans())
def test_random_bytes_are_served_or_get_a_reply(data: bytes, inside: bool) -> None:
    head = Head(LIMIT)
    try:
        for piece in (b"CONNECT " * inside + data, b""):
            if head.feed(piece):
                return
    except BadRequest as error:
        _check_reply(head.reply(error.status, str(error)), error.status)


# -- users


def _for_user(*headers: str, method: str = "CONNECT", authority: str = "x:1") -> bytes:
    """The reply where a user is wanted; empty if the request is taken."""
    head = Head(LIMIT, lambda shown: shown == "Basic me")
    try:
        assert head.feed(_head(authority, *headers, method=method)) is not None
    except BadRequest as error:
        return head.reply(error.status, str(error))
    return b""


def test_a_user_is_taken_by_its_header() -> None:
    assert _for_user("Proxy-Authorization: Basic me") == b""


@pytest.mark.parametrize(
    "headers",
    [
        [],
        ["Proxy-Authorization: Basic you"],
        ["Proxy-Authorization: Basic me", "Proxy-Authorization: Basic me"],
        ["Authorization: Basic me"],
        ["Tunnel-Agent: two words"],
    ],
)
def test_without_it_the_answer_is_407_and_says_what_is_wanted(headers: list[str]) -> None:
    reply = _for_user(*headers)
    assert reply.startswith(b"HTTP/1.1 407 ")
    assert b'\r\nproxy-authenticate: Basic realm="tunnel"' in reply.lower().replace(b"basic realm", b"Basic realm")


@pytest.mark.parametrize(("method", "authority"), [("GET", "/"), ("CONNECT", "nowhere"), ("CONNECT", "x:0")])
def test_nothing_else_about_a_request_is_answered_first(method: str, authority: str) -> None:
    assert _for_user(method=method, authority=authority).startswith(b"HTTP/1.1 407 ")


def test_what_is_wrong_otherwise_is_answered_to_users() -> None:
    assert _for_user("Proxy-Authorization: Basic me", authority="x:0").startswith(b"HTTP/1.1 400 ")
