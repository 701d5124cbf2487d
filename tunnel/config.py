"""What can be configured: frozen dataclasses with their defaults and units, and the readers for their texts.

Rules that hold here:

- Sizes are bytes, times are seconds; the field says so only where it is something else.
- A config object that exists is well-formed. Whether it is *safe* is a question of its own: ``check_exposed``.
- Every failure is a ``ConfigError`` that names where the input was, the input, and what is taken.

This file must not know the command line, or files that configure a program.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from tunnel.address import Identifier, ListenAddress, Target
from tunnel.certificates import ClientTls, ServerTls
from tunnel.errors import ConfigError
from tunnel.limits import Limits, Timeouts
from tunnel.patterns import Rules

LONGEST_NAME = 128
_NO_URL = (".", "..")  # names that a path cannot hold: it would lead elsewhere
STRATEGIES = ("destHost", "defaultRoute", "default")
LOWEST_PRIORITY = 99
_CLAIMS_BYTES = 2048  # of identifiers, together: a HELLO must fit into what is taken before authentication

_LINKS = ListenAddress("127.0.0.1", 7400)
_CONNECT = ListenAddress("127.0.0.1", 7401)
_LONGEST_PATH = 100  # bytes in the path of a unix socket; some systems take 103

_CURES = {"--listen": "--token-file", "--connect": "--connect-auth", "--admin": "--token-file"}  # a forward has none

_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Forward:
    """A local port that leads to a target, through the agents of one name if ``agent`` says so."""

    listen: ListenAddress
    target: Target
    agent: str | None = None

    def __str__(self) -> str:
        return f"{self.listen}={self.target}" + (f"@{self.agent}" if self.agent else "")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``LISTEN=TARGET`` or ``LISTEN=TARGET@AGENT``.

        Raises:
            ConfigError: there is no ``=``, or one of the parts is not taken.
        """
        listen, equals, rest = text.partition("=")
        if not equals:
            raise ConfigError(
                f"{_shown(text)} is not a forward; taken: LISTEN=TARGET[@AGENT], like 5432=db.internal:5432"
            )
        return cls(ListenAddress.parse(listen), *parse_destination(rest))


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """Where to listen in the file system, for the owner of the process alone.

    Raises:
        ConfigError: the path is not absolute, or too long for a socket.
    """

    path: str

    is_loopback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.path.startswith("/") or "\0" in self.path or len(os.fsencode(self.path)) > _LONGEST_PATH:
            raise ConfigError(
                f"{_shown(str(self))} is not an address; taken: unix:/PATH, at most {_LONGEST_PATH} bytes long"
            )

    def __str__(self) -> str:
        return f"unix:{self.path}"


AdminAddress = ListenAddress | UnixAddress


@dataclass(frozen=True, slots=True)
class AdminConfig:
    """Where an operator talks to a program, and who may tell it something.

    Attributes:
        listen: where all of it is; None for nowhere.
        required: do not start where that is taken; otherwise the program says so, and goes on without it.
        health: where the health paths are, and nothing else; None for nowhere.
    """

    listen: AdminAddress | None = None
    required: bool = True
    health: AdminAddress | None = None

    def exposed(self) -> list[str]:
        """The option, as one would type it, if others can reach it."""
        if self.listen is None or self.listen.is_loopback:
            return []
        return [f"--admin {self.listen}"]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What a server needs to know.

    Attributes:
        listen: where links from agents and clients arrive.
        connect: where the CONNECT front-end listens; None for none.
        forwards: local ports, each leading to one target.
        dial_timeout: seconds from asking for a stream to its answer.
        insecure: serve on addresses that others can reach although nobody has to prove who they are.
        strategies: how backends are matched to a target, in the order tried; some of ``STRATEGIES``.
        server_count: how many servers there are in all, for agents to link to.
        lame_duck: seconds for which a server that is leaving goes on as before, so that others stop sending.
        drain_fallback: whether draining agents serve what no other agent can.
        admin: where its operator talks to it, if it is a program of its own.
        token_file: tokens of which whoever links must prove one; see ``credentials.py``. None asks for none.
        tls: the certificate that links are accepted with; None for plain TCP.
        connect_auth: users of the CONNECT front-end; see ``users.py``. None asks for none.
    """

    listen: ListenAddress = _LINKS
    connect: ListenAddress | None = _CONNECT
    forwards: tuple[Forward, ...] = ()
    dial_timeout: float = 10.0
    insecure: bool = False
    strategies: tuple[str, ...] = STRATEGIES
    server_count: int = 1
    lame_duck: float = 0.0
    drain_fallback: bool = True
    admin: AdminConfig = AdminConfig(ListenAddress("127.0.0.1", 7402), required=False)
    token_file: str | None = None
    tls: ServerTls | None = None
    connect_auth: str | None = None
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        for address in (self.listen, self.connect):
            if address is not None:
                _check_kind(address, ListenAddress)
        if self.dial_timeout <= 0:
            raise ConfigError("--dial-timeout 0s leaves no time for any dial; taken: more than that, like 10s")
        if self.lame_duck > self.timeouts.shutdown:
            raise ConfigError(
                f"--lame-duck {self.lame_duck:g}s does not fit into --shutdown-budget {self.timeouts.shutdown:g}s"
            )

    def exposed(self) -> list[str]:
        """The options, as one would type them, whose addresses others can reach without credentials."""
        doors = [("--forward", forward.listen, str(forward)) for forward in self.forwards]
        if self.connect and self.connect_auth is None:
            doors.insert(0, ("--connect", self.connect, str(self.connect)))
        if self.token_file is None:
            doors.insert(0, ("--listen", self.listen, str(self.listen)))
        exposed = [f"{option} {text}" for option, address, text in doors if not address.is_loopback]
        return exposed + ([] if self.token_file else self.admin.exposed())


def check_exposed(exposed: Sequence[str], insecure: bool) -> None:
    """Refuse to serve strangers unless told to; ``exposed`` are the addresses that are not loopback.

    Raises:
        ConfigError: there are some, and ``insecure`` is not set.
    """
    if exposed and not insecure:
        cures = {option: cure for option, cure in _CURES.items() if any(each.startswith(option) for each in exposed)}
        set_ = "".join(f", set {cure} for {option}" for option, cure in cures.items())
        raise ConfigError(
            f"{', '.join(exposed)}: not a loopback address, and nobody has to prove there who they are, so anyone who "
            f"reaches it could use the tunnel; listen on loopback{set_}, or say --insecure to serve them all the same"
        )


@dataclass(frozen=True, slots=True)
class Claims:
    """What an agent says it can serve.

    Attributes:
        identifiers: hosts and kinds of hosts; none are twice.
        default_route: also whatever no identifier of anyone matches.
        priority: 0 to 99; it serves when no agent of a lower number that matches is active.

    Raises:
        ConfigError: the priority is out of range, or the identifiers are too long together.
    """

    identifiers: tuple[Identifier, ...] = ()
    default_route: bool = False
    priority: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "identifiers", tuple(dict.fromkeys(self.identifiers)))
        if not 0 <= self.priority <= LOWEST_PRIORITY:
            raise ConfigError(f"{self.priority} is not a priority; taken: 0 (first) to {LOWEST_PRIORITY}")
        if sum(len(str(identifier)) + 2 for identifier in self.identifiers) > _CLAIMS_BYTES:
            raise ConfigError(
                f"{len(self.identifiers)} identifiers are longer than {_CLAIMS_BYTES} bytes together; "
                "a suffix or a cidr says more in less"
            )


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """What an agent needs to know.

    Attributes:
        servers: where the agent dials out to; each may stand for several servers.
        name: how the agent is called, see ``parse_agent_name``.
        claims: what it says it can serve.
        exit_on_failure: leave, rather than try again, when no server takes it at first or one refuses it for good.
        admin: where its operator talks to it, if it is a program of its own.
        token_file: holds the token that it shows to servers, and those that operators show to it.
        tls: what it takes servers for, over TLS; None for plain TCP.
        rules: where streams may lead; servers are not subject to them.

    Raises:
        ConfigError: the name is not taken, there is no server, or strangers could tell the agent what to do.
    """

    servers: tuple[Target, ...]
    name: str
    claims: Claims = field(default_factory=Claims)
    exit_on_failure: bool = False
    admin: AdminConfig = AdminConfig(ListenAddress("127.0.0.1", 7403), required=False)
    token_file: str | None = None
    tls: ClientTls | None = None
    rules: Rules = field(default_factory=Rules)
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        parse_agent_name(self.name)
        object.__setattr__(self, "servers", _some_servers(self.servers))
        exposed = self.admin.exposed()
        if exposed and self.token_file is None:
            raise ConfigError(
                f"{exposed[0]}: not a loopback address, so anyone who reaches it could drain the agent; "
                "listen on loopback, or set --token-file"
            )


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """What a client needs to know.

    Attributes:
        servers: where it links to, in the order tried.
        name: what servers' logs call it.
        token_file: holds the token that it shows.
        tls: what it takes servers for, over TLS; None for plain TCP.

    Raises:
        ConfigError: the name is not taken, or there is no server.
    """

    servers: tuple[Target, ...]
    name: str = field(default_factory=lambda: os.uname().nodename)
    token_file: str | None = None
    tls: ClientTls | None = None
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        parse_agent_name(self.name)
        object.__setattr__(self, "servers", _some_servers(self.servers))


def _some_servers(servers: tuple[Target, ...]) -> tuple[Target, ...]:
    """Without those that are there twice."""
    if not servers:
        raise ConfigError("no server is given; taken: one or more HOST:PORT")
    for server in servers:
        _check_kind(server, Target)
    return tuple(dict.fromkeys(servers))


def parse_strategies(text: str) -> tuple[str, ...]:
    """The strategies of a comma list, in its order.

    Raises:
        ConfigError: one is unknown or there twice, or there is none.
    """
    words = tuple(text.split(","))
    if len(set(words)) != len(words) or not set(words) <= set(STRATEGIES):
        raise ConfigError(
            f"{_shown(text)} is not a list of strategies; taken: {','.join(STRATEGIES)}, each at most once"
        )
    return words


def parse_agent_name(text: str) -> str:
    """The same text, if it is 1 to 128 printable characters without white space, and neither ``.`` nor ``..``.

    Raises:
        ConfigError: it is not.
    """
    if not 1 <= len(text) <= LONGEST_NAME or not text.isprintable() or " " in text or text in _NO_URL:
        raise ConfigError(
            f"{_shown(text)} is not an agent name; taken: 1 to {LONGEST_NAME} printable characters, no spaces, "
            "and neither . nor .."
        )
    return text


def parse_destination(text: str) -> tuple[Target, str | None]:
    """A target, and the name of the agent to reach it through if there is one, from ``TARGET[@AGENT]``.

    Raises:
        ConfigError: one of the parts is not taken.
    """
    target, at, agent = text.partition("@")
    return Target.parse(target), parse_agent_name(agent) if at else None


def parse_admin_address(text: str) -> AdminAddress | None:
    """An address from ``HOST:PORT``, ``PORT`` or ``unix:/PATH``; ``off`` is none.

    Raises:
        ConfigError: the text is none of these.
    """
    if text == "off":
        return None
    return UnixAddress(text.removeprefix("unix:")) if text.startswith("unix:") else ListenAddress.parse(text)


def parse_duration(text: str) -> float:
    """Seconds from ``500ms``, ``30s``, ``1.5m`` or ``1h``. Zero is taken; a number without a unit is not.

    Raises:
        ConfigError: the text is not of that form.
    """
    found = _DURATION.fullmatch(text)
    if not found:
        raise ConfigError(f"{_shown(text)} is not a duration; taken: a number and its unit, like 500ms, 30s, 5m or 1h")
    return float(found[1]) * _SECONDS[found[2]]


def _check_kind(value: object, kind: type[Target | ListenAddress]) -> None:
    """Whoever embeds a program may have given a text."""
    if not isinstance(value, kind):
        raise ConfigError(f"{_shown(value)} is not a {kind.__name__}; taken: {kind.__name__}.parse({_shown(value)})")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."
