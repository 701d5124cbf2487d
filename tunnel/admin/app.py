"""The paths: what an operator, a probe, a scraper and a browser can ask and tell.

Rules that hold here:

- GET changes nothing. Whatever changes something is said in the log: who asked, and why.
- Nothing is remembered between requests: ``rev`` follows from what it stands for.
- Long polls and event streams end when the listener is about to close.

This file must not know how anything is listened on, or who is operated beyond ``operate.py``.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from trio_util import wait_any

from tunnel import logs
from tunnel.address import Target
from tunnel.admin.gate import gate
from tunnel.admin.health import Health, readiness_of, who_is
from tunnel.admin.heart import Heart
from tunnel.admin.openapi import document
from tunnel.admin.site import (
    Handler,
    Problem,
    Site,
    answer,
    as_json,
    asked_by,
    bad_request,
    duration,
    fields,
    flag,
    object_of,
    plain,
    seconds,
    step,
    text,
    whole_number,
)
from tunnel.config import parse_agent_name
from tunnel.errors import ConfigError
from tunnel.operate import AgentView, DrainView, Operated, OperatedServer, TooLate, is_server

log = logs.get_logger(__name__)

LONGEST_WAIT = 60.0
MOST_STREAMS = 1000
MOST_WATCHERS = 20
_GLANCE = 0.2  # seconds between two looks of a long poll, for what is not told as news
_TICK = 1.0  # seconds between two events
_DRAIN = {"reason": text, "deadline_s": seconds, "exit": flag}
_EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


def health_site(operated: Operated, heart: Heart) -> Site:
    """The health paths alone."""
    return Site(Health(operated, heart).paths(), lambda request: None)


def admin_site(operated: Operated, heart: Heart, closing: trio.Event, *, guarded: bool, local: bool) -> Site:
    """All paths; for ``guarded`` and ``local`` see ``gate.py``."""
    admin = _Server(operated, closing) if is_server(operated) else _Agent(operated, closing)
    check = gate(lambda: operated.admins, guarded=guarded, local=local)
    return Site({**Health(operated, heart).paths(), **admin.paths()}, check)


# -- what both programs have


class _Program:
    def __init__(self, operated: Operated, closing: trio.Event) -> None:
        self._operated = operated
        self._closing = closing
        self._watchers = 0
        self._event = (-_TICK, "")  # the last one, and when it was

    def paths(self) -> dict[str, Mapping[str, Handler]]:
        return {
            "/": {"GET": _page},
            "/openapi.json": {"GET": self._openapi},
            "/metrics": {"GET": self._metrics},
            "/api/v1/drain": {"GET": self._drain, "PUT": self._put_drain, "DELETE": self._delete_drain},
            "/api/v1/ready": {"GET": self._ready, "PUT": self._put_ready},
            "/api/v1/streams": {"GET": self._streams},
            "/api/v1/events": {"GET": self._events},
        }

    async def _openapi(self, request: Request) -> Response:
        return answer(document(self._operated.role, self._operated.version))

    async def _metrics(self, request: Request) -> Response:
        metrics = await _aside(_load_metrics)
        scrape = metrics.Scrape(metrics.Collector(self._operated))
        return plain(await _aside(scrape.text), metrics.CONTENT_TYPE)

    # -- its own drain

    def _drain_object(self) -> dict[str, Any]:
        view = self._operated.drain_view()
        return {**who_is(self._operated), **object_of(view), "rev": _rev(_news(view))}

    async def _drain(self, request: Request) -> Response:
        found = await self._until_news(request, self._drain_object)
        return answer(found, headers={"etag": f'"{found["rev"]}"'})

    async def _put_drain(self, request: Request) -> Response:
        said = await fields(request, _DRAIN)
        if is_server(self._operated) and "deadline_s" in said:
            raise bad_request("deadline_s: a server has its own, --shutdown-budget; taken: reason, exit")
        reason, leave = said.get("reason", ""), said.get("exit", False)
        _log_change(request, "drain", reason=reason, exit=leave)
        with _in_time():
            self._operated.drain_self(reason, said.get("deadline_s"), leave=leave)
        return answer(self._drain_object(), 202)

    async def _delete_drain(self, request: Request) -> Response:
        _log_change(request, "undrain")
        with _in_time():
            self._operated.undrain_self()
        return answer(self._drain_object())

    # -- the switch

    async def _ready(self, request: Request) -> Response:
        return answer(readiness_of(self._operated))

    async def _put_ready(self, request: Request) -> Response:
        said = await fields(request, {"ready": flag})
        if "ready" not in said:
            raise bad_request("ready is missing; taken: true or false")
        _log_change(request, "ready", ready=said["ready"])
        self._operated.switched_off = not said["ready"]
        return answer(readiness_of(self._operated))

    # -- what is open

    async def _streams(self, request: Request) -> Response:
        after = whole_number(request, "after", 0, 2**53, 0)
        limit = whole_number(request, "limit", 1, MOST_STREAMS, 100)
        found = self._operated.streams(after, limit + 1)
        page, more = found[:limit], found[limit:]
        following = page[-1].number if more else None
        return answer({"streams": page, "next": following, "open": self._operated.drain_view().open})

    # -- waiting for news

    async def _until_news(self, request: Request, look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What there is when it has not the ``rev`` any more that the request knows, or when its time is over."""
        end = trio.current_time() + duration(request, "wait", LONGEST_WAIT)
        since = request.query_params.get("since")
        while True:
            found, left = look(), end - trio.current_time()
            if found["rev"] != since or left <= 0 or self._closing.is_set():
                return found
            with trio.move_on_after(min(left, _GLANCE)):
                await wait_any(self._operated.news, self._closing.wait)

    async def _events(self, request: Request) -> ASGIApp:
        if request.method == "HEAD":
            return plain(b"", "text/event-stream")
        if self._watchers >= MOST_WATCHERS:
            raise Problem(503, "busy", f"{MOST_WATCHERS} are watching already")
        return self._stream_events

    async def _stream_events(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        self._watchers += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
            while not self._closing.is_set():
                event = f"data: {self._news_now()}\n\n"
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
                with trio.move_on_after(_TICK):
                    await self._closing.wait()
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._watchers -= 1

    def _news_now(self) -> str:
        """One event for all who watch."""
        now = trio.current_time()
        if now - self._event[0] >= _TICK / 2:
            self._event = now, as_json(self._overview())
        return self._event[1]

    def _overview(self) -> dict[str, Any]:
        counts = self._operated.counts()
        carried: Any = counts["bytes_total"]
        return {
            "drain": self._drain_object(),
            "ready": readiness_of(self._operated),
            "streams_open": counts["open_streams"],
            "sent": carried["sent",],
            "received": carried["received",],
            "at": time.time(),
        }


class _Agent(_Program):
    def paths(self) -> dict[str, Mapping[str, Handler]]:
        here = ("/agents", "/agents/{name}", "/agents/{name}/drain", "/explain")
        return super().paths() | {f"/api/v1{path}": {"GET": _only_on_servers, **_TOLD} for path in here}


async def _only_on_servers(request: Request) -> Response:
    raise Problem(404, "not_found", "this is an agent; servers know agents, and explain: theirs is another address")


_TOLD: dict[str, Handler] = {"PUT": _only_on_servers, "DELETE": _only_on_servers}


class _Server(_Program):
    _operated: OperatedServer

    def paths(self) -> dict[str, Mapping[str, Handler]]:
        drain = {"GET": self._agent_drain, "PUT": self._put_agent_drain, "DELETE": self._delete_agent_drain}
        return super().paths() | {
            "/api/v1/agents": {"GET": self._agents},
            "/api/v1/agents/{name}": {"GET": self._agent},
            "/api/v1/agents/{name}/drain": drain,
            "/api/v1/explain": {"GET": self._explain},
        }

    def _overview(self) -> dict[str, Any]:
        return {**super()._overview(), "agents": list(self._operated.agents())}

    async def _agents(self, request: Request) -> Response:
        return answer({"agents": list(self._operated.agents())})

    async def _agent(self, request: Request) -> Response:
        name = _agent_name(request)
        return answer({"name": name, "agents": self._known(name)})

    def _known(self, name: str) -> list[AgentView]:
        """Those of a name."""
        found = self._operated.agent(name)
        if not found:
            raise Problem(404, "not_found", f"no agent {name} is linked")
        return found

    # -- their drains

    def _drain_of(self, name: str) -> dict[str, Any]:
        known = self._known(name)
        found = [
            {"instance": agent.instance, "state": agent.state, "streams": agent.streams, "drain": agent.drain}
            for agent in known
        ]
        news = [[agent.instance, agent.state, agent.streams, agent.drain and _news(agent.drain)] for agent in known]
        return {"name": name, "rev": _rev(news), "agents": found}

    async def _agent_drain(self, request: Request) -> Response:
        name = _agent_name(request)
        found = await self._until_news(request, lambda: self._drain_of(name))
        return answer(found, headers={"etag": f'"{found["rev"]}"'})

    async def _put_agent_drain(self, request: Request) -> Response:
        name, said = _agent_name(request), await fields(request, _DRAIN)
        self._known(name)
        reason, leave = said.get("reason", ""), said.get("exit", False)
        _log_change(request, "drain", agent=name, reason=reason, exit=leave)
        told = self._operated.drain_agent(name, reason, said.get("deadline_s", 0.0), leave=leave)
        return self._told(name, told, 202)

    async def _delete_agent_drain(self, request: Request) -> Response:
        name = _agent_name(request)
        self._known(name)
        _log_change(request, "undrain", agent=name)
        return self._told(name, self._operated.undrain_agent(name), 200)

    def _told(self, name: str, told: int, status: int) -> Response:
        if not told:
            raise Problem(409, "too_late", f"agent {name} has finished draining, and is leaving")
        return answer({**self._drain_of(name), "told": told}, status)

    # -- why

    async def _explain(self, request: Request) -> Response:
        if "target" not in request.query_params:
            raise bad_request("target is missing; taken: HOST:PORT")
        try:
            target = Target.parse(request.query_params["target"])
            agent = request.query_params.get("agent")
            named = None if agent is None else parse_agent_name(agent)
        except ConfigError as error:
            raise bad_request(str(error)) from None
        return answer(self._operated.explain(target, named))


# -- parts


def _agent_name(request: Request) -> str:
    try:
        return parse_agent_name(step(request, "name"))
    except ConfigError as error:
        raise bad_request(str(error)) from None


def _log_change(request: Request, change: str, **facts: object) -> None:
    log.info("asked", change=change, by=asked_by(request), **facts)


@contextmanager
def _in_time() -> Iterator[None]:
    try:
        yield
    except TooLate as error:
        raise Problem(409, "too_late", str(error)) from None


def _news(drain: DrainView) -> list[object]:
    """What of it is news when it changes; the rest changes with time."""
    return [drain.state, drain.reasons, drain.open, drain.pending, drain.acked, drain.servers]


def _rev(news: object) -> str:
    return blake2b(json.dumps(news).encode(), digest_size=8).hexdigest()


async def _aside(work: Callable[[], Any]) -> Any:
    """Do in a thread what would take long enough to be in the way of what runs."""
    return await trio.to_thread.run_sync(work)


def _load_metrics() -> Any:
    """Who is never scraped does not load what makes metrics."""
    from tunnel import metrics

    return metrics


@cache
def _page_text() -> str:
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")


async def _page(request: Request) -> Response:
    nonce = secrets.token_urlsafe(16)
    policy = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "style-src": f"'nonce-{nonce}'",
        "script-src": f"'nonce-{nonce}'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "content-security-policy": "; ".join(f"{of} {taken}" for of, taken in policy.items()),
        "referrer-policy": "no-referrer",
    }
    return plain(_page_text().replace("{nonce}", nonce), "text/html", headers)
