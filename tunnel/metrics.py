"""The metrics: what a program counts anyway, in the words of Prometheus.

Rules that hold here:

- There are no counters here: a scrape looks at what is there at that moment, and at nothing when nobody scrapes.
- ``FAMILIES`` is all there is. Whatever has the name of an agent as a label has a thousand of them at most; what all
  others have is folded into one, ``other``.
- Of several agents of one name it is the one that is least far in its drain that counts, and the slowest link.

This file must not know HTTP, or how anything is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import Metric, generate_latest

from tunnel.operate import AgentView, Measured, Operated, is_server
from tunnel.tally import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_NAMES = 1000
OTHER = "other"

_ACTIVE, _DRAINING, _DRAINED, _FINAL = range(4)
_DRAIN_STATES = {
    "lame duck": _DRAINING,
    "draining": _DRAINING,
    "drained": _DRAINED,
    "final": _FINAL,
    "stopping": _FINAL,
    "cut": _FINAL,
    "closing": _FINAL,
    "exit": _FINAL,
}

Values = Mapping[tuple[str, ...], Measured]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric.

    Attributes:
        name: without the prefix ``tunnel_``.
        kind: ``gauge``, ``counter`` or ``histogram``.
        on: which programs have it: ``server``, ``agent`` or ``both``.
        text: what it counts.
        labels: what tells its values apart. A value with fewer labels is the program's own.
    """

    name: str
    kind: str
    on: str
    text: str
    labels: tuple[str, ...] = ()

    def metric(self, values: Values) -> Metric:
        """As Prometheus' library has it."""
        metric = Metric(f"tunnel_{self.name.removesuffix('_total')}", self.text, self.kind)
        for labels, value in values.items():
            named = dict(zip(self.labels, labels, strict=False))
            if isinstance(value, Histogram):
                _add_histogram(metric, named, value)
            else:
                metric.add_sample(f"tunnel_{self.name}", named, value)
        return metric


def _add_histogram(metric: Metric, labels: dict[str, str], histogram: Histogram) -> None:
    bounds = [*map(str, map(float, histogram.bounds)), "+Inf"]
    counts = list(accumulate(histogram.counts))
    for bound, count in zip(bounds, counts, strict=True):
        metric.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, count)
    metric.add_sample(f"{metric.name}_sum", labels, histogram.sum)
    metric.add_sample(f"{metric.name}_count", labels, counts[-1])


FAMILIES = (
    Family("info", "gauge", "both", "Always 1.", ("version", "role")),
    Family(
        "drain_state",
        "gauge",
        "both",
        "0 active, 1 draining, 2 drained, 3 leaving for good; without a label of the program itself.",
        ("agent",),
    ),
    Family("drain_remaining_seconds", "gauge", "both", "Until what is open is cut; absent where nothing is to end."),
    Family("drain_duration_seconds", "histogram", "agent", "How long operators' drains took.", ("outcome",)),
    Family("drain_cut_streams_total", "counter", "both", "Streams that were cut because the time was over."),
    Family("drain_ack_timeouts_total", "counter", "agent", "Times that a server did not acknowledge a drain."),
    Family("open_streams", "gauge", "both", "Streams that are open."),
    Family("pending_dials", "gauge", "both", "Connections whose stream is not open yet."),
    Family("oldest_stream_seconds", "gauge", "both", "Age of the oldest connection; 0 if there is none."),
    Family("backends", "gauge", "server", "Agents that are linked: active, draining or final.", ("state",)),
    Family(
        "dials_total",
        "counter",
        "both",
        "Dials that ended, by ok or the code of the error, and the state of the agent asked last, or none.",
        ("result", "backend_state"),
    ),
    Family("dial_duration_seconds", "histogram", "server", "From asking for a stream to the answer."),
    Family("dial_redispatch_total", "counter", "server", "Dials that went to a second agent, by why.", ("cause",)),
    Family("dial_fallback_total", "counter", "server", "Dials that only a draining agent could serve."),
    Family("bounds_total", "counter", "both", "Times that a bound bit: see the table of them.", ("bound",)),
    Family("links", "gauge", "both", "Links that are up: on a server those of agents and clients."),
    Family("link_rtt_seconds", "gauge", "server", "Round trip of the link to an agent, as measured last.", ("agent",)),
    Family("bytes_total", "counter", "both", "Payload between servers and agents, seen from here.", ("direction",)),
    Family("frames_total", "counter", "both", "Frames of streams between servers and agents.", ("direction",)),
    Family("queued_bytes", "gauge", "both", "What links have to send that did not go yet."),
)


class Collector:
    """What Prometheus' library collects from: a program, as it is at that moment."""

    def __init__(self, operated: Operated) -> None:
        self._operated = operated

    def collect(self) -> Iterator[Metric]:
        """All families that the program has a value for."""
        values = self._values()
        for family in FAMILIES:
            if family.name in values:
                yield family.metric(values[family.name])

    def _values(self) -> dict[str, Values]:
        operated, drain = self._operated, self._operated.drain_view()
        values: dict[str, Values] = {
            name: value if isinstance(value, Mapping) else {(): value} for name, value in operated.counts().items()
        }
        values["info"] = {(operated.version, operated.role): 1.0}
        values["drain_state"] = {(): float(_DRAIN_STATES.get(drain.state, _ACTIVE))}
        values["drain_remaining_seconds"] = {} if drain.remaining_s is None else {(): drain.remaining_s}
        if is_server(operated):
            states, trips = _by_name(operated.agents())
            values["drain_state"] = {**values["drain_state"], **states}
            values["link_rtt_seconds"] = trips
        return values


class Scrape:
    """What was collected at one moment. It does not change any more, so any thread may make a text of it."""

    def __init__(self, collector: Collector) -> None:
        self._families = list(collector.collect())

    def collect(self) -> Iterator[Metric]:
        """All families."""
        return iter(self._families)

    def text(self) -> bytes:
        """For an answer of the type ``CONTENT_TYPE``."""
        return generate_latest(self)


def _by_name(agents: Iterable[AgentView]) -> tuple[Values, Values]:
    """How far the drains of agents are, and their links' round trips."""
    states: dict[tuple[str, ...], float] = {}
    trips: dict[tuple[str, ...], float] = {}
    for agent in agents:
        name = agent.name if (agent.name,) in states or len(states) < MOST_NAMES else OTHER
        states[name,] = min(_drain_state(agent), states.get((name,), _FINAL))
        if agent.rtt_ms is not None:
            trips[name,] = max(agent.rtt_ms / 1000, trips.get((name,), 0.0))
    return states, trips


def _drain_state(agent: AgentView) -> float:
    """A server knows of a drain at once, and hears later how far it is."""
    if agent.state == "draining":
        return _DRAIN_STATES.get(agent.drain.state, _DRAINING) if agent.drain else _DRAINING
    return _DRAIN_STATES.get(agent.state, _ACTIVE)
