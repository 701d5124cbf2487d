"""Standard input and output as a stream, over pipes that stand for them; and what a run ends with."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Callable, Iterator

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tunnel import stdio
from tunnel.address import Target
from tunnel.config import ClientConfig
from tunnel.errors import DIAL_ERRORS, DialError, NoServer, Refused, StreamReset
from tunnel.stdio import Stdio

Run = Callable[[Exception | None], int]


class Pipes:
    """Stand for standard input and output.

    Attributes:
        input: where this side writes what ``Stdio`` reads.
        output: where this side reads what ``Stdio`` writes.
        far: the other ends: what ``Stdio`` takes for its input and output.
    """

    def __init__(self) -> None:
        far_input, self.input = os.pipe()
        self.output, far_output = os.pipe()
        self.far = far_input, far_output
        self._open = {self.input, self.output, *self.far}

    def close(self, descriptor: int) -> None:
        """Close an end, once: its number may be somebody else's afterwards."""
        if descriptor in self._open:
            self._open.remove(descriptor)
            os.close(descriptor)


@pytest.fixture
def pipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipes]:
    pipes = Pipes()
    monkeypatch.setattr(stdio, "_STDIN", pipes.far[0])
    monkeypatch.setattr(stdio, "_STDOUT", pipes.far[1])
    yield pipes
    for descriptor in (pipes.input, pipes.output, *pipes.far):  # our input first: it wakes threads that still read
        pipes.close(descriptor)


async def read_all(descriptor: int) -> bytes:
    """Everything up to the end."""
    data = b""
    while piece := await trio.to_thread.run_sync(os.read, descriptor, 64 * 1024, abandon_on_cancel=True):
        data += piece
    return data


def reason(error: pytest.ExceptionInfo[trio.BrokenResourceError]) -> int | None:
    assert isinstance(error.value.__cause__, OSError)
    return error.value.__cause__.errno


# -- the stream


async def test_what_comes_is_received_and_then_the_end(pipes: Pipes) -> None:
    os.write(pipes.input, b"hello")
    assert await Stdio().receive_some() == b"hello"
    pipes.close(pipes.input)
    assert await Stdio().receive_some() == b""


async def test_no_more_is_received_than_was_asked_for(pipes: Pipes) -> None:
    os.write(pipes.input, b"hello")
    assert [await Stdio().receive_some(2) for _ in range(3)] == [b"he", b"ll", b"o"]


async def test_a_cancelled_receive_does_not_wait_for_input(pipes: Pipes) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Stdio().receive_some)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    os.write(pipes.input, b"for the thread that was left behind")
    # or it would read what a later test has at that number
    while select.select([pipes.far[0]], [], [], 0)[0]:
        await trio.lowlevel.checkpoint()


async def test_an_input_that_somebody_else_made_non_blocking_is_waited_for(pipes: Pipes) -> None:
    os.set_blocking(pipes.far[0], False)
    received = b""

    async def receive() -> None:
        nonlocal received
        received = await Stdio().receive_some()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await wait_all_tasks_blocked(0.05)  # also the thread
        os.write(pipes.input, b"hello")
    assert received == b"hello"


async def test_an_output_that_somebody_else_made_non_blocking_is_waited_for(pipes: Pipes) -> None:
    os.set_blocking(pipes.far[1], False)
    before = os.write(pipes.far[1], bytes(1_000_000))  # as much as it holds
    received = b""

    async def send() -> None:
        await Stdio().send_all(b"hello")
        await Stdio().send_eof()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await wait_all_tasks_blocked(0.05)  # also the thread
        received = await read_all(pipes.output)
    assert received == bytes(before) + b"hello"


async def test_more_than_a_pipe_holds_is_sent_whole(pipes: Pipes) -> None:
    data = os.urandom(1_000_000)
    received = b""

    async def send() -> None:
        await Stdio().send_all(memoryview(data))
        await Stdio().send_eof()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        received = await read_all(pipes.output)
    assert received == data


@pytest.mark.parametrize("end", [Stdio.send_eof, Stdio.aclose])
async def test_the_end_closes_the_output_and_not_the_input(pipes: Pipes, end: type[Stdio]) -> None:
    stream = Stdio()
    await stream.send_all(b"that is all")
    await end(stream)
    assert await read_all(pipes.output) == b"that is all"
    os.write(pipes.input, b"more")
    assert await stream.receive_some() == b"more"


async def test_after_the_end_the_output_is_still_a_descriptor(pipes: Pipes) -> None:
    await Stdio().send_eof()
    os.write(pipes.far[1], b"what an interpreter flushes at its end")
    assert await read_all(pipes.output) == b""


async def test_an_end_that_is_said_twice_is_one(pipes: Pipes) -> None:
    await Stdio().send_eof()
    await Stdio().aclose()
    assert await read_all(pipes.output) == b""


async def test_an_output_that_nobody_reads_is_broken(pipes: Pipes) -> None:
    pipes.close(pipes.output)
    with pytest.raises(trio.BrokenResourceError, match="Broken pipe") as error:
        await Stdio().send_all(b"hello")
    assert reason(error) == errno.EPIPE


async def test_an_input_that_cannot_be_read_is_broken(pipes: Pipes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio, "_STDIN", pipes.input)  # which is for writing
    with pytest.raises(trio.BrokenResourceError, match="Bad file descriptor") as error:
        await Stdio().receive_some()
    assert reason(error) == errno.EBADF


# -- a run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the program, whose stream ends with an error, or well."""

    def run(error: Exception | None) -> int:
        async def carry(*_: object) -> None:
            await trio.lowlevel.checkpoint()
            if error:
                raise error

        monkeypatch.setattr(stdio, "_carry", carry)
        return stdio.run(ClientConfig((Target("127.0.0.1", 7400),)), Target("db.internal", 5432), None)

    return run


def test_a_stream_that_ended_well_is_exit_0_without_a_word(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(None) == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", DIAL_ERRORS.values())
def test_a_dial_that_failed_is_the_exit_code_of_its_error(
    run: Run, capfd: pytest.CaptureFixture[str], kind: type[DialError]
) -> None:
    assert run(kind("it did not work")) == kind.exit_code
    assert capfd.readouterr() == ("", f"tunnel connect: db.internal:5432: it did not work ({kind.code})\n")


def test_of_exit_codes_69_is_cannot_reach_and_75_try_later(run: Run) -> None:
    assert (run(Refused("no")), run(NoServer("no"))) == (69, 75)


def test_a_reset_is_exit_1(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(StreamReset("reset", "the target broke off")) == 1
    assert capfd.readouterr() == (
        "",
        "tunnel connect: db.internal:5432: the stream was reset: the target broke off (reset)\n",
    )


def test_what_a_terminal_would_obey_is_not_printed(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run(Refused("\x1b[2J\nall is well"))
    assert capfd.readouterr().err == "tunnel connect: db.internal:5432: ?[2J?all is well (refused)\n"


def test_a_complaint_that_nobody_reads_changes_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", Broken())
    assert run(Refused("no")) == 69


def test_without_a_standard_error_there_is_still_an_exit_code(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # as it is when the process started with that descriptor closed
    assert run(Refused("no")) == 69
