"""Wire traces: every control packet of a link is shown, payload and the handshake's contents are not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from trio.testing import wait_all_tasks_blocked

from tunnel import logs, wiretrace
from tunnel.packets import DrainAck, Hello

if TYPE_CHECKING:
    from conftest import MakeLinks

Lines = list[dict[str, object]]


@pytest.fixture
def tracing(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logs.TRACE, "tunnel"):
        yield


def _lines(caplog: pytest.LogCaptureFixture) -> Lines:
    return [record.msg for record in caplog.records if record.levelno == logs.TRACE]  # type: ignore[misc]


async def test_packets_of_a_link_are_shown_at_both_ends(
    tracing: None, make_links: MakeLinks, caplog: pytest.LogCaptureFixture
) -> None:
    links = await make_links("memory")
    caplog.clear()
    await links.open()
    about = {"peer": "agent", "packet": "DIAL_REQ", "stream": 1}
    sent, received = [line for line in _lines(caplog) if line["packet"] == "DIAL_REQ"]
    assert about.items() <= sent.items()
    assert sent["event"] == "packet sent"
    assert received["event"] == "packet received"
    assert {"peer": "server", "stream": 1}.items() <= received.items()


async def test_payload_is_not_shown(tracing: None, make_links: MakeLinks, caplog: pytest.LogCaptureFixture) -> None:
    near, far = await (await make_links("memory")).open()
    await near.send_all(b"payload")
    assert await far.receive_some() == b"payload"
    assert "payload" not in caplog.text


async def test_a_link_that_began_untraced_shows_nothing(
    make_links: MakeLinks, caplog: pytest.LogCaptureFixture
) -> None:
    links = await make_links("memory")
    await links.open()
    await wait_all_tasks_blocked()
    assert _lines(caplog) == []


async def test_the_handshake_is_shown_both_ways(
    tracing: None, make_links: MakeLinks, caplog: pytest.LogCaptureFixture
) -> None:
    await make_links("memory")
    shown = {(line["event"], line["packet"]) for line in _lines(caplog)}
    assert shown == {(event, name) for event in ("packet sent", "packet received") for name in ("HELLO", "WELCOME")}


def test_of_the_handshake_only_the_name_is_shown(tracing: None, caplog: pytest.LogCaptureFixture) -> None:
    outbox = wiretrace.TracedOutbox(lambda: "?")
    outbox.control(Hello(1, {"nonce": b"not to be seen"}))
    assert _lines(caplog) == [{"event": "packet sent", "peer": "?", "packet": "HELLO"}]
    assert outbox.take(1000) == [Hello(1, {"nonce": b"not to be seen"}).encode()]


def test_what_is_shown_is_handed_on(tracing: None, caplog: pytest.LogCaptureFixture) -> None:
    taken: list[object] = []
    wiretrace.traced(lambda: "one", taken.append)(DrainAck(1, "soft"))
    assert taken == [DrainAck(1, "soft")]
    assert _lines(caplog) == [
        {"event": "packet received", "peer": "one", "packet": "DRAIN_ACK", "seq": 1, "phase": "soft"}
    ]


def test_nobody_traces_at_any_other_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "tunnel"):
        assert not wiretrace.wanted()
    with caplog.at_level(logs.TRACE, "tunnel"):
        assert wiretrace.wanted()
