"""Control packets as lines of the log, for who looks for a fault between two programs: ``--log-level trace``.

Rules that hold here:

- DATA is not shown, only what is about it. Of the handshake, where tokens are proved, only the names of packets.
- Nobody pays who does not ask: whether packets are traced is decided when a link begins.

This file must not know what packets mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict

from tunnel import logs
from tunnel.outbox import Outbox
from tunnel.packets import Auth, Challenge, Hello, Packet, Welcome

log = logs.get_logger(__name__)

_GREETINGS = (Hello, Challenge, Auth, Welcome)
Peer = Callable[[], str]
"""The name of who is at the other end, as far as it is known."""


def wanted() -> bool:
    """Whether links should be traced."""
    return log.traces


class TracedOutbox(Outbox):
    """An outbox whose control packets are shown when they are queued."""

    __slots__ = ("_peer",)

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self._peer = peer

    def control(self, packet: Packet) -> None:
        """See ``Outbox``."""
        log.trace("packet sent", peer=self._peer(), **_facts(packet))
        super().control(packet)


def traced(peer: Peer, take: Callable[[Packet], None]) -> Callable[[Packet], None]:
    """``take``, for packets that are shown before, if they are wanted."""
    if not wanted():
        return take

    def show_and_take(packet: Packet) -> None:
        log.trace("packet received", peer=peer(), **_facts(packet))
        take(packet)

    return show_and_take


def _facts(packet: Packet) -> dict[str, object]:
    fields = {} if isinstance(packet, _GREETINGS) else asdict(packet)
    return {"packet": _name(type(packet)), **fields}


def _name(kind: type[Packet]) -> str:
    """As the protocol spells it: ``DialReq`` is DIAL_REQ."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).upper()
