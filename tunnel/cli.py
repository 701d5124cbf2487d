"""The command line: what people type, turned into the config objects that the programs take.

Rules that hold here:

- Each option is declared once; the file's keys, the variables' names and the help follow from the declaration.
- flag > variable > file > default. Whatever cannot be used is named, with what is taken instead, and ends in exit 2.
- The programs are imported when they are to run, so that ``--help`` and ``--version`` answer at once.

This file must not know what the programs do: it calls their ``run()`` and passes the exit code on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import click
from click.core import ParameterSource

from tunnel import __version__, early
from tunnel.address import Identifier, ListenAddress, Target
from tunnel.config import (
    LOWEST_PRIORITY,
    STRATEGIES,
    AdminAddress,
    AdminConfig,
    AgentConfig,
    Claims,
    ClientConfig,
    Forward,
    ServerConfig,
    Timeouts,
    Token,
    check_exposed,
    load_file,
    parse_admin_address,
    parse_agent_name,
    parse_destination,
    parse_duration,
    parse_strategies,
    read_token,
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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the programs, and what operates them, each in the order of declaration."""
        for heading, operating in (("Programs", False), ("Operating them", True)):
            names = [name for name in self.commands if (name in _OPERATING) is operating]
            limit = formatter.width - 6 - max(map(len, self.commands))
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit)) for name in names])


def _defaults_from_file(path: str) -> dict[str, dict[str, Any]]:
    """The file's contents as click's default map, which goes by parameter names: ``dial_timeout``."""
    return {section: _default_map(table) for section, table in load_file(path, _file_keys()).items()}


def _file_keys() -> dict[str, dict[str, type]]:
    return {section: _keys(program.commands[section]) for section in ("server", "agent", "forward", "connect")}


def _default_map(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in table.items()}


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
_operator = Parsed("address", parse_admin_address)
_secret = Parsed("file", read_token)
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


def _admin_options(default: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Options that arrive together, as ``admin``. The default address may be taken; one that was asked for may not."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def together(
            admin: AdminAddress | None, health: AdminAddress | None, admin_token_file: Token | None, **others: Any
        ) -> None:
            asked_for = click.get_current_context().get_parameter_source("admin") is not ParameterSource.DEFAULT
            command(admin=AdminConfig(admin, asked_for, health, admin_token_file), **others)

        return listen(health(token(together)))

    listen = _option(
        "--admin",
        type=_operator,
        metavar="HOST:PORT|unix:/PATH|off",
        default=f"127.0.0.1:{default}",
        help="Operators talk to it here: health, drain, metrics, a status page.",
    )
    health = _option(
        "--health",
        type=_operator,
        metavar="HOST:PORT|unix:/PATH|off",
        default="off",
        help="The health paths alone, for probes from elsewhere.",
    )
    token = _option(
        "--admin-token-file",
        type=_secret,
        metavar="FILE",
        help="Who changes anything through --admin needs the token in this file; nobody but you may read it.",
    )
    return decorate


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
@_admin_options(7402)
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
    admin: AdminConfig,
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
        admin=admin,
        timeouts=Timeouts(shutdown=shutdown_budget),
    )
    _check_exposed(config.exposed(), insecure, log_level, log_format)
    from tunnel import programs

    raise SystemExit(programs.run_server(config))


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
@_admin_options(7403)
@_log_options
def _agent(
    server: tuple[Target, ...],
    name: str,
    identifier: tuple[Identifier, ...],
    default_route: bool,
    priority: int,
    exit_on_failure: bool,
    shutdown_budget: float,
    admin: AdminConfig,
    log_level: str,
    log_format: str,
) -> None:
    """Link to servers, and reach targets for them."""
    config = AgentConfig(
        server,
        name,
        Claims(identifier, default_route, priority),
        exit_on_failure,
        admin,
        timeouts=Timeouts(shutdown=shutdown_budget),
    )
    _log_to_stderr(log_level, log_format)
    from tunnel import programs

    raise SystemExit(programs.run_agent(config))


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
    from tunnel import programs

    config = ClientConfig(server, timeouts=Timeouts(shutdown=shutdown_budget))
    raise SystemExit(programs.run_forwarder(config, forwards))


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
    """Begin: all that the command was told is taken. That is all that a rehearsal wanted to know."""
    context = click.get_current_context()
    if context.meta.get(_REHEARSAL):
        context.exit()
    from tunnel import logs

    logs.configure(level, fmt)


# -- operating what runs


def _admin_url(text: str) -> Any:
    from tunnel.remote import AdminUrl

    return AdminUrl.parse(text)


def _token(path: str) -> str:
    from tunnel.remote import read_token

    return read_token(path)


_admin = _option(
    "--admin",
    type=Parsed("URL", _admin_url),
    metavar="URL",
    default="http://127.0.0.1:7402",
    help="The program's admin API: http://HOST:PORT, HOST:PORT or unix:/PATH. Agents have theirs on port 7403.",
)
_json = _option("--json", is_flag=True, help="Print what comes for programs: JSON, a line for each answer.")
_token_file = _option(
    "--token-file",
    type=Parsed("file", _token),
    metavar="FILE",
    help="The admin token, if the program wants one; nobody but you may read the file.",
)


@program.command("status")
@_admin
@_option("--watch", is_flag=True, help="Look again each second, until Ctrl-C; also when it goes away and comes back.")
@_json
@_ends_by_signal
def _status(admin: Any, watch: bool, json: bool) -> None:
    """Show how a server or an agent is, and who is linked."""
    from tunnel import operator_cli
    from tunnel.remote import Remote

    operator_cli.status(Remote(admin), watch=watch, as_json=json)


@program.command("agents")
@_admin
@_json
@_ends_by_signal
def _agents(admin: Any, json: bool) -> None:
    """List the agents that are linked to a server."""
    from tunnel import operator_cli
    from tunnel.remote import Remote

    operator_cli.agents(Remote(admin), as_json=json)


@program.command("drain")
@click.argument("agent", type=_name, required=False)
@_option(
    "--self",
    "itself",
    is_flag=True,
    envvar="TUNNEL_DRAIN_SELF",
    help="Drain the program behind --admin itself; a server only with --exit.",
)
@_option("--wait", is_flag=True, help="Show how far it is, until it is certain how it ended.")
@_option("--timeout", type=_duration, metavar="DURATION", default="10m", help="For how long to --wait.")
@_option("--reason", metavar="TEXT", help="Why, for the log.")
@_option("--exit", "leave", is_flag=True, envvar="TUNNEL_DRAIN_EXIT", help="Exit when drained.")
@_admin
@_token_file
@_json
@_ends_by_signal
def _drain(
    agent: str | None,
    itself: bool,
    wait: bool,
    timeout: float,
    reason: str | None,
    leave: bool,
    admin: Any,
    token_file: str | None,
    json: bool,
) -> None:
    """Have all agents of a name drain, on all their servers.

    Ctrl-C ends the waiting, not the drain; tunnel undrain takes it back.

    Ends with 0 when they are drained, or without --wait when they were told; 2 for a bad flag; 3 when the time is over;
    4 when somebody else undrained them; 5 if there is no such agent; 6 when one went away with something open; 69 if
    nobody answers at first; 130 at Ctrl-C.
    """
    if (agent is None) is not itself:
        raise click.UsageError("say which agents are to drain: either AGENT, or --self")
    from tunnel import operator_cli
    from tunnel.remote import Remote

    drained = operator_cli.Drained(Remote(admin, token_file), agent)
    seconds = timeout if wait else None
    raise SystemExit(operator_cli.drain(drained, reason, leave=leave, wait=seconds, as_json=json))


@program.command("undrain")
@click.argument("agent", type=_name)
@_admin
@_token_file
@_json
@_ends_by_signal
def _undrain(agent: str, admin: Any, token_file: str | None, json: bool) -> None:
    """Have all agents of a name take new dials again."""
    from tunnel import operator_cli
    from tunnel.remote import Remote

    operator_cli.undrain(operator_cli.Drained(Remote(admin, token_file), agent), as_json=json)


@program.command("explain")
@click.argument("target", type=_destination, metavar="TARGET[@AGENT]")
@_admin
@_json
@_ends_by_signal
def _explain(target: tuple[Target, str | None], admin: Any, json: bool) -> None:
    """Show which agent would serve a target now, and why."""
    from tunnel import operator_cli
    from tunnel.remote import Remote

    operator_cli.explain(Remote(admin), *target, as_json=json)


@program.command("check")
@click.argument("file", type=click.Path(dir_okay=False), metavar="FILE")
@_json
@_ends_by_signal
def _check(file: str, json: bool) -> None:
    """Check a configuration file, and name each problem.

    Prints ok and ends with 0, or each problem with its line and ends with 2. Variables and flags are left out.
    """
    from tunnel import check, operator_cli

    raise SystemExit(operator_cli.check(check.problems(file, program.commands, _file_keys(), _rehearse), json))


_OPERATING = ("status", "agents", "drain", "undrain", "explain", "check")
_REHEARSAL = "tunnel.rehearsal"  # in the meta of a command's context
_INSTEAD = {  # of what is required, and may be missing in a file, by its name
    "server": ("--server", "localhost:1"),
    "forwards": ("0=localhost:1",),
    "target": ("localhost:1",),
}


def _rehearse(section: str, table: Mapping[str, Any]) -> None:
    """Run a command with what its section of a file says, up to where it would begin.

    Raises:
        click.UsageError, ConfigError: it would end with exit 2.
    """
    command = program.commands[section]
    required = {param.name for param in command.params if param.required}
    words = [word for name in _INSTEAD if name in required and name not in table for word in _INSTEAD[name]]
    try:
        with command.make_context(section, words, default_map=_default_map(table)) as context:
            context.meta[_REHEARSAL] = True
            command.invoke(context)
    except click.exceptions.Exit:
        return


def main() -> None:
    """Run the program ``tunnel``; does not return."""
    program(prog_name="tunnel")
