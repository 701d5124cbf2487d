"""Connections that end badly, or never begin: each is told as what it is, and leaves nothing behind."""

from __future__ import annotations

import select
import socket
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
from endpoints import (
    MIB,
    Blackhole,
    NewTarget,
    check_echo,
    chunks,
    connect,
    connect_head,
    echo,
    read_all,
    read_exactly,
    read_refusal,
    reset,
)
from programs import eventually
from tunnels import NewTunnel, Tunnel

ANSWER = bytes(range(256)) * (MIB // 256)


def check_reset(sock: socket.socket) -> int:
    """Read up to a reset, which must come; how many bytes came before it."""
    count = 0
    try:
        for chunk in chunks(sock):
            count += len(chunk)
    except ConnectionResetError:
        return count
    pytest.fail(f"a clean end after {count} bytes")


def test_a_target_may_answer_after_the_end_of_the_request(tunnel: NewTunnel, target: NewTarget, way: str) -> None:
    def answer(sock: socket.socket) -> None:
        if read_all(sock) == b"a question":
            sock.sendall(ANSWER)

    port = target(answer).port
    sock = tunnel(forward=port).open(way, port)
    sock.sendall(b"a question")
    sock.shutdown(socket.SHUT_WR)
    assert read_all(sock) == ANSWER


def test_a_client_may_go_on_after_the_end_of_the_answer(tunnel: NewTunnel, target: NewTarget, way: str) -> None:
    received: SimpleQueue[bytes] = SimpleQueue()

    def end_first(sock: socket.socket) -> None:
        sock.sendall(b"enough")
        sock.shutdown(socket.SHUT_WR)
        received.put(read_all(sock))

    port = target(end_first).port
    sock = tunnel(forward=port).open(way, port)
    assert read_all(sock) == b"enough"
    sock.sendall(ANSWER * 10)
    sock.shutdown(socket.SHUT_WR)
    assert received.get(timeout=30) == ANSWER * 10


def test_all_that_was_sent_before_a_close_arrives(tunnel: NewTunnel, target: NewTarget, way: str) -> None:
    port = target(lambda sock: sock.sendall(ANSWER * 20)).port
    assert read_all(tunnel(forward=port).open(way, port)) == ANSWER * 20


def test_a_targets_reset_is_a_reset_for_the_client(tunnel: NewTunnel, target: NewTarget, way: str) -> None:
    def break_off(sock: socket.socket) -> None:
        read_exactly(sock, 1)  # before this, a reset might still count as a dial that failed
        sock.sendall(ANSWER)
        reset(sock)

    port = target(break_off).port
    sock = tunnel(forward=port).open(way, port)
    sock.sendall(b"?")
    assert check_reset(sock) <= MIB


def test_a_clients_reset_is_a_reset_for_the_target(tunnel: NewTunnel, target: NewTarget, way: str) -> None:
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def listen(sock: socket.socket) -> None:
        try:
            echo(sock)
            ended.put(None)
        except OSError as error:
            ended.put(error)

    port = target(listen).port
    sock = tunnel(forward=port).open(way, port)
    check_echo(sock)
    reset(sock)
    assert isinstance(ended.get(timeout=30), ConnectionResetError)


# -- dials that fail


def test_a_refused_connect_is_a_502_that_says_so(tunnel: NewTunnel, refusing_port: int) -> None:
    tunnel_ = tunnel()
    status, text = tunnel_.refused(refusing_port)
    assert status == 502
    assert text.startswith("refused: ")
    assert str(refusing_port) in text
    tunnel_.server.wait_for("dial failed", use="connect", code="refused")


def test_a_refused_forward_is_reset_without_a_byte(tunnel: NewTunnel, refusing_port: int) -> None:
    tunnel_ = tunnel(forward=refusing_port)
    assert check_reset(tunnel_.client("forward")) == 0
    tunnel_.server.wait_for("dial failed", use="forward", code="refused")


def test_a_name_that_does_not_exist_is_a_502_that_says_so(tunnel: NewTunnel) -> None:
    status, text = tunnel().refused(80, host="nosuch.invalid")
    assert status == 502
    assert text.startswith("dns: nosuch.invalid")


def test_without_an_agent_a_connect_is_a_503_that_says_so(tunnel: NewTunnel, refusing_port: int) -> None:
    status, text = tunnel(agents=0).refused(refusing_port)
    assert status == 503
    assert text.startswith("no_backend: ")


def test_a_target_that_never_answers_is_a_504_that_says_so(tunnel: NewTunnel, blackhole: Blackhole) -> None:
    status, text = tunnel("--dial-timeout", "1s").refused(blackhole.port)
    assert status == 504
    assert text.startswith("timeout: ")


def test_a_forward_to_a_target_that_never_answers_is_reset(tunnel: NewTunnel, blackhole: Blackhole) -> None:
    tunnel_ = tunnel("--dial-timeout", "1s", forward=blackhole.port)
    assert check_reset(tunnel_.client("forward")) == 0
    tunnel_.server.wait_for("dial failed", use="forward", code="timeout")


def test_500_dials_into_a_black_hole_do_not_delay_a_good_one(
    tunnel: NewTunnel, target: NewTarget, blackhole: Blackhole
) -> None:
    tunnel_ = tunnel()
    waiting = [tunnel_.client("connect") for _ in range(500)]
    for sock in waiting:
        sock.sendall(connect_head("127.0.0.1", blackhole.port))
    eventually(lambda: tunnel_.agent.descriptors() > 500, "500 dials at the agent")
    check_echo(tunnel_.open("connect", target(echo).port))
    assert not answered(waiting)
    assert {read_refusal(sock)[0] for sock in waiting} == {504}


def answered(socks: list[socket.socket]) -> list[tuple[int, int]]:
    """Those on which something has come."""
    poller = select.poll()
    for sock in socks:
        poller.register(sock, select.POLLIN)
    return poller.poll(0)


# -- what is left behind


def check_nothing_left(tunnel: Tunnel, before: list[int]) -> None:
    eventually(lambda: tunnel.descriptors() == before, f"as many descriptors as before: {before}")


def test_2000_refused_connects_leave_nothing_behind(tunnel: NewTunnel, refusing_port: int) -> None:
    tunnel_ = tunnel()
    before = tunnel_.descriptors()
    with ThreadPoolExecutor(16) as pool:
        statuses = pool.map(lambda _: tunnel_.refused(refusing_port)[0], range(2000))
        assert set(statuses) == {502}
    check_nothing_left(tunnel_, before)


def test_a_client_that_leaves_during_its_dial_leaves_nothing_behind(
    tunnel: NewTunnel, blackhole: Blackhole, way: str
) -> None:
    tunnel_ = tunnel("--dial-timeout", "2s", forward=blackhole.port)
    before = tunnel_.descriptors()
    with connect(tunnel_.port(way)) as sock:
        if way == "connect":
            sock.sendall(connect_head("127.0.0.1", blackhole.port))
        eventually(lambda: tunnel_.agent.descriptors() > before[1], "a dial under way")
    check_nothing_left(tunnel_, before)


def test_a_dial_that_succeeds_after_its_client_left_ends_at_the_target(
    tunnel: NewTunnel, blackhole: Blackhole, way: str
) -> None:
    tunnel_ = tunnel(forward=blackhole.port)
    before = tunnel_.descriptors()
    sock = connect(tunnel_.port(way))
    if way == "connect":
        sock.sendall(connect_head("127.0.0.1", blackhole.port))
    eventually(lambda: tunnel_.agent.descriptors() > before[1], "a dial under way")
    reset(sock)
    with tunnel_.clients.enter_context(blackhole.open_up()) as listener:
        listener.settimeout(1)
        while True:  # first come the connections that filled the queue
            try:
                target, _ = listener.accept()
            except TimeoutError:
                break
            target.close()
    check_nothing_left(tunnel_, before)
