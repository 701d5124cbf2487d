"""HTTP CONNECT without I/O: the request head in, a target and early bytes out, and every reply as bytes.

Rules that hold here:

- h11 reads and writes the heads; what it refuses, we refuse, with the status it hints at.
- Only CONNECT is taken, with an authority (``host:port``) and without a body.
- Bytes behind the head belong to the stream: they are kept, in order.

This file must not know sockets, time, or how a dial is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import h11

from tunnel.address import Target
from tunnel.config import parse_agent_name
from tunnel.errors import ConfigError, TunnelError

_LONGEST_TEXT = 1000  # characters of a reply; an agent may have said more
ESTABLISHED = b"HTTP/1.1 200 Connection Established\r\n\r\n"


class BadRequest(TunnelError):
    """The head is not a CONNECT that can be served; ``status`` is what to answer with."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class ConnectRequest:
    """A CONNECT that can be served.

    Attributes:
        target: where to.
        early: bytes that came behind the head.
        agent: through the agents of this name only; from the header ``Tunnel-Agent``.
    """

    target: Target
    early: bytes
    agent: str | None = None


def _agent(request: h11.Request) -> str | None:
    names = [value.decode("utf-8") for name, value in request.headers if name == b"tunnel-agent"]
    if len(names) > 1:
        raise BadRequest(400, "Tunnel-Agent is there more than once")
    return parse_agent_name(names[0]) if names else None


class Head:
    """One request head.

    Args:
        limit: longest head taken, in bytes.
        takes_user: whether the value of ``Proxy-Authorization`` is taken; None if nobody needs one.
    """

    def __init__(self, limit: int, takes_user: Callable[[str], bool] | None = None) -> None:
        self._takes_user = takes_user
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limit)
        self._limit = limit
        self._fed = 0
        self._no_body = False  # of a reply: the request was HEAD

    @property
    def begun(self) -> bool:
        """Whether any of it has come."""
        return self._fed > 0

    def feed(self, data: bytes) -> ConnectRequest | None:
        """Take bytes, ``b""`` at the end; the request once its head is whole.

        Raises:
            BadRequest: it is not one that can be served.
        """
        if not data:
            raise BadRequest(400, "the connection ended before a whole request")
        self._fed += len(data)
        try:
            self._http.receive_data(data)
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise BadRequest(error.error_status_hint, str(error)) from None
        return self._check(event) if isinstance(event, h11.Request) else None

    def _check(self, request: h11.Request) -> ConnectRequest:
        self._no_body = request.method == b"HEAD"
        if self._fed - len(self._http.trailing_data[0]) > self._limit:  # h11 bounds only what is not whole yet
            raise BadRequest(431, f"the head is longer than {self._limit} bytes")
        self._check_user(request)
        if request.method != b"CONNECT":
            raise BadRequest(405, f"{request.method.decode('ascii')} is not served here, only CONNECT")
        names = {name for name, value in request.headers if (name, value) != (b"content-length", b"0")}
        if names & {b"content-length", b"transfer-encoding"}:
            raise BadRequest(400, "a CONNECT has no body")
        try:
            target = Target.parse(request.target.decode("utf-8"))
            agent = _agent(request)
        except (ConfigError, UnicodeDecodeError) as error:
            raise BadRequest(400, str(error)) from None
        return ConnectRequest(target, bytes(self._http.trailing_data[0]), agent)

    def _check_user(self, request: h11.Request) -> None:
        """Before anything else about the request is looked at, or answered."""
        if self._takes_user is None:
            return
        shown = [value.decode("latin-1") for name, value in request.headers if name == b"proxy-authorization"]
        if len(shown) != 1 or not self._takes_user(shown[0]):
            raise BadRequest(407, "a name and its password are wanted, in Proxy-Authorization")

    def reply(self, status: int, text: str) -> bytes:
        """A whole reply that ends the connection, with one line of text."""
        body = f"{''.join(char if char.isprintable() else '?' for char in text[:_LONGEST_TEXT])}\n".encode()
        headers = [
            ("Content-Type", "text/plain; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        if status == 405:
            headers.append(("Allow", "CONNECT"))
        if status == 407:
            headers.append(("Proxy-Authenticate", 'Basic realm="tunnel", charset="UTF-8"'))
        reason = HTTPStatus(status).phrase.encode()
        events: list[h11.Event] = [h11.Response(status_code=status, reason=reason, headers=headers)]
        if not self._no_body:
            events.append(h11.Data(data=body))
        return b"".join(self._http.send(event) or b"" for event in (*events, h11.EndOfMessage()))
