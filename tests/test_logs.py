"""Logs: one event, one line, whatever the values hold and whatever becomes of stderr."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunnel import logs

log = logs.get_logger("tunnel.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("tunnel")
    before, levels = set(root.handlers), (root.level, ours.level)
    yield
    for handler in set(root.handlers) - before:
        root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def configured(level: str, fmt: str, stream: io.StringIO | None = None) -> io.StringIO:
    stream = stream or io.StringIO()
    logs.configure(level, fmt, stream)
    return stream


def read_json(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def without_time(line: str) -> str:
    return re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", "", line)


def test_a_logfmt_line_is_time_level_event_and_facts() -> None:
    stream = configured("info", "logfmt")
    log.info("listening", use="links", address="127.0.0.1:7400")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info listening use=links address=127\.0\.0\.1:7400\n",
        stream.getvalue(),
    )


def test_logfmt_quotes_what_would_not_read_as_one_word() -> None:
    stream = configured("info", "logfmt")
    log.warning("link failed", a="x y", b="", c='"', d="k=v", e="a\\b c", f="plain\\")
    assert without_time(stream.getvalue()) == (
        'warning "link failed" a="x y" b="" c="\\"" d="k=v" e="a\\\\b c" f=plain\\\n'
    )


def test_logfmt_writes_values_of_other_types() -> None:
    stream = configured("info", "logfmt")
    log.info("x", none=None, yes=True, number=1.5, error=ValueError("no"), raw=b"\n")
    assert without_time(stream.getvalue()) == "info x none=null yes=true number=1.5 error=no raw=b'\\n'\n"


def test_a_json_line_holds_the_same() -> None:
    stream = configured("info", "json")
    log.info("listening", use="links", port=7400, cause=ValueError("no"))
    line = json.loads(stream.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("timestamp"))
    assert line == {"level": "info", "event": "listening", "use": "links", "port": 7400, "cause": "no"}


@pytest.mark.parametrize("fmt", ["logfmt", "json"])
@given(event=st.text(), value=st.text() | st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"])))
def test_no_text_breaks_out_of_its_line(fmt: str, event: str, value: str) -> None:
    stream = configured("info", fmt)
    log.info(event, value=value)
    line = stream.getvalue()
    assert line.endswith("\n")
    assert line[:-1].isprintable()


def test_json_gives_every_text_back() -> None:
    stream = configured("info", "json")
    log.info("x", value="Zürich\x1b[2J\n\u202e")
    assert json.loads(stream.getvalue())["value"] == "Zürich\x1b[2J\n\u202e"


def test_a_terminal_gets_logfmt() -> None:
    stream = configured("info", "auto", Terminal())
    log.info("x")
    assert without_time(stream.getvalue()) == "info x\n"


def test_a_file_gets_json() -> None:
    stream = configured("info", "auto")
    log.info("x")
    assert json.loads(stream.getvalue())["event"] == "x"


def test_what_is_below_the_level_is_not_shown() -> None:
    stream = configured("warning", "logfmt")
    log.debug("x")
    log.info("x")
    log.warning("y")
    assert without_time(stream.getvalue()) == "warning y\n"


def test_a_disabled_call_does_not_look_at_its_facts() -> None:
    class Untouchable:
        def __str__(self) -> str:
            raise AssertionError

    configured("info", "logfmt")
    log.debug("x", value=Untouchable())


def test_an_error_shows_its_traceback_set_back_from_the_events() -> None:
    stream = configured("info", "logfmt")
    try:
        raise ValueError("a\n2026-01-02T03:04:05.678Z info forged\x1b")
    except ValueError:
        log.exception("failed")
    first, *trace = stream.getvalue().splitlines()
    assert without_time(first) == "error failed"
    assert trace[-1] == "    2026-01-02T03:04:05.678Z info forged\\u001b"
    assert all(line.startswith("    ") for line in trace)


def test_a_warning_shows_its_exception_in_one_line() -> None:
    stream = configured("info", "logfmt")
    log.warning("failed", exc_info=ValueError("a\nb"))
    assert without_time(stream.getvalue()) == 'warning failed exception="ValueError: a\\nb"\n'


def test_json_holds_the_whole_traceback_in_its_line() -> None:
    stream = configured("info", "json")
    try:
        raise ValueError("no")
    except ValueError as error:
        log.warning("failed", exc_info=error)
    exception = json.loads(stream.getvalue())["exception"]
    assert exception.startswith("Traceback")
    assert exception.endswith("ValueError: no\n")


def test_other_libraries_log_in_the_same_shape() -> None:
    stream = configured("info", "logfmt")
    logging.getLogger("other").warning("found %s", "a\nb")
    assert without_time(stream.getvalue()) == 'warning "found a\\nb"\n'


def test_of_other_libraries_only_warnings_are_shown() -> None:
    stream = configured("debug", "logfmt")
    logging.getLogger("other").info("x")
    assert stream.getvalue() == ""


def test_a_second_configuration_replaces_the_first() -> None:
    first, second = configured("info", "logfmt"), configured("info", "logfmt")
    log.info("x")
    assert first.getvalue() == ""
    assert without_time(second.getvalue()) == "info x\n"


def test_a_closed_stream_is_of_no_concern_to_the_caller() -> None:
    stream = configured("info", "logfmt")
    stream.close()
    log.error("x")


def test_a_value_that_cannot_be_written_is_of_no_concern_to_the_caller() -> None:
    class Broken:
        def __str__(self) -> str:
            raise ValueError

    configured("info", "logfmt")
    logging.getLogger().handlers = logging.getLogger().handlers[-1:]  # pytest's own handlers do raise
    log.error("x", value=Broken())


def test_a_line_that_cannot_be_made_is_of_no_concern_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)  # else logging itself says so on stderr
    handler = logs._Aside(io.StringIO())
    handler.emit(logging.LogRecord("library", logging.WARNING, "x.py", 1, "%d things", ("no number",), None))
    handler.close()


def test_an_embedding_program_that_configures_nothing_sees_readable_warnings(caplog: pytest.LogCaptureFixture) -> None:
    log.warning("link failed", attempt=3)
    assert caplog.messages == ['"link failed" attempt=3']


def test_a_reader_that_goes_away_does_not_change_the_exit_code() -> None:
    read, write = os.pipe()
    os.close(read)
    script = "from tunnel import logs; logs.configure('info', 'json'); logs.get_logger('tunnel').error('x')"
    try:
        done = subprocess.run([sys.executable, "-c", script], stderr=write, check=False)
    finally:
        os.close(write)
    assert done.returncode == 0


def test_a_program_without_stderr_still_runs() -> None:
    script = "import os, sys; sys.stderr = None; from tunnel import logs; logs.configure('info', 'auto')"
    script += "; logs.get_logger('tunnel').error('x')"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# -- beside the program


class Stalled(io.StringIO):
    """Takes nothing until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def write(self, text: str) -> int:
        self.goes_on.wait(30)
        return super().write(text)


def test_a_reader_that_stalls_stalls_nobody_and_hears_how_much_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Stalled()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(logs, "_MOST_LINES", 10)
    logs.configure("info", "json")
    for number in range(100):
        log.info("said", number=number)
    stderr.goes_on.set()
    logs.configure("info", "json", io.StringIO())  # the first one has written what it had
    events = read_json(stderr)
    numbers = [event["number"] for event in events if event["event"] == "said"]
    lost = sum(event["lines"] for event in events if event["event"] == "log lines lost")
    assert numbers == sorted(numbers)
    assert lost > 0
    assert len(numbers) + lost == 100


def test_what_was_logged_last_is_written_before_the_program_ends() -> None:
    code = "from tunnel import logs; logs.configure('info', 'json'); logs.get_logger('tunnel.x').info('last words')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stderr)["event"] == "last words"


# -- lines that are held back


class Now:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_a_thing_is_said_at_once_and_then_once_a_minute_with_how_often_it_happened() -> None:
    now = Now()
    seldom = logs.Seldom(now)
    assert [seldom.times("a") for _ in range(4)] == [1, 0, 0, 0]
    now.time += 59.9
    assert seldom.times("a") == 0
    now.time += 0.1
    assert [seldom.times("a"), seldom.times("a")] == [5, 0]


def test_each_thing_is_said_by_itself() -> None:
    seldom = logs.Seldom(Now())
    assert [seldom.times("a"), seldom.times("b"), seldom.times(("a", "b"))] == [1, 1, 1]


def test_things_without_end_are_not_remembered_without_end() -> None:
    seldom = logs.Seldom(Now())
    assert all(seldom.times(number) == 1 for number in range(5000))
    assert len(seldom._when) <= 1000
    assert not seldom._times


def test_what_was_said_lately_is_remembered_before_what_was_said_long_ago() -> None:
    now = Now()
    seldom = logs.Seldom(now)
    for number in range(999):
        seldom.times(number)
    now.time += 60
    seldom.times("new")
    assert seldom.times("newer") == 1
    assert seldom.times("new") == 0
