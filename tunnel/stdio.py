"""``tunnel connect``: one stream between standard input and output and a target, as ssh's ProxyCommand wants it.

Rules that hold here:

- Each direction ends by itself: the end of the input is passed on, and the target's end closes the output.
- Input and output are read and written in threads, as they are: they may be files, pipes or a terminal, which somebody
  else uses as well.
- Nothing but the target's bytes is written to the output.

This file must not know the command line.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable
from typing import TypeVar

import trio

from tunnel import turns
from tunnel.address import Target
from tunnel.client import running
from tunnel.config import ClientConfig
from tunnel.errors import DialError, StreamReset
from tunnel.pumps import pump

T = TypeVar("T")

_STDIN, _STDOUT = 0, 1
_CHUNK = 64 * 1024
EXIT_DONE, EXIT_RESET = 0, 1


class Stdio(trio.abc.HalfCloseableStream):
    """Standard input and output as one stream. ``aclose`` leaves the input as it is, with its end unread."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """See ``trio.abc.ReceiveStream``. If cancelled, what is read next is lost."""
        return await _in_thread(_read, _STDIN, max_bytes or _CHUNK)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See ``trio.abc.SendStream``."""
        rest = bytes(data)
        while rest:
            rest = rest[await _in_thread(_write, _STDOUT, rest) :]

    async def wait_send_all_might_not_block(self) -> None:
        """See ``trio.abc.SendStream``."""
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        """Close the output. Something must stay at its number, which the interpreter flushes at its end."""
        await trio.lowlevel.checkpoint()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STDOUT)
        os.close(nowhere)

    async def aclose(self) -> None:
        """See ``trio.abc.AsyncResource``."""
        await self.send_eof()


async def _in_thread(call: Callable[..., T], *arguments: object) -> T:
    try:
        return await trio.to_thread.run_sync(call, *arguments, abandon_on_cancel=True)
    except OSError as error:  # nobody reads the output, say
        raise trio.BrokenResourceError(f"standard input or output: {error.strerror}") from error


def _read(source: int, size: int) -> bytes:
    while True:
        try:
            return os.read(source, size)
        except BlockingIOError:  # somebody else who has it too made it so
            select.select([source], [], [])


def _write(sink: int, data: bytes) -> int:
    while True:
        try:
            return os.write(sink, data)
        except BlockingIOError:
            select.select([], [sink], [])


def _fill_standard_streams() -> None:
    """Where one was closed, the next socket would get its number, and be read and written as if it were that."""
    while (nowhere := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(nowhere)


async def _carry(config: ClientConfig, target: Target, agent: str | None) -> None:
    async with running(config) as client:
        await pump(Stdio(), await client.dial(target.host, target.port, agent=agent))


def run(config: ClientConfig, target: Target, agent: str | None) -> int:
    """Run as this process's program; the exit code. What went wrong is said on standard error.

    Raises:
        ConfigError: a file is not taken.
    """
    _fill_standard_streams()
    try:
        turns.run(_carry, config, target, agent)
    except DialError as error:
        _complain(f"{target}: {error.text} ({error.code})")
        return error.exit_code
    except StreamReset as error:
        _complain(f"{target}: the stream was reset: {error}")
        return EXIT_RESET
    return EXIT_DONE


def _complain(text: str) -> None:
    shown = "".join(char if char.isprintable() else "?" for char in text)  # an agent may have said anything
    with contextlib.suppress(OSError, AttributeError):  # nobody reads that either, or it was closed from the start
        sys.stderr.write(f"tunnel connect: {shown}\n")
