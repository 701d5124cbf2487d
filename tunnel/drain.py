"""An agent's drain: what it says to its servers about leaving, and what they have acknowledged.

    ACTIVE --drain()--> SOFT --final()--> FINAL
       ^---undrain()-----+

Rules that hold here:

- The agent owns its drain state. There may be several reasons at once; it is ACTIVE when there is none left.
- Each change is said on every link, with a number that grows; ahead of queued DATA, and with no wait between links.
- A link whose HELLO said something else than what holds when it is up is told first of all.
- An acknowledgement is a barrier: every dial that was chosen before it is ahead of it. A link that ends owes none.
- FINAL has no way back: from then on dials are refused, and asked again elsewhere.

This file must not know streams, targets, or how links are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

import trio

from tunnel import logs
from tunnel.link import Link
from tunnel.packets import Drain, DrainAck, Packet, Undrain, UndrainAck, milliseconds

log = logs.get_logger(__name__)

SOFT_ACK, FINAL_ACK = 5.0, 2.0  # seconds that servers have for acknowledging


class DrainPhase(Enum):
    """See the head of this file."""

    ACTIVE = "active"
    SOFT = "soft"
    FINAL = "final"


class AgentDrain:
    """The exchange, on all links of an agent.

    Args:
        links: those that are up.
        remaining: seconds that are left, and how many streams are open, for the servers' information.

    Attributes:
        phase: see the head of this file.
        reasons: why; ``signal``, ``admin``.
        ack_timeouts: how many exchanges ended without all acknowledgements.
    """

    def __init__(self, links: Callable[[], Iterable[Link]], remaining: Callable[[], tuple[float, int]]) -> None:
        self.phase = DrainPhase.ACTIVE
        self.reasons: set[str] = set()
        self.ack_timeouts = 0
        self._links = links
        self._remaining = remaining
        self._seq = 0
        self._linking: dict[Link, bool] = {}  # what their HELLO says, by links that are not up yet
        self._unacked: dict[Link, trio.Event] = {}  # by links that owe an ack of what was said last

    def __repr__(self) -> str:
        return f"<AgentDrain {self.phase.name} reasons={sorted(self.reasons)} unacked={len(self._unacked)}>"

    @property
    def draining(self) -> bool:
        """Whether servers should prefer other agents."""
        return self.phase is not DrainPhase.ACTIVE

    @property
    def unacked(self) -> int:
        """How many links owe an acknowledgement."""
        return len(self._unacked)

    @property
    def informed(self) -> int:
        """How many of the links that are up owe none."""
        return sum(link not in self._unacked for link in self._links())

    # -- changes

    def drain(self, reason: str) -> None:
        """ACTIVE -> SOFT, or one more reason for it; and say so."""
        self.reasons.add(reason)
        if self.phase is not DrainPhase.FINAL:
            self.phase = DrainPhase.SOFT
            self._say()

    def undrain(self, reason: str) -> bool:
        """Take a reason back; SOFT -> ACTIVE if it was the last. False if it is too late, or others remain."""
        if self.phase is DrainPhase.FINAL:
            return False
        self.reasons.discard(reason)
        if self.reasons:
            return False
        if self.phase is DrainPhase.SOFT:
            self.phase = DrainPhase.ACTIVE
            self._say()
        return True

    def final(self) -> None:
        """SOFT -> FINAL, and say so."""
        self.phase = DrainPhase.FINAL
        self._say()

    async def acknowledged(self, seconds: float) -> None:
        """Wait until every link has acknowledged what was said last, or has ended; so long at most."""
        with trio.move_on_after(seconds):
            await self.wait_acked()
            return
        self.ack_timeouts += 1
        log.warning("drain not acked", servers=self.unacked)

    async def wait_acked(self) -> None:
        """Wait until no link owes an acknowledgement."""
        while self._unacked:
            await next(iter(self._unacked.values())).wait()

    def _say(self) -> None:
        self._seq += 1
        before, self._unacked = self._unacked, {}
        for link in list(self._links()):  # telling one may find it broken
            self._unacked[link] = before.pop(link, trio.Event())
            self._tell(link)
        for link, said in self._linking.items():  # told when they are up; a server may have heard the HELLO by now
            if self._is_news(said):
                self._unacked[link] = before.pop(link, trio.Event())
        for event in before.values():
            event.set()

    def _tell(self, link: Link) -> None:
        link.session.send_control(self._packet())
        link.flush()

    def _packet(self) -> Packet:
        if self.phase is DrainPhase.ACTIVE:
            return Undrain(self._seq)
        seconds, streams = self._remaining()
        return Drain(self._seq, self.phase.value, ",".join(sorted(self.reasons)), milliseconds(seconds), streams)

    # -- links

    def linking(self, link: Link, said: bool) -> None:
        """A link is begun whose HELLO says whether this side drains: if that changes, it owes an acknowledgement."""
        self._linking[link] = said

    def linked(self, link: Link, said: bool) -> None:
        """It is up: if what its HELLO said has changed, say so before anything else."""
        self._linking.pop(link, None)
        if self._is_news(said):
            self._unacked.setdefault(link, trio.Event())
            self._tell(link)

    def _is_news(self, said: bool) -> bool:
        return self.draining != said or self.phase is DrainPhase.FINAL

    def acked(self, link: Link, packet: DrainAck | UndrainAck) -> None:
        """A server has acknowledged."""
        if packet.seq == self._seq:
            self.gone(link)

    def gone(self, link: Link) -> None:
        """A link owes nothing any more."""
        self._linking.pop(link, None)
        acked = self._unacked.pop(link, None)
        if acked is not None:
            acked.set()
