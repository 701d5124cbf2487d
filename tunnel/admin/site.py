"""A site: resources by path, and what every request to one goes through, whatever it asks for.

Rules that hold here:

- Every answer that is an error is ``{"error": {"code": ..., "text": ...}}``. A fault of ours is logged, and not shown.
- HEAD is answered where GET is, OPTIONS everywhere; any other method that a resource has not gets 405 and ``Allow``.
- A body is an object of known keys, at most 64 KiB, and comes within ten seconds; what is not taken is named.
- Paths are matched as they were sent, so that a name in one may hold any character.

This file must not know any path, or what is operated.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from tunnel import logs
from tunnel.address import ListenAddress
from tunnel.config import parse_duration
from tunnel.errors import ConfigError

log = logs.get_logger(__name__)

Handler = Callable[[Request], Awaitable[ASGIApp]]
Gate = Callable[[Request], None]
"""Raises ``Problem`` for a request that is not to be looked at."""
Take = Callable[[object], Any]
"""Gives what a value in a body means; raises ValueError with what is taken instead."""

MOST_BODY = 64 * 1024
_MOST_DROPPED = 1024 * 1024  # of a body that is too long: who is cut off while sending may not see the answer
_BODY_SECONDS = 10.0
MOST_SECONDS = 4_000_000.0  # in milliseconds still a u32, which is what the wire has
LEAST_SECONDS = 0.001
LONGEST_TEXT = 256
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class Problem(Exception):
    """What is answered instead."""

    def __init__(self, status: int, code: str, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.answer = answer({"error": {"code": code, "text": text}}, status, headers)


def bad_request(text: str) -> Problem:
    """The request itself is wrong."""
    return Problem(400, "bad_request", text)


def answer(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON. Dataclasses become objects."""
    body = as_json(content).encode()
    return Response(body, status, {**_HEADERS, **(headers or {})}, media_type="application/json")


def as_json(content: object) -> str:
    """One line. Names may hold anything, so it is ASCII."""
    return json.dumps(content, default=object_of, separators=(",", ":"))


def object_of(value: Any) -> dict[str, object]:
    """A view's fields by their names."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def plain(content: bytes | str, media_type: str, headers: Mapping[str, str] | None = None) -> Response:
    """Anything else."""
    return Response(content, 200, {**_HEADERS, **(headers or {})}, media_type=media_type)


class Resource:
    """What one path answers: an ASGI app."""

    def __init__(self, gate: Gate, handlers: Mapping[str, Handler]) -> None:
        self._gate = gate
        self._handlers = handlers
        heads = ["HEAD"] if "GET" in handlers else []
        self._allow = {"allow": ", ".join([*handlers, *heads, "OPTIONS"])}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        response: ASGIApp
        try:
            self._gate(request)
            response = await self._answer(request)
        except Problem as problem:
            response = problem.answer
        except Exception:
            log.exception("fault in the admin interface", path=request.url.path)
            response = answer({"error": {"code": "internal", "text": "internal fault; the log has it"}}, 500)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> ASGIApp:
        method = "GET" if request.method == "HEAD" else request.method
        if method in self._handlers:
            return await self._handlers[method](request)
        if method == "OPTIONS":
            return Response(None, 204, {**_HEADERS, **self._allow})
        text = f"{request.method} has no meaning here; taken: {self._allow['allow']}"
        raise Problem(405, "method_not_allowed", text, self._allow)


class Site:
    """All resources of a listener: an ASGI app.

    Args:
        paths: what each answers, by method; ``{name}`` in a path is one step of it.
    """

    def __init__(self, paths: Mapping[str, Mapping[str, Handler]], gate: Gate) -> None:
        routes = [Route(path, Resource(gate, handlers)) for path, handlers in paths.items()]
        self._router = Router(routes, redirect_slashes=False, default=_nothing_here(gate))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        elif scope["type"] == "http":
            await self._router({**scope, "path": scope["raw_path"].decode("ascii")}, receive, send)


def _nothing_here(gate: Gate) -> ASGIApp:
    def check(request: Request) -> None:
        gate(request)
        raise Problem(404, "not_found", "there is no such path")

    return Resource(check, {})


# -- who asks for what


def asked_by(request: Request) -> str:
    """Where it comes from."""
    if request.client is None:
        return "unix"
    return str(ListenAddress(request.client.host.partition("%")[0], request.client.port))


def step(request: Request, name: str) -> str:
    """The part of the path that stands for this.

    Raises:
        Problem: it is not UTF-8.
    """
    try:
        return unquote(request.path_params[name], errors="strict")
    except UnicodeDecodeError:
        raise bad_request(f"the {name} in the path is not UTF-8") from None


def whole_number(request: Request, name: str, least: int, most: int, default: int) -> int:
    """A number in the query.

    Raises:
        Problem: it is none, or out of range.
    """
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most):
        raise bad_request(f"{name}: {text!r:.80} is not taken; taken: a whole number from {least} to {most}")
    return int(text)


def duration(request: Request, name: str, most: float) -> float:
    """Seconds in the query; none are 0.

    Raises:
        Problem: it is no duration, or too long.
    """
    try:
        seconds = parse_duration(request.query_params.get(name, "0s"))
    except ConfigError as error:
        raise bad_request(f"{name}: {error}") from None
    if seconds > most:
        raise bad_request(f"{name}: {seconds:g} s is too long; taken: up to {most:g}s")
    return seconds


async def fields(request: Request, takes: Mapping[str, Take]) -> dict[str, Any]:
    """What a body says, by key; null is the same as nothing.

    Raises:
        Problem: it is too long, too late or no such object, or a key or its value is not taken.
    """
    said = _parse(await _body(request) or b"{}")
    found = {}
    for key, value in said.items():
        if key not in takes:
            raise bad_request(f"{key!r:.80} is an unknown key; taken: {', '.join(takes)}")
        if value is not None:
            found[key] = _taken(key, value, takes[key])
    return found


def _taken(key: str, value: object, take: Take) -> Any:
    try:
        return take(value)
    except ValueError as error:
        shown = type(value).__name__ if isinstance(value, list | dict) else f"{value!r:.80}"
        raise bad_request(f"{key}: {shown} is not taken; taken: {error}") from None


async def _body(request: Request) -> bytes:
    body, size = bytearray(), 0
    with trio.move_on_after(_BODY_SECONDS):
        async for piece in request.stream():
            size += len(piece)
            if size <= MOST_BODY:
                body += piece
            elif size > _MOST_DROPPED:
                break
        if size > MOST_BODY:
            raise Problem(413, "too_large", f"the body is longer than {MOST_BODY} bytes")
        return bytes(body)
    raise bad_request(f"the body did not come within {_BODY_SECONDS:g} s")


def _parse(body: bytes) -> dict[str, object]:
    try:
        said = json.loads(body.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise bad_request("the body is not JSON") from None
    if not isinstance(said, dict):
        raise bad_request("the body is not a JSON object")
    return said


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def text(value: object) -> str:
    """A short text."""
    if isinstance(value, str) and len(value) <= LONGEST_TEXT and value.isprintable():
        return value
    raise ValueError(f"a text of up to {LONGEST_TEXT} printable characters")


def flag(value: object) -> bool:
    """Yes or no."""
    if isinstance(value, bool):
        return value
    raise ValueError("true or false")


def seconds(value: object) -> float:
    """How long something may take."""
    if isinstance(value, int | float) and not isinstance(value, bool) and LEAST_SECONDS <= value <= MOST_SECONDS:
        return float(value)
    raise ValueError(f"a number of seconds from {LEAST_SECONDS:g} to {MOST_SECONDS:.0f}")
