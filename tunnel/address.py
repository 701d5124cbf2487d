"""Addresses: where to listen, where a stream leads, what an agent reaches, and the one canonical form of a host.

Rules that hold here:

- Whatever exists is canonical: ``Target`` and ``ListenAddress`` check and normalise in their constructor,
  so comparing two of them compares places, not spellings, and ``parse(str(x)) == x``.
- Every failure is an ``AddressError`` that names the input and what is taken; no other exception leaves this file.
- A host that one resolver reads as a name and another as a number (``127.1``, ``0x7f.1``) is refused:
  a policy that looks at the text must see what the resolver will see.

This file must not know I/O: nothing is resolved here, nothing is opened.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Self

from tunnel.errors import AddressError

_IDENTIFIER_KINDS = ("host", "ipv4", "ipv6", "cidr", "suffix")
_NETWORK = "cidr=NETWORK/BITS, like cidr=10.1.0.0/16"
_WRAPPED_BITS = 96  # the prefix that wraps an IPv4 address into an IPv6 one
_HOST = "a name, an IPv4 address like 192.0.2.1 or an IPv6 address like 2001:db8::1"

_LONGEST_NAME = 253
_NAME = re.compile(r"(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}")
_ENDS_IN_A_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")
_ENDPOINT = re.compile(r"(?:\[(?P<v6>[^\[\]]*:[^\[\]]*)\]|(?P<name>[^:\[\]]+)):(?P<port>[0-9]{1,5})")
_PORT = re.compile(r"[0-9]{1,5}")
_BARE_V6 = re.compile(r"[0-9a-fA-F.]*:[0-9a-fA-F.]*:[0-9a-fA-F.:%]*")


@lru_cache(maxsize=1024)
def canonical_host(text: str) -> str:
    """The one form of a host, without brackets: lower case, no final dot, A-labels, compressed IPv6.

    An IPv6 address that only wraps an IPv4 one (``::ffff:192.0.2.1``) becomes the IPv4 address.

    Raises:
        AddressError: the text is no host, carries a zone id, or is a number that is not a plain dotted quad.
    """
    if len(text) > _LONGEST_NAME + 1:  # also bounds what the costlier steps below can be made to read
        raise refusal(text, f"is longer than {_LONGEST_NAME} characters", _HOST)
    if ":" in text:
        return _canonical_v6(text)
    name = text.lower() if text.isascii() else _to_ascii(text)
    name = name.removesuffix(".")
    if len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        raise refusal(text, "is not a host", f"{_HOST}; labels are 1 to 63 letters, digits, '-' or '_'")
    if _ENDS_IN_A_NUMBER.fullmatch(name) and not isinstance(_ip(name), ipaddress.IPv4Address):
        raise refusal(text, "ends in a number but is not a plain dotted quad", _HOST)
    return name


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """A canonical host and a port; what ``Target`` and ``ListenAddress`` share."""

    host: str
    port: int

    lowest_port: ClassVar[int] = 1
    forms: ClassVar[str] = "HOST:PORT or [IPV6]:PORT"

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", canonical_host(self.host))
        if not self.lowest_port <= self.port <= 65535:
            raise refusal(str(self), "has a port out of range", f"ports {self.lowest_port} to 65535")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``HOST:PORT`` or ``[IPV6]:PORT``.

        Raises:
            AddressError: the text is not of that form, or the host or the port is not taken.
        """
        found = _ENDPOINT.fullmatch(text)
        if found:
            return cls(found["v6"] or found["name"], int(found["port"]))
        if _BARE_V6.fullmatch(text):
            raise refusal(text, "is ambiguous", "an IPv6 address in brackets, like [::1]:80")
        raise refusal(text, "is not an address", f"{cls.forms}, port {cls.lowest_port} to 65535")


@dataclass(frozen=True, slots=True)
class Target(_Endpoint):
    """Where a stream leads: a host that an agent can reach, and a port from 1 to 65535."""


@dataclass(frozen=True, slots=True)
class ListenAddress(_Endpoint):
    """Where to listen: an own host, and a port from 0 (the system chooses one) to 65535."""

    lowest_port: ClassVar[int] = 0
    forms: ClassVar[str] = "HOST:PORT, [IPV6]:PORT or PORT"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``HOST:PORT``, ``[IPV6]:PORT``, or ``PORT``, which means 127.0.0.1.

        Raises:
            AddressError: the text is not of that form, or the host or the port is not taken.
        """
        if _PORT.fullmatch(text):
            text = f"127.0.0.1:{text}"
        return super(ListenAddress, cls).parse(text)  # the bare super() does not survive slots=True

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it; of names, ``localhost`` alone is trusted to say so."""
        ip = _ip(self.host)
        return ip.is_loopback if ip else self.host == "localhost"


@dataclass(frozen=True, slots=True)
class Identifier:
    """What an agent says it can reach: one host, or all hosts of a kind.

    ``kind`` is ``host`` (a name), ``ipv4``, ``ipv6``, ``suffix`` (all names below a domain) or ``cidr`` (all addresses
    of a network); ``value`` is in its canonical form, a suffix with its leading dot.
    """

    kind: str
    value: str

    def __str__(self) -> str:
        return f"{self.kind}={self.value}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``KIND=VALUE``. A ``host`` that is an address becomes ``ipv4`` or ``ipv6``.

        Raises:
            AddressError: the kind is unknown, or the value is not of that kind.
        """
        kind, _, value = text.partition("=")
        if kind not in _IDENTIFIER_KINDS:
            raise refusal(text, "is not an identifier", ", ".join(f"{known}=..." for known in _IDENTIFIER_KINDS))
        if kind == "suffix":
            return cls(kind, f".{_canonical_name(text, value.removeprefix('*.').removeprefix('.'))}")
        if kind == "cidr":
            return cls(kind, str(canonical_network(text, value)))
        host = canonical_host(value)
        found = host_kind(host)
        if kind not in (found, "host"):
            raise refusal(text, f"holds no {kind} address", "for example ipv4=192.0.2.1 or ipv6=2001:db8::1")
        return cls(found, host)

    @property
    def network(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
        """Of a ``cidr``: the network."""
        return ipaddress.ip_network(self.value)


def host_kind(host: str) -> str:
    """What a canonical host is: ``ipv6``, ``ipv4`` or ``host``."""
    if ":" in host:
        return "ipv6"
    return "ipv4" if host[-1].isdigit() and _ENDS_IN_A_NUMBER.fullmatch(host) else "host"


def _canonical_name(text: str, value: str) -> str:
    name = canonical_host(value)
    if host_kind(name) != "host":
        raise refusal(text, "is not a domain", "suffix=.DOMAIN, like suffix=.svc.local")
    return name


def canonical_network(text: str, value: str, taken: str = _NETWORK) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """The network that ``value`` says, as IPv4 if it only wraps that into IPv6. ``text`` is what errors show.

    Raises:
        AddressError: it is none.
    """
    try:
        network = ipaddress.ip_network(value)
    except ValueError as error:
        what = "has host bits set" if "host bits set" in str(error) else "is not a network"
        raise refusal(text, what, taken) from None
    if isinstance(network, ipaddress.IPv4Network):
        return network
    if network.network_address.scope_id:
        raise refusal(text, "has a zone id, which means nothing on another machine", taken)
    wrapped = network.network_address.ipv4_mapped if network.prefixlen >= _WRAPPED_BITS else None
    return network if wrapped is None else ipaddress.IPv4Network((wrapped, network.prefixlen - _WRAPPED_BITS))


def refusal(text: str, why: str, taken: str) -> AddressError:
    """What is wrong with a text that came from outside, and what is taken in its place."""
    shown = repr(text) if len(text) <= 80 else f"{text[:80]!r}..."
    return AddressError(f"{shown} {why}; taken: {taken}")


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _canonical_v6(text: str) -> str:
    if "%" in text:
        raise refusal(text, "has a zone id, which means nothing on another machine", _HOST)
    ip = _ip(text)
    if not isinstance(ip, ipaddress.IPv6Address):
        raise refusal(text, "is not an IPv6 address", _HOST)
    return str(ip.ipv4_mapped or ip)


def _to_ascii(text: str) -> str:
    """Map as browsers do (UTS 46), then encode label by label: an ASCII label may hold what IDNA forbids (``_``)."""
    import idna  # its tables cost more to load than all the rest of this file, and few hosts need them

    try:
        mapped = idna.uts46_remap(text, std3_rules=False)
        return ".".join(label if label.isascii() else idna.alabel(label).decode() for label in mapped.split("."))
    except (idna.IDNAError, UnicodeError) as error:
        raise refusal(text, "is not an international name", _HOST) from error
