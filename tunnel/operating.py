"""The commands that operate what runs, as people type them.

Rules that hold here:

- What does the work is imported when it is wanted, so that the programs do not pay for it.

This file must not know HTTP, or what answers mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tunnel.address import Target
from tunnel.options import (
    AGENT_NAME,
    DESTINATION,
    DURATION,
    SEVERAL,
    Operating,
    OperatingGroup,
    Parsed,
    commands,
    ends_by_signal,
    file_keys,
    option,
    rehearse,
    token_file,
)

if TYPE_CHECKING:
    from tunnel.remote import Remote


def _admin_url(text: str) -> Any:
    from tunnel.remote import AdminUrl

    return AdminUrl.parse(text)


_admin = option(
    "--admin",
    type=Parsed("URL", _admin_url),
    metavar="URL",
    default="http://127.0.0.1:7402",
    help="The program's admin API: http://HOST:PORT, HOST:PORT or unix:/PATH. Agents have theirs on port 7403.",
)
_json = option("--json", is_flag=True, help="Print what comes for programs: JSON, a line for each answer.")
_token_file = token_file("Holds the admin token, if the program wants one.")


@click.command("status", cls=Operating)
@_admin
@option("--watch", is_flag=True, help="Look again each second, until Ctrl-C; also when it goes away and comes back.")
@_json
@ends_by_signal
def _status(admin: Any, watch: bool, json: bool) -> None:
    """Show how a server or an agent is, and who is linked."""
    from tunnel import operator_cli
    from tunnel.remote import Remote

    operator_cli.status(Remote(admin), watch=watch, as_json=json)


@click.command("agents", cls=Operating)
@_admin
@_json
@ends_by_signal
def _agents(admin: Any, json: bool) -> None:
    """List the agents that are linked to a server."""
    from tunnel import operator_cli
    from tunnel.remote import Remote

    operator_cli.agents(Remote(admin), as_json=json)


def _shown_to(admin: Any, path: str | None) -> Remote:
    """The program, and the token that it is shown."""
    from tunnel.credentials import of_role, read_tokens
    from tunnel.remote import Remote

    return Remote(admin, of_role("admin", read_tokens(path, own="admin"))[0] if path else None)


def _itself(text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return option("--self", "itself", is_flag=True, show_envvar=False, allow_from_autoenv=False, help=text)


def _check_whose(agent: str | None, itself: bool) -> None:
    if (agent is None) is not itself:
        raise click.UsageError("say whose drain is meant: either AGENT, or --self")


@click.command("drain", cls=Operating)
@click.argument("agent", type=AGENT_NAME, required=False)
@_itself("Drain the program behind --admin itself; a server only with --exit.")
@option("--wait", is_flag=True, help="Show how far it is, until it is certain how it ended.")
@option("--timeout", type=DURATION, metavar="DURATION", default="10m", help="For how long to --wait.")
@option("--reason", metavar="TEXT", help="Why, for the log.")
@option("--exit", "leave", is_flag=True, envvar="TUNNEL_DRAIN_EXIT", help="Exit when drained.")
@_admin
@_token_file
@_json
@ends_by_signal
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

    Ends with 0 when they are drained, or without --wait when they were told; 1 for an answer that is an error; 2 for a
    bad flag; 3 when the time is over;
    4 when somebody else undrained them; 5 if there is no such agent; 6 when one went away with something open; 69 if
    nobody answers at first; 130 at Ctrl-C.
    """
    _check_whose(agent, itself)
    if not wait and click.get_current_context().get_parameter_source("timeout") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--timeout means nothing without --wait")
    from tunnel import operator_cli

    drained = operator_cli.Drained(_shown_to(admin, token_file), agent)
    seconds = timeout if wait else None
    raise SystemExit(operator_cli.drain(drained, reason, leave=leave, wait=seconds, as_json=json))


@click.command("undrain", cls=Operating)
@click.argument("agent", type=AGENT_NAME, required=False)
@_itself("Have the program behind --admin itself stay.")
@_admin
@_token_file
@_json
@ends_by_signal
def _undrain(agent: str | None, itself: bool, admin: Any, token_file: str | None, json: bool) -> None:
    """Have all agents of a name take new dials again."""
    _check_whose(agent, itself)
    from tunnel import operator_cli

    operator_cli.undrain(operator_cli.Drained(_shown_to(admin, token_file), agent), as_json=json)


@click.command("explain", cls=Operating)
@click.argument("target", type=DESTINATION, metavar="TARGET[@AGENT]")
@_admin
@_json
@ends_by_signal
def _explain(target: tuple[Target, str | None], admin: Any, json: bool) -> None:
    """Show which agent would serve a target now, and why."""
    from tunnel import operator_cli
    from tunnel.remote import Remote

    operator_cli.explain(Remote(admin), *target, as_json=json)


@click.command("check", cls=Operating)
@click.argument("file", type=click.Path(dir_okay=False), metavar="FILE")
@_json
@ends_by_signal
def _check(file: str, json: bool) -> None:
    """Check a configuration file, and name each problem.

    Prints ok and ends with 0, or each problem with its line and ends with 2. Variables and flags are left out.
    """
    from tunnel import check, operator_cli

    known = commands(click.get_current_context())
    found = check.problems(file, known, file_keys(known), lambda section, table: rehearse(known[section], table))
    raise SystemExit(operator_cli.check(found, json))


@click.group("token", cls=OperatingGroup, short_help="Make tokens, for proving who one is.")
def _token() -> None:
    """Make tokens, with which agents, clients and operators prove who they are."""


@_token.command("new", short_help="Print a new token.")
@click.argument("token_id", metavar="ID")
@option("--role", type=click.Choice(["agent", "client", "admin"]), required=True, help="Who is to have it.")
@option("--agent", multiple=True, metavar="NAME", help=f"Of an agent: what it may call itself, like edge-*. {SEVERAL}")
@option("--identifier", multiple=True, metavar="KIND=VALUE", help=f"What it may claim; default-route, or *. {SEVERAL}")
@option("--target", multiple=True, metavar="HOST:PORTS", help=f"Of a client: what it may ask for. {SEVERAL}")
@ends_by_signal
def _token_new(
    token_id: str, role: str, agent: tuple[str, ...], identifier: tuple[str, ...], target: tuple[str, ...]
) -> None:
    """Print a new token, for the files of those who are to know it: tunnel token new ... >> tokens.toml."""
    from tunnel.credentials import new_token

    lists = {"agents": agent, "identifiers": identifier, "targets": target}
    click.echo(new_token(token_id, role, lists), nl=False)


COMMANDS = (_status, _agents, _drain, _undrain, _explain, _check, _token)
