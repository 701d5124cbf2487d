"""The command line: what people type, turned into the config objects that the programs take.

Rules that hold here:

- The programs are imported when they are to run, so that ``--help`` and ``--version`` answer at once.

This file must not know what the programs do: it has them run and passes the exit code on.
"""

from __future__ import annotations

import os

import click

from tunnel import __version__, operating
from tunnel.address import Identifier, ListenAddress, Target
from tunnel.certificates import ClientTls, ServerTls
from tunnel.config import (
    LOWEST_PRIORITY,
    STRATEGIES,
    AdminConfig,
    AgentConfig,
    Claims,
    ClientConfig,
    Forward,
    ServerConfig,
    check_exposed,
    parse_strategies,
)
from tunnel.limits import Timeouts
from tunnel.options import (
    AGENT_NAME,
    DEFAULTS,
    DESTINATION,
    DURATION,
    SEVERAL,
    Parsed,
    Program,
    admin_options,
    begin,
    budget,
    config_file,
    ends_by_signal,
    log_options,
    option,
    tls_options,
    token_file,
)
from tunnel.patterns import Pattern, Rules

_listen = Parsed("address", ListenAddress.parse)
_connect = Parsed("address", lambda text: None if text == "off" else ListenAddress.parse(text))
_forward = Parsed("forward", Forward.parse)
_target = Parsed("address", Target.parse)
_identifier = Parsed("identifier", Identifier.parse)
_pattern = Parsed("pattern", Pattern.parse)
_strategies = Parsed("strategies", parse_strategies)


@click.group("tunnel", cls=Program, context_settings={"auto_envvar_prefix": "TUNNEL", "show_default": True})
@click.version_option(__version__, message="%(prog)s %(version)s")
@config_file
def program() -> None:
    """Reach services in private networks, through agents that dial out of them.

    A flag counts before its variable, the variable before the file, the file before the default.
    """


@program.command("server")
@option("--listen", type=_listen, metavar="HOST:PORT", default=str(DEFAULTS.listen), help="Links arrive here.")
@option(
    "--connect",
    type=_connect,
    metavar="HOST:PORT|off",
    default=str(DEFAULTS.connect),
    help="The HTTP CONNECT front-end listens here.",
)
@option(
    "--forward",
    type=_forward,
    metavar="LISTEN=TARGET[@AGENT]",
    multiple=True,
    help=f"A local port that leads to a target, like 5432=db.internal:5432; @AGENT: through that one. {SEVERAL}",
)
@option(
    "--dial-timeout",
    type=DURATION,
    metavar="DURATION",
    default=f"{DEFAULTS.dial_timeout:g}s",
    help="How long a stream may take to open: 500ms, 30s, 5m.",
)
@option(
    "--strategy",
    type=_strategies,
    metavar="LIST",
    default=",".join(STRATEGIES),
    help="How agents are matched to a target, in the order tried.",
)
@option(
    "--server-count",
    type=click.IntRange(1),
    metavar="N",
    default=DEFAULTS.server_count,
    help="How many servers there are behind each name that agents dial; they link to each.",
)
@option(
    "--lame-duck",
    type=DURATION,
    metavar="DURATION",
    default=f"{DEFAULTS.lame_duck:g}s",
    help="When told to leave, go on as before for so long, a part of the budget, while others learn of it.",
)
@option(
    "--drain-fallback",
    type=click.Choice(["allow", "deny"]),
    default="allow",
    help="Whether a draining agent serves what no other agent can.",
)
@budget
@token_file("Of these, agents and clients must prove to know one; operators show one of the role admin.")
@option("--tls-cert", metavar="FILE", help="Take links over TLS only, with this certificate.")
@option("--tls-key", metavar="FILE", help="Its key, which nobody but you may use.")
@option("--tls-client-ca", metavar="FILE", help="Whose certificates agents and clients must have.")
@option(
    "--connect-auth",
    metavar="FILE",
    help="Whoever uses CONNECT must be in this file of NAME:PASSWORD lines; nobody but you may use it.",
)
@option("--insecure", is_flag=True, help="Serve addresses that others can reach, though nobody proves who they are.")
@admin_options(7402)
@log_options
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
    token_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    tls_client_ca: str | None,
    connect_auth: str | None,
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
        token_file=token_file,
        tls=_server_tls(tls_cert, tls_key, tls_client_ca),
        connect_auth=connect_auth,
        timeouts=Timeouts(shutdown=shutdown_budget),
    )
    _check_exposed(config.exposed(), insecure, log_level, log_format)
    from tunnel import programs

    raise SystemExit(programs.run_server(config))


def _server_tls(cert: str | None, key: str | None, client_ca: str | None) -> ServerTls | None:
    if cert and key:
        return ServerTls(cert, key, client_ca)
    if cert or key or client_ca:
        raise click.UsageError("--tls-cert and --tls-key go together, and --tls-client-ca with them")
    return None


@program.command("agent")
@option(
    "--server",
    type=_target,
    metavar="HOST:PORT",
    multiple=True,
    required=True,
    help=f"Where to link to servers; a name may stand for several. {SEVERAL}",
)
@option(
    "--name",
    type=AGENT_NAME,
    metavar="NAME",
    default=lambda: os.uname().nodename,
    show_default="the host name",
    help="How this agent is called.",
)
@option(
    "--identifier",
    type=_identifier,
    metavar="KIND=VALUE",
    multiple=True,
    help="A host that it serves: host=db.internal, ipv4=10.0.0.7, ipv6=2001:db8::7, suffix=.svc.local, "
    f"cidr=10.1.0.0/16. {SEVERAL}",
)
@option("--default-route", is_flag=True, help="Serve whatever no agent's identifier matches.")
@option(
    "--priority",
    type=click.IntRange(0, LOWEST_PRIORITY),
    metavar="N",
    default=0,
    help="0 serves first; others when no agent of a lower number that matches is active.",
)
@option(
    "--exit-on-failure",
    is_flag=True,
    help="Exit with 5, rather than try again, when no server takes it at first, or one refuses it for good.",
)
@option(
    "--allow",
    type=_pattern,
    metavar="PATTERN",
    multiple=True,
    help=f"Connect to nothing else: db.internal, *.svc.local, 10.0.0.0/8, any with :PORT or :FIRST-LAST. {SEVERAL}",
)
@option(
    "--deny",
    type=_pattern,
    metavar="PATTERN",
    multiple=True,
    help=f"Never connect to this, whatever --allow says, nor to a name that leads there. {SEVERAL}",
)
@token_file("Holds the token that it shows to servers, and those that operators show to it.")
@tls_options
@budget
@admin_options(7403)
@log_options
def _agent(
    server: tuple[Target, ...],
    name: str,
    identifier: tuple[Identifier, ...],
    default_route: bool,
    priority: int,
    exit_on_failure: bool,
    allow: tuple[Pattern, ...],
    deny: tuple[Pattern, ...],
    token_file: str | None,
    tls: ClientTls | None,
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
        token_file,
        tls,
        Rules(allow, deny),
        timeouts=Timeouts(shutdown=shutdown_budget),
    )
    begin(log_level, log_format)
    from tunnel import programs

    raise SystemExit(programs.run_agent(config))


_servers = option(
    "--server",
    type=_target,
    metavar="HOST:PORT",
    multiple=True,
    required=True,
    help=f"Where to find a server; of several, the first that can be linked to. {SEVERAL}",
)


_own_token = token_file("Holds the token that it shows to servers.")


@program.command("forward", short_help="Listen on local ports that lead to targets.")
@click.argument("forwards", type=_forward, metavar="LISTEN=TARGET[@AGENT]...", nargs=-1, required=True)
@_servers
@_own_token
@tls_options
@budget
@option(
    "--insecure", is_flag=True, help="Listen on addresses that others can reach, though nobody proves who they are."
)
@log_options
def _forward_ports(
    forwards: tuple[Forward, ...],
    server: tuple[Target, ...],
    token_file: str | None,
    tls: ClientTls | None,
    shutdown_budget: float,
    insecure: bool,
    log_level: str,
    log_format: str,
) -> None:
    """Listen on local ports that lead to targets, like 5432=db.internal:5432; with @AGENT, through that one."""
    exposed = [str(forward) for forward in forwards if not forward.listen.is_loopback]
    _check_exposed(exposed, insecure, log_level, log_format)
    from tunnel import programs

    config = ClientConfig(server, token_file=token_file, tls=tls, timeouts=Timeouts(shutdown=shutdown_budget))
    raise SystemExit(programs.run_forwarder(config, forwards))


@program.command("connect", short_help="Connect standard input and output to a target.")
@click.argument("target", type=DESTINATION, metavar="TARGET[@AGENT]")
@_servers
@_own_token
@tls_options
@ends_by_signal
def _connect_stdio(
    target: tuple[Target, str | None], server: tuple[Target, ...], token_file: str | None, tls: ClientTls | None
) -> None:
    """Connect standard input and output to a target, as for ssh -o ProxyCommand='tunnel connect %h:%p ...'.

    Ends with 0 when both directions have ended, 1 when the stream was reset, 69 when the target cannot be reached, 75
    when that may work later.
    """
    begin("error", "auto")
    from tunnel import stdio

    raise SystemExit(stdio.run(ClientConfig(server, token_file=token_file, tls=tls), *target))


@program.command("demo")
@ends_by_signal
def _demo() -> None:
    """Show it all in one process, on loopback and free ports."""
    begin("error", "auto")
    from tunnel import demo

    raise SystemExit(demo.run())


def _check_exposed(exposed: list[str], insecure: bool, log_level: str, log_format: str) -> None:
    """Set up the log; its first line is what strangers can reach, if they may at all."""
    check_exposed(exposed, insecure)
    begin(log_level, log_format)
    if exposed:
        from tunnel import logs

        logs.get_logger(__name__).warning("insecure", exposed=", ".join(exposed))


for _command in operating.COMMANDS:
    program.add_command(_command)


def main() -> None:
    """Run the program ``tunnel``; does not return."""
    program(prog_name="tunnel")
