"""How options are declared, for all commands: what their texts mean, and where values come from.

Rules that hold here:

- Each option is declared once; the file's keys, the variables' names and the help follow from the declaration.
- flag > variable > file > default. Whatever cannot be used is named, with what is taken instead, and ends in exit 2.

This file must not know which commands there are, beyond the sections that a file may have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource

from tunnel import early
from tunnel.certificates import ClientTls
from tunnel.config import (
    AdminAddress,
    AdminConfig,
    ServerConfig,
    parse_admin_address,
    parse_agent_name,
    parse_destination,
    parse_duration,
)
from tunnel.errors import ConfigError, first_of

DEFAULTS = ServerConfig()
SECTIONS = ("server", "agent", "forward", "connect")
SEVERAL = "Repeatable; the variable takes several, separated by spaces."
_REHEARSAL = "tunnel.rehearsal"  # in the meta of a command's context
_INSTEAD = {  # of what is required, and may be missing in a file, by its name
    "server": ("--server", "localhost:1"),
    "forwards": ("0=localhost:1",),
    "target": ("localhost:1",),
}


if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # generic from 8.4 on


class Parsed(_ParamType):
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
            kinds = (Operating, OperatingGroup)
            names = [name for name, command in self.commands.items() if isinstance(command, kinds) is operating]
            limit = formatter.width - 6 - max(map(len, self.commands))
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit)) for name in names])


class Operating(click.Command):
    """A command that operates a program which runs elsewhere, or a file."""


class OperatingGroup(click.Group):
    """Several such commands."""


# -- files


def commands(ctx: click.Context) -> Mapping[str, click.Command]:
    """All commands of the program that runs, by name."""
    return cast(click.Group, ctx.find_root().command).commands


def file_keys(known: Mapping[str, click.Command]) -> dict[str, dict[str, type]]:
    """The keys that each section of a file may have, with the types of their values."""
    return {section: _keys(known[section]) for section in SECTIONS}


def default_map(table: Mapping[str, Any]) -> dict[str, Any]:
    """A section as click's defaults, which go by parameter names: ``dial_timeout``."""
    return {key.replace("-", "_"): value for key, value in table.items()}


def _set_defaults(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    if path is None:
        return
    from tunnel import configfile  # only who has a file pays for its reader

    try:
        tables = configfile.load(path, file_keys(commands(ctx)))
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    ctx.default_map = {section: default_map(table) for section, table in tables.items()}


def _keys(command: click.Command) -> dict[str, type]:
    options = [param for param in command.params if isinstance(param, click.Option)]
    return {option.opts[0].removeprefix("--"): _value_type(option) for option in options}


def _value_type(option: click.Option) -> type:
    if option.multiple:
        return list
    return bool if option.is_flag else int if isinstance(option.type, click.IntRange) else str


# -- what several commands have


def ends_by_signal(command: Callable[..., None]) -> Callable[..., None]:
    """Of a command that does not take care of signals itself."""

    @wraps(command)
    def released(*arguments: Any, **options: Any) -> None:
        early.release()
        command(*arguments, **options)

    return released


option = partial(click.option, show_envvar=True)
DESTINATION = Parsed("target", parse_destination)
DURATION = Parsed("duration", parse_duration)
AGENT_NAME = Parsed("name", parse_agent_name)
_OPERATOR = Parsed("address", parse_admin_address)


config_file = option(
    "--config",
    metavar="FILE",
    callback=_set_defaults,
    expose_value=False,
    help=f"TOML with a section for each of {', '.join(SECTIONS)}, like [server]; keys are the flags without dashes.",
)
budget = option(
    "--shutdown-budget",
    type=DURATION,
    metavar="DURATION",
    default=f"{DEFAULTS.timeouts.shutdown:g}s",
    help="From the signal to the exit; what is open when little of it is left is cut: 500ms, 30s, 5m.",
)


def log_options(command: Callable[..., None]) -> Callable[..., None]:
    levels, formats = (
        click.Choice(["trace", "debug", "info", "warning", "error"]),
        click.Choice(["auto", "logfmt", "json"]),
    )
    level = option("--log-level", type=levels, default="info", help="The least grave events to show.")
    fmt = option("--log-format", type=formats, default="auto", help="auto: logfmt on a terminal, json elsewhere.")
    return level(fmt(command))


def admin_options(default: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Options that arrive together, as ``admin``. The default address may be taken; one that was asked for may not."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def together(admin: AdminAddress | None, health: AdminAddress | None, **others: Any) -> None:
            asked_for = click.get_current_context().get_parameter_source("admin") is not ParameterSource.DEFAULT
            command(admin=AdminConfig(admin, asked_for, health), **others)

        return listen(health(together))

    listen = option(
        "--admin",
        type=_OPERATOR,
        metavar="HOST:PORT|unix:/PATH|off",
        default=f"127.0.0.1:{default}",
        help="Operators talk to it here: health, drain, metrics, a status page.",
    )
    health = option(
        "--health",
        type=_OPERATOR,
        metavar="HOST:PORT|unix:/PATH|off",
        default="off",
        help="The health paths alone, for probes from elsewhere.",
    )
    return decorate


def token_file(text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The option of that name; ``text`` says what the tokens in it are for."""
    return option("--token-file", metavar="FILE", help=f"{text} Nobody but you may use the file; see tunnel token new.")


def tls_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of those that dial servers, which arrive together, as ``tls``."""

    @wraps(command)
    def together(
        tls: bool, tls_ca: str | None, tls_cert: str | None, tls_key: str | None, tls_name: str | None, **others: Any
    ) -> None:
        files = (tls_ca, tls_cert, tls_key, tls_name)
        if any(files) and not tls:
            raise click.UsageError("--tls-ca, --tls-cert, --tls-key and --tls-name mean nothing without --tls")
        command(tls=ClientTls(*files) if tls else None, **others)

    flag = option("--tls", is_flag=True, help="Link over TLS.")
    ca = option("--tls-ca", metavar="FILE", help="Whose certificates servers must have; if not said, the system's.")
    cert = option("--tls-cert", metavar="FILE", help="Our certificate, for servers that want one.")
    key = option("--tls-key", metavar="FILE", help="Its key, which nobody but you may use.")
    name = option("--tls-name", metavar="HOST", help="For whom the certificate must be, if not for who is dialled.")
    return flag(ca(cert(key(name(together)))))


# -- beginning, and only seeming to


def begin(level: str, fmt: str) -> None:
    """Begin: all that the command was told is taken. That is all that a rehearsal wanted to know."""
    context = click.get_current_context()
    if context.meta.get(_REHEARSAL):
        context.exit()
    from tunnel import logs

    logs.configure(level, fmt)


def rehearse(command: click.Command, table: Mapping[str, Any]) -> None:
    """Run a command with what its section of a file says, up to where it would begin.

    Raises:
        click.UsageError, ConfigError: it would end with exit 2.
    """
    required = {param.name for param in command.params if param.required}
    words = [word for name in _INSTEAD if name in required and name not in table for word in _INSTEAD[name]]
    try:
        with command.make_context(command.name, words, default_map=default_map(table)) as context:
            context.meta[_REHEARSAL] = True
            command.invoke(context)
    except click.exceptions.Exit:
        return
