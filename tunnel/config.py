"""What can be configured: frozen dataclasses with their defaults and units, and the readers for texts and files.

Rules that hold here:

- Sizes are bytes, times are seconds; the field says so only where it is something else.
- A config object that exists is well-formed. Whether it is *safe* is a question of its own: ``ServerConfig.check()``.
- Every failure is a ``ConfigError`` that names where the input was, the input, and what is taken.

This file must not know the command line: the names that a file may use are handed in by whoever declares them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunnel.address import Forward, ListenAddress, Target
from tunnel.errors import ConfigError

LONGEST_NAME = 128

_LINKS = ListenAddress("127.0.0.1", 7400)
_CONNECT = ListenAddress("127.0.0.1", 7401)

_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TAKEN_TYPES: dict[type, str] = {str: "a text", bool: "true or false", list: "a list of texts"}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what a peer can make this process hold, in bytes.

    Attributes:
        body_before_auth: longest frame body taken before the handshake is done.
        body: longest frame body taken after it.
        first_window: what may be sent on a new stream before credit comes back.
        high_water: queued DATA per link above which the sockets of that link are not read.
        head: longest CONNECT request head.
    """

    body_before_auth: int = 4 * 1024
    body: int = 1024 * 1024
    first_window: int = 512 * 1024
    high_water: int = 1024 * 1024
    head: int = 16 * 1024


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Bounds on waiting, in seconds.

    Attributes:
        handshake: from the TCP connection to a usable link.
        keepalive: a PING goes out after so much silence; after three times that, the link is dead.
        head: from the accepted connection to the end of its CONNECT request head.
        shutdown: what open streams get after a signal.
        backoff_first: bound of the random delay before the first reconnect; doubles with each failure.
        backoff_max: where the doubling ends.
        stable: a link that lived this long resets the back-off.
    """

    handshake: float = 10.0
    keepalive: float = 5.0
    head: float = 10.0
    shutdown: float = 25.0
    backoff_first: float = 0.2
    backoff_max: float = 15.0
    stable: float = 1.0


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What a server needs to know.

    Attributes:
        listen: where links from agents and clients arrive.
        connect: where the CONNECT front-end listens; None for none.
        forwards: local ports, each leading to one target.
        dial_timeout: seconds from asking for a stream to its answer.
        insecure: serve on addresses that others can reach although nobody has to prove who they are.
    """

    listen: ListenAddress = _LINKS
    connect: ListenAddress | None = _CONNECT
    forwards: tuple[Forward, ...] = ()
    dial_timeout: float = 10.0
    insecure: bool = False
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def exposed(self) -> list[str]:
        """The options, as one would type them, whose addresses are not loopback."""
        doors = [("--listen", self.listen, str(self.listen))]
        if self.connect:
            doors.append(("--connect", self.connect, str(self.connect)))
        doors += [("--forward", forward.listen, str(forward)) for forward in self.forwards]
        return [f"{option} {text}" for option, address, text in doors if not address.is_loopback]

    def check(self) -> None:
        """Refuse to serve strangers unless told to.

        Raises:
            ConfigError: an address is not loopback, and ``insecure`` is not set.
        """
        exposed = self.exposed()
        if exposed and not self.insecure:
            raise ConfigError(
                f"{', '.join(exposed)}: not a loopback address, and no credentials are configured, so anyone who "
                "reaches it could use the tunnel; listen on loopback, or say --insecure to serve them all the same"
            )


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """What an agent needs to know.

    Attributes:
        server: where the agent dials out to.
        name: how the agent is called, see ``parse_agent_name``.
        dial_timeout: seconds that reaching a target may take, resolving its name included.

    Raises:
        ConfigError: the name is not taken.
    """

    server: Target
    name: str
    dial_timeout: float = 10.0
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        parse_agent_name(self.name)


def parse_agent_name(text: str) -> str:
    """The same text, if it is 1 to 128 printable characters without white space.

    Raises:
        ConfigError: it is not.
    """
    if not 1 <= len(text) <= LONGEST_NAME or not text.isprintable() or " " in text:
        raise ConfigError(
            f"{_shown(text)} is not an agent name; taken: 1 to {LONGEST_NAME} printable characters, no spaces"
        )
    return text


def parse_duration(text: str) -> float:
    """Seconds from ``500ms``, ``30s``, ``1.5m`` or ``1h``. Zero is taken; a number without a unit is not.

    Raises:
        ConfigError: the text is not of that form.
    """
    found = _DURATION.fullmatch(text)
    if not found:
        raise ConfigError(f"{_shown(text)} is not a duration; taken: a number and its unit, like 500ms, 30s, 5m or 1h")
    return float(found[1]) * _SECONDS[found[2]]


def load_file(path: str | Path, known: Mapping[str, Mapping[str, type]]) -> dict[str, dict[str, Any]]:
    """Read a TOML file of sections and keys; ``known`` says which there are, and the type of each key's value.

    A type is ``str``, ``bool``, or ``list`` for a list of texts. Texts are not looked into.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or holds an unknown section, an unknown key or a value of
            another type.
    """
    document = _read_toml(path)
    for section, table in document.items():
        if section not in known:
            raise _unknown(f"{path}: unknown section", section, known)
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} is a value; taken: a section [{section}]")
        for key, value in table.items():
            if key not in known[section]:
                raise _unknown(f"{path}: [{section}] has an unknown key", key, known[section])
            if not _fits(value, known[section][key]):
                taken = _TAKEN_TYPES[known[section][key]]
                raise ConfigError(f"{path}: {section}.{key} is {_shown(value)}; taken: {taken}")
    return document


def _read_toml(path: str | Path) -> dict[str, Any]:
    import tomllib  # only who has a file pays for its reader

    try:
        text = Path(path).read_text(encoding="utf-8")
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        at_line = re.search(r"at line (\d+)", str(error))
        line = int(at_line[1]) if at_line else text.count("\n") + 1  # otherwise "at end of document"
        raise ConfigError(f"{path}:{line}: not TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error


def _fits(value: object, wanted: type) -> bool:
    if wanted is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return isinstance(value, wanted)


def _unknown(what: str, word: str, known: Mapping[str, object]) -> ConfigError:
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"taken: {', '.join(known)}"
    return ConfigError(f"{what} {_shown(word)}; {hint}")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."
