"""A whole tunnel of real processes, and what its clients do."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass

from endpoints import connect, connect_head, read_head, read_refusal
from programs import Program, Stdio


@dataclass
class Tunnel:
    """A server, its agents, and the clients of a test."""

    server: Program
    agents: list[Program]
    clients: contextlib.ExitStack

    @property
    def agent(self) -> Program:
        return self.agents[0]

    def port(self, use: str) -> int:
        """Where the server listens for ``links``, ``connect`` or ``forward``."""
        return self.server.port(use)

    @property
    def links(self) -> str:
        """Where clients and agents find the server."""
        return f"127.0.0.1:{self.port('links')}"

    def client(self, use: str) -> socket.socket:
        """A client's connection to the server, on which nothing was said yet."""
        return self.clients.enter_context(connect(self.port(use)))

    def open(self, way: str, port: int) -> socket.socket:
        """A stream to a target on loopback; by ``forward`` it is the one that the forward leads to."""
        sock = self.client(way)
        if way == "connect":
            sock.sendall(connect_head("127.0.0.1", port))
            assert read_head(sock).startswith(b"HTTP/1.1 200 ")
        return sock

    def refused(self, port: int, host: str = "127.0.0.1") -> tuple[int, str]:
        """Status and text of the answer to a CONNECT that cannot be served."""
        with connect(self.port("connect")) as sock:
            sock.sendall(connect_head(host, port))
            return read_refusal(sock)

    def descriptors(self) -> list[int]:
        """How many are open in the server and each agent."""
        return [program.descriptors() for program in (self.server, *self.agents)]

    def memory(self) -> list[int]:
        """Bytes held by the server and each agent."""
        return [program.memory() for program in (self.server, *self.agents)]


NewTunnel = Callable[..., Tunnel]
StartForward = Callable[..., Program]
StartStdio = Callable[..., Stdio]
StartSocks = Callable[..., int]
