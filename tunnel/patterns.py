"""Patterns and rules: which targets are meant, and which of them an agent may connect to.

    HOST[:PORTS]    HOST: * | name | *.DOMAIN | address | NETWORK/BITS, IPv6 in brackets    PORTS: * | 443 | 8000-8999

Rules that hold here:

- A pattern that exists is canonical, as in ``address.py``: it compares what is meant, and ``parse(str(x)) == x``.
- Names match names, addresses match addresses, ``*`` matches both. A name says nothing about other names, or the
  addresses, of the same machine: whoever wants those denied has to deny the addresses.
- A target is judged twice. By the host that was asked for, before it is looked up: a name that is denied is not even
  asked about. By each address that was found, before it is connected to: whoever runs a DNS zone can make a name stand
  for any address, and a name must not smuggle in an address that is denied. A denial wins wherever it is found.

This file must not know I/O: nothing is resolved here; who resolves hands in what was found.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Self

from tunnel.address import Target, canonical_host, canonical_network, host_kind, refusal
from tunnel.errors import AddressError, Denied

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_ALL_PORTS = (1, 65535)
_ANY = "*"
_BELOW = "*."
_NOT_ALLOWED = "no rule allows it"
_TAKEN = (
    "HOST or HOST:PORTS, HOST being *, a name, *.DOMAIN, an address or NETWORK/BITS, with IPv6 in brackets, "
    "and PORTS like 443 or 8000-8999"
)

_PATTERN = re.compile(
    r"(?:\[(?P<v6>[^\[\]]*:[^\[\]]*)\]|(?P<host>[^:\[\]]+))"
    r"(?::(?:\*|(?P<first>[0-9]{1,5})(?:-(?P<last>[0-9]{1,5}))?))?"
)
_BARE_V6_NETWORK = re.compile(r"[0-9a-fA-F:.]*:[0-9a-fA-F:.]*/[0-9]{1,3}")
_BARE_V6 = re.compile(r"[0-9a-fA-F.]*:[0-9a-fA-F.]*:[0-9a-fA-F.:%/]*")
_NETWORK = re.compile(r"([^/]+)/([0-9]{1,3})")


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which targets are meant.

    An IPv6 address or network that only wraps IPv4 (``::ffff:192.0.2.1``) is the IPv4 one. Other ways to wrap one need
    a translator in the network, like ``64:ff9b::/96``; where there is such, its network has to be denied as well.

    Attributes:
        host: ``*`` is any; ``*.DOMAIN`` is all names below the domain, and not itself; else a name, an address, or a
            network, without brackets. A network of one address is that address.
        first, last: the ports, both included.

    Raises:
        AddressError: the host is none of these, or the ports are not from 1 to 65535, the lower one first.
    """

    host: str
    first: int = _ALL_PORTS[0]
    last: int = _ALL_PORTS[1]
    _network: _Network | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        host = _canonical(self.host)
        object.__setattr__(self, "host", host)
        object.__setattr__(self, "_network", ipaddress.ip_network(host) if _is_address(host) else None)
        if not _ALL_PORTS[0] <= self.first <= self.last <= _ALL_PORTS[1]:
            raise _refusal(str(self), "has ports out of range or order")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        if (self.first, self.last) == _ALL_PORTS:
            return host
        return f"{host}:{self.first}" if self.first == self.last else f"{host}:{self.first}-{self.last}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``HOST`` or ``HOST:PORTS``. IPv6 is in brackets; they may be left off a network without ports.

        Raises:
            AddressError: the text is not of that form, or one of the parts is not taken.
        """
        if _BARE_V6_NETWORK.fullmatch(text):
            return cls(text)
        if _BARE_V6.fullmatch(text):  # ::1:443 would be an address, and hardly the one that was meant
            raise _refusal(text, "is ambiguous")
        found = _PATTERN.fullmatch(text)
        if not found:
            raise _refusal(text, "is not a pattern")
        first, last = found["first"] or _ALL_PORTS[0], found["last"] or found["first"] or _ALL_PORTS[1]
        return cls(found["v6"] or found["host"], int(first), int(last))

    @property
    def is_address(self) -> bool:
        """Whether it means addresses, and no names."""
        return self._network is not None

    def matches(self, host: str, port: int) -> bool:
        """Whether that canonical host, a name or an address, and that port are meant.

        To connect to an unspecified address (``0.0.0.0``, ``::``) is to connect to this very machine, so what means
        the loopback address of that family means it, too.
        """
        return self.has_port(port) and self._has_host(host)

    def has_port(self, port: int) -> bool:
        """Whether that port is meant."""
        return self.first <= port <= self.last

    def _has_host(self, host: str) -> bool:
        if self._network is not None:
            return any(address in self._network for address in _reached(host))
        if self.host.startswith(_BELOW):
            return host.endswith(self.host[1:])
        return self.host in (_ANY, host)


@dataclass(frozen=True, slots=True)
class Rules:
    """Where an agent may connect to: anywhere that is not denied, and if anything is allowed, only there.

    False if there are none.

    Attributes:
        allow: targets are allowed by the host that was asked for, or by the address that it stands for.
        deny: wins over ``allow``; targets are denied by either.
    """

    allow: tuple[Pattern, ...] = ()
    deny: tuple[Pattern, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.allow or self.deny)

    def check_name(self, target: Target) -> None:
        """What can be said before the target is looked up. See the head of this file.

        Raises:
            Denied: the target is denied, or nothing could allow it, whatever its addresses are.
        """
        if rule := _matching(self.deny, target.host, target.port):
            raise Denied(f"{target}: denied by {rule}")
        may_be_found = any(rule.is_address and rule.has_port(target.port) for rule in self.allow)
        if not may_be_found and not self._allows(target.host, target.port):
            raise Denied(f"{target}: {_NOT_ALLOWED}")

    def permitted(self, target: Target, addresses: Iterable[str]) -> list[str]:
        """Those of a target's addresses that may be connected to, in the same order; at least one.

        What is not looked up at all, as a service of this process, has its own host as its only address.

        Raises:
            Denied: none is left.
        """
        self.check_name(target)
        reasons = {address: self._against(target, address) for address in addresses}
        left = [address for address, reason in reasons.items() if not reason]
        if not left:
            raise Denied(f"{target}: {next(iter(reasons.values()), 'it has no address')}")
        return left

    def _against(self, target: Target, address: str) -> str:
        """Why an address of a target may not be connected to; empty if it may."""
        try:
            host = canonical_host(address.partition("%")[0])  # on which link it is makes it no other address
        except AddressError as error:
            return str(error)  # what cannot be read cannot be judged
        if rule := _matching(self.deny, host, target.port):
            return f"it is {host}, which is denied by {rule}"
        allowed = self._allows(target.host, target.port) or self._allows(host, target.port)
        return "" if allowed else _NOT_ALLOWED

    def _allows(self, host: str, port: int) -> bool:
        return not self.allow or _matching(self.allow, host, port) is not None


def _matching(patterns: tuple[Pattern, ...], host: str, port: int) -> Pattern | None:
    return next((pattern for pattern in patterns if pattern.matches(host, port)), None)


@lru_cache(maxsize=1024)
def _reached(host: str) -> tuple[_Address, ...]:
    """The addresses that a connection to a canonical host arrives at; none for a name."""
    if host_kind(host) == "host":
        return ()
    address = ipaddress.ip_address(host)
    loopback = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return (address, loopback) if address.is_unspecified else (address,)


def _is_address(host: str) -> bool:
    return "/" in host or (not host.startswith(_ANY) and host_kind(host) != "host")


def _canonical(host: str) -> str:
    if host == _ANY:
        return host
    if "/" in host:
        return _canonical_network(host)
    name = host.removeprefix(_BELOW)
    if _ANY in name:
        raise _refusal(host, "has a * where none is taken")
    return _BELOW + _canonical_domain(host, name) if host.startswith(_BELOW) else canonical_host(name)


def _canonical_domain(text: str, name: str) -> str:
    try:
        domain = canonical_host(name)
    except AddressError:
        raise _refusal(text, "has no domain after the *") from None
    if host_kind(domain) != "host":
        raise _refusal(text, "has an address where a domain is taken")
    return domain


def _canonical_network(text: str) -> str:
    if not _NETWORK.fullmatch(text):
        raise _refusal(text, "is not a network")
    network = canonical_network(text, text, _TAKEN)
    return str(network.network_address) if network.prefixlen == network.max_prefixlen else str(network)


def _refusal(text: str, why: str) -> AddressError:
    return refusal(text, why, _TAKEN)
