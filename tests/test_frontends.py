"""The ways in: what clients, by CONNECT, ports and links, get, whatever they, the targets and the agents do."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from house import (
    PROMPT,
    Held,
    House,
    Service,
    Talk,
    descriptors,
    echo,
    expect,
    forward,
    greet,
    head,
    receive_all,
    receive_exactly,
    refusal,
    reset,
    reset_after_one_piece,
    talks,
    tasks,
    through,
)
from trio.testing import wait_all_tasks_blocked

from tunnel.backends import Backends
from tunnel.connect import Attempt, Connector
from tunnel.credentials import new_token
from tunnel.errors import Denied, DialProtocolError, NoBackend
from tunnel.explain import explain
from tunnel.http_connect import ESTABLISHED
from tunnel.limits import Limits, Timeouts
from tunnel.stream import TunnelStream

Enter = Callable[[Talk], Awaitable[tuple[trio.SocketStream, Service]]]


@pytest.fixture
async def echoes(house: House) -> Service:
    """A server, an agent, and a target that echoes."""
    await house.serve()
    await house.agent()
    return await house.service(echo)


@pytest.fixture(params=["connect", "forward"])
def enter(house: House, request: pytest.FixtureRequest) -> Enter:
    """A client and the service that it talks to, through either front-end."""

    async def enter(talk: Talk) -> tuple[trio.SocketStream, Service]:
        service = await house.service(talk)
        await house.serve(forwards=(forward(service.target),))
        await house.agent()
        if request.param == "forward":
            return await house.call("forward"), service
        return await house.connect(service.target), service

    return enter


# -- CONNECT: requests that are served


async def test_a_head_in_two_segments_split_anywhere_is_served(house: House, echoes: Service) -> None:
    whole = head(echoes.target)
    for position in range(1, len(whole)):
        async with await house.call() as client:
            await client.send_all(whole[:position])
            await wait_all_tasks_blocked()
            await client.send_all(whole[position:])
            await expect(client, ESTABLISHED)
            assert await talks(client)


async def test_a_head_that_comes_byte_by_byte_is_served(house: House, echoes: Service) -> None:
    client = await house.call()
    for byte in head(echoes.target):
        await client.send_all(bytes([byte]))
        await wait_all_tasks_blocked()
    await expect(client, ESTABLISHED)
    assert await talks(client)


async def test_data_in_the_segment_of_the_head_arrives_once_and_first(house: House, echoes: Service) -> None:
    client = await house.call()
    early = bytes(range(256)) * 8
    await client.send_all(head(echoes.target) + early)
    await client.send_all(b"later")
    await client.send_eof()
    assert await receive_all(client) == ESTABLISHED + early + b"later"


async def test_early_data_that_ends_with_eof_arrives_whole(house: House, echoes: Service) -> None:
    client = await house.call()
    await client.send_all(head(echoes.target) + b"all there is")
    await client.send_eof()
    assert await receive_all(client) == ESTABLISHED + b"all there is"


async def test_data_sent_while_the_dial_is_pending_arrives_once(house: House, held: Held, echoes: Service) -> None:
    client = await house.ask(through(echoes.target))
    await held.arrived.wait_value(1)
    await client.send_all(b"impatient")
    await wait_all_tasks_blocked()
    held.open.set()
    await client.send_eof()
    assert await receive_all(client) == ESTABLISHED + b"impatient"


async def test_a_target_that_speaks_first_is_never_heard_before_the_status_line(house: House) -> None:
    await house.serve()
    await house.agent()
    service = await house.service(greet)
    for _ in range(200):
        async with await house.ask(service.target) as client:
            await expect(client, ESTABLISHED + b"welcome\n")


async def test_a_connect_of_http_1_0_is_served(house: House, echoes: Service) -> None:
    client = await house.call()
    await client.send_all(f"CONNECT {echoes.target} HTTP/1.0\r\n\r\n".encode())
    await expect(client, ESTABLISHED)
    assert await talks(client)


# -- CONNECT: requests that are not


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "CONNECTS"])
async def test_other_methods_are_405_and_told_what_is_allowed(house: House, method: str) -> None:
    await house.serve()
    client = await house.call()
    await client.send_all(f"{method} / HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    status, headers, _ = await refusal(client, method)
    assert (status, headers[b"allow"]) == (405, b"CONNECT")


async def test_a_head_that_is_too_long_is_431(house: House) -> None:
    await house.serve()
    client = await house.ask("x:1", "Filler: " + "a" * 16 * 1024)
    status, _, _ = await refusal(client)
    assert status == 431


async def test_a_head_that_drips_is_408_at_the_total_deadline(house: House) -> None:
    await house.serve(timeouts=Timeouts(head=0.1))
    client = await house.call()
    await client.send_all(b"CONNECT x:1 HTTP/1.1\r\nHost: ")

    async def drip() -> None:
        while True:
            await client.send_all(b"x")
            await trio.sleep(0.02)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(drip)
        assert (await refusal(client))[0] == 408
        nursery.cancel_scope.cancel()


async def test_a_client_that_says_nothing_is_408_at_the_total_deadline(house: House) -> None:
    await house.serve(timeouts=Timeouts(head=0.05))
    assert (await refusal(await house.call()))[0] == 408


@pytest.mark.parametrize(
    "authority", ["example.com", "example.com:0", "example.com:65536", "x:-1", ":80", "/path", "http://x/", "[::1:80"]
)
async def test_a_bad_authority_is_400(house: House, authority: str) -> None:
    await house.serve()
    status, _, text = await refusal(await house.ask(authority))
    assert status == 400
    assert text.strip()


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01", b"\x05\x01\x00", b"\r\n\r\n", b"CONNECT\r\n\r\n"])
async def test_what_is_not_http_is_400(house: House, garbage: bytes) -> None:
    await house.serve()
    client = await house.call()
    await client.send_all(garbage)
    await client.send_eof()
    assert (await refusal(client))[0] == 400


async def test_an_unknown_transfer_coding_is_501(house: House) -> None:
    await house.serve()
    client = await house.ask("x:1", "Transfer-Encoding: gzip")
    assert (await refusal(client))[0] == 501


async def test_a_head_cut_short_by_eof_is_400(house: House) -> None:
    await house.serve()
    client = await house.call()
    await client.send_all(b"CONNECT x:1 HTTP/1.1\r\nHo")
    await client.send_eof()
    assert (await refusal(client))[0] == 400


async def test_a_client_that_has_sent_more_than_is_read_gets_its_refusal_whole(house: House) -> None:
    await house.serve()
    client = await house.call()
    await client.send_all(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n" + bytes(2_000_000))
    status, _, text = await refusal(client, "POST")
    assert (status, text) == (405, "POST is not served here, only CONNECT\n")


async def test_a_client_with_early_data_gets_the_refusal_of_its_dial_whole(house: House) -> None:
    await house.serve()
    await house.agent()
    client = await house.call()
    await client.send_all(head(house.closed_port()) + bytes(300_000))
    assert (await refusal(client))[0] == 502


# -- CONNECT: dials that fail


async def test_a_refused_dial_is_502_with_its_code_and_text(house: House) -> None:
    await house.serve()
    await house.agent()
    target = house.closed_port()
    status, _, text = await refusal(await house.ask(target))
    assert (status, text) == (502, f"refused: 127.0.0.1 port {target.port}: Connection refused\n")


async def test_a_name_without_address_is_502_with_its_code_and_text(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    getaddrinfo = socket.getaddrinfo

    def resolver(host: str, *args: object, **kwargs: object) -> object:
        if host == "nowhere.test":
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return getaddrinfo(host, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    await house.serve()
    await house.agent()
    status, _, text = await refusal(await house.ask("nowhere.test:80"))
    assert (status, text) == (502, "dns: nowhere.test: no such name\n")


async def test_a_dial_without_answer_is_504_with_its_code_and_text(house: House, held: Held) -> None:
    await house.serve(dial_timeout=0.05)
    await house.agent()
    status, _, text = await refusal(await house.ask("held.test:80"))
    assert status == 504
    assert text.startswith("timeout: held.test")


async def test_a_dial_without_agent_is_503_with_its_code_and_text(house: House) -> None:
    await house.serve()
    status, _, text = await refusal(await house.ask("x:1"))
    assert (status, text) == (503, "no_backend: no agent is linked\n")


# -- CONNECT: which agent


@pytest.mark.parametrize("name", ["one", "two"])
async def test_the_header_picks_the_agent(house: House, echoes: Service, name: str) -> None:
    two = await house.agent("two")
    for _ in range(5):
        assert await talks(await house.connect(echoes.target, f"Tunnel-Agent: {name}"))
    assert two.dials.served == (5 if name == "two" else 0)


async def test_the_header_with_an_unknown_name_is_503(house: House, echoes: Service) -> None:
    status, _, text = await refusal(await house.ask(echoes.target, "Tunnel-Agent: nobody"))
    assert (status, text) == (503, "no_backend: no agent named nobody can take it now\n")


@pytest.mark.parametrize(
    "headers", [["Tunnel-Agent: a b"], ["Tunnel-Agent:"], ["Tunnel-Agent: one", "tunnel-agent: one"]]
)
async def test_the_header_with_a_bad_name_or_twice_is_400(house: House, echoes: Service, headers: list[str]) -> None:
    assert (await refusal(await house.ask(echoes.target, *headers)))[0] == 400


# -- clients that leave


async def test_clients_that_leave_before_a_head_leave_nothing(
    house: House, echoes: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tunnel")
    for leave in (trio.SocketStream.aclose, trio.SocketStream.send_eof):
        await leave(await house.call())
    reset(await house.call())
    async with await house.call() as client:
        await client.send_all(b"CONNECT x")
    await house.idle()
    assert not caplog.records


async def test_clients_that_leave_after_the_head_leave_nothing(house: House, held: Held, echoes: Service) -> None:
    gone, lost = [await house.ask(through(echoes.target)) for _ in range(2)]
    await held.arrived.wait_value(2)
    await gone.aclose()
    reset(lost)
    held.open.set()
    await house.idle()
    await echoes.open.wait_value(0)
    assert echoes.opened.value == 2


async def test_a_dial_that_succeeds_when_its_client_has_left_is_undone(house: House, held: Held) -> None:
    async def wait_for_a_reset(stream: trio.SocketStream) -> None:
        await receive_all(stream)
        await stream.send_all(bytes(64))
        await trio.sleep_forever()

    await house.serve()
    agent = await house.agent()
    service = await house.service(wait_for_a_reset)
    client = await house.ask(through(service.target))
    await held.arrived.wait_value(1)
    await client.aclose()
    held.open.set()
    await service.opened.wait_value(1)
    await house.idle()
    await agent.life.open.wait_value(0)
    (link,) = agent.sync.links.values()
    (key,) = explain(house.server.backends, service.target).considered
    assert [link.open_streams.value, *(backend.streams for backend in key.candidates)] == [0, 0]


# -- forwarded ports


async def test_a_forward_leads_to_its_target(house: House) -> None:
    service = await house.service(echo)
    await house.serve(forwards=(forward(service.target),))
    await house.agent()
    assert await talks(await house.call("forward"))


async def test_a_target_that_speaks_first_is_heard_through_a_forward(house: House) -> None:
    service = await house.service(greet)
    await house.serve(forwards=(forward(service.target),))
    await house.agent()
    await expect(await house.call("forward"), b"welcome\n")


async def test_a_forward_can_be_bound_to_an_agent(house: House) -> None:
    service = await house.service(echo)
    await house.serve(forwards=(forward(service.target, "two"),))
    one, two = await house.agent("one"), await house.agent("two")
    for _ in range(5):
        assert await talks(await house.call("forward"))
    assert (one.dials.served, two.dials.served) == (0, 5)


async def test_a_forward_whose_dial_fails_is_reset_without_a_byte(house: House) -> None:
    await house.serve(forwards=(forward(house.closed_port()),))
    await house.agent()
    client = await house.call("forward")
    with pytest.raises(trio.BrokenResourceError):
        await client.receive_some()


async def test_a_forward_without_its_agent_is_reset_without_a_byte(house: House) -> None:
    service = await house.service(echo)
    await house.serve(forwards=(forward(service.target, "two"),))
    await house.agent("one")
    client = await house.call("forward")
    with pytest.raises(trio.BrokenResourceError):
        await client.receive_some()


# -- both: ends of streams


async def test_a_client_that_ends_its_direction_still_hears_the_target(enter: Enter) -> None:
    async def count(stream: trio.SocketStream) -> None:
        size = len(await receive_all(stream))
        await stream.send_all(b"%d bytes" % size)

    client, _ = await enter(count)
    await client.send_all(bytes(100_000))
    await client.send_eof()
    assert await receive_all(client) == b"100000 bytes"


async def test_a_target_that_ends_its_direction_still_hears_the_client(enter: Enter) -> None:
    heard: list[bytes] = []

    async def end_first(stream: trio.SocketStream) -> None:
        await stream.send_all(b"bye")
        await stream.send_eof()
        heard.append(await receive_all(stream))

    client, service = await enter(end_first)
    assert await receive_all(client) == b"bye"
    await client.send_all(bytes(100_000))
    await client.aclose()
    await service.opened.wait_value(1)
    await service.open.wait_value(0)
    assert len(heard[0]) == 100_000


async def test_a_target_that_resets_is_a_reset_at_the_client(enter: Enter) -> None:
    client, _ = await enter(reset_after_one_piece)
    await client.send_all(b"x")
    with pytest.raises(trio.BrokenResourceError):
        await receive_all(client)


async def test_a_client_that_resets_is_a_reset_at_the_target(enter: Enter) -> None:
    ends: list[object] = []

    async def note_the_end(stream: trio.SocketStream) -> None:
        try:
            await stream.send_all(b"x")
            ends.append(await receive_all(stream))
        except trio.BrokenResourceError:
            ends.append("reset")

    client, service = await enter(note_the_end)
    await client.receive_some()
    reset(client)
    await service.open.wait_value(0)
    assert ends == ["reset"]


async def test_every_byte_before_a_close_arrives(enter: Enter) -> None:
    async def send_and_leave(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(bytes(3_000_000))

    client, _ = await enter(send_and_leave)
    await client.send_all(b"x")
    assert await receive_all(client) == bytes(3_000_000)


async def test_connections_that_end_normally_log_nothing_above_debug(
    enter: Enter, house: House, caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = await enter(echo)
    caplog.set_level(logging.INFO, "tunnel")
    assert await talks(client)
    await client.send_eof()
    assert await receive_exactly(client, 1) == b""
    await client.aclose()
    await house.idle()
    assert not caplog.records


# -- many


async def test_dials_without_answer_delay_no_other(house: House, held: Held, echoes: Service) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(500):
            nursery.start_soon(house.ask, "held.test:80")
    await held.arrived.wait_value(500)
    assert await talks(await house.connect(echoes.target))
    assert held.given_up == 0


async def test_each_dial_without_answer_times_out_by_itself(house: House, held: Held) -> None:
    await house.serve(dial_timeout=0.3)
    agent = await house.agent()
    statuses: list[int] = []

    async def client() -> None:
        async with await house.ask("held.test:80") as stream:
            statuses.append((await refusal(stream))[0])

    async with trio.open_nursery() as nursery:
        for _ in range(500):
            nursery.start_soon(client)
    assert statuses == [504] * 500
    await agent.life.open.wait_value(0)


async def test_two_thousand_refused_dials_leave_nothing(house: House) -> None:
    await house.serve()
    agent = await house.agent()
    target = house.closed_port()
    statuses: list[int] = []

    async def clients(count: int) -> None:
        for _ in range(count):
            async with await house.ask(target) as stream:
                statuses.append((await refusal(stream))[0])

    async def settled() -> tuple[int, int]:
        await house.idle()
        await agent.life.open.wait_value(0)
        return tasks(), descriptors()

    await clients(1)
    before = await settled()
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(clients, 100)
    assert statuses == [502] * 2001
    assert await settled() == before


async def test_a_thousand_dials_that_are_answered_when_their_caller_has_gone_leave_nothing(
    house: House, echoes: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Connector.begin
    callers: list[trio.CancelScope] = []

    def begin_and_lose_the_caller(connector: Connector, host: str, port: int) -> Attempt | None:
        attempt = begin(connector, host, port)
        callers.pop().cancel()
        return attempt

    monkeypatch.setattr(Connector, "begin", begin_and_lose_the_caller)
    before = tasks(), descriptors()
    for _ in range(1000):
        with trio.CancelScope() as caller:
            callers.append(caller)
            await house.server.backends.dial(echoes.target, 10.0)
        assert caller.cancelled_caught
    await echoes.opened.wait_value(1000)
    await echoes.open.wait_value(0)
    await house.idle()
    assert (tasks(), descriptors()) == before


async def test_a_connect_that_is_still_dialled_at_the_cut_is_answered(house: House, held: Held) -> None:
    server = await house.serve(timeouts=replace(PROMPT, shutdown=0.5))
    await house.agent()
    client = await house.ask(through(house.closed_port()))
    await held.arrived.wait_value(1)
    server.life.leave()
    assert (await refusal(client))[0] == 503


async def test_a_dial_that_times_out_counts_for_the_agent_that_was_asked(house: House, held: Held) -> None:
    server = await house.serve(dial_timeout=0.05)
    await house.agent()
    client = await house.ask(through(house.closed_port()))
    assert (await refusal(client))[0] == 504
    assert server.backends.dials == {("timeout", "active"): 1}


# -- clients' links


async def test_a_clients_target_is_spelled_like_any_other(house: House) -> None:
    server = await house.serve()
    await house.agent(services={"[2001:db8::1]:80": _forever})
    async with house.client() as client:
        await client.dial("2001:db8::1", 80)
        assert [entry.target for entry in server.book.entries.values()] == ["[2001:db8::1]:80"]


async def test_a_client_that_takes_more_than_a_window_unasked_is_refused(house: House) -> None:
    await house.serve()
    too_much = Limits().window + 1
    async with house.client() as client:
        link = await client.connect()
        with pytest.raises(DialProtocolError, match=f"a window of {too_much} bytes"):
            await link.dial("service", 7, seconds=1, window=too_much)


async def test_a_clients_dial_that_fails_is_answered_and_logged(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tunnel.frontends")
    await house.serve()
    async with house.client() as client:
        with pytest.raises(NoBackend, match="no agent is linked"):
            await client.dial("x", 1)
    assert logged(caplog) == ['"dial failed" use=client target=x:1 code=no_backend cause="no agent is linked"']


async def test_a_clients_reset_is_told_to_who_looks_for_faults(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tunnel.frontends")
    await house.serve()
    await house.agent(services={"svc.internal:7": _forever})
    async with house.client() as client:
        stream = await client.dial("svc.internal", 7)
        stream.reset("reset", "the cat did it")
        await house.idle()
    (line,) = logged(caplog)
    assert "stream reset" in line
    assert "the cat did it" in line


async def test_a_client_reaches_only_what_its_token_is_for(house: House, tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.touch(0o600)
    file.write_text(new_token("laptop", "client", {"targets": ["*.db:5432"]}))
    await house.serve(token_file=str(file))
    async with house.client(token_file=str(file)) as client:
        with pytest.raises(Denied, match=r"^a\.db:22: the token laptop is not for it$"):
            await client.dial("a.db", 22)
        with pytest.raises(NoBackend):
            await client.dial("a.db", 5432)


async def test_a_clients_dial_that_is_given_up_as_it_is_answered_is_undone(
    house: House, echoes: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    dial, asking = Backends.dial, trio.CancelScope()

    async def dial_and_lose_the_client(backends: Backends, *args: Any) -> TunnelStream:
        stream = await dial(backends, *args)
        asking.cancel()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
        return stream

    monkeypatch.setattr(Backends, "dial", dial_and_lose_the_client)
    async with house.client() as client:
        with asking:
            await client.dial(echoes.target.host, echoes.target.port)
        assert asking.cancelled_caught
        await house.idle()
        await echoes.open.wait_value(0)
    assert echoes.opened.value == 1


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the front-ends logged."""
    return [record.getMessage() for record in caplog.records if record.name == "tunnel.frontends"]


async def _forever(stream: trio.abc.HalfCloseableStream) -> None:
    await trio.sleep_forever()
