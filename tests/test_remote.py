"""The admin API's client: what it sends, and what becomes of every answer, and of none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stub_admin import StubAdmin, refusal, stub_admin

from tunnel.address import Target
from tunnel.credentials import Token
from tunnel.errors import ConfigError
from tunnel.remote import AdminRefused, AdminUrl, NoAdmin, Remote


@pytest.fixture
def stub() -> Iterator[StubAdmin]:
    with stub_admin() as stub:
        yield stub


def remote(stub: StubAdmin, token: str | None = None) -> Remote:
    return Remote(AdminUrl.parse(stub.url), Token("ops", "admin", token.encode(), "tokens.toml") if token else None)


@contextmanager
def answering(said: bytes) -> Iterator[Remote]:
    """A port that says this to one connection, and closes it."""

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(65536)
            sock.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield Remote(AdminUrl(Target("127.0.0.1", listener.getsockname()[1])))
        thread.join()


# -- addresses


@pytest.mark.parametrize("text", ["http://127.0.0.1:7402", "http://127.0.0.1:7402/", "127.0.0.1:7402"])
def test_an_address_may_be_a_url_or_host_and_port(text: str) -> None:
    assert str(AdminUrl.parse(text)) == "http://127.0.0.1:7402"


def test_an_address_may_be_ipv6() -> None:
    assert AdminUrl.parse("http://[::1]:7402").target == Target("::1", 7402)


def test_an_address_may_be_a_unix_socket() -> None:
    address = AdminUrl.parse("unix:/run/tunnel.sock")
    assert (address.path, str(address)) == ("/run/tunnel.sock", "unix:/run/tunnel.sock")


@pytest.mark.parametrize("text", ["", "7402", "https://127.0.0.1:7402", "http://127.0.0.1", "127.0.0.1:0", "unix:"])
def test_what_is_no_address_is_refused_with_what_is_taken(text: str) -> None:
    with pytest.raises(ConfigError, match=r"http://HOST:PORT, HOST:PORT or unix:/PATH"):
        AdminUrl.parse(text)


# -- what is sent


def test_a_question_carries_its_words_but_not_those_left_out(stub: StubAdmin) -> None:
    stub.says("GET", "/api/v1/explain", (200, {"target": "a:1"}))
    assert remote(stub).get("/api/v1/explain", target="a:1", agent=None) == {"target": "a:1"}
    assert stub.asked[0].query == {"target": "a:1"}


def test_a_question_that_waits_says_for_how_long(stub: StubAdmin) -> None:
    stub.says("GET", "/api/v1/drain", (200, {}))
    remote(stub).get("/api/v1/drain", 0.25, since="7")
    assert stub.asked[0].query == {"since": "7", "wait": "250ms"}


def test_the_host_is_sent_as_an_address(stub: StubAdmin) -> None:
    stub.says("GET", "/", (200, {}))
    remote(stub).get("/")
    assert stub.asked[0].headers["Host"] == stub.url.removeprefix("http://")


def test_a_change_is_sent_as_json_with_the_token(stub: StubAdmin) -> None:
    stub.says("PUT", "/api/v1/drain", (202, {"state": "draining"}))
    assert remote(stub, "s3cret").put("/api/v1/drain", {"exit": True}) == {"state": "draining"}
    (asked,) = stub.asked
    assert (asked.body, asked.headers["Content-Type"]) == ({"exit": True}, "application/json")
    assert asked.headers["Authorization"] == "Bearer s3cret"


def test_without_a_token_none_is_sent(stub: StubAdmin) -> None:
    stub.says("DELETE", "/api/v1/drain", (200, {}))
    remote(stub).delete("/api/v1/drain")
    assert "Authorization" not in stub.asked[0].headers


def test_the_token_is_shown_nowhere(stub: StubAdmin) -> None:
    assert "s3cret" not in repr(remote(stub, "s3cret"))


def test_a_unix_socket_is_asked_like_any_other(tmp_path: Path) -> None:
    with stub_admin(tmp_path / "admin") as stub:
        stub.says("GET", "/readyz", (200, {"ready": True}))
        assert remote(stub).get("/readyz") == {"ready": True}
        assert stub.asked[0].headers["Host"] == "localhost"


# -- what comes back, or does not


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_an_error_is_raised_with_its_code_and_text(stub: StubAdmin, method: str) -> None:
    stub.says(method, "/x", refusal(409, "too_late", "it is leaving"))
    calls = {
        "GET": lambda: remote(stub).get("/x"),
        "PUT": lambda: remote(stub).put("/x", {}),
        "DELETE": lambda: remote(stub).delete("/x"),
    }
    with pytest.raises(AdminRefused) as caught:
        calls[method]()
    assert (caught.value.code, caught.value.text, str(caught.value)) == (
        "too_late",
        "it is leaving",
        "too_late: it is leaving",
    )


def test_where_nobody_listens_is_named_with_the_cause() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(NoAdmin) as caught:
        Remote(AdminUrl.parse(address)).get("/")
    assert str(caught.value) == f"http://{address}: Connection refused"
    assert caught.value.nobody


def test_a_unix_socket_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoAdmin) as caught:
        Remote(AdminUrl(path=str(tmp_path / "none"))).get("/")
    assert str(caught.value) == f"unix:{tmp_path}/none: No such file or directory"
    assert caught.value.nobody


def test_silence_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = AdminUrl(Target("127.0.0.1", listener.getsockname()[1]))
        with pytest.raises(NoAdmin, match="no answer in time") as caught:
            Remote(address, seconds=0.05).get("/")
    assert not caught.value.nobody


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (b"", "closed connection without response"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "BadStatusLine"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", "status 200"),
        (b"HTTP/1.1 200 OK\r\n\r\n[1]", "status 200"),
        (b"HTTP/1.1 200 OK\r\n\r\n\xff", "status 200"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>", "status 502"),
        (b'HTTP/1.1 404 Not Found\r\n\r\n{"error": "what?"}', "status 404"),
    ],
)
def test_an_answer_of_somebody_else_is_no_answer(said: bytes, cause: str) -> None:
    with answering(said) as remote, pytest.raises(NoAdmin, match=cause) as caught:
        remote.get("/api/v1/drain")
    assert str(caught.value).startswith(f"{remote.address}: ")
    assert not caught.value.nobody


def test_what_an_answer_lacks_is_named_when_it_is_looked_for(stub: StubAdmin) -> None:
    stub.says("GET", "/", (200, {"drain": {}}))
    answer = remote(stub).get("/")
    with pytest.raises(NoAdmin, match=rf"{stub.url}: .*'state'"):
        answer["drain"]["state"]
