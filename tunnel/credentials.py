"""Tokens: who may link as what, and the proof that both sides know the same secret.

A file of tokens is TOML; nobody but its owner may use it:

    [[token]]
    id = "edge"                                    # not secret: it crosses the wire, and is in logs
    role = "agent"                                 # or client, or admin
    secret = "..."                                 # 32 characters or more; `tunnel token new` makes one
    agents = ["edge-*"]                            # role agent: what it may call itself
    identifiers = ["suffix=.db.internal"]          # role agent: what it may claim; "default-route" and "*" as well
    targets = ["*.db.internal:5432"]               # role client: what it may ask for

Rules that hold here:

- What is left out is not allowed: an agent's token without ``identifiers`` claims nothing.
- A secret is in no ``repr``, message or log. What names it is its id, its file and its fingerprint.
- Secrets and proofs are compared in constant time. No end of a link sends a secret; operators show theirs, over HTTP.

This file must not know the wire, or what links and dials are.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import reprlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tunnel.address import Identifier, Target
from tunnel.config import LONGEST_NAME, Claims
from tunnel.configfile import parse_toml, read_text
from tunnel.errors import ConfigError
from tunnel.patterns import Pattern

ROLES = ("agent", "client", "admin")
DEFAULT_ROUTE, ANYTHING = "default-route", "*"
LEAST_SECRET = 32  # characters: what is guessed from a proof that was seen must take for ever
_LONGEST_LIST = 500  # characters: a refusal must fit into what is taken during the handshake
_LISTS = {"agent": ("agents", "identifiers"), "client": ("targets",), "admin": ()}
_LONGEST_ID = 64
_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{_LONGEST_ID}}}")


@dataclass(frozen=True, slots=True)
class Grant:
    """What a token allows, beyond its role.

    Attributes:
        agents: what an agent may call itself; ``*`` in one stands for any characters.
        identifiers: what an agent may claim: that, and whatever lies within.
        default_route: whether it may claim the default route.
        anything: whether it may claim whatever it likes.
        targets: what a client may ask for.
    """

    agents: tuple[str, ...] = ()
    identifiers: tuple[Identifier, ...] = ()
    default_route: bool = False
    anything: bool = False
    targets: tuple[Pattern, ...] = ()

    def refuses_name(self, name: str) -> str:
        """Why an agent may not call itself that; empty if it may."""
        if any(fnmatchcase(name, pattern) for pattern in self.agents):
            return ""
        return f"it may not be used by an agent called {name}; allowed: {_listed(self.agents)}"

    def refuses_claims(self, claims: Claims) -> str:
        """Why an agent may not claim that; empty if it may."""
        if self.anything:
            return ""
        if claims.default_route and not self.default_route:
            return f"it may not claim the default route; allowed: {_listed(self.identifiers)}"
        for claim in claims.identifiers:
            if not any(_covers(allowed, claim) for allowed in self.identifiers):
                return f"it may not claim {claim}; allowed: {_listed(self.identifiers)}"
        return ""

    def allows_target(self, target: Target) -> bool:
        """Whether a client may ask for it."""
        return any(pattern.matches(target.host, target.port) for pattern in self.targets)


@dataclass(frozen=True, slots=True)
class Token:
    """A secret that two sides share, and what it allows.

    Attributes:
        source: the file that it came from.
    """

    id: str
    role: str
    secret: bytes = field(repr=False)
    source: str
    grant: Grant = Grant()

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits that tell whether two sides have the same secret, and nothing else of it."""
        return hashlib.sha256(b"trio-tunnel fingerprint" + self.secret).hexdigest()[:8]

    @property
    def facts(self) -> dict[str, str]:
        """What a log says of it. Of one that is not known there is nothing to compare."""
        known = {"source": self.source, "fingerprint": self.fingerprint} if self.source else {}
        return {"token": self.id, **known}

    def proof(self, side: str, transcript: bytes) -> bytes:
        """What shows that one side of a handshake knows the secret, and has seen the same as the other side."""
        return hmac.digest(self.secret, b"trio-tunnel " + side.encode() + b"\0" + transcript, "sha256")

    def proves(self, side: str, transcript: bytes, proof: bytes) -> bool:
        """Whether a proof is that one."""
        return hmac.compare_digest(proof, self.proof(side, transcript))

    @property
    def authorization(self) -> str:
        """What an HTTP header says to show it, to an operator's interface."""
        return f"Bearer {self.secret.decode()}"

    def is_shown(self, text: str) -> bool:
        """Whether a text is the secret."""
        return hmac.compare_digest(text.encode(), self.secret)


def stranger(token_id: str) -> Token:
    """A token that nobody can prove: who guesses ids is asked for a proof like everybody else."""
    return Token(token_id[:_LONGEST_ID], "", secrets.token_bytes(LEAST_SECRET), "")


Tokens = Mapping[str, Token]
"""By id."""


def read_tokens(path: str | Path, *, own: str = "") -> Tokens:
    """All tokens of a file; ``own`` is the role of the one that a program is to show, of which there must be one.

    Raises:
        ConfigError: it cannot be read, others may use it, it is not as the head of this file says, or it is empty;
            or there is none of the own role, or more than one.
    """
    document = parse_toml(path, read_text(path, private=True))
    entries = document.pop("token", [])
    are_tables = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if document or not entries or not are_tables:
        raise ConfigError(f"{path}: taken: one or more [[token]], and nothing else")
    tokens = [_read_token(str(path), number, entry) for number, entry in enumerate(entries, 1)]
    found = {token.id: token for token in tokens}
    if len(found) < len(tokens):
        raise ConfigError(f"{path}: two tokens have the same id")
    if own and len(of_role(own, found)) != 1:
        raise ConfigError(f"{path}: holds {len(of_role(own, found))} tokens of the role {own}; taken: exactly one")
    return found


def of_role(role: str, tokens: Tokens) -> tuple[Token, ...]:
    """Those of one role."""
    return tuple(token for token in tokens.values() if token.role == role)


def _read_token(path: str, number: int, entry: dict[str, Any]) -> Token:
    token_id, role, secret = (entry.get(key) for key in ("id", "role", "secret"))
    where = f"{path}: token {number}"
    if not isinstance(token_id, str) or not _ID.fullmatch(token_id):
        what = "has no id" if token_id is None else f"has the id {reprlib.repr(token_id)}"
        raise ConfigError(f"{where} {what}; taken: 1 to {_LONGEST_ID} letters, digits, '.', '_' or '-'")
    where = f"{path}: token {token_id}"
    if role not in ROLES:
        raise ConfigError(f"{where} has no role; taken: {', '.join(ROLES)}")
    if not isinstance(secret, str) or not _is_secret(secret):
        what = "has no secret" if secret is None else "has a secret that is not taken"
        raise ConfigError(f"{where} {what}; taken: {LEAST_SECRET} or more printable ASCII characters, no spaces")
    lists = _LISTS[str(role)]
    for key, value in entry.items():
        if key not in ("id", "role", "secret", *lists):
            raise ConfigError(f"{where}: {key!r} means nothing for the role {role}; taken: {_listed(lists)}")
        if key in lists and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise ConfigError(f"{where}: {key} is no list of texts")
    try:
        grant = _read_grant({key: tuple(entry.get(key, ())) for key in lists})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return Token(token_id, str(role), secret.encode(), path, grant)


def _is_secret(text: str) -> bool:
    return LEAST_SECRET <= len(text) <= 1024 and text.isascii() and text.isprintable() and " " not in text


def _read_grant(lists: Mapping[str, tuple[str, ...]]) -> Grant:
    claims = lists.get("identifiers", ())
    named = [text for text in claims if text not in (DEFAULT_ROUTE, ANYTHING)]
    return Grant(
        agents=tuple(map(_name_pattern, lists.get("agents", ()))),
        identifiers=tuple(map(Identifier.parse, named)),
        default_route=DEFAULT_ROUTE in claims,
        anything=ANYTHING in claims,
        targets=tuple(map(Pattern.parse, lists.get("targets", ()))),
    )


def _name_pattern(text: str) -> str:
    if not 1 <= len(text) <= LONGEST_NAME or not text.isprintable() or set(text) & set(" ?[]"):
        raise ConfigError(f"{text!r:.80} is no name of agents; taken: a name, in which * stands for any characters")
    return text


def _covers(allowed: Identifier, claim: Identifier) -> bool:
    """Whether whatever a claim matches is matched by what is allowed."""
    if allowed == claim:
        return True
    match allowed.kind, claim.kind:
        case "suffix", "host" | "suffix":
            return claim.value.endswith(allowed.value)
        case "cidr", "ipv4" | "ipv6" | "cidr":
            inner = claim.network if claim.kind == "cidr" else Identifier("cidr", claim.value).network
            outer = allowed.network
            return inner.version == outer.version and inner.subnet_of(outer)  # type: ignore[arg-type]
    return False


def _listed(items: Iterable[object]) -> str:
    text = ", ".join(map(str, items)) or "nothing"
    return text if len(text) <= _LONGEST_LIST else f"{text[:_LONGEST_LIST]}..."


def new_token(token_id: str, role: str, lists: Mapping[str, Iterable[str]]) -> str:
    """A token with a new secret, as a file has it.

    Raises:
        ConfigError: a token of that file would not be taken.
    """
    entry: dict[str, Any] = {"id": token_id, "role": role, "secret": secrets.token_urlsafe(LEAST_SECRET)}
    entry |= {key: list(value) for key, value in lists.items() if value}
    _read_token("this command", 1, entry)
    return "[[token]]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in entry.items())


def _toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
