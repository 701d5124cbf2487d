"""The command line: what people type, turned into the config objects that the programs take.

Rules that hold here:

- Each option is declared once; the file's keys, the variables' names and the help follow from the declaration.
- flag > variable > file > default. Whatever cannot be used is named, with what is taken instead, and ends in exit 2.
- The programs are imported when they are to run, so that ``--help`` and ``--version`` answer at once.

This file must not know what the programs do: it calls their ``run()`` and passes the exit code on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import click

from tunnel import __version__, early
from tunnel.address import Identifier, ListenAddress, Target
from tunnel.config import (
    LOWEST_PRIORITY,
    STRATEGIES,
    AgentConfig,
    Claims,
    ClientConfig,
    Forward,
    ServerConfig,
    Timeouts,
    check_exposed,
    load_file,
    parse_agent_name,
    parse_destination,
    parse_duration,
    parse_strategies,
)
from tunnel.errors import ConfigError, first_of

_DEFAULTS = ServerConfig()


class Parsed(click.ParamType[Any]):
    """A text that one of our own parsers reads; its ConfigError becomes click's error, which names the flag."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a text; whatever else arrives has been parsed before."""
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class Program(click.Group):
    """The group of commands, with the two ends that click does not know."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command: a config that cannot be used is exit 2, Ctrl-C before the program takes care of it 130."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        except (KeyboardInterrupt, BaseExceptionGroup) as error:  # out of trio it may come in a group
            if isinstance(first_of(error), KeyboardInterrupt):
                raise SystemExit(130) from None
            raise


def _defaults_from_file(path: str) -> dict[str, dict[str, Any]]:
    """The file's contents as click's default map, which goes by parameter names: ``dial_timeout``."""
    known = {section: _keys(program.commands[section]) for section in ("server", "agent", "forward", "connect")}
    return {
        section: {key.replace("-", "_"): value for key, value in table.items()}
        for section, table in load_file(path, known).items()
    }


def _keys(command: click.Command) -> dict[str, type]:
    options = [param for param in command.params if isinstance(param, click.Option)]
    return {option.opts[0].removeprefix("--"): _value_type(option) for option in options}


def _value_type(option: click.Option) -> type:
    if option.multiple:
        return list
    return bool if option.is_flag else int if isinstance(option.type, click.IntRange) else str


def _set_defaults(ctx: click.Context, _param: click.Parameter, defaults: dict[str, Any] | None) -> None:
    ctx.default_map = defaults


def _ends_by_signal(command: Callable[..., None]) -> Callable[..., None]:
    """Of a command that does not take care of signals itself."""

    @wraps(command)
    def released(*arguments: Any, **options: Any) -> None:
        early.release()
        command(*arguments, **options)

    return released


_option = partial(click.option, show_envvar=True)
_listen = Parsed("address", ListenAddress.parse)
_connect = Parsed("address", lambda text: None if text == "off" else ListenAddress.parse(text))
_forward = Parsed("forward", Forward.parse)
_destination = Parsed("target", parse_destination)
_target = Parsed("address", Target.parse)
_duration = Parsed("duration", parse_duration)
_name = Parsed("name", parse_agent_name)
_identifier = Parsed("identifier", Identifier.parse)
_strategies = Parsed("strategies", parse_strategies)
_SEVERAL = "Repeatable; the variable takes several, separated by spaces."
_file = Parsed("file", _defaults_from_file)


_budget = _option(
    "--shutdown-budget",
    type=_duration,
    metavar="DURATION",
    default=f"{_DEFAULTS.timeouts.shutdown:g}s",
    help="From the signal to the exit; what is open when little of it is left is cut: 500ms, 30s, 5m.",
)


def _log_options(command: Callable[..., None]) -> Callable[..., None]:
    levels, formats = click.Choice(["debug", "info", "warning", "error"]), click.Choice(["auto", "logfmt", "json"])
    level = _option("--log-level", type=levels, default="info", help="The least grave events to show.")
    fmt = _option("--log-format", type=formats, default="auto", help="auto: logfmt on a terminal, json elsewhere.")
    return level(fmt(command))


@click.group("tunnel", cls=Program, context_settings={"auto_envvar_prefix": "TUNNEL", "show_default": True})
@click.version_option(__version__, message="%(prog)s %(version)s")
@_option(
    "--config",
    type=_file,
    metavar="FILE",
    callback=_set_defaults,
    expose_value=False,
    help="TOML with a section for each command, like [server]; keys are the flags without their dashes.",
)
def program() -> None:
    """Reach services in private networks, through agents that dial out of them.

    A flag counts before its variable, the variable before the file, the file before the default.
    """


@program.command("server")
@_option("--listen", type=_listen, metavar="HOST:PORT", default=str(_DEFAULTS.listen), help="Links arrive here.")
@_option(
    "--connect",
    type=_connect,
    metavar="HOST:PORT|off",
    default=str(_DEFAULTS.connect),
    help="The HTTP CONNECT front-end listens here.",
)
@_option(
    "--forward",
    type=_forward,
    metavar="LISTEN=TARGET[@AGENT]",
    multiple=True,
    help=f"A local port that leads to a target, like 5432=db.internal:5432; @AGENT: through that one. {_SEVERAL}",
)
@_option(
    "--dial-timeout",
    type=_duration,
    metavar="DURATION",
    default=f"{_DEFAULTS.dial_timeout:g}s",
    help="How long a stream may take to open: 500ms, 30s, 5m.",
)
@_option(
    "--strategy",
    type=_strategies,
    metavar="LIST",
    default=",".join(STRATEGIES),
    help="How agents are matched to a target, in the order tried.",
)
@_option(
    "--server-count",
    type=click.IntRange(1),
    metavar="N",
    default=_DEFAULTS.server_count,
    help="How many servers there are behind each name that agents dial; they link to each.",
)
@_option(
    "--lame-duck",
    type=_duration,
    metavar="DURATION",
    default=f"{_DEFAULTS.lame_duck:g}s",
    help="When told to leave, go on as before for so long, a part of the budget, while others learn of it.",
)
@_option(
    "--drain-fallback",
    type=click.Choice(["allow", "deny"]),
    default="allow",
    help="Whether a draining agent serves what no other agent can.",
)
@_budget
@_option("--insecure", is_flag=True, help="Serve addresses that others can reach, though nobody proves who they are.")
@_log_options
def _server(
    listen: ListenAddress,
    connect: ListenAddress | None,
    forward: tuple[Forward, ...],
    dial_timeout: float,
    strategy: tuple[str, ...],
    server_count: int,
    lame_duck: float,
    drain_fallback: str,
    shutdown_budget: float,
    insecure: bool,
    log_level: str,
    log_format: str,
) -> None:
    """Take links from agents, and open streams through them."""
    config = ServerConfig(
        listen=listen,
        connect=connect,
        forwards=forward,
        dial_timeout=dial_timeout,
        insecure=insecure,
        strategies=strategy,
        server_count=server_count,
        lame_duck=lame_duck,
        drain_fallback=drain_fallback == "allow",
        timeouts=Timeouts(shutdown=shutdown_budget),
    )
    _check_exposed(config.exposed(), insecure, log_level, log_format)
    from tunnel import server

    raise SystemExit(server.run(config))


@program.command("agent")
@_option(
    "--server",
    type=_target,
    metavar="HOST:PORT",
    multiple=True,
    required=True,
    help=f"Where to link to servers; a name may stand for several. {_SEVERAL}",
)
@_option(
    "--name",
    type=_name,
    metavar="NAME",
    default=lambda: os.uname().nodename,
    show_default="the host name",
    help="How this agent is called.",
)
@_option(
    "--identifier",
    type=_identifier,
    metavar="KIND=VALUE",
    multiple=True,
    help="A host that it serves: host=db.internal, ipv4=10.0.0.7, ipv6=2001:db8::7, suffix=.svc.local, "
    f"cidr=10.1.0.0/16. {_SEVERAL}",
)
@_option("--default-route", is_flag=True, help="Serve whatever no agent's identifier matches.")
@_option(
    "--priority",
    type=click.IntRange(0, LOWEST_PRIORITY),
    metavar="N",
    default=0,
    help="0 serves first; others when no agent of a lower number that matches is active.",
)
@_option(
    "--exit-on-failure",
    is_flag=True,
    help="Exit with 5, rather than try again, when no server takes it at first, or one refuses it for good.",
)
@_budget
@_log_options
def _agent(
    server: tuple[Target, ...],
    name: str,
    identifier: tuple[Identifier, ...],
    default_route: bool,
    priority: int,
    exit_on_failure: bool,
    shutdown_budget: float,
    log_level: str,
    log_format: str,
) -> None:
    """Link to servers, and reach targets for them."""
    config = AgentConfig(
        server,
        name,
        Claims(identifier, default_route, priority),
        exit_on_failure,
        timeouts=Timeouts(shutdown=shutdown_budget),
    )
    _log_to_stderr(log_level, log_format)
    from tunnel import agent

    raise SystemExit(agent.run(config))


_servers = _option(
    "--server",
    type=_target,
    metavar="HOST:PORT",
    multiple=True,
    required=True,
    help=f"Where to find a server; of several, the first that can be linked to. {_SEVERAL}",
)


@program.command("forward")
@click.argument("forwards", type=_forward, metavar="LISTEN=TARGET[@AGENT]...", nargs=-1, required=True)
@_servers
@_budget
@_option(
    "--insecure", is_flag=True, help="Listen on addresses that others can reach, though nobody proves who they are."
)
@_log_options
def _forward_ports(
    forwards: tuple[Forward, ...],
    server: tuple[Target, ...],
    shutdown_budget: float,
    insecure: bool,
    log_level: str,
    log_format: str,
) -> None:
    """Listen on local ports that lead to targets, like 5432=db.internal:5432; with @AGENT, through that one."""
    exposed = [str(forward) for forward in forwards if not forward.listen.is_loopback]
    _check_exposed(exposed, insecure, log_level, log_format)
    from tunnel import forwarder

    config = ClientConfig(server, timeouts=Timeouts(shutdown=shutdown_budget))
    raise SystemExit(forwarder.run(config, forwards))


@program.command("connect")
@click.argument("target", type=_destination, metavar="TARGET[@AGENT]")
@_servers
@_ends_by_signal
def _connect_stdio(target: tuple[Target, str | None], server: tuple[Target, ...]) -> None:
    """Connect standard input and output to a target, as for ssh -o ProxyCommand='tunnel connect %h:%p ...'.

    Ends with 0 when both directions have ended, 1 when the stream was reset, 69 when the target cannot be reached, 75
    when that may work later.
    """
    _log_to_stderr("error", "auto")
    from tunnel import stdio

    raise SystemExit(stdio.run(server, *target))


@program.command("demo")
@_ends_by_signal
def _demo() -> None:
    """Show it all in one process, on loopback and free ports."""
    _log_to_stderr("error", "auto")
    from tunnel import demo

    raise SystemExit(demo.run())


def _check_exposed(exposed: list[str], insecure: bool, log_level: str, log_format: str) -> None:
    """Set up the log; its first line is what strangers can reach, if they may at all."""
    check_exposed(exposed, insecure)
    _log_to_stderr(log_level, log_format)
    if exposed:
        from tunnel import logs

        logs.get_logger(__name__).warning("insecure", exposed=", ".join(exposed))


def _log_to_stderr(level: str, fmt: str) -> None:
    from tunnel import logs

    logs.configure(level, fmt)


def main() -> None:
    """Run the program ``tunnel``; does not return."""
    program(prog_name="tunnel")
