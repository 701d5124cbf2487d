"""The bridge: leads a client's stream on through an agent's, frame by frame.

    OPEN --EOF from one side--> EOF to the other ----+--> both: DONE
      +----reset by either--> the other is reset: DONE with an error
      +----client's link gone, after its EOF--> the agent's side goes on alone: DONE at its end, or reset by its DATA

Rules that hold here:

- Nothing is kept: each end's credit is the other end's, so whatever arrives may be sent on at once. What an end that
  reads nothing can make its link queue is bounded by ``most``, whatever credit it gives.
- What is about the window of a stream (CREDIT, PING, PONG) passes through to its real end.
- The bytes of a client that sent EOF before its link ended are delivered, as a socket's are that was closed.

This file must not know who wants the stream, or where it leads.
"""

from __future__ import annotations

import trio

from tunnel.core import State, Stream
from tunnel.errors import LinkLost, StreamReset
from tunnel.packets import Credit, Ping, Pong
from tunnel.parked import Parked
from tunnel.stream import TunnelStream


class _End:
    """The sink of one of two bridged streams, ``core``; what arrives goes to ``other``."""

    __slots__ = ("core", "ended", "other", "outlet", "span")

    def __init__(self, span: _Span, stream: TunnelStream, other: TunnelStream) -> None:
        self.span = span
        self.core = stream.core
        self.other = other.core
        self.outlet = other.outlet
        self.ended = False

    def on_data(self, data: memoryview) -> None:
        """Send it on, in frames that the other link's peer takes."""
        other = self.other
        most = min(other.session.most_data, self.outlet.burst)
        if len(data) <= most:  # mostly
            other.send(bytes(data))
        else:
            for start in range(0, len(data), most):
                other.send(bytes(data[start : start + most]))
        self.outlet.flush()

    def on_eof(self) -> None:
        """Pass it on, behind the bytes before it."""
        self.ended = True
        self.other.send_eof()
        self.outlet.flush()
        if self.core.state is self.other.state is State.CLOSED:
            self.span.end()

    def on_reset(self, code: str, text: str) -> None:
        """Pass it on."""
        self.span.reset(self, code, text)

    def on_credit(self) -> None:
        """Nothing: credit goes ``onward``."""

    def onward(self, packet: Credit | Ping | Pong) -> None:
        """Hand the packet to the stream's real end."""
        if self.other.session.out.crowded:
            self.span.give_up("protocol", "the next link does not take what comes for it")
        elif isinstance(packet, Credit):
            if self.other.window.left + packet.amount > self.span.most:
                self.span.give_up("protocol", f"credit for more than {self.span.most} bytes")
            self.other.give_credit(packet.amount)
        else:
            self.other.session.send_control(type(packet)(self.other.id, packet.token))
        self.outlet.flush()


class _Alone:
    """The sink of an agent's stream whose client has gone after its EOF: its bytes are still being delivered."""

    __slots__ = ("core", "span")

    def __init__(self, span: _Span, core: Stream) -> None:
        self.span = span
        self.core = core

    def on_data(self, data: memoryview) -> None:
        """Nobody is there for an answer."""
        self.span.give_up("closed", "the client has gone")

    def on_eof(self) -> None:
        """Both directions have ended."""
        self.span.end()

    def on_reset(self, code: str, text: str) -> None:
        """The agent's side ended otherwise."""
        self.span.end(StreamReset(code, text))

    def on_credit(self) -> None:
        """There is nothing to send."""


def _nowhere(packet: Credit | Ping | Pong) -> None:
    """The real end has gone."""


class _Span(Parked):
    """Both streams, and the task that owns them."""

    __slots__ = ("agent", "client", "most", "moved")

    def __init__(self, most: int, client: TunnelStream, agent: TunnelStream) -> None:
        super().__init__()
        self.most = most
        self.client = _End(self, client, agent)
        self.agent = _End(self, agent, client)
        self.moved = (-1, -1)  # bytes sent and received when they were looked at last

    def attach(self) -> None:
        """Let the bytes through, and first what had arrived already."""
        for end in (self.client, self.agent):
            end.core.lead_on(end.onward)
        for end in (self.client, self.agent):
            end.core.attach(end)

    def reset(self, end: _End, code: str, text: str) -> None:
        """One end was reset by its peer, or its link has gone."""
        if code == LinkLost.code and end is self.client and end.ended:
            end.other.lead_on(_nowhere)
            end.other.attach(_Alone(self, end.other))
            return
        end.other.reset(code, text)
        end.outlet.flush()
        self.end(StreamReset(code, text))

    @property
    def stalled(self) -> bool:
        """Whether one direction has ended, and nothing moved in the other since this was asked last."""
        moved, self.moved = self.moved, (self.agent.core.sent, self.agent.core.received)
        return (self.client.ended or self.agent.ended) and moved == self.moved

    def give_up(self, code: str, text: str) -> None:
        """Reset both."""
        self.end(StreamReset(code, text))
        for end in (self.client, self.agent):
            end.core.reset(code, text)
            end.outlet.flush()

    def abandoned(self) -> None:
        """See ``Parked``: the owner was cancelled."""
        self.give_up("cancelled", "the server was stopped")


class Bridge:
    """All bridged streams of a server.

    Args:
        most: bytes of credit that one end of a stream may have at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._spans: dict[_Span, None] = {}  # oldest first

    def __repr__(self) -> str:
        return f"<Bridge streams={len(self._spans)}>"

    async def join(self, client: TunnelStream, agent: TunnelStream, window: int) -> None:
        """Accept a client's stream, and carry it over an agent's until both directions have ended.

        ``window`` is what the agent was told that it may send unasked: the client's credit at that time.
        If cancelled, both streams are reset.

        Raises:
            StreamReset: one of the two was reset, and so is the other now.
        """
        span = _Span(self._most, client, agent)
        self._spans[span] = None
        try:
            await self._carry(span, client, agent, window)
        finally:
            del self._spans[span], span.client.span, span.agent.span

    async def _carry(self, span: _Span, client: TunnelStream, agent: TunnelStream, window: int) -> None:
        client.core.accept(min(agent.core.credit, self._most))
        if client.core.credit > window:
            agent.core.give_credit(client.core.credit - window)
        span.attach()
        client.outlet.flush()
        agent.outlet.flush()
        await span.wait()

    async def cut(self, code: str, text: str, seconds: float) -> None:
        """Reset every stream, spread over half the time. If cancelled, what is left is reset at once."""
        left = list(self._spans)
        pause = seconds / 2 / max(1, len(left))
        try:
            while left:
                left.pop().give_up(code, text)
                await trio.sleep(pause)
        finally:
            for span in left:
                span.give_up(code, text)

    def reap(self) -> None:
        """Reset the streams that are half-closed, and on which nothing moved since the last call."""
        for span in list(self._spans):
            if span.stalled:
                span.give_up("idle", "half-closed, and nothing moved while others were waited for")
