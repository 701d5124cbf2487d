"""The listeners of an operator's interface: how they begin, who is let go, and that nobody holds their end up."""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from house import LOOPBACK, House, descriptors, echo, receive_exactly, talks
from trio.testing import wait_all_tasks_blocked

from tunnel.address import ListenAddress
from tunnel.admin import app as app_module
from tunnel.admin.serve import serve
from tunnel.config import AdminConfig, UnixAddress
from tunnel.desk import AgentDesk, ServerDesk
from tunnel.listen import BindError
from tunnel.operate import Operated


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this package logged."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("tunnel.")]


@asynccontextmanager
async def served(operated: Operated, config: AdminConfig) -> AsyncIterator[tuple[dict[str, str], trio.Event]]:
    """The interface on real sockets: where it listens, and what ends it."""
    closing = trio.Event()
    try:
        async with trio.open_nursery() as nursery:
            addresses = await nursery.start(serve, operated, config, closing)
            yield addresses, closing
            closing.set()
    finally:
        while _opened:
            _opened.pop().socket.close()


def on_loopback(**options: Any) -> AdminConfig:
    return AdminConfig(**{"listen": LOOPBACK, **options})


_opened: list[trio.SocketStream] = []


async def open_to(address: str, path: str | None = None) -> trio.SocketStream:
    """A connection, on which a path was asked for if there is one."""
    if address.startswith("unix:"):
        stream = await trio.open_unix_socket(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        stream = await trio.open_tcp_stream(host, int(port))
    _opened.append(stream)
    if path is not None:
        await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return stream


async def answer(stream: trio.SocketStream) -> str:
    """One whole answer that says how long it is."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive_some(4096)
    head, _, body = data.partition(b"\r\n\r\n")
    (length,) = [int(line.split()[1]) for line in head.lower().splitlines() if line.startswith(b"content-length:")]
    return (data + await receive_exactly(stream, length - len(body))).decode()


async def exchange(
    address: str, head: str = "GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
) -> str:
    async with await open_to(address) as stream:
        await stream.send_all(head.encode())
        return b"".join([data async for data in stream]).decode()


async def rev_at(address: str) -> str:
    rev: str = json.loads((await answer(await open_to(address, "/api/v1/drain"))).partition("\r\n\r\n")[2])["rev"]
    return rev


class TestServing:
    async def test_each_use_says_where_it_listens(self, house: House, caplog: pytest.LogCaptureFixture) -> None:
        desk = ServerDesk(await house.serve())
        caplog.clear()
        caplog.set_level(logging.INFO)
        async with served(desk, on_loopback(health=LOOPBACK)) as (addresses, _):
            assert said(caplog) == [f"listening use={use} address={addresses[use]}" for use in ("admin", "health")]
            for use in ("admin", "health"):
                assert (await exchange(addresses[use])).startswith("HTTP/1.1 200 ")
            metrics = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            assert (await exchange(addresses["admin"], metrics)).startswith("HTTP/1.1 200 ")
            assert (await exchange(addresses["health"], metrics)).startswith("HTTP/1.1 404 ")

    async def test_probes_may_use_any_name(self, house: House) -> None:
        desk = ServerDesk(await house.serve())
        head = "GET /livez HTTP/1.1\r\nHost: tunnel.svc\r\nConnection: close\r\n\r\n"
        async with served(desk, on_loopback(health=LOOPBACK)) as (addresses, _):
            assert (await exchange(addresses["health"], head)).startswith("HTTP/1.1 200 ")
            assert (await exchange(addresses["admin"], head)).startswith("HTTP/1.1 421 ")

    async def test_a_head_has_no_body(self, house: House) -> None:
        desk = ServerDesk(await house.serve())
        async with served(desk, on_loopback()) as (addresses, _):
            for path in ("/livez", "/api/v1/events"):
                head = f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                assert (await exchange(addresses["admin"], head)).partition("\r\n\r\n")[2] == ""

    async def test_no_connection_of_an_operator_is_counted_as_open(self, house: House) -> None:
        server = await house.serve()
        desk = ServerDesk(server)
        async with served(desk, on_loopback(health=LOOPBACK)) as (addresses, _):
            for use in ("admin", "health"):
                stream = await open_to(addresses[use], "/readyz")
                assert '"open":0,"pending":0' in await answer(stream)
            assert server.life.open.value == 0
            assert desk.counts()["pending_dials"] == 0

    async def test_nothing_is_left_behind(self, house: House) -> None:
        desk = ServerDesk(await house.serve())
        before = descriptors()
        async with served(desk, on_loopback(health=LOOPBACK)) as (addresses, _):
            await exchange(addresses["admin"])
            idle = await open_to(addresses["health"])
        await idle.aclose()
        assert descriptors() == before

    async def test_a_default_address_that_is_taken_is_a_warning(
        self, house: House, caplog: pytest.LogCaptureFixture
    ) -> None:
        desk = ServerDesk(await house.serve())
        with socket.create_server(("127.0.0.1", 0)) as taken:
            at = ListenAddress(*taken.getsockname())
            async with served(desk, AdminConfig(at, required=False, health=LOOPBACK)) as (addresses, _):
                assert [*addresses] == ["health"]
        assert [message for message in said(caplog) if message.startswith('"admin off" cause=')]

    @pytest.mark.parametrize("use", ["listen", "health"])
    async def test_an_address_that_was_asked_for_has_to_be_free(self, house: House, use: str) -> None:
        desk = ServerDesk(await house.serve())
        with socket.create_server(("127.0.0.1", 0)) as taken:
            at = ListenAddress(*taken.getsockname())
            with pytest.RaisesGroup(
                pytest.RaisesExc(BindError, match=f"cannot listen on {at}"), flatten_subgroups=True
            ):
                async with served(desk, on_loopback(**{use: at})):
                    pytest.fail("it listens")

    async def test_one_connection_more_than_there_may_be_is_closed(
        self, house: House, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tunnel.admin.serve._MOST_CONNECTIONS", 2)
        desk = ServerDesk(await house.serve())
        async with served(desk, on_loopback()) as (addresses, _):
            held = [await open_to(addresses["admin"], "/livez") for _ in range(2)]
            for stream in held:
                await answer(stream)
            assert await (await open_to(addresses["admin"])).receive_some(1) == b""
            await held[0].aclose()
            again = await open_to(addresses["admin"])
            while await ended_by_peer(again):
                again = await open_to(addresses["admin"])
            await again.send_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await answer(again)).startswith("HTTP/1.1 200 ")

    async def test_what_is_no_http_ends_that_connection_alone(self, house: House) -> None:
        desk = ServerDesk(await house.serve())
        async with served(desk, on_loopback()) as (addresses, _):
            assert (await exchange(addresses["admin"], "\x00\x01\r\n\r\n")).startswith("HTTP/1.1 400 ")
            assert (await exchange(addresses["admin"])).startswith("HTTP/1.1 200 ")

    @pytest.mark.parametrize(
        "path", ["/api/v1/events", "/api/v1/drain?wait=60s&since=REV", "/api/v1/streams", "/livez"]
    )
    async def test_a_client_that_leaves_in_the_middle_makes_room(
        self, house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
    ) -> None:
        monkeypatch.setattr(ServerDesk, "streams", lambda *_: ["x" * 8_000_000])
        monkeypatch.setattr("hypercorn.config.Config.keep_alive_timeout", 1000)
        desk = ServerDesk(await house.serve())
        async with served(desk, on_loopback()) as (addresses, _):
            first = await open_to(addresses["admin"], "/api/v1/drain")
            rev = json.loads((await answer(first)).partition("\r\n\r\n")[2])["rev"]
            await first.aclose()
            monkeypatch.setattr("tunnel.admin.serve._MOST_CONNECTIONS", 1)
            stream = await self._in_turn(addresses["admin"])
            await stream.send_all(f"GET {path.replace('REV', rev)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            if "wait" not in path:
                await stream.receive_some(1)
            await stream.aclose()
            with trio.fail_after(20):
                await self._in_turn(addresses["admin"])
        assert said(caplog) == []

    async def _in_turn(self, address: str) -> trio.SocketStream:
        """A connection, when there is room for one."""
        while await ended_by_peer(stream := await open_to(address)):
            pass
        return stream


class TestEnd:
    async def test_an_idle_connection_does_not_hold_it_up(self, house: House) -> None:
        desk = ServerDesk(await house.serve())
        async with served(desk, on_loopback()) as (addresses, closing):
            stream = await open_to(addresses["admin"], "/livez")
            await answer(stream)
            closing.set()
            assert await stream.receive_some(1) == b""

    async def test_a_long_poll_is_answered_at_the_end(self, house: House) -> None:
        desk = ServerDesk(await house.serve())
        async with served(desk, on_loopback()) as (addresses, closing):
            rev = await rev_at(addresses["admin"])
            poll = await open_to(addresses["admin"])
            path = f"/api/v1/drain?wait=60s&since={rev}"
            await poll.send_all(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            await wait_all_tasks_blocked(0.05)
            closing.set()
            assert (await answer(poll)).startswith("HTTP/1.1 200 ")
            assert await poll.receive_some(1) == b""

    async def test_who_watches_events_sees_their_end(self, house: House) -> None:
        desk = ServerDesk(await house.serve())
        async with served(desk, on_loopback()) as (addresses, closing):
            watcher = await open_to(addresses["admin"], "/api/v1/events")
            head = await watcher.receive_some(65536)
            assert head.startswith(b"HTTP/1.1 200 ")
            closing.set()
            rest = b"".join([data async for data in watcher])
            assert (head + rest).endswith(b"0\r\n\r\n")  # a whole answer, not one that was cut off

    @pytest.fixture
    def endless(self, monkeypatch: pytest.MonkeyPatch) -> str:
        """A path with an answer that does not fit anywhere, and nobody loses patience with who does not take it."""
        monkeypatch.setattr(ServerDesk, "streams", lambda *_: ["x" * 8_000_000])
        monkeypatch.setattr("tunnel.admin.talk._SEND_SECONDS", 1000.0)
        return "/api/v1/streams"

    async def test_a_client_that_takes_nothing_does_not_hold_it_up(self, house: House, endless: str) -> None:
        desk = ServerDesk(await house.serve())
        with trio.fail_after(30):
            async with served(desk, on_loopback()) as (addresses, _):
                stuck = await open_to(addresses["admin"], endless)
                assert await stuck.receive_some(1)

    async def test_cancelling_ends_it_at_once(self, house: House, endless: str) -> None:
        desk = ServerDesk(await house.serve())
        with trio.fail_after(30), trio.CancelScope() as scope:
            async with served(desk, on_loopback()) as (addresses, _):
                stuck = await open_to(addresses["admin"], endless)
                assert await stuck.receive_some(1)
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught

    async def test_a_client_that_takes_nothing_is_let_go(
        self, house: House, endless: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tunnel.admin.talk._SEND_SECONDS", 0.01)
        desk = ServerDesk(await house.serve())
        async with served(desk, on_loopback()) as (addresses, _):
            stuck = await open_to(addresses["admin"], endless)
            await trio.sleep(0.1)  # while it takes nothing
            with trio.fail_after(30), suppress(trio.BrokenResourceError):
                while await stuck.receive_some(1 << 20):
                    pass

    async def test_a_silent_connection_is_let_go(self, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hypercorn.config.Config.keep_alive_timeout", 1000)
        monkeypatch.setattr("tunnel.admin.talk._SILENCE", 0.2)
        desk = ServerDesk(await house.serve())
        async with served(desk, on_loopback()) as (addresses, _):
            with trio.fail_after(30):
                assert await (await open_to(addresses["admin"])).receive_some(1) == b""


class TestEvents:
    async def _first(self, stream: trio.SocketStream) -> Any:
        text = b""
        while b"\n\n" not in text:
            text += await stream.receive_some(65536)
        return json.loads(text.partition(b"data: ")[2].partition(b"\n\n")[0])

    async def test_the_first_comes_at_once_and_shows_the_agents(self, house: House) -> None:
        await house.serve()
        await house.agent("one")
        service = await house.service(echo)
        assert await talks(await house.connect(service.target))
        async with served(ServerDesk(house.server), on_loopback()) as (addresses, _):
            watcher = await open_to(addresses["admin"], "/api/v1/events")
            said = await self._first(watcher)
            await watcher.aclose()
        assert said["drain"]["role"] == "server"
        assert said["ready"]["ready"]
        assert [agent["name"] for agent in said["agents"]] == ["one"]
        assert (said["streams_open"], said["sent"], said["received"]) == (1, 5, 5)
        assert said["at"] > 1e9

    async def test_an_agent_has_no_agents(self, house: House) -> None:
        await house.serve()
        async with served(AgentDesk(await house.agent("one")), on_loopback()) as (addresses, _):
            watcher = await open_to(addresses["admin"], "/api/v1/events")
            said = await self._first(watcher)
            await watcher.aclose()
        assert "agents" not in said
        assert said["drain"]["name"] == "one"

    async def test_there_is_an_end_to_how_many_may_watch(self, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(app_module, "MOST_WATCHERS", 1)
        async with served(ServerDesk(await house.serve()), on_loopback()) as (addresses, _):
            head = "GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            watcher = await open_to(addresses["admin"])
            await watcher.send_all(head.encode())
            await self._first(watcher)
            answer = await exchange(addresses["admin"], head)
            assert answer.startswith("HTTP/1.1 503 ")
            assert '"code":"busy"' in answer
            await watcher.aclose()
            while (await exchange_head(addresses["admin"], head)).startswith(b"HTTP/1.1 503 "):  # noqa: ASYNC110
                await trio.sleep(0.01)


async def ended_by_peer(stream: trio.SocketStream) -> bool:
    """Whether the other side closes the connection that it accepted, rather than wait for a request."""
    with trio.move_on_after(0.1):
        return await stream.receive_some(1) == b""
    return False


async def exchange_head(address: str, head: str) -> bytes:
    async with await open_to(address) as stream:
        await stream.send_all(head.encode())
        return await stream.receive_some(15)


def mode_of(path: Path) -> int | None:
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else None


class TestSocketFile:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "admin.sock"

    @pytest.fixture
    def precious(self, path: Path) -> Path:
        path.write_text("precious")
        return path

    @pytest.fixture
    def config(self, path: Path) -> AdminConfig:
        return AdminConfig(UnixAddress(str(path)))

    async def test_it_is_the_owners_alone_and_gone_at_the_end(
        self, house: House, path: Path, config: AdminConfig
    ) -> None:
        async with served(ServerDesk(await house.serve()), config) as (addresses, _):
            assert addresses["admin"] == f"unix:{path}"
            assert mode_of(path) == 0o600
            assert (await exchange(addresses["admin"])).startswith("HTTP/1.1 200 ")
        assert mode_of(path) is None

    async def test_any_name_may_be_used_there(self, house: House, config: AdminConfig) -> None:
        head = "GET /livez HTTP/1.1\r\nHost: whatever\r\nConnection: close\r\n\r\n"
        async with served(ServerDesk(await house.serve()), config) as (addresses, _):
            assert (await exchange(addresses["admin"], head)).startswith("HTTP/1.1 200 ")

    async def test_a_change_is_logged_without_an_address(
        self, house: House, config: AdminConfig, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        head = 'PUT /api/v1/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 15\r\n\r\n{"ready":false}'
        async with served(ServerDesk(await house.serve()), config) as (addresses, _):
            assert (await exchange(addresses["admin"], head)).startswith("HTTP/1.1 200 ")
        assert "asked change=ready by=unix ready=false" in said(caplog)

    async def test_one_that_nobody_listens_on_is_replaced(self, house: House, path: Path, config: AdminConfig) -> None:
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))
        async with served(ServerDesk(await house.serve()), config) as (addresses, _):
            assert (await exchange(addresses["admin"])).startswith("HTTP/1.1 200 ")

    async def test_one_that_somebody_listens_on_is_left_alone(
        self, house: House, path: Path, config: AdminConfig
    ) -> None:
        desk = ServerDesk(await house.serve())
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            other.listen()
            await self._refused(desk, config, "another process listens there")
            assert mode_of(path) is not None

    async def test_a_file_that_is_no_socket_is_left_alone(
        self, house: House, precious: Path, config: AdminConfig
    ) -> None:
        size = os.stat(precious).st_size
        await self._refused(ServerDesk(await house.serve()), config, "no socket")
        assert os.stat(precious).st_size == size

    async def test_a_folder_that_is_not_there_is_named(self, house: House, tmp_path: Path) -> None:
        config = AdminConfig(UnixAddress(str(tmp_path / "nowhere" / "admin.sock")))
        await self._refused(ServerDesk(await house.serve()), config, "No such file")

    async def _refused(self, desk: Operated, config: AdminConfig, words: str) -> None:
        with pytest.RaisesGroup(pytest.RaisesExc(BindError, match=words), flatten_subgroups=True):
            async with served(desk, config):
                pytest.fail("it listens")

    async def test_one_that_another_process_made_meanwhile_is_not_removed(
        self, house: House, path: Path, config: AdminConfig
    ) -> None:
        with socket.socket(socket.AF_UNIX) as other:
            async with served(ServerDesk(await house.serve()), config):
                os.rename(path, path.with_suffix(".old"))
                other.bind(str(path))
            assert mode_of(path) is not None
