"""Signals that arrive before anybody can act on them: held, told once, or let through."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tunnel
from tunnel import early

_ROOT = Path(tunnel.__file__).parent.parent
_DEADLINE = 30.0  # seconds after which whatever is waited for counts as never coming


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Put back what this process does on signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    early.taken()


def _python(*lines: str) -> subprocess.CompletedProcess[str]:
    """A process of its own that runs these lines."""
    script = "\n".join(["import signal", "from tunnel import early", *lines])
    return subprocess.run(
        [sys.executable, "-c", script], cwd=_ROOT, capture_output=True, text=True, timeout=_DEADLINE, check=False
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_hold_ends_nothing_and_is_told_once(number: signal.Signals) -> None:
    early.hold()
    signal.raise_signal(number)
    assert early.taken() == [number]
    assert early.taken() == []


def test_several_are_told_in_their_order() -> None:
    early.hold()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        signal.raise_signal(number)
    assert early.taken() == [signal.SIGINT, signal.SIGTERM, signal.SIGINT]


def test_without_hold_nothing_is_told() -> None:
    assert early.taken() == []


def test_release_without_a_signal_gives_them_their_usual_effect() -> None:
    early.hold()
    early.release()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_release_lets_a_held_sigint_through() -> None:
    early.hold()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        early.release()
    assert early.taken() == []


def test_release_lets_a_held_sigterm_through() -> None:
    done = _python(
        "early.hold()",
        "signal.raise_signal(signal.SIGTERM)",
        "print('held', flush=True)",
        "early.release()",
        "print('not reached', flush=True)",
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "held\n", "")


def test_what_was_told_is_not_let_through_as_well() -> None:
    done = _python(
        "early.hold()", "signal.raise_signal(signal.SIGTERM)", "early.taken()", "early.release()", "print('alive')"
    )
    assert (done.returncode, done.stdout) == (0, "alive\n")


def test_once_ignored_signals_have_no_effect_even_when_the_interpreter_ends() -> None:
    done = _python(
        "import os",
        "early.hold()",
        "class Late:",
        "    def __del__(self): os.kill(os.getpid(), signal.SIGTERM)",
        "signal.late = Late()  # goes when the modules do, and that is after the handlers",
        "early.ignore()",
        "print('alive', flush=True)",
    )
    assert (done.returncode, done.stdout) == (0, "alive\n")


# -- whole processes

_SERVER = ("server", "--listen", "127.0.0.1:0", "--connect", "127.0.0.1:0")
_AGENT = ("agent", "--server", "127.0.0.1:1")
_FORWARD = ("forward", "0=x:1", "--server", "127.0.0.1:1")
_CONNECT = ("connect", "x:1", "--server", "127.0.0.1:1")


def _catches_sigterm(pid: int) -> bool:
    """Whether a process has a handler of its own by now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    raise LookupError("a process without SigCgt")


def _terminated_as_soon_as_it_can_be(*arguments: str) -> tuple[int, str]:
    """Start a program, send it SIGTERM the moment it catches that; its exit code, and what it said."""
    with subprocess.Popen(
        [sys.executable, "-m", "tunnel", *arguments],
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            end = time.monotonic() + _DEADLINE
            while not _catches_sigterm(process.pid):
                assert time.monotonic() < end, "it never caught the signal"
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=_DEADLINE)
        finally:
            process.kill()
    return process.returncode, said


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks /proc what is caught")
@pytest.mark.parametrize("program", [_SERVER, _AGENT, _FORWARD], ids=lambda program: program[0])
def test_a_program_that_is_stopped_as_soon_as_it_can_be_exits_with_0(program: tuple[str, ...]) -> None:
    code, said = _terminated_as_soon_as_it_can_be(*program)
    assert "Traceback" not in said
    assert (code, '"exit"' in said) == (0, True), said


def _signalled_after_hold(number: signal.Signals, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program that gets a signal right after it holds them, before anything else is loaded."""
    return _python(
        "import sys",
        "from tunnel.__main__ import main",
        "hold = early.hold",
        f"early.hold = lambda: (hold(), signal.raise_signal({int(number)}))",
        f"sys.argv = ['tunnel', *{arguments!r}]",
        "main()",
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_program_starts_and_leaves_after_a_signal_that_came_first(number: signal.Signals) -> None:
    done = _signalled_after_hold(number, *_SERVER)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0
    assert [event in done.stderr for event in ('"ready"', '"leaving"', '"exit"')] == [True] * 3, done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_command_that_takes_no_care_of_signals_ends_by_one_that_came_first(number: signal.Signals, code: int) -> None:
    done = _signalled_after_hold(number, *_CONNECT)
    assert (done.returncode, done.stderr) == (code, "")
