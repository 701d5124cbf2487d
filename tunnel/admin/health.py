"""What probes ask: whether a program lives, and whether new work should be sent to it.

Rules that hold here:

- A program that drains lives. It is not ready from the moment it was told, since this looks when it is asked.

This file must not know what else can be asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tunnel.admin.heart import Heart
from tunnel.admin.site import Handler, answer, bad_request
from tunnel.operate import Operated


class Health:
    """The paths of health."""

    def __init__(self, operated: Operated, heart: Heart) -> None:
        self._operated = operated
        self._heart = heart

    def paths(self) -> dict[str, Mapping[str, Handler]]:
        """What each answers, by method."""
        return {
            "/livez": {"GET": self._alive},
            "/healthz": {"GET": self._alive},
            "/readyz": {"GET": self._ready},
        }

    async def _alive(self, request: Request) -> Response:
        return answer({"alive": self._heart.alive}, 200 if self._heart.alive else 503)

    async def _ready(self, request: Request) -> Response:
        exclude = request.query_params.get("exclude")
        if exclude not in (None, "drain"):
            raise bad_request(f"exclude: {exclude!r:.80} is not taken; taken: drain")
        found = readiness_of(self._operated, "draining" if exclude else "")
        if "verbose" in request.query_params:
            found |= who_is(self._operated) | {"state": self._operated.drain_view().state}
        return answer(found, 200 if found["ready"] else 503)


def readiness_of(operated: Operated, exclude: str = "") -> dict[str, Any]:
    """Whether new work should be sent here, as it is answered; ``exclude`` is a reason to look past."""
    readiness, drain = operated.readiness, operated.drain_view()
    reasons = [reason for reason in readiness.reasons if reason != exclude]
    return {
        "ready": readiness.ready or not reasons,
        "reasons": reasons,
        "open": drain.open,
        "pending": drain.pending,
        "remaining_s": drain.remaining_s,
    }


def who_is(operated: Operated) -> dict[str, Any]:
    """Who answers."""
    return {"role": operated.role, "name": operated.name, "instance": operated.instance}
