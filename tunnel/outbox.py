"""What one side of a link is to send next, and in what order.

Rules that hold here:

- Control packets go out before DATA.
- DATA of all streams takes turns, frame by frame. What one stream has queued keeps its order; EOF is one of its frames.
- What a stream has queued can be thrown away, whole.
- What waits is counted: control packets, since whoever asks must read the answers; and frames of streams, by whether
  they begin here, where somebody can wait, or only pass through on their way from another link.

This file must not know what streams may do, credit, or sockets.
"""

from __future__ import annotations

from collections import deque

from tunnel.packets import Packet

JOIN_BELOW = 8 * 1024  # header and payload of a frame this small are one buffer: cheaper than two in a gather list
_MAX_BUFFERS = 512  # per take; systems refuse more than 1024 in one gather list
_MAX_CONTROL = 4 * 1024 * 1024  # bytes of control packets that may wait for a peer that reads nothing

Frame = bytes | tuple[bytes, bytes]
"""One buffer, or header and payload."""


class Line:
    """The frames of one stream that wait, in their order; a stream is one.

    Attributes:
        passing: they come from another link.
    """

    __slots__ = ("frame", "frames", "passing")

    def __init__(self) -> None:
        self.frame: Frame | None = None  # the next to be sent
        self.frames: deque[Frame] | None = None  # those behind it: mostly there are none
        self.passing = False


class Outbox:
    """All that waits on one side of a link.

    Attributes:
        queued: bytes of streams' frames that wait.
        passing: how many of them come from another link; their sender is bound by its window alone.
        frames_sent: of streams, so far.
    """

    __slots__ = ("_control", "_control_size", "_ready", "frames_sent", "passing", "queued")

    def __init__(self) -> None:
        self.queued = self.passing = 0
        self.frames_sent = 0
        self._control: list[bytes] = []
        self._control_size = 0
        self._ready: deque[Line] = deque()  # those with frames, in the order of their turns

    def __repr__(self) -> str:
        return f"<Outbox {self}>"

    def __str__(self) -> str:
        return f"queued={self.queued} control={len(self._control)}"

    def __bool__(self) -> bool:
        return bool(self._control or self.queued)

    @property
    def own_queued(self) -> int:
        """Bytes queued by those on this side, who can wait."""
        return self.queued - self.passing

    @property
    def unread(self) -> int:
        """Bytes of control packets that wait."""
        return self._control_size

    @property
    def clogged(self) -> bool:
        """Whether more control packets wait for the peer than it should leave unread."""
        return self._control_size > _MAX_CONTROL

    @property
    def crowded(self) -> bool:
        """Whether so much waits that what comes from other links should stop: only this peer's own may end its link."""
        return self._control_size * 2 > _MAX_CONTROL

    def control(self, packet: Packet) -> None:
        """Queue a control packet, ahead of all DATA."""
        frame = packet.encode()
        self._control.append(frame)
        self._control_size += len(frame)

    def queue(self, line: Line, frame: Frame, size: int) -> None:
        """Queue a stream's frame of so many bytes behind those it has queued."""
        self.queued += size
        if line.passing:
            self.passing += size
        if line.frame is None:
            line.frame = frame
            self._ready.append(line)
        elif line.frames is None:
            line.frames = deque((frame,))
        else:
            line.frames.append(frame)

    def drop(self, line: Line) -> None:
        """Throw away what a stream has queued."""
        if line.frame is not None:
            size = sum(map(_size, (line.frame, *(line.frames or ()))))
            self.queued -= size
            if line.passing:
                self.passing -= size
            line.frame = line.frames = None

    def take(self, limit: int) -> list[bytes]:
        """The buffers to send next, in order: all control packets, then whole frames up to about ``limit`` bytes."""
        buffers: list[bytes] = []
        if self._control:
            buffers.append(self._control[0] if len(self._control) == 1 else b"".join(self._control))
            self._control.clear()
            self._control_size = 0
        taken = 0
        ready = self._ready
        while ready and taken < limit and len(buffers) < _MAX_BUFFERS:
            line = ready.popleft()
            frame = line.frame
            if frame is None:  # it was dropped
                continue
            if line.frames:
                line.frame = line.frames.popleft()
                ready.append(line)
            else:
                line.frame = line.frames = None
            if isinstance(frame, bytes):
                buffers.append(frame)
                size = len(frame)
            else:
                buffers += frame
                size = _size(frame)
            if line.passing:
                self.passing -= size
            self.frames_sent += 1
            taken += size
        self.queued -= taken
        return buffers


def _size(frame: Frame) -> int:
    return len(frame) if isinstance(frame, bytes) else len(frame[0]) + len(frame[1])
