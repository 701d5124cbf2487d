"""Which agents' claims match a target: the keys that backends are found by, and the buckets under them.

    strategy    keys looked for, most preferred first
    destHost    the exact host; then suffixes of a name, or networks of an address, longest first
    defaultRoute, default    one key each: who claims the default route; anybody

Rules that hold here:

- Nothing here scans backends. What a look costs depends on the labels of a name and on how many different lengths of
  networks are claimed, not on how many agents there are.
- An agent that was asked for by name is looked for by that alone.
- What was found for a host is remembered until a key comes or goes.

This file must not know dialling, links, or how one of a bucket is chosen.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

from tunnel.address import Identifier, Target, host_kind
from tunnel.config import Claims
from tunnel.pools import BackendState, Bucket, Member

Key = tuple[str, str | int, int]
"""What buckets go by: a kind, a value, and for networks (``cidr4``, ``cidr6``) the length of the prefix."""

Match = tuple[str, Key]
"""A strategy, and what it matched."""

M = TypeVar("M", bound=Member)
_REMEMBERED = 1024  # hosts
_ANY: Key = ("any", "", 0)
_DEFAULT_ROUTE: Key = ("default-route", "", 0)


def keys_of(name: str, claims: Claims) -> tuple[Key, ...]:
    """Under which keys an agent is found."""
    default = (_DEFAULT_ROUTE,) if claims.default_route else ()
    return (_ANY, _named(name), *default, *map(_key_of, claims.identifiers))


def spelled(key: Key) -> str:
    """The key as an identifier would be written."""
    kind, value, bits = key
    if isinstance(value, str):
        return f"{kind}={value}" if value else kind
    address = value << (_family(kind == "cidr6")[1] - bits)
    return f"cidr={ipaddress.IPv6Address(address) if kind == 'cidr6' else ipaddress.IPv4Address(address)}/{bits}"


def _named(agent: str) -> Key:
    return "agent", agent, 0


def _key_of(identifier: Identifier) -> Key:
    if identifier.kind != "cidr":
        return identifier.kind, identifier.value, 0
    network = identifier.network
    kind, width = _family(network.version == 6)
    return kind, int(network.network_address) >> (width - network.prefixlen), network.prefixlen


def _family(is_v6: bool) -> tuple[str, int]:
    return ("cidr6", 128) if is_v6 else ("cidr4", 32)


class Index(Generic[M]):
    """Backends by what they claim.

    Args:
        strategies: in the order tried.
    """

    def __init__(self, strategies: tuple[str, ...]) -> None:
        self.strategies = strategies
        self.buckets: dict[Key, Bucket[M]] = {}
        self._prefixes: dict[str, Counter[int]] = {"cidr4": Counter(), "cidr6": Counter()}
        self._suffixes = 0
        self._found: dict[str, tuple[Match, ...]] = {}  # for hosts that were asked for lately

    def add(self, member: M, keys: tuple[Key, ...], state: BackendState) -> None:
        """Find it under these keys, in this state."""
        for key in keys:
            bucket = self.buckets.get(key)
            if bucket is None:
                bucket = self.buckets[key] = Bucket()
                self._count(key, 1)
            bucket.add(member, state)

    def remove(self, member: M, keys: tuple[Key, ...], state: BackendState) -> None:
        """Find it there no more."""
        for key in keys:
            bucket = self.buckets[key]
            bucket.remove(member, state)
            if not bucket:
                del self.buckets[key]
                self._count(key, -1)

    def _count(self, key: Key, change: int) -> None:
        """Know which suffixes and prefix lengths are worth looking for. What was found before may not be so now."""
        self._found.clear()
        kind, _, bits = key
        if kind == "suffix":
            self._suffixes += change
        elif kind in self._prefixes:
            self._prefixes[kind][bits] += change
            self._prefixes[kind] = +self._prefixes[kind]  # without what fell to zero

    def named(self, agent: str) -> list[M]:
        """All of one name, whatever their state."""
        bucket = self.buckets.get(_named(agent))
        return [] if bucket is None else [member for member, _ in bucket.members()]

    def matches(self, target: Target, agent: str | None) -> tuple[Match, ...]:
        """Strategies and keys under which somebody is, most preferred first."""
        if agent is not None:
            key = _named(agent)
            return (("agent", key),) if key in self.buckets else ()
        found = self._found.get(target.host)
        if found is None:
            if len(self._found) == _REMEMBERED:
                self._found.clear()
            found = self._found[target.host] = tuple(self._look_for(target.host))
        return found

    def _look_for(self, host: str) -> Iterator[Match]:
        for strategy in self.strategies:
            for key in _KEYS_FOR[strategy](self, host):
                if key in self.buckets:
                    yield strategy, key

    def _host_keys(self, host: str) -> Iterator[Key]:
        kind = host_kind(host)
        yield kind, host, 0
        if kind == "host":
            yield from self._suffix_keys(host)
        else:
            yield from self._cidr_keys(host)

    def _cidr_keys(self, host: str) -> Iterator[Key]:
        kind, width = _family(":" in host)
        if self._prefixes[kind]:
            number = int(ipaddress.ip_address(host))
            for bits in sorted(self._prefixes[kind], reverse=True):
                yield kind, number >> (width - bits), bits

    def _suffix_keys(self, host: str) -> Iterator[Key]:
        dot = host.find(".") if self._suffixes else -1
        while dot >= 0:
            yield "suffix", host[dot:], 0
            dot = host.find(".", dot + 1)

    def _default_route_keys(self, _host: str) -> Iterator[Key]:
        yield _DEFAULT_ROUTE

    def _any_keys(self, _host: str) -> Iterator[Key]:
        yield _ANY


_KEYS_FOR = {
    "destHost": Index._host_keys,
    "defaultRoute": Index._default_route_keys,
    "default": Index._any_keys,
}
