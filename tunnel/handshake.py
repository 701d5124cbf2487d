"""The first packets of a link, without I/O: who are you, do we speak the same protocol, and can you prove it.

    dialling side:   START --first()--> HELLO SENT --WELCOME--> DONE           unless it has a token, then:
                                        HELLO SENT --CHALLENGE--> PROVED --AUTH--> KNOWN --WELCOME--> DONE
                     any --CLOSE(0)--> refused
    accepting side:  START --HELLO--> DONE (answers WELCOME)                   unless it has tokens, then:
                     START --HELLO--> CHALLENGED (answers CHALLENGE) --AUTH--> DONE (answers AUTH, WELCOME)
                     any --what cannot be taken--> refused (answers CLOSE of stream 0)

Rules that hold here:

- Nothing of the peer is believed before it is checked for shape, and nothing else is legal before DONE.
- A version mismatch names both versions, on both sides.
- Both sides prove that they know the secret of the token that HELLO names: an HMAC over every byte that was said so
  far, with a nonce of each side in it, and over what the channel below is bound to. So no proof can be used again, for
  another HELLO, over another connection, or by the other side. Who has a token takes no server that proves nothing.
- Who names a token that does not exist is asked for a proof all the same, and hears the same refusal.

This file must not know sockets, streams or time.
"""

from __future__ import annotations

import hashlib
import reprlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from tunnel.credentials import Token, Tokens, stranger
from tunnel.errors import AuthFailed, HandshakeRefused, RemoteProtocolError
from tunnel.identity import Identity, read_identity
from tunnel.packets import VERSION, Auth, Challenge, Close, Hello, Packet, Welcome

ROLES = ("agent", "client")
_NONCE = 32  # bytes
_NOT_PROVEN = "the token is not known here, or its secret is another one"
_SERVER_NOT_PROVEN = "the server does not prove that it knows the token"


def _check_version(version: int) -> None:
    if version != VERSION:
        raise RemoteProtocolError(f"the peer speaks protocol version {version}, this side {VERSION}")


def welcome(me: Identity, servers: int) -> Welcome:
    """A WELCOME; sent again on a link, it says that the number of servers has changed."""
    return Welcome(VERSION, {**me.to_info(), "servers": servers})


class _Transcript:
    """All that both sides have said, as bytes on the wire; ``binding`` is what the channel below is bound to."""

    def __init__(self, binding: bytes) -> None:
        self._hash = hashlib.sha256(len(binding).to_bytes(4, "big") + binding)

    def add(self, body: bytes) -> None:
        """One frame's body."""
        self._hash.update(len(body).to_bytes(4, "big") + body)

    def say(self, packet: Packet) -> Packet:
        """The same packet, which is going to be sent."""
        self._hash.update(packet.encode())
        return packet

    @property
    def digest(self) -> bytes:
        return self._hash.digest()


class DiallingHandshake:
    """The side that opened the connection: an agent or a client.

    Args:
        token: what it proves who it is with; None if it has none.
        binding: see ``tls.py``; empty over plain TCP.

    Attributes:
        peer: the server, once DONE.
        servers: how many servers there are in all, as the server says.
    """

    def __init__(self, me: Identity, token: Token | None = None, binding: bytes = b"") -> None:
        self.me = me
        self.peer: Identity | None = None
        self.servers = 1
        self._token = token
        self._said = _Transcript(binding)
        self._due: type[Packet] | None = Challenge if token else Welcome

    @property
    def opens(self) -> bool:
        """Whether this side opens the streams of the link."""
        return self.me.role == "client"

    def first(self) -> Packet:
        """What to send before anything is received."""
        info = self.me.to_info()
        if self._token:
            info["auth"] = {"token": self._token.id, "nonce": secrets.token_bytes(_NONCE)}
        return self._said.say(Hello(VERSION, info))

    def receive(self, packet: Packet, body: bytes = b"") -> list[Packet]:
        """Take a packet, and the body that it came as if there are tokens; what to answer.

        Raises:
            HandshakeRefused: the server said no; code and text are the server's.
            AuthFailed: the server wants a proof that this side cannot give, or gives none itself.
            RemoteProtocolError: the packet is not due, or not one that can be believed.
        """
        if isinstance(packet, Close) and packet.stream == 0:
            raise self._refused(packet.code, packet.text)
        due, self._due = self._due, None  # each is taken once, and a refusal is for good
        if due is None or not isinstance(packet, due):
            raise self._unexpected(packet, due)
        match packet, self._token:
            case Challenge(), Token() as token:
                return self._prove(packet, body, token)
            case Auth(), Token() as token:
                self._believe(packet, token)
            case Welcome(), _:
                self._done(packet)
        return []

    def _refused(self, code: str, text: str) -> HandshakeRefused:
        if code != AuthFailed.code:
            return HandshakeRefused(code, text)
        return AuthFailed(f"the server says: {text}", self._token.facts if self._token else {})

    def _unexpected(self, packet: Packet, due: type[Packet] | None) -> Exception:
        if isinstance(packet, Challenge):
            return AuthFailed("the server wants a token, and there is none", {})
        if isinstance(packet, Welcome) and self._token:
            return AuthFailed(_SERVER_NOT_PROVEN, self._token.facts)
        return _not_due(packet, due)

    def _prove(self, packet: Challenge, body: bytes, token: Token) -> list[Packet]:
        _read_bytes(packet.info, "nonce")
        self._said.add(body)
        self._due = Auth
        return [self._said.say(Auth(token.proof("dialling", self._said.digest)))]

    def _believe(self, packet: Auth, token: Token) -> None:
        if not token.proves("accepting", self._said.digest, packet.proof):
            raise AuthFailed(_SERVER_NOT_PROVEN, token.facts)
        self._due = Welcome

    def _done(self, packet: Welcome) -> None:
        _check_version(packet.version)
        self.recount(packet)
        self.peer = read_identity(packet.info, "server")

    def recount(self, packet: Welcome) -> None:
        """Take a WELCOME that comes later on: the number of servers has changed.

        Raises:
            RemoteProtocolError: it does not say a positive number.
        """
        servers = packet.info.get("servers", 1)
        if type(servers) is not int or servers < 1:
            raise RemoteProtocolError(f"servers is {reprlib.repr(servers):.60}, not a positive number")
        self.servers = servers


class AcceptingHandshake:
    """The side that was dialled: the server.

    Args:
        me: who this server is.
        servers: how many servers there are in all.
        admit: called with who wants to link and the token that it has proved to know, if one is wanted; raises
            ``HandshakeRefused`` if it may not.
        tokens: gives those that are taken now; None if nobody has to prove anything.
        binding: see ``tls.py``; empty over plain TCP.

    Attributes:
        peer: the agent or client, once DONE.
        token: what it has proved who it is with.
    """

    def __init__(
        self,
        me: Identity,
        servers: int = 1,
        admit: Callable[[Identity, Token | None], None] = lambda _peer, _token: None,
        tokens: Callable[[], Tokens] | None = None,
        binding: bytes = b"",
    ) -> None:
        self.me = me
        self.servers = servers
        self.peer: Identity | None = None
        self.token: Token | None = None
        self._admit = admit
        self._tokens = tokens
        self._said = _Transcript(binding)
        self._due: type[Packet] | None = Hello
        self._asking: tuple[Identity, Token] | None = None  # CHALLENGED: who, and what it says it can prove

    @property
    def opens(self) -> bool:
        """Whether this side opens the streams of the link, once DONE."""
        return self.peer is not None and self.peer.role == "agent"

    def first(self) -> Packet | None:
        """Nothing: the dialling side speaks first."""
        return None

    def receive(self, packet: Packet, body: bytes = b"") -> list[Packet]:
        """Take a packet, and the body that it came as if there are tokens; what to answer.

        Raises:
            RemoteProtocolError: the packet is not due, or not one that can be taken.
            AuthFailed: the peer did not prove that it knows a token, or may not do with it what it wants to.
            HandshakeRefused: ``admit`` said so.
        """
        due, self._due = self._due, None  # each is taken once, and a refusal is for good
        match packet, self._asking:
            case Hello(), None if due is Hello:
                return self._greeted(packet, body)
            case Auth(), (peer, token) if due is Auth:
                return self._proven(packet, body, peer, token)
        raise _not_due(packet, due)

    def _greeted(self, packet: Hello, body: bytes) -> list[Packet]:
        _check_version(packet.version)
        peer = read_identity(packet.info, *ROLES)
        if self._tokens is None:
            return self._done(peer)
        self._asking = peer, self._named(packet.info, self._tokens())
        self._due = Auth
        self._said.add(body)
        return [self._said.say(Challenge({"nonce": secrets.token_bytes(_NONCE)}))]

    def _named(self, info: dict[str, Any], tokens: Tokens) -> Token:
        """The token that HELLO names."""
        auth = info.get("auth")
        if auth is None:
            raise AuthFailed("a token is wanted here, and none was named", {})
        token_id = auth.get("token") if type(auth) is dict else None
        if type(token_id) is not str:
            raise RemoteProtocolError("auth is not a map with a token and a nonce")
        _read_bytes(auth, "nonce")
        return tokens.get(token_id) or stranger(token_id)

    def _proven(self, packet: Auth, body: bytes, peer: Identity, token: Token) -> list[Packet]:
        proven = token.proves("dialling", self._said.digest, packet.proof)
        if not proven or not self._tokens or self._tokens().get(token.id) != token:  # it may have gone meanwhile
            raise AuthFailed(_NOT_PROVEN, token.facts)
        if token.role != peer.role:
            raise AuthFailed(f"the token is for the role {token.role}, not {peer.role}", token.facts)
        refusal = _refusal(token, peer)
        if refusal:
            raise AuthFailed(f"the token {token.id}: {refusal}", token.facts)
        self._said.add(body)
        self.token = token
        return [self._said.say(Auth(token.proof("accepting", self._said.digest))), *self._done(peer)]

    def _done(self, peer: Identity) -> list[Packet]:
        self._admit(peer, self.token)
        self.peer = peer
        return [welcome(self.me, self.servers)]

    def still_valid(self, tokens: Tokens) -> bool:
        """Whether the peer may keep its link now that these are the tokens."""
        if self.token is None or self.peer is None:
            return True
        now = tokens.get(self.token.id)
        if now is None or now.secret != self.token.secret or now.role != self.token.role:
            return False
        self.token = now
        return not _refusal(now, self.peer)

    @property
    def facts(self) -> dict[str, str]:
        """What a log says of the token."""
        return self.token.facts if self.token else {}

    def recount(self, packet: Welcome) -> None:
        """A WELCOME that comes later on.

        Raises:
            RemoteProtocolError: always; only servers say it.
        """
        raise RemoteProtocolError("WELCOME from the side that dialled")


def _not_due(packet: Packet, due: type[Packet] | None) -> RemoteProtocolError:
    when = f"before {due.__name__.upper()}" if due else "after the handshake"
    return RemoteProtocolError(f"{type(packet).__name__} {when}")


def _refusal(token: Token, peer: Identity) -> str:
    """Why the token is not for a peer of its role; empty if it is."""
    if peer.role != "agent":
        return ""
    return token.grant.refuses_name(peer.name) or token.grant.refuses_claims(peer.claims)


def _read_bytes(info: Mapping[str, Any], entry: str) -> None:
    value = info.get(entry)
    if type(value) is not bytes or len(value) != _NONCE:
        raise RemoteProtocolError(f"{entry} is not {_NONCE} bytes")


Handshake = DiallingHandshake | AcceptingHandshake
