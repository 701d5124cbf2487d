"""Logs: one line per event on stderr, as logfmt for people or as JSON for machines.

Rules that hold here:

- Modules log through ``get_logger(__name__)``: a word or two for the event, the facts as keywords. They go into the
  standard library's logging, so a program that embeds this package decides what becomes of them.
- No value can break out of its line: whatever is not printable is escaped in both formats, whoever sent it.
- Logging never raises into its caller, not even when nobody reads stderr any more; nor does it wait for who reads.
- A disabled call costs a level check and nothing else.

This file must not know who logs what.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import queue
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

TRACE = 5  # below logging.DEBUG
logging.addLevelName(TRACE, "TRACE")

_MOST_LINES = 10_000  # that wait for who reads them
_SELDOM = 60.0  # seconds between two lines about the same thing, where such are held back
_MOST_THINGS = 1000  # that are remembered for that
_LAST_WORDS = 0.5  # seconds that they get at the end, twice


class Logger:
    """What modules log with.

    Every method takes ``exc_info=``, an exception or True for the one that is being handled.
    """

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    @property
    def traces(self) -> bool:
        """Whether ``trace`` says anything."""
        return self._logger.isEnabledFor(TRACE)

    def trace(self, event: str, **facts: object) -> None:
        """Say what only someone wants to read who looks at single packets."""
        self._log(TRACE, event, facts)

    def debug(self, event: str, **facts: object) -> None:
        """Say what only someone who looks for a fault wants to read."""
        self._log(logging.DEBUG, event, facts)

    def info(self, event: str, **facts: object) -> None:
        """Say what an operator may want to read."""
        self._log(logging.INFO, event, facts)

    def warning(self, event: str, **facts: object) -> None:
        """Say what an operator should read some day."""
        self._log(logging.WARNING, event, facts)

    def error(self, event: str, **facts: object) -> None:
        """Say what an operator should read now."""
        self._log(logging.ERROR, event, facts)

    def exception(self, event: str, **facts: object) -> None:
        """``error``, with the traceback of the exception that is being handled."""
        self._log(logging.ERROR, event, {"exc_info": True, **facts})

    def _log(self, level: int, event: str, facts: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            exc_info = facts.pop("exc_info", None)
            self._logger.log(level, _Event(event=event, **facts), exc_info=exc_info)


def get_logger(name: str) -> Logger:
    """The logger of a module, by its ``__name__``."""
    return Logger(logging.getLogger(name))


def configure(level: str, fmt: str, stream: TextIO | None = None) -> None:
    """Send this process's log to ``stream``, or stderr; a second call replaces the first.

    ``level`` is trace, debug, info, warning or error, and holds for this package; of all others only warnings and
    errors are shown. ``fmt`` is logfmt, json, or auto: logfmt on a terminal and JSON elsewhere.
    """
    stream = stream or sys.stderr
    if fmt == "auto":
        fmt = "logfmt" if stream and stream.isatty() else "json"
    handler = _Aside(stream) if stream is sys.stderr else _Handler(stream)
    handler.setFormatter(_Json() if fmt == "json" else _Logfmt())
    root, threshold = logging.getLogger(), logging.getLevelNamesMapping()[level.upper()]
    for other in [other for other in root.handlers if isinstance(other, _Handler)]:
        root.removeHandler(other)
        other.close()
    root.addHandler(handler)
    root.setLevel(max(threshold, logging.WARNING))
    logging.getLogger("tunnel").setLevel(threshold)


class _Event(dict[str, object]):
    """The message of a log record. Where nobody configured anything, its text is what is shown."""

    def __str__(self) -> str:
        return _logfmt(self)


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Let it go: a reader that went away must not end the program, and there is nowhere left to complain."""


class _Aside(_Handler):
    """Writes in a thread of its own. A reader that stalls costs lines, which are counted, and never the traffic."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_LINES)
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._lost += 1
        except Exception:  # whatever making a text of it raises: it is not the caller's to deal with
            self.handleError(record)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            self._put(line)
            lost, self._lost = self._lost, 0
            if lost:
                event = _Event(event="log lines lost", lines=lost)
                self._put(self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, event, None, None)))

    def _put(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            self.stream.write(f"{line}\n")
            self.stream.flush()

    def close(self) -> None:
        """Let the thread write what is left, if that goes at all."""
        atexit.unregister(self.close)
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_LAST_WORDS)
        self._thread.join(_LAST_WORDS)
        super().close()


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"timestamp": _timestamp(record), "level": record.levelname.lower(), **_facts(record)}
        if error := _exception(record):
            line["exception"] = "".join(traceback.format_exception(error))
        return json.dumps(line, default=str)  # pure ASCII, so every control character comes out escaped


class _Logfmt(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts, error, trace = _facts(record), _exception(record), ""
        if error and record.levelno < logging.ERROR:
            facts["exception"] = traceback.format_exception_only(error)[-1].strip()
        elif error:
            trace = "".join(f"\n    {line}" for line in _trace(error))  # set back, so that none can pose as an event
        return f"{_timestamp(record)} {record.levelname.lower()} {_logfmt(facts)}{trace}"


def _facts(record: logging.LogRecord) -> dict[str, object]:
    return dict(record.msg) if isinstance(record.msg, _Event) else {"event": record.getMessage()}


def _exception(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if record.exc_info else None


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _trace(error: BaseException) -> Iterable[str]:
    return map(_escape, "".join(traceback.format_exception(error)).splitlines())


def _logfmt(facts: Mapping[str, object]) -> str:
    return " ".join(_word(value) if key == "event" else f"{key}={_word(value)}" for key, value in facts.items())


def _word(value: object) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    if text and text.isprintable() and not any(char in text for char in ' "='):
        return text
    return f'"{_escape(text, also=chr(34) + chr(92))}"'


def _escape(text: str, also: str = "") -> str:
    """JSON's escapes for whatever is not printable: line breaks, terminal sequences, characters that turn the text."""
    return "".join(char if char.isprintable() and char not in also else json.dumps(char)[1:-1] for char in text)


class Seldom:
    """Lets a line about each thing through once a minute, and counts those that it does not.

    Args:
        now: seconds, from whenever on.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._when: dict[Hashable, float] = {}
        self._times: Counter[Hashable] = Counter()

    def times(self, about: Hashable) -> int:
        """How often it has happened since the last line about that, if it is time for one; 0 if not."""
        now = self._now()
        if about not in self._when and len(self._when) >= _MOST_THINGS:
            self._forget(now)
        self._times[about] += 1
        if now - self._when.get(about, -math.inf) < _SELDOM:
            return 0
        self._when[about] = now
        return self._times.pop(about)

    def _forget(self, now: float) -> None:
        """Those that were said long ago; all of them if none were: rather a line too many than too much memory."""
        self._when = {about: when for about, when in self._when.items() if now - when < _SELDOM}
        if len(self._when) >= _MOST_THINGS:
            self._when.clear()
        self._times = Counter({about: times for about, times in self._times.items() if about in self._when})
