"""How much, and for how long: the bounds of a program, with their defaults and units.

Rules that hold here:

- Sizes are bytes, times are seconds; the field says so only where it is something else.

This file must not know what is bounded, or who sets a bound.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what others can make this process hold, in bytes where nothing else is said, and do.

    What happens at each is in ``docs/operations.md``.

    Attributes:
        body_before_auth: longest frame body taken before the handshake is done.
        body: longest frame body taken after it.
        first_window: what may be sent on a new stream before credit comes back.
        window: what that may grow to on a stream that would be faster with more.
        spare_window: what all streams of a link together may have beyond their first windows.
        high_water: queued DATA per link above which the sockets of that link are not read.
        link_window: what all streams of a link together may have as first windows: one gets a quarter of what is
            left, if that is less than ``first_window``, and 16 KiB at least.
        link_queue: queued DATA per link, from other links included, above which the link is ended.
        head: longest CONNECT request head.
        unauthenticated: connections to the link listener whose handshake is not done yet.
        unauthenticated_per_source: those of one address.
        heads: connections to the CONNECT front-end whose request is not whole yet.
        heads_per_source: those of one address.
        streams: open or being dialled.
        streams_per_link: those that one peer asked for.
        pending_dials: streams being dialled.
        pending_per_link: those that one client asked for, at a server.
        ping_rate: PINGs in a second that are taken from an agent or a client, and twice as many at once. Those that
            measure how fast it gets DATA come on top.
        dial_rate: dials in a second that are taken from a client, and twice as many at once.
    """

    body_before_auth: int = 4 * 1024
    body: int = 1024 * 1024
    first_window: int = 512 * 1024
    window: int = 16 * 1024 * 1024
    spare_window: int = 64 * 1024 * 1024
    high_water: int = 1024 * 1024
    link_window: int = 256 * 1024 * 1024
    link_queue: int = 512 * 1024 * 1024
    head: int = 16 * 1024
    unauthenticated: int = 2048
    unauthenticated_per_source: int = 512
    heads: int = 2048
    heads_per_source: int = 512
    streams: int = 20_000
    streams_per_link: int = 16_384
    pending_dials: int = 4096
    pending_per_link: int = 1024
    ping_rate: int = 1000
    dial_rate: int = 2000


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Bounds on waiting, in seconds.

    Attributes:
        handshake: for the connection and its TLS, and as much again from there to a usable link.
        keepalive: between two PINGs; three such times in a row in which nothing came, and the link is dead.
        head: from the accepted connection to the end of its CONNECT request head.
        shutdown: from the signal to leave to the exit; what open streams get, but for the last steps.
        backoff_first: bound of the random delay before the first reconnect; doubles with each failure.
        backoff_max: where the doubling ends.
        stable: a link that lived this long resets the back-off.
    """

    handshake: float = 10.0
    keepalive: float = 5.0
    head: float = 10.0
    shutdown: float = 25.0
    backoff_first: float = 0.2
    backoff_max: float = 15.0
    stable: float = 1.0
