"""Who may ask: a browser must not have been led here, and whoever changes something shows the token, if one is set.

Rules that hold here:

- On a loopback port only addresses and ``localhost`` are names of this place: a web page that has the browser of
  somebody on this machine come here does so by a name of its own.
- Looking needs no token. Changing needs one where there are any, and always where others than this machine can come.

This file must not know what is asked for.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence

from starlette.requests import Request

from tunnel.admin.site import Gate, Problem
from tunnel.credentials import Token

_HOST = re.compile(r"\[(?P<v6>[^\]]*)\](:\d+)?|(?P<name>[^:]*)(:\d+)?")


def gate(admins: Callable[[], Sequence[Token]], *, guarded: bool, local: bool) -> Gate:
    """What every request has to pass.

    Args:
        admins: gives the tokens that are taken now.
        guarded: only a browser on this machine can come here, wherever it was led from.
        local: only this machine can come here.
    """

    def check(request: Request) -> None:
        if guarded and not is_here(request.headers.get("host", "localhost")):
            raise Problem(421, "misdirected", "this is no name of this place; taken: an IP address, or localhost")
        if request.method in ("GET", "HEAD", "OPTIONS"):
            return
        tokens = admins()
        if tokens or not local:
            scheme, _, shown = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not any(token.is_shown(shown.strip()) for token in tokens):
                text = "the token is missing or wrong; taken: Authorization: Bearer TOKEN"
                raise Problem(401, "unauthorized", text, {"www-authenticate": "Bearer"})

    return check


def is_here(host: str) -> bool:
    """Whether a Host header is no name that somebody else could lead here."""
    found = _HOST.fullmatch(host)
    name = (found["v6"] or found["name"] or "") if found else ""
    try:
        return name.lower() == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
