"""What people run on their own machine, with the clients they run it for: ``tunnel forward``, ``tunnel connect``."""

from __future__ import annotations

import hashlib
import random
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import pytest
import redis as redis_py
from endpoints import MIB, Blackhole, NewTarget, check_echo, connect, echo, read_all, read_exactly, reset
from programs import Program, Sshd, StartProgram, Stdio, connect_argv, eventually, free_port, needs, run
from test_faults import check_reset
from test_flow import ALLOWED, Counter
from test_http import random_file
from tunnels import NewTunnel, StartForward, StartStdio, Tunnel

ANSWER = bytes(range(256)) * (MIB // 256)


def call(forward: Program, nth: int = 1) -> socket.socket:
    return connect(forward.port("forward", nth))


def check_reset_at_once(forward: Program) -> None:
    """No byte comes, only a reset: it may do so before this side has seen that it is connected."""
    with pytest.raises(ConnectionResetError), call(forward) as sock:
        sock.recv(1)


def send_in_pieces(sock: socket.socket, data: bytes) -> None:
    """Send pieces of all sizes, and the end."""
    sizes, start = random.Random(len(data)), 0
    while start < len(data):
        size = sizes.choice([1, 1000, 16 * 1024, 300_000])
        sock.sendall(data[start : start + size])
        start += size
    sock.shutdown(socket.SHUT_WR)


# -- tunnel forward: real clients


def test_redis_py_stores_and_finds_through_a_forward(shared_tunnel: Tunnel, forward: StartForward, redis: int) -> None:
    with redis_py.Redis(port=forward(shared_tunnel, redis).port("forward")) as client:
        assert client.set("key", b"some value")
        assert client.get("key") == b"some value"
        big = random.randbytes(MIB)
        assert client.set("big", big)
        assert client.get("big") == big
        with client.pipeline(transaction=False) as pipeline:
            for number in range(1000):
                pipeline.set(f"key {number}", number).get(f"key {number}")
            assert pipeline.execute()[1::2] == [b"%d" % number for number in range(1000)]


def test_redis_py_is_told_what_others_publish(shared_tunnel: Tunnel, forward: StartForward, redis: int) -> None:
    with redis_py.Redis(port=forward(shared_tunnel, redis).port("forward")) as client, client.pubsub() as subscriber:
        subscriber.subscribe("news")
        assert subscriber.get_message(timeout=30)["type"] == "subscribe"
        for number in range(100):
            assert client.publish("news", number) == 1
        assert [subscriber.get_message(timeout=30)["data"] for _ in range(100)] == [b"%d" % one for one in range(100)]


# -- tunnel forward: where it leads


def test_a_forward_leads_through_the_agent_that_it_names(
    tunnel: NewTunnel, forward: StartForward, target: NewTarget
) -> None:
    tunnel_ = tunnel(agents=2)
    program = forward(tunnel_, f"{target(echo).port}@a1")
    before = tunnel_.descriptors()
    for _ in range(8):
        check_echo(tunnel_.clients.enter_context(call(program)))
    server, other, named = (now - then for now, then in zip(tunnel_.descriptors(), before, strict=True))
    assert (other, named) == (0, 8)
    assert server <= 1  # all of them over one link


def test_several_forwards_lead_each_to_its_own_target(
    shared_tunnel: Tunnel, forward: StartForward, target: NewTarget
) -> None:
    names = [b"first", b"second"]
    program = forward(shared_tunnel, *(target(lambda sock, name=name: sock.sendall(name)).port for name in names))
    for nth, name in enumerate(names, 1):
        with call(program, nth) as sock:
            assert read_all(sock) == name


def test_a_forward_to_a_closed_port_is_reset_and_the_log_says_why(
    shared_tunnel: Tunnel, forward: StartForward, refusing_port: int
) -> None:
    program = forward(shared_tunnel, refusing_port)
    check_reset_at_once(program)
    failure = program.wait_for("dial failed", use="forward", code="refused")
    assert failure["target"] == f"127.0.0.1:{refusing_port}"


def test_a_forward_may_start_before_its_server(start: StartProgram, target: NewTarget) -> None:
    port = free_port()
    program = start("forward", f"127.0.0.1:0=127.0.0.1:{target(echo).port}", "--server", f"127.0.0.1:{port}")
    assert program.wait_for("no server yet")["level"] == "warning"
    check_reset_at_once(program)
    program.wait_for("dial failed", use="forward", code="no_server")
    server = start("server", "--listen", f"127.0.0.1:{port}", "--connect", "off")
    start("agent", "--server", f"127.0.0.1:{server.port('links')}")
    server.wait_for("agent linked")
    with call(program) as sock:
        check_echo(sock)


@pytest.mark.parametrize("end", [Program.stop, Program.kill])
def test_a_forward_goes_on_after_its_server_was_restarted(
    tunnel: NewTunnel, forward: StartForward, target: NewTarget, start: StartProgram, end: Callable[[Program], int]
) -> None:
    tunnel_ = tunnel("--listen", f"127.0.0.1:{free_port()}")
    program = forward(tunnel_, target(echo).port)
    with call(program) as sock:
        check_echo(sock)
    end(tunnel_.server)
    start("server", "--listen", tunnel_.links, "--connect", "off").wait_for("agent linked")
    with call(program) as sock:
        check_echo(sock)


# -- tunnel forward: bytes


def test_pieces_of_any_size_arrive_whole_both_ways_at_once(
    shared_tunnel: Tunnel, forward: StartForward, target: NewTarget
) -> None:
    up, down = random.randbytes(10 * MIB), random.randbytes(10 * MIB)
    received: SimpleQueue[bytes] = SimpleQueue()

    def exchange(sock: socket.socket, data: bytes) -> None:
        sending = threading.Thread(target=send_in_pieces, args=(sock, data))
        sending.start()
        received.put(hashlib.sha256(read_all(sock)).digest())
        sending.join()

    program = forward(shared_tunnel, target(lambda sock: exchange(sock, down)).port)
    with call(program) as sock:
        exchange(sock, up)
    assert {received.get(timeout=30) for _ in range(2)} == {hashlib.sha256(data).digest() for data in (up, down)}


def test_through_a_forward_a_target_may_answer_after_the_end_of_the_request(
    shared_tunnel: Tunnel, forward: StartForward, target: NewTarget
) -> None:
    def answer(sock: socket.socket) -> None:
        if read_all(sock) == b"a question":
            sock.sendall(ANSWER)

    with call(forward(shared_tunnel, target(answer).port)) as sock:
        sock.sendall(b"a question")
        sock.shutdown(socket.SHUT_WR)
        assert read_all(sock) == ANSWER


def test_through_a_forward_a_client_may_go_on_after_the_end_of_the_answer(
    shared_tunnel: Tunnel, forward: StartForward, target: NewTarget
) -> None:
    received: SimpleQueue[bytes] = SimpleQueue()

    def end_first(sock: socket.socket) -> None:
        sock.sendall(b"enough")
        sock.shutdown(socket.SHUT_WR)
        received.put(read_all(sock))

    with call(forward(shared_tunnel, target(end_first).port)) as sock:
        assert read_all(sock) == b"enough"
        sock.sendall(ANSWER * 10)
        sock.shutdown(socket.SHUT_WR)
        assert received.get(timeout=30) == ANSWER * 10


def test_through_a_forward_a_targets_reset_is_a_reset_for_the_client(
    shared_tunnel: Tunnel, forward: StartForward, target: NewTarget
) -> None:
    def break_off(sock: socket.socket) -> None:
        read_exactly(sock, 1)
        sock.sendall(ANSWER)
        reset(sock)

    with call(forward(shared_tunnel, target(break_off).port)) as sock:
        sock.sendall(b"?")
        assert check_reset(sock) <= MIB


def test_through_a_forward_a_clients_reset_is_a_reset_for_the_target(
    shared_tunnel: Tunnel, forward: StartForward, target: NewTarget
) -> None:
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def listen(sock: socket.socket) -> None:
        try:
            echo(sock)
            ended.put(None)
        except OSError as error:
            ended.put(error)

    sock = call(forward(shared_tunnel, target(listen).port))
    check_echo(sock)
    reset(sock)
    assert isinstance(ended.get(timeout=30), ConnectionResetError)


def test_a_download_through_a_forward_that_nobody_reads_costs_no_memory(
    tunnel: NewTunnel, forward: StartForward, target: NewTarget
) -> None:
    def memory() -> list[int]:
        return [*tunnel_.memory(), program.memory()]

    sent = Counter()
    tunnel_ = tunnel()
    program = forward(tunnel_, target(lambda sock: sent.send(sock, 1 << 60)).port, target(echo).port)
    other = tunnel_.clients.enter_context(call(program, 2))
    check_echo(other)
    before = memory()
    tunnel_.clients.enter_context(call(program))
    eventually(sent.stalled, "a firehose that is stopped")
    for _ in range(100):
        check_echo(other)
    assert max(now - then for now, then in zip(memory(), before, strict=True)) < ALLOWED


# -- tunnel forward: how it ends


def test_a_signal_ends_an_idle_forward(shared_tunnel: Tunnel, forward: StartForward, target: NewTarget) -> None:
    program = forward(shared_tunnel, target(echo).port)
    with call(program) as sock:
        check_echo(sock)
    program.signal(signal.SIGTERM)
    assert program.ended() == 0
    assert [event["event"] for event in program.log if event["level"] not in ("debug", "info")] == []


def test_a_leaving_forward_lets_a_download_finish(
    shared_tunnel: Tunnel, forward: StartForward, target: NewTarget
) -> None:
    left = threading.Event()

    def serve(sock: socket.socket) -> None:
        sock.sendall(ANSWER)
        left.wait(30)
        sock.sendall(ANSWER * 20)

    program = forward(shared_tunnel, target(serve).port)
    port = program.port("forward")
    with call(program) as sock:
        assert read_exactly(sock, MIB) == ANSWER
        program.signal(signal.SIGTERM)
        program.wait_for("leaving", open=1)
        eventually(lambda: refuses(port), "a port that is closed")
        left.set()
        assert read_all(sock) == ANSWER * 20
    assert program.ended() == 0


def refuses(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["5432", "--server", "a:1"], ["'5432'", "LISTEN=TARGET"]),
        (["5432=a:1"], ["Missing option", "--server"]),
        (["0.0.0.0:0=a:1", "--server", "a:1"], ["0.0.0.0:0=a:1", "--insecure"]),
    ],
)
def test_a_forward_that_cannot_be_is_named(start: StartProgram, arguments: list[str], words: list[str]) -> None:
    program = start("forward", *arguments)
    assert program.ended() == 2
    text = " ".join(program.noise)
    program.noise.clear()
    assert all(word in text for word in words), text


def test_a_port_of_a_forward_that_is_in_use_is_named(start: StartProgram, refusing_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        program = start("forward", f"{address}=a:1", "--server", f"127.0.0.1:{refusing_port}")
        assert program.ended() == 1
    (event,) = program.said("cannot start")
    assert address in event["cause"]


# -- tunnel connect: ssh


def through_tunnel(tunnel: Tunnel, sshd: Sshd) -> list[str]:
    """What ssh and scp need to be told, besides the port, which is the target's own."""
    return [*sshd.options(), "-o", f"ProxyCommand={shlex.join(connect_argv('%h:%p', tunnel.links))}"]


def test_ssh_runs_a_command_through_a_proxy_command(tunnel: NewTunnel, sshd: Sshd) -> None:
    options = through_tunnel(tunnel(), sshd)
    assert run(needs("ssh"), *options, "-p", str(sshd.port), sshd.login, "echo through the tunnel") == (
        b"through the tunnel\n"
    )


def test_scp_copies_100_mb_there_and_back_through_a_proxy_command(
    shared_tunnel: Tunnel, sshd: Sshd, tmp_path: Path
) -> None:
    scp = [needs("scp"), *through_tunnel(shared_tunnel, sshd), "-P", str(sshd.port)]
    here, there, back = (tmp_path / name for name in ("here", "there", "back"))
    digests = {random_file(here, 100)}
    try:
        run(*scp, str(here), f"{sshd.login}:{there}")
        run(*scp, f"{sshd.login}:{there}", str(back))
        digests |= {hashlib.sha256(path.read_bytes()).hexdigest() for path in (there, back)}
    finally:
        for path in (here, there, back):
            path.unlink(missing_ok=True)
    assert len(digests) == 1


# -- tunnel connect: input and output


def answer_all(sock: socket.socket) -> None:
    """Say what came, once it has ended."""
    sock.sendall(b"got " + read_all(sock))


def test_the_input_may_be_a_pipe(shared_tunnel: Tunnel, target: NewTarget, stdio: StartStdio) -> None:
    process = stdio(shared_tunnel, target(answer_all).port)
    process.input.write(ANSWER)
    process.input.close()
    assert process.output.readall() == b"got " + ANSWER
    assert process.ended() == (0, "")


def test_the_input_may_be_a_file(shared_tunnel: Tunnel, target: NewTarget, stdio: StartStdio, tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(ANSWER)
    with (tmp_path / "input").open("rb") as file:
        process = stdio(shared_tunnel, target(answer_all).port, stdin=file)
    assert process.output.readall() == b"got " + ANSWER
    assert process.ended() == (0, "")


def test_the_input_may_be_nothing(shared_tunnel: Tunnel, target: NewTarget, stdio: StartStdio) -> None:
    process = stdio(shared_tunnel, target(answer_all).port, stdin=subprocess.DEVNULL)
    assert process.output.readall() == b"got "
    assert process.ended() == (0, "")


@pytest.mark.parametrize(("closed", "printed"), [("<&-", b"got "), (">&-", b"")])
def test_a_closed_input_or_output_is_like_nothing(
    shared_tunnel: Tunnel, target: NewTarget, closed: str, printed: bytes
) -> None:
    command = shlex.join(connect_argv(f"127.0.0.1:{target(answer_all).port}", shared_tunnel.links))
    assert run("sh", "-c", f"exec {command} {closed}") == printed


def test_the_output_may_be_a_file(shared_tunnel: Tunnel, target: NewTarget, stdio: StartStdio, tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as file:
        process = stdio(shared_tunnel, target(answer_all).port, stdout=file)
    process.input.write(ANSWER)
    process.input.close()
    assert process.ended() == (0, "")
    assert (tmp_path / "output").read_bytes() == b"got " + ANSWER


def test_an_output_that_nobody_reads_any_more_ends_it(
    shared_tunnel: Tunnel, target: NewTarget, stdio: StartStdio
) -> None:
    process = stdio(shared_tunnel, target(lambda sock: Counter().send(sock, 1 << 60)).port)
    assert process.output.read(1)
    process.output.close()
    check_complaint(process, 1, "Broken pipe")


def test_talk_goes_back_and_forth(shared_tunnel: Tunnel, target: NewTarget, stdio: StartStdio) -> None:
    process = stdio(shared_tunnel, target(echo).port)
    for number in range(100):
        process.input.write(b"%d\n" % number)
        assert process.output.read(100) == b"%d\n" % number
    process.input.close()
    assert process.output.readall() == b""
    assert process.ended() == (0, "")


def test_the_agent_may_be_named(tunnel: NewTunnel, target: NewTarget, stdio: StartStdio) -> None:
    tunnel_ = tunnel(agents=2)
    whole = f"127.0.0.1:{target(answer_all).port}"
    assert stdio(tunnel_, f"{whole}@a1", stdin=subprocess.DEVNULL).output.readall() == b"got "
    check_complaint(stdio(tunnel_, f"{whole}@a7", stdin=subprocess.DEVNULL), 75, "no_backend")


# -- tunnel connect: ends


def test_an_answer_that_comes_long_after_the_end_of_the_input_is_whole(
    shared_tunnel: Tunnel, target: NewTarget
) -> None:
    def answer_later(sock: socket.socket) -> None:
        question = read_all(sock)
        time.sleep(0.5)  # this is the answer's delay, which is what is tested
        sock.sendall(question + ANSWER)

    command = shlex.join(connect_argv(f"127.0.0.1:{target(answer_later).port}", shared_tunnel.links))
    assert run("sh", "-c", f"printf question | {command}") == b"question" + ANSWER


def test_the_input_may_go_on_after_the_end_of_the_output(
    shared_tunnel: Tunnel, target: NewTarget, stdio: StartStdio
) -> None:
    received: SimpleQueue[bytes] = SimpleQueue()

    def end_first(sock: socket.socket) -> None:
        sock.sendall(b"enough")
        sock.shutdown(socket.SHUT_WR)
        received.put(read_all(sock))

    process = stdio(shared_tunnel, target(end_first).port)
    assert process.output.readall() == b"enough"
    process.input.write(ANSWER * 10)
    process.input.close()
    assert received.get(timeout=30) == ANSWER * 10
    assert process.ended() == (0, "")


def check_complaint(process: Stdio, code: int, *words: str) -> None:
    """It ends with this code, and one line on stderr that holds these words."""
    got, text = process.ended()
    assert got == code, text
    assert text.startswith("tunnel connect: ")
    assert text.count("\n") == 1
    assert all(word in text for word in words), text


def test_a_targets_reset_ends_it_though_the_input_goes_on(
    shared_tunnel: Tunnel, target: NewTarget, stdio: StartStdio
) -> None:
    def break_off(sock: socket.socket) -> None:
        read_exactly(sock, 1)
        reset(sock)

    port = target(break_off).port
    process = stdio(shared_tunnel, port)
    process.input.write(b"?")
    check_complaint(process, 1, f"127.0.0.1:{port}", "reset")
    assert process.output.readall() == b""


def test_a_target_that_refuses_is_exit_69(shared_tunnel: Tunnel, stdio: StartStdio, refusing_port: int) -> None:
    process = stdio(shared_tunnel, refusing_port)
    check_complaint(process, 69, f"127.0.0.1:{refusing_port}", "(refused)")
    assert process.output.readall() == b""


def test_a_name_that_does_not_exist_is_exit_69(shared_tunnel: Tunnel, stdio: StartStdio) -> None:
    check_complaint(stdio(shared_tunnel, "nosuch.invalid:80"), 69, "nosuch.invalid:80", "(dns)")


def test_without_an_agent_it_is_exit_75(tunnel: NewTunnel, stdio: StartStdio, refusing_port: int) -> None:
    check_complaint(stdio(tunnel(agents=0), refusing_port), 75, "(no_backend)")


def test_without_a_server_it_is_exit_75(refusing_port: int) -> None:
    argv = connect_argv("127.0.0.1:22", f"127.0.0.1:{refusing_port}")
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (75, "")
    assert f"127.0.0.1:{refusing_port}" in done.stderr
    assert "(no_server)" in done.stderr


def test_a_target_that_is_none_is_exit_2(refusing_port: int) -> None:
    argv = connect_argv("nowhere", f"127.0.0.1:{refusing_port}")
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'nowhere'" in done.stderr


def test_ctrl_c_during_a_talk_is_exit_130(shared_tunnel: Tunnel, target: NewTarget, stdio: StartStdio) -> None:
    process = stdio(shared_tunnel, target(echo).port)
    process.input.write(b"hello")
    assert process.output.read(5) == b"hello"
    process.signal(signal.SIGINT)
    assert process.ended() == (130, "")


def test_ctrl_c_during_a_dial_is_exit_130(tunnel: NewTunnel, stdio: StartStdio, blackhole: Blackhole) -> None:
    tunnel_ = tunnel()
    before = tunnel_.agent.descriptors()
    process = stdio(tunnel_, blackhole.port)
    eventually(lambda: tunnel_.agent.descriptors() > before, "a dial under way")
    process.signal(signal.SIGINT)
    assert process.ended() == (130, "")
