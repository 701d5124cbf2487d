"""What systemd is told about a service of ``Type=notify``: a datagram to the socket that it names.

This file must not know what the program is, or when something is worth saying.
"""

from __future__ import annotations

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Say ``READY=1``, ``STOPPING=1`` and the like. No effect where nobody listens."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    address = f"\0{path[1:]}" if path.startswith("@") else path
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(state.encode(), address)
