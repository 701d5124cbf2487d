"""What the paths are, in the words of OpenAPI: a document for tools, true of the program that gives it.

Rules that hold here:

- Every path and method of ``app.py`` is here, and nothing else; every status that one may answer is.
- What fits a schema is taken. Where a pattern can only say a part of what is taken, the text beside it says the rest.

This file must not know how anything is answered.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_YES: Schema = {"type": "boolean"}


def document(role: str, version: str) -> Schema:
    """The document of a ``server`` or an ``agent``."""
    return {
        "openapi": "3.1.0",
        "info": {"title": f"trio-tunnel {role}", "version": version},
        "security": [{}, {"token": []}],
        "paths": _SERVER_PATHS if role == "server" else _AGENT_PATHS,
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


# -- parts


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _object(**properties: Schema) -> Schema:
    """All properties are there, and no others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _query(name: str, schema: Schema, text: str, *, required: bool = False) -> Schema:
    return {"name": name, "in": "query", "required": required, "schema": schema, "description": text}


def _body(properties: dict[str, Schema], *required: str) -> Schema:
    needed = {"required": [*required]} if required else {}
    schema = {"type": "object", "properties": properties, "additionalProperties": False, **needed}
    return {"required": bool(required), "content": {"application/json": {"schema": schema}}}


def _answers(status: int, text: str, content: Schema, *others: int, media_type: str = "application/json") -> Schema:
    said = {"description": text, "content": {media_type: {"schema": content}}}
    return {str(status): said, **{str(other): _ERRORS[other] for other in (*others, 421)}}


def _error(text: str) -> Schema:
    return {"description": text, "content": {"application/json": {"schema": _ref("Error")}}}


_ERRORS = {
    400: _error("bad_request: what is wrong with the request"),
    401: _error("unauthorized: the token is missing or wrong"),
    404: _error("not_found: no agent of that name is linked"),
    409: _error("too_late: it is leaving for good"),
    413: _error("too_large: the body is longer than 64 KiB"),
    421: _error("misdirected: the Host header is neither an IP address nor localhost"),
    503: _error("busy: too many are watching already"),
}

# -- what is in the answers

_DRAIN: dict[str, Schema] = {
    "state": _TEXT,
    "reasons": _list(_TEXT),
    "open": _COUNT,
    "pending": _COUNT,
    "oldest_s": _NUMBER,
    "remaining_s": _or_null(_NUMBER),
    "acked": _COUNT,
    "servers": _COUNT,
}
_WHO: dict[str, Schema] = {"role": {"enum": ["server", "agent"]}, "name": _TEXT, "instance": _TEXT}
_READY: dict[str, Schema] = {
    "ready": _YES,
    "reasons": _list(_TEXT),
    "open": _COUNT,
    "pending": _COUNT,
    "remaining_s": _or_null(_NUMBER),
}
_STATE: Schema = {"enum": ["active", "draining", "final"]}
_CANDIDATE = _object(agent=_TEXT, instance=_TEXT, state=_TEXT, priority=_COUNT, streams=_COUNT, verdict=_TEXT)

_SCHEMAS: dict[str, Schema] = {
    "Error": _object(error=_object(code=_TEXT, text=_TEXT)),
    "Ready": _object(**_READY),
    "Readyz": {
        "type": "object",
        "properties": {**_READY, **_WHO, "state": _TEXT},
        "required": [*_READY],
        "additionalProperties": False,
    },
    "DrainView": _object(**_DRAIN),
    "Drain": _object(**_WHO, **_DRAIN, rev=_TEXT),
    "AgentDrain": _object(instance=_TEXT, state=_STATE, streams=_COUNT, drain=_or_null(_ref("DrainView"))),
    "Agent": _object(
        name=_TEXT,
        instance=_TEXT,
        state=_STATE,
        address=_TEXT,
        since_s=_NUMBER,
        rtt_ms=_or_null(_NUMBER),
        streams=_COUNT,
        sent=_COUNT,
        received=_COUNT,
        identifiers=_list(_TEXT),
        default_route=_YES,
        priority=_COUNT,
        drain=_or_null(_ref("DrainView")),
    ),
    "Stream": _object(
        number=_COUNT, use=_TEXT, target=_TEXT, agent=_TEXT, state=_TEXT, age_s=_NUMBER, sent=_COUNT, received=_COUNT
    ),
    "Explanation": _object(
        target=_TEXT,
        agent=_or_null(_TEXT),
        decision=_or_null(_object(agent=_TEXT, instance=_TEXT, strategy=_TEXT, key=_TEXT, fallback=_YES)),
        considered=_list(_object(strategy=_TEXT, key=_TEXT, verdict=_TEXT, candidates=_list(_CANDIDATE))),
    ),
}

# -- what is asked

_WAIT = _query(
    "wait",
    {"type": "string", "pattern": "^([0-9]|[1-5][0-9]|60)s$"},
    "Answer when there is news, or after so long; up to 60s. Any duration is taken, like 500ms.",
)
_TARGET: Schema = {"type": "string", "pattern": r"^([a-z][a-z0-9]{0,20}\.){0,3}[a-z][a-z0-9]{0,20}:[1-9][0-9]{0,3}$"}
_SINCE = _query("since", _TEXT, "The rev that is known already.")
_LEAVE: dict[str, Schema] = {
    "reason": {"type": ["string", "null"], "maxLength": 256, "pattern": "^[ -~]*$", "description": "For the log."},
    "exit": {"type": ["boolean", "null"], "description": "Exit when drained, or at the deadline."},
}
_DEADLINE: Schema = {
    "type": ["number", "null"],
    "minimum": 0.001,
    "maximum": 4_000_000,
    "description": "In how many seconds the drain should be over.",
}
_SERVER_DRAIN, _AGENT_DRAIN = _body(_LEAVE), _body({**_LEAVE, "deadline_s": _DEADLINE})
_AGENT_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[!-~]*[!-,/-~-][!-~]*$"}
_NAME: Schema = {
    "name": "name",
    "in": "path",
    "required": True,
    "schema": _AGENT_NAME,
    "description": "Printable characters, no spaces, and neither . nor ..; percent-encoded.",
}


def _get(text: str, answers: Schema, *parameters: Schema) -> Schema:
    return {"summary": text, "parameters": [*parameters], "responses": answers}


def _tell(text: str, answers: Schema, body: Schema | None = None) -> Schema:
    return {"summary": text, "responses": answers, **({"requestBody": body} if body else {})}


_ALIVE = {
    **_answers(200, "It is.", _object(alive=_YES)),
    "503": {"description": "Its loop stands still.", "content": {"application/json": {"schema": _object(alive=_YES)}}},
}
_EXCLUDE = _query("exclude", {"enum": ["drain"]}, "Look past this.")
_VERBOSE = _query("verbose", _TEXT, "Say also who answers.")
_READYZ = {
    **_answers(200, "New work may be sent here.", _ref("Readyz"), 400),
    "503": {"description": "It may not.", "content": {"application/json": {"schema": _ref("Readyz")}}},
}
_AGENTS = _object(name=_TEXT, agents=_list(_ref("Agent")))
_SEEN: dict[str, Schema] = {"name": _TEXT, "rev": _TEXT, "agents": _list(_ref("AgentDrain"))}
_TOLD = _object(**_SEEN, told=_COUNT)
_STREAMS = _object(streams=_list(_ref("Stream")), next=_or_null(_COUNT), open=_COUNT)

_PATHS: Schema = {
    "/livez": {"get": _get("Whether the program lives.", _ALIVE)},
    "/healthz": {"get": _get("The same.", _ALIVE)},
    "/readyz": {"get": _get("Whether new work should be sent here.", _READYZ, _EXCLUDE, _VERBOSE)},
    "/metrics": {"get": _get("Metrics for Prometheus.", _answers(200, "All of them.", _TEXT, media_type="text/plain"))},
    "/openapi.json": {"get": _get("This document.", _answers(200, "It.", {"type": "object"}))},
    "/": {"get": _get("The status page.", _answers(200, "For a browser.", _TEXT, media_type="text/html"))},
    "/api/v1/ready": {
        "get": _get("Whether new work should be sent here.", _answers(200, "The answer is inside.", _ref("Ready"))),
        "put": _tell(
            "Say so, without a drain.",
            _answers(200, "It does.", _ref("Ready"), 400, 401, 413),
            _body({"ready": _YES}, "ready"),
        ),
    },
    "/api/v1/streams": {
        "get": _get(
            "What is open, oldest first.",
            _answers(200, "A page of it.", _STREAMS, 400),
            _query("after", {"type": "integer", "minimum": 0, "maximum": 2**53}, "The last number of the page before."),
            _query("limit", {"type": "integer", "minimum": 1, "maximum": 1000}, "How many at most; 100 if not said."),
        )
    },
    "/api/v1/events": {
        "get": _get(
            "What the status page shows, once a second.",
            _answers(200, "Without an end.", _TEXT, 503, media_type="text/event-stream"),
        )
    },
}


def _own_drain(text: str, body: Schema) -> Schema:
    return {
        "get": _get("How far its drain is.", _answers(200, "So far.", _ref("Drain"), 400), _WAIT, _SINCE),
        "put": _tell(text, _answers(202, "It does.", _ref("Drain"), 400, 401, 409, 413), body),
        "delete": _tell("Stay after all.", _answers(200, "It does.", _ref("Drain"), 401, 409)),
    }


_AGENT_PATHS: Schema = {**_PATHS, "/api/v1/drain": _own_drain("Drain on all servers.", _AGENT_DRAIN)}
_SERVER_PATHS: Schema = {
    **_PATHS,
    "/api/v1/drain": _own_drain("Leave, within its own budget: wants exit, since it cannot come back.", _SERVER_DRAIN),
    "/api/v1/agents": {
        "get": _get("Who is linked.", _answers(200, "In the order of linking.", _object(agents=_list(_ref("Agent")))))
    },
    "/api/v1/agents/{name}": {
        "parameters": [_NAME],
        "get": _get("Those of one name.", _answers(200, "One or more.", _AGENTS, 400, 404)),
    },
    "/api/v1/agents/{name}/drain": {
        "parameters": [_NAME],
        "get": _get("How far their drains are.", _answers(200, "Each.", _object(**_SEEN), 400, 404), _WAIT, _SINCE),
        "put": _tell(
            "Have them drain, on all their servers.",
            _answers(202, "They were told.", _TOLD, 400, 401, 404, 409, 413),
            _AGENT_DRAIN,
        ),
        "delete": _tell("Have them stay after all.", _answers(200, "They were told.", _TOLD, 400, 401, 404, 409)),
    },
    "/api/v1/explain": {
        "get": _get(
            "How a target finds its agent now.",
            _answers(200, "The decision, and what was considered.", _ref("Explanation"), 400),
            _query("target", _TARGET, "HOST:PORT or [IPV6]:PORT.", required=True),
            _query("agent", _AGENT_NAME, "Only those of this name."),
        )
    },
}
