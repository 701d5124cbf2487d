"""Metrics: what a scrape says, that Prometheus understands it, and that no name can break out or blow it up."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from house import House, echo, talks
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import wait_all_tasks_blocked

from tunnel import __version__
from tunnel.config import LONGEST_NAME
from tunnel.desk import AgentDesk, ServerDesk
from tunnel.metrics import FAMILIES, MOST_NAMES, OTHER, Collector, Family, Scrape
from tunnel.operate import AgentView, DrainView, Operated
from tunnel.tally import Histogram

DOCS = Path(__file__).parent.parent / "docs"

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(operated: Operated) -> Samples:
    """What Prometheus reads, by name and labels."""
    text = Scrape(Collector(operated)).text().decode()
    families = list(text_string_to_metric_families(text))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"tunnel_{name}", tuple(sorted(labels.items()))]


class Fleet:
    """A server with agents that a test makes up."""

    role = name = "server"
    instance = "i"
    version = "0"
    switched_off = False

    def __init__(self, agents: Iterable[AgentView] = (), **counts: Any) -> None:
        self._agents = list(agents)
        self._counts = counts

    def drain_view(self) -> DrainView:
        return DrainView("ready", (), 0, 0, 0.0, None, 0, 0)

    def counts(self) -> Any:
        return self._counts

    def agents(self) -> list[AgentView]:
        return self._agents


def fleet(agents: Iterable[AgentView] = (), **counts: Any) -> Operated:
    made_up: Any = Fleet(agents, **counts)
    operated: Operated = made_up
    return operated


def agent(name: str, state: str = "active", rtt_ms: float | None = None, said: str | None = None) -> AgentView:
    drain = None if said is None else DrainView(said, (), 0, 0, 0.0, None, 1, 1)
    return AgentView(name, "i", state, "127.0.0.1:1", 0.0, rtt_ms, 0, 0, 0, (), False, 0, drain)


# -- what is said


async def test_a_server_that_serves_says_so(house: House) -> None:
    await house.serve()
    await house.agent("one")
    service = await house.service(echo)
    assert await talks(await house.connect(service.target))
    samples = scraped(ServerDesk(house.server))
    assert value(samples, "info", role="server", version=__version__) == 1
    assert value(samples, "drain_state") == 0
    assert value(samples, "drain_state", agent="one") == 0
    assert value(samples, "open_streams") == 1
    assert value(samples, "pending_dials") == 0
    assert value(samples, "oldest_stream_seconds") > 0
    assert value(samples, "backends", state="active") == 1
    assert value(samples, "backends", state="draining") == 0
    assert value(samples, "dials_total", result="ok", backend_state="active") == 1
    assert value(samples, "dial_duration_seconds_count") == 1
    assert value(samples, "dial_duration_seconds_bucket", le="+Inf") == 1
    assert value(samples, "links") == 1
    assert value(samples, "bytes_total", direction="sent") == 5
    assert value(samples, "bytes_total", direction="received") == 5
    assert value(samples, "frames_total", direction="sent") == 1
    assert value(samples, "queued_bytes") == 0
    assert ("tunnel_drain_remaining_seconds", ()) not in samples


async def test_an_agent_that_serves_says_so(house: House) -> None:
    await house.serve()
    agent = await house.agent("one")
    service = await house.service(echo)
    assert await talks(await house.connect(service.target))
    refused = await house.ask(house.closed_port())
    await refused.receive_some()
    samples = scraped(AgentDesk(agent))
    assert value(samples, "info", role="agent", version=__version__) == 1
    assert value(samples, "drain_state") == 0
    assert value(samples, "open_streams") == 1
    assert value(samples, "dials_total", result="ok", backend_state="none") == 1
    assert value(samples, "dials_total", result="refused", backend_state="none") == 1
    assert value(samples, "links") == 1
    assert value(samples, "bytes_total", direction="sent") == 5
    assert value(samples, "bytes_total", direction="received") == 5


async def test_what_a_link_carried_is_not_forgotten_when_it_ends(house: House) -> None:
    await house.serve()
    agent = await house.agent("one")
    service = await house.service(echo)
    assert await talks(await house.connect(service.target))
    house.kill(agent)
    await house.idle()
    for desk in (ServerDesk(house.server), AgentDesk(agent)):
        samples = scraped(desk)
        assert value(samples, "links") == 0
        for direction in ("sent", "received"):
            assert value(samples, "bytes_total", direction=direction) == 5
            assert value(samples, "frames_total", direction=direction) >= 1


async def test_the_phases_of_an_operators_drain(house: House) -> None:
    await house.serve()
    agent = await house.agent("one")
    service = await house.service(echo)
    stream = await house.connect(service.target)
    agent.drain(seconds=60)
    await wait_all_tasks_blocked()
    samples = scraped(AgentDesk(agent))
    assert value(samples, "drain_state") == 1
    assert 0 < value(samples, "drain_remaining_seconds") <= 60
    assert value(scraped(ServerDesk(house.server)), "drain_state", agent="one") == 1
    await stream.aclose()
    await house.idle()
    await agent.life.open.wait_value(0)
    await wait_all_tasks_blocked()
    samples = scraped(AgentDesk(agent))
    assert value(samples, "drain_state") == 2
    assert value(samples, "drain_duration_seconds_count", outcome="drained") == 1
    agent.undrain()
    agent.drain()
    agent.undrain()
    samples = scraped(AgentDesk(agent))
    assert value(samples, "drain_state") == 0
    assert value(samples, "drain_duration_seconds_count", outcome="drained") == 1
    assert value(samples, "drain_duration_seconds_count", outcome="undone") == 1


@pytest.mark.parametrize(
    ("state", "said", "number"),
    [
        ("active", None, 0),
        ("draining", None, 1),
        ("draining", "draining", 1),
        ("draining", "drained", 2),
        ("draining", "stopping", 3),
        ("final", "stopping", 3),
        ("final", None, 3),
    ],
)
def test_how_far_an_agents_drain_is(state: str, said: str | None, number: float) -> None:
    assert value(scraped(fleet([agent("one", state, said=said)])), "drain_state", agent="one") == number


def test_a_name_is_drained_when_all_of_that_name_are() -> None:
    drained, draining = agent("one", "draining", said="drained"), agent("one", "draining")
    assert value(scraped(fleet([drained, draining])), "drain_state", agent="one") == 1
    assert value(scraped(fleet([drained, drained])), "drain_state", agent="one") == 2


def test_of_several_links_of_a_name_the_slowest_counts() -> None:
    samples = scraped(fleet([agent("one", rtt_ms=5.0), agent("one", rtt_ms=250.0), agent("two")]))
    assert value(samples, "link_rtt_seconds", agent="one") == 0.25
    assert ("tunnel_link_rtt_seconds", (("agent", "two"),)) not in samples


def test_a_histogram_is_cumulative() -> None:
    took = Histogram(0.1, 1)
    for seconds in (0.05, 0.1, 0.5, 7):
        took.observe(seconds)
    samples = scraped(fleet(dial_duration_seconds=took))
    counts = [value(samples, "dial_duration_seconds_bucket", le=bound) for bound in ("0.1", "1.0", "+Inf")]
    assert counts == [2, 3, 4]
    assert value(samples, "dial_duration_seconds_count") == 4
    assert value(samples, "dial_duration_seconds_sum") == pytest.approx(7.65)


# -- names of others


@pytest.mark.parametrize("name", ['a"} 1\ntunnel_x{y="', "a\\", "a\\n", 'a"b', "\x1b[2J", "Zürich", "{}", "\u2028"])
def test_no_name_breaks_out_of_its_label(name: str) -> None:
    text = Scrape(Collector(fleet([agent(name), agent("after")]))).text().decode()
    lines = [line for line in text.split("\n") if line and not line.startswith("#")]
    assert all(re.fullmatch(r'[a-z_]+(\{([a-z_]+="([^"\\]|\\.)*",?)*\})? \S+', line) for line in lines)
    samples = scraped(fleet([agent(name), agent("after")]))
    assert value(samples, "drain_state", agent=name) == 0
    assert value(samples, "drain_state", agent="after") == 0


def test_there_is_an_end_to_how_many_names_there_are() -> None:
    agents = [agent(f"a{number}", rtt_ms=1.0) for number in range(MOST_NAMES)]
    rest = [agent("late", "draining", rtt_ms=7.0), agent("later", rtt_ms=5.0), agent("a0", "draining", rtt_ms=9.0)]
    samples = scraped(fleet([*agents, *rest]))
    names = {dict(labels)["agent"] for name, labels in samples if name == "tunnel_drain_state" and labels}
    assert len(names) == MOST_NAMES + 1
    assert value(samples, "drain_state", agent=OTHER) == 0
    assert value(samples, "link_rtt_seconds", agent=OTHER) == 0.007
    assert value(samples, "link_rtt_seconds", agent="a0") == 0.009


def test_the_longest_names_make_a_scrape_that_is_bounded() -> None:
    agents = [agent(f"{number:0{LONGEST_NAME}}", rtt_ms=1.0) for number in range(5 * MOST_NAMES)]
    assert len(Scrape(Collector(fleet(agents))).text()) < 1_000_000


# -- what is documented


async def test_every_family_is_there_where_it_says_it_is(house: House) -> None:
    await house.serve()
    edge = await house.agent("one")
    edge.drain(seconds=60)
    for role, desk in (("server", ServerDesk(house.server)), ("agent", AgentDesk(edge))):
        collected = {metric.name: metric.type for metric in Collector(desk).collect()}
        declared = {
            f"tunnel_{family.name.removesuffix('_total')}": family.kind
            for family in FAMILIES
            if family.on in (role, "both")
        }
        assert collected == declared


async def test_no_number_is_counted_for_nothing(house: House) -> None:
    await house.serve()
    for desk in (ServerDesk(house.server), AgentDesk(await house.agent())):
        assert {*desk.counts()} <= {family.name for family in FAMILIES}


def labels_of(family: Family) -> str:
    return ", ".join(f"`{label}`" for label in family.labels)


def test_the_table_in_the_manual_is_this_one() -> None:
    rows = re.findall(r"^\| `tunnel_(.*)$", (DOCS / "operations.md").read_text(encoding="utf-8"), re.MULTILINE)
    wanted = [
        " | ".join([f"{family.name}`", family.kind, labels_of(family), family.on, f"{family.text} |"])
        for family in FAMILIES
    ]
    assert rows == wanted


def test_the_dashboard_asks_for_nothing_else() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    asked = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ()))
    known = {f"tunnel_{family.name}" for family in FAMILIES}
    named = {name.removesuffix("_bucket") for name in re.findall(r"tunnel_\w+", asked)}
    assert named <= known
    assert len(named) > 10
