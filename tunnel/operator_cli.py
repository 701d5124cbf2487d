"""The commands that operate a program that runs: look at it, drain it, ask it why.

Rules that hold here:

- A program that cannot be reached is one line and exit 69, an error that it answers with one line and exit 1.
- With ``--json`` the answer is printed as it came, a line for each; texts for people go to stderr then, if at all.
- Ctrl-C ends the looking, and nothing else.

This file must not know how options are declared.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn
from urllib.parse import quote

import click

from tunnel.address import Target
from tunnel.configfile import Problem
from tunnel.follow import Following, Outcome, Seen
from tunnel.remote import AdminRefused, NoAdmin, Remote, RemoteError
from tunnel.tables import Part, Table, amount, clean, duration, on_terminal, show, updating

EXIT_REFUSED = 1
EXIT_NOT_TAKEN = 2
EXIT_NO_SUCH_AGENT = 5
EXIT_NO_ADMIN = 69
EXIT_STOPPED_WATCHING = 130

_REFRESH = 1.0  # seconds between two looks
_RETRY = 0.2  # seconds before the next look, when there was nothing to see


def _fail(text: str, code: int) -> NoReturn:
    click.echo(f"Error: {clean(text)}", err=True)
    raise SystemExit(code)


@contextmanager
def _failures(not_found: int = EXIT_REFUSED) -> Iterator[None]:
    try:
        yield
    except NoAdmin as error:
        _fail(f"no answer from {error}", EXIT_NO_ADMIN)
    except AdminRefused as error:
        _fail(str(error), not_found if error.code == "not_found" else EXIT_REFUSED)


def _print_json(answer: object) -> None:
    click.echo(json.dumps(answer))


# -- looking


def status(remote: Remote, *, watch: bool, as_json: bool) -> None:
    """What the program is, whether it is ready, and its agents; with ``watch`` again and again, until Ctrl-C."""
    if watch:
        _watch(remote, as_json)
        return
    with _failures():
        state = _State.of(remote)
    if as_json:
        _print_json(state.as_json())
    else:
        show(*state.parts())


def _watch(remote: Remote, as_json: bool) -> None:
    parts: list[Part] = []
    with suppress(KeyboardInterrupt), updating(live=not as_json) as update:
        while True:
            try:
                state = _State.of(remote)
                parts, answer = state.parts(), state.as_json()
                shown = parts
            except RemoteError as error:  # it may come back
                answer, shown = {"unreachable": str(error)}, [f"no answer from {error}", *parts]
            if as_json:
                _print_json(answer)
            else:
                update(*shown)
            time.sleep(_REFRESH)


@dataclass(frozen=True, slots=True)
class _State:
    """A program at one moment; ``agents`` is None on an agent, which has none."""

    where: str
    drain: Mapping[str, Any]
    ready: Mapping[str, Any]
    agents: Sequence[Mapping[str, Any]] | None

    @classmethod
    def of(cls, remote: Remote) -> _State:
        drain, ready = remote.get("/api/v1/drain"), remote.get("/api/v1/ready")
        agents = remote.get("/api/v1/agents")["agents"] if drain["role"] == "server" else None
        return cls(str(remote.address), drain, ready, agents)

    def as_json(self) -> dict[str, object]:
        of_agents = {} if self.agents is None else {"agents": self.agents}
        return {"drain": self.drain, "ready": self.ready, **of_agents}

    def parts(self) -> list[Part]:
        drain, reasons = self.drain, ", ".join(self.ready["reasons"])
        name = drain["role"] if drain["role"] == drain["name"] else f"{drain['role']} {drain['name']}"
        ready = "ready for new work" if self.ready["ready"] else "not ready for new work"
        head: list[Part] = [
            f"{name} at {self.where}, instance {drain['instance']}",
            f"{drain['state']}: {ready}" + (f" ({reasons})" if reasons else ""),
            f"{drain['open']} open, {drain['pending']} pending, oldest {duration(drain['oldest_s'])}",
        ]
        if self.agents is None:
            return [*head, f"links to servers: {drain['servers']}"]
        return [*head, "", _agents_table(self.agents)]


def agents(remote: Remote, *, as_json: bool) -> None:
    """The agents of a server."""
    with _failures():
        answer = remote.get("/api/v1/agents")
        table = _agents_table(answer["agents"])
    if as_json:
        _print_json(answer)
    else:
        show(table)


def _agents_table(views: Sequence[Mapping[str, Any]]) -> Part:
    if not views:
        return "no agent is linked"
    columns = ("AGENT", "STATE", ">STREAMS", ">SENT", ">RECEIVED", ">RTT", ">SINCE")
    return Table(columns, [_agent_row(view) for view in views])


def _agent_row(view: Mapping[str, Any]) -> tuple[str, ...]:
    rtt = view["rtt_ms"]
    return (
        view["name"],
        Seen.agent(view).state if view["drain"] else view["state"],
        str(view["streams"]),
        amount(view["sent"]),
        amount(view["received"]),
        "-" if rtt is None else f"{rtt:.1f}ms",
        duration(view["since_s"]),
    )


def explain(remote: Remote, target: Target, agent: str | None, *, as_json: bool) -> None:
    """How a target finds its agent, and what else was considered."""
    with _failures():
        answer = remote.get("/api/v1/explain", target=str(target), agent=agent)
        parts = _explained(answer)
    if as_json:
        _print_json(answer)
    else:
        show(*parts)


def _explained(answer: Mapping[str, Any]) -> list[Part]:
    asked = answer["target"] + (f"@{answer['agent']}" if answer["agent"] else "")
    decision = answer["decision"]
    if decision is None:
        return [f"{asked}: nobody; no agent that is linked matches"]
    fallback = ", as a fallback: it is draining" if decision["fallback"] else ""
    by = f"by {decision['strategy']}, {decision['key']}"
    rows = [_candidate_row(match, each) for match in answer["considered"] for each in match["candidates"]]
    columns = ("STRATEGY", "KEY", "AGENT", "INSTANCE", "STATE", ">PRIORITY", ">STREAMS", "VERDICT")
    chosen = f"{asked}: {decision['agent']} (instance {decision['instance'][:8]}), {by}{fallback}"
    return [chosen, "", Table(columns, rows)]


def _candidate_row(match: Mapping[str, Any], candidate: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        match["strategy"],
        match["key"],
        candidate["agent"],
        candidate["instance"][:8],
        candidate["state"],
        str(candidate["priority"]),
        str(candidate["streams"]),
        candidate["verdict"],
    )


# -- draining


@dataclass(frozen=True, slots=True)
class Drained:
    """Whose drain it is: that of all agents of a name at their server, or that of the program itself without one."""

    remote: Remote
    agent: str | None = None
    path: str = field(init=False)

    def __post_init__(self) -> None:
        of_agent = f"/agents/{quote(self.agent, safe='')}" if self.agent is not None else ""
        object.__setattr__(self, "path", f"/api/v1{of_agent}/drain")

    def __str__(self) -> str:
        return self.agent or str(self.remote.address)

    def seen(self, answer: Mapping[str, Any]) -> list[Seen]:
        """What an answer about it shows."""
        return [Seen.itself(answer)] if self.agent is None else [Seen.agent(view) for view in answer["agents"]]

    def following(self, answer: Mapping[str, Any], *, leaves: bool) -> Following:
        """From the answer to what it was told. A program that is gone itself does not link again."""
        if self.agent is None:
            return Following(self.seen(answer), leaves=leaves, patience=0, relinking=0)
        return Following(self.seen(answer), leaves=leaves)

    def look(self, since: str | None, wait: float) -> tuple[str | None, list[Seen]]:
        """What there is to see when it is not ``since`` any more, or after so many seconds.

        Raises:
            RemoteError: nothing could be seen.
        """
        try:
            answer = self.remote.get(self.path, wait, since=since)
        except AdminRefused as error:
            if error.code != "not_found":
                raise
        except NoAdmin as error:
            if self.agent is not None or not error.nobody:
                raise
        else:
            return answer["rev"], self.seen(answer)
        return None, []


def drain(drained: Drained, reason: str | None, *, leave: bool, wait: float | None, as_json: bool) -> int:
    """Tell it to drain, and follow that for ``wait`` seconds; the exit code."""
    body: dict[str, object] = {"exit": leave} | ({"reason": reason} if reason else {})
    with _failures(EXIT_NO_SUCH_AGENT):
        answer = drained.remote.put(drained.path, body)
        following = drained.following(answer, leaves=leave)
    if wait is not None:
        return _follow(drained, following, wait, as_json)
    if as_json:
        _print_json(answer)
    else:
        show(_told(drained, "drain", len(drained.seen(answer))))
    return 0


def undrain(drained: Drained, *, as_json: bool) -> None:
    """Tell it to stay after all."""
    with _failures(EXIT_NO_SUCH_AGENT):
        answer = drained.remote.delete(drained.path)
        told = 1 if drained.agent is None else answer["told"]
    if as_json:
        _print_json(answer)
    else:
        show(_told(drained, "stay", told))


def _told(drained: Drained, what: str, processes: int) -> str:
    return f"{drained}: told to {what}" + (f" ({processes} processes)" if processes > 1 else "")


def _follow(drained: Drained, following: Following, seconds: float, as_json: bool) -> int:
    try:
        with updating(live=not as_json) as update:
            outcome = _until_certain(drained, following, seconds, _progress(drained, following, as_json, update))
            if as_json:
                _print_json({**following.as_json(), "outcome": outcome.name.lower()})
            else:
                update(f"{drained}: {_concluded(outcome, following, seconds)}")
    except KeyboardInterrupt:
        back = "" if drained.agent is None else f"; tunnel undrain {drained} takes it back"
        click.echo(f"stopped watching; the drain of {drained} goes on{back}", err=True)
        return EXIT_STOPPED_WATCHING
    return outcome.value


def _progress(drained: Drained, following: Following, as_json: bool, update: Callable[..., None]) -> Callable[[], None]:
    """What shows how far it is: always where a line is replaced, only what is news where lines are added."""
    said = ""

    def progress() -> None:
        nonlocal said
        news, said = str(following) != said, str(following)
        if as_json and news:
            _print_json(following.as_json())
        elif not as_json and (news or on_terminal()):
            update(f"{drained}: {following}, oldest {duration(following.oldest_s)}")

    return progress


def _until_certain(drained: Drained, following: Following, seconds: float, progress: Callable[[], None]) -> Outcome:
    since: str | None = None
    deadline = time.monotonic() + seconds
    while True:
        now = time.monotonic()
        outcome = following.outcome(now)
        if outcome:
            return outcome
        progress()
        if now >= deadline:
            return Outcome.TIMED_OUT
        since = _look(drained, following, since, min(_REFRESH, deadline - now))


def _look(drained: Drained, following: Following, since: str | None, wait: float) -> str | None:
    """Look once; what it was, for the next time. Where nothing answers as it should, only time may help."""
    try:
        rev, seen = drained.look(since, wait)
        following.saw(seen, time.monotonic())
    except RemoteError as error:
        rev = None
        following.saw_nothing(f"no answer from {error}" if isinstance(error, NoAdmin) else str(error))
    if rev is None:
        time.sleep(min(_RETRY, wait))
    return rev


def _concluded(outcome: Outcome, following: Following, seconds: float) -> str:
    match outcome:
        case Outcome.DRAINED:
            return "drained"
        case Outcome.UNDRAINED:
            return "not drained: it is active, since somebody else took the drain back"
        case Outcome.GONE:
            return f"went away before it was drained, with {following.left_behind} open"
        case Outcome.TIMED_OUT:
            return f"not drained within {duration(seconds)}, and the drain goes on; {following}"


# -- checking


def check(problems: Sequence[Problem], as_json: bool) -> int:
    """Show what is wrong with a file; the exit code."""
    if as_json:
        _print_json({"ok": not problems, "problems": [asdict(problem) for problem in problems]})
    else:
        show(*(map(str, problems) if problems else ["ok"]))
    return EXIT_NOT_TAKEN if problems else 0
