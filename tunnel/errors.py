"""Every error this package raises on purpose, and what each one means to the outside.

Rules that hold here:

- A code is a short word that crosses the wire unchanged, and is the same word in logs, metrics and docs.
- A dial error carries what every front-end needs to answer with: HTTP status, SOCKS5 reply, exit code.
  Those are class attributes, so each mapping is written exactly once, here.
- ``RemoteProtocolError`` means the peer broke the rules, ``LocalProtocolError`` that our own caller did.

This file must not know anything else of the package, and imports nothing from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

CUT = "drain_deadline"
"""The code of streams that were ended because the time that leaving gives them was over."""


class TunnelError(Exception):
    """The root of everything this package raises on purpose."""


class ConfigError(TunnelError, ValueError):
    """A flag, variable, file or argument holds something unusable; the text names the input."""


class AddressError(ConfigError):
    """A text is not an address of the wanted kind; the text says what it is and what is taken."""


class ProtocolError(TunnelError):
    """A rule of the wire protocol was broken."""


class LocalProtocolError(ProtocolError):
    """Our own side asked for something the protocol does not allow now; a bug in the caller."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that is not valid, or not now; the link ends with this reason.

    ``bound``: the name of the bound that was exceeded, if that is what it is.
    """

    def __init__(self, text: str, bound: str = "") -> None:
        super().__init__(text)
        self.bound = bound


class HandshakeRefused(TunnelError):
    """The peer refused our HELLO; ``code`` and ``text`` are what it said."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{text} ({code})")
        self.code = code
        self.text = text


class AuthFailed(HandshakeRefused):
    """One side did not prove who it is, or may not do what it wants to; ``facts`` are for this side's own log."""

    code = "auth"

    def __init__(self, text: str, facts: Mapping[str, str]) -> None:
        super().__init__(self.code, text)
        self.facts = facts


class LinkClosed(TunnelError):
    """A link ended; the text says why."""


class LinkStopped(LinkClosed):
    """A link ended because this side wanted it to."""


class StreamReset(TunnelError):
    """A stream ended other than by EOF in both directions; ``code`` and ``text`` say why."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{text} ({code})")
        self.code = code
        self.text = text


class DialError(TunnelError):
    """A dial ended without a stream.

    Attributes:
        code: the word on the wire.
        http_status: what the CONNECT front-end answers with.
        socks_reply: the SOCKS5 reply byte of the same meaning (RFC 1928, section 6).
        exit_code: what a command line ends with (sysexits: 69 cannot reach, 75 try again later).
        text: what happened, for people.
        agent: the name of the agent that was asked, where one was.
        state: the state of that backend then; ``none`` where none was asked.
    """

    code: ClassVar[str]
    http_status: ClassVar[int] = 502
    socks_reply: ClassVar[int] = 1
    exit_code: ClassVar[int] = 69

    def __init__(self, text: str = "") -> None:
        super().__init__(text or type(self).code)
        self.text = text or type(self).code
        self.agent: str | None = None
        self.state = "none"


class Refused(DialError):
    """The target's host answered and refused: no one listens on that port."""

    code = "refused"
    socks_reply = 5


class Unreachable(DialError):
    """No route, or no answer from the network, to any address of the target."""

    code = "unreachable"
    socks_reply = 4


class DnsError(DialError):
    """The target's name could not be resolved where the agent is."""

    code = "dns"
    socks_reply = 4


class DialTimeout(DialError):
    """The dial's deadline passed before there was an answer."""

    code = "timeout"
    http_status = 504
    socks_reply = 6


class Denied(DialError):
    """Policy forbids this target."""

    code = "denied"
    http_status = 403
    socks_reply = 2


class NoBackend(DialError):
    """No agent is linked that could serve the target."""

    code = "no_backend"
    http_status = 503
    exit_code = 75


class NoServer(DialError):
    """No server could be linked to; the text says of each why. Only a client's own side says it."""

    code = "no_server"
    http_status = 503
    exit_code = 75


class RefusedDraining(DialError):
    """The agent is leaving and takes no dial any more."""

    code = "refused_draining"
    http_status = 503
    exit_code = 75


class TooMany(DialError):
    """Whoever was asked has as many streams, or dials without an answer, as it takes."""

    code = "too_many"
    http_status = 503
    exit_code = 75


class LinkLost(DialError):
    """The link to the agent was lost before the dial was answered."""

    code = "link_lost"
    http_status = 503
    exit_code = 75


class DialProtocolError(DialError):
    """The answer to the dial made no sense, or this side could not make sense of the request."""

    code = "protocol"


DIAL_ERRORS: dict[str, type[DialError]] = {
    kind.code: kind
    for kind in (
        Refused,
        Unreachable,
        DnsError,
        DialTimeout,
        Denied,
        NoBackend,
        NoServer,
        RefusedDraining,
        TooMany,
        LinkLost,
        DialProtocolError,
    )
}


def dial_error(code: str, text: str) -> DialError:
    """The typed error for an answer from the wire; an unknown code keeps its word in the text."""
    kind = DIAL_ERRORS.get(code)
    if kind is None:
        return DialProtocolError(f"{text} ({code})")
    return kind(text)


def first_of(error: BaseException) -> BaseException:
    """The first error of a group, however deep; any other error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
