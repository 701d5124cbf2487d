"""Asks and tells a running program through its admin API: JSON over HTTP/1.1, by TCP or a unix socket; blocking.

Rules that hold here:

- One call, one connection; nothing is asked twice by itself.
- Whatever goes wrong is a ``RemoteError``: ``NoAdmin`` where nothing came back that this API would say,
  ``AdminRefused`` where the program answered with an error of its own.
- An answer that lacks what the caller looks for in it is ``NoAdmin`` as well: somebody else listens there.
- The token is sent, and shown nowhere.

This file must not know what the answers mean, or what people typed.
"""

from __future__ import annotations

import errno
import http.client
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self
from urllib.parse import urlencode

from tunnel.address import Target
from tunnel.credentials import Token
from tunnel.errors import AddressError, ConfigError, TunnelError

SECONDS = 10.0  # that an answer may take, on top of what it was asked to wait
_TAKEN = "http://HOST:PORT, HOST:PORT or unix:/PATH"
_NOBODY = (errno.ECONNREFUSED, errno.ENOENT)


class RemoteError(TunnelError):
    """The program did not do, or did not say, what it was asked for."""


class NoAdmin(RemoteError):
    """No answer, or none that this API would give.

    Attributes:
        nobody: nobody listens there.
    """

    def __init__(self, where: object, cause: object, *, nobody: bool = False) -> None:
        super().__init__(f"{where}: {cause}")
        self.nobody = nobody


class AdminRefused(RemoteError):
    """The program answered with an error: its code and its text."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


@dataclass(frozen=True, slots=True)
class AdminUrl:
    """Where an admin API is: ``path`` of a unix socket, or else ``target``."""

    target: Target | None = None
    path: str = ""

    def __str__(self) -> str:
        return f"http://{self.target}" if self.target else f"unix:{self.path}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``http://HOST:PORT``, ``HOST:PORT`` or ``unix:/PATH``.

        Raises:
            ConfigError: the text is none of these.
        """
        if text.startswith("unix:"):
            if len(text) == len("unix:"):
                raise ConfigError(f"{text!r} has no path; taken: {_TAKEN}")
            return cls(path=text.removeprefix("unix:"))
        try:
            return cls(Target.parse(text.removeprefix("http://").removesuffix("/")))
        except AddressError as error:
            raise ConfigError(f"{error}; as an admin address: {_TAKEN}") from None


class Answer(dict[str, Any]):
    """A JSON object that the program sent. What it should have, and has not, is ``NoAdmin``."""

    def __init__(self, where: AdminUrl, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self._where = where

    def __missing__(self, key: str) -> Any:
        raise NoAdmin(self._where, f"an answer without {key!r} is none of this API")


@dataclass(frozen=True, slots=True)
class Remote:
    """A program that can be asked and told."""

    address: AdminUrl
    token: Token | None = None
    seconds: float = SECONDS

    def get(self, path: str, wait: float = 0.0, **query: str | None) -> Answer:
        """Ask. With ``wait``, it answers when there is news, or after so many seconds.

        Raises:
            RemoteError: there is no answer, or it is an error.
        """
        if wait:
            query["wait"] = f"{max(1, round(wait * 1000))}ms"
        words = urlencode({key: value for key, value in query.items() if value is not None})
        return self._call("GET", f"{path}?{words}" if words else path, None, wait)

    def put(self, path: str, body: Mapping[str, object]) -> Answer:
        """Tell.

        Raises:
            RemoteError: there is no answer, or it is an error.
        """
        return self._call("PUT", path, json.dumps(body))

    def delete(self, path: str) -> Answer:
        """Take back.

        Raises:
            RemoteError: there is no answer, or it is an error.
        """
        return self._call("DELETE", path)

    def _call(self, method: str, path: str, body: str | None = None, wait: float = 0.0) -> Answer:
        connection = _connection(self.address, self.seconds + wait)
        try:
            connection.request(method, path, body, self._headers(body))
            reply = connection.getresponse()
            status, content = reply.status, reply.read()
        except OSError as error:
            raise NoAdmin(self.address, _cause(error), nobody=error.errno in _NOBODY) from error
        except http.client.HTTPException as error:
            raise NoAdmin(self.address, f"a broken answer ({type(error).__name__})") from error
        finally:
            connection.close()
        return self._understood(status, content)

    def _headers(self, body: str | None) -> dict[str, str]:
        headers = {"Accept": "application/json", "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.token:
            headers["Authorization"] = self.token.authorization
        return headers

    def _understood(self, status: int, content: bytes) -> Answer:
        try:
            answer = json.loads(content, object_hook=partial(Answer, self.address))
        except ValueError:
            answer = None
        if not isinstance(answer, Answer):
            raise NoAdmin(self.address, f"status {status} without a JSON object is no answer of this API")
        if status >= 400:
            raise _refusal(answer) or NoAdmin(self.address, f"status {status} without a code is no answer of this API")
        return answer


def _refusal(answer: Answer) -> AdminRefused | None:
    match answer:
        case {"error": {"code": str(code), "text": str(text)}}:
            return AdminRefused(code, text)
    return None


def _cause(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return error.strerror or str(error) or type(error).__name__


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(address: AdminUrl, seconds: float) -> http.client.HTTPConnection:
    if address.target is None:
        return _UnixConnection(address.path, seconds)
    return http.client.HTTPConnection(address.target.host, address.target.port, timeout=seconds)
