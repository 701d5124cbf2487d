"""A TCP tunnel: agents dial out to a server, many streams share each link, draining loses nothing.

The names below are the library; everything else may change without notice. Each is imported when it is first used, so
that the command line starts without what it does not need.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunnel.address import Identifier, ListenAddress, Target
    from tunnel.agent import Agent
    from tunnel.certificates import ClientTls, ServerTls
    from tunnel.client import Client, dial, open_client
    from tunnel.config import AgentConfig, Claims, ClientConfig, Forward, ServerConfig
    from tunnel.dials import Service
    from tunnel.errors import (
        AddressError,
        ConfigError,
        Denied,
        DialError,
        DialProtocolError,
        DialTimeout,
        DnsError,
        LinkLost,
        NoBackend,
        NoServer,
        Refused,
        RefusedDraining,
        StreamReset,
        TooMany,
        TunnelError,
        Unreachable,
    )
    from tunnel.limits import Limits, Timeouts
    from tunnel.listen import BindError
    from tunnel.patterns import Pattern, Rules
    from tunnel.pumps import pump
    from tunnel.server import Server
    from tunnel.stream import TunnelStream

__version__ = "0.1.0"

__all__ = [
    "AddressError",
    "Agent",
    "AgentConfig",
    "BindError",
    "Claims",
    "Client",
    "ClientConfig",
    "ClientTls",
    "ConfigError",
    "Denied",
    "DialError",
    "DialProtocolError",
    "DialTimeout",
    "DnsError",
    "Forward",
    "Identifier",
    "Limits",
    "LinkLost",
    "ListenAddress",
    "NoBackend",
    "NoServer",
    "Pattern",
    "Refused",
    "RefusedDraining",
    "Rules",
    "Server",
    "ServerConfig",
    "ServerTls",
    "Service",
    "StreamReset",
    "Target",
    "Timeouts",
    "TooMany",
    "TunnelError",
    "TunnelStream",
    "Unreachable",
    "dial",
    "open_client",
    "pump",
]

_ROOMS = (
    "errors",
    "address",
    "patterns",
    "certificates",
    "limits",
    "config",
    "stream",
    "listen",
    "pumps",
    "client",
    "dials",
    "agent",
    "server",
)  # lower floors first


def __getattr__(name: str) -> object:
    if name in __all__:
        for room in _ROOMS:
            module = _import_module(f"tunnel.{room}")
            if hasattr(module, name):
                return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module 'tunnel' has no attribute {name!r}")
