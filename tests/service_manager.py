"""A service manager that listens to what services say of themselves."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager


class ServiceManager:
    """Hears whatever is sent to its socket."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    def heard(self) -> list[str]:
        """The lines that have come since this was asked last."""
        heard: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                heard += self._listener.recv(1000).decode().splitlines()
        return heard


@contextmanager
def service_manager(address: str) -> Iterator[ServiceManager]:
    """One that listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        listener.setblocking(False)
        yield ServiceManager(listener)
