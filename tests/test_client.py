"""The client: its one link, its dials, what each failure is called, and what is left when it ends."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Callable

import pytest
import trio
from house import (
    Held,
    House,
    Service,
    descriptors,
    echo,
    greet,
    receive_all,
    receive_exactly,
    reset_after_one_piece,
    talks,
    tasks,
    through,
)
from trio.testing import wait_all_tasks_blocked

import tunnel
from tunnel import client as client_module
from tunnel.address import Target
from tunnel.agent import Agent
from tunnel.client import Client, open_client
from tunnel.config import ClientConfig
from tunnel.connect import Attempt, Connector
from tunnel.errors import (
    AddressError,
    ConfigError,
    Denied,
    DialError,
    DialProtocolError,
    DialTimeout,
    DnsError,
    LinkLost,
    NoBackend,
    NoServer,
    Refused,
    StreamReset,
    Unreachable,
)
from tunnel.frames import Decoder
from tunnel.handshake import DiallingHandshake, welcome
from tunnel.identity import Identity
from tunnel.lifecycle import Phase
from tunnel.limits import Limits
from tunnel.link import Link
from tunnel.packets import Close, DialReq, DialRsp, Eof, GoAway, GoAwayAck, Packet
from tunnel.stream import TunnelStream

HELD = "held.test"
MIB = 1024 * 1024


@pytest.fixture
async def agent(house: House) -> Agent:
    """The only agent of a server."""
    await house.serve()
    return await house.agent()


@pytest.fixture
async def echoes(house: House, agent: Agent) -> Service:
    """A target that echoes, behind a server and an agent."""
    return await house.service(echo)


@pytest.fixture
async def client(house: House, agent: Agent) -> AsyncIterator[Client]:
    """A client of the server; no link yet."""
    async with house.client() as client:
        yield client


async def dial(client: Client, target: Target) -> TunnelStream:
    return await client.dial(target.host, target.port)


async def nothing_left(house: House, agent: Agent, client: Client) -> None:
    """Return when no stream is left on any link."""
    links = [*house.server._links, *agent.sync.links.values(), *filter(None, [client.link])]
    for link in links:
        await link.open_streams.wait_value(0)
    await house.server.life.open.wait_value(0)
    await agent.life.open.wait_value(0)


async def reset_of(stream: TunnelStream) -> StreamReset:
    """Why it broke."""
    with pytest.raises(trio.BrokenResourceError) as caught:
        await stream.wait_ended()
    assert isinstance(caught.value.__cause__, StreamReset)
    return caught.value.__cause__


def lose(house: House) -> None:
    """Have the server drop the client's link."""
    (link,) = house.client_links()
    link.drop("lost")


# -- the link


async def test_a_client_that_dials_nothing_links_to_nothing(house: House, client: Client) -> None:
    await wait_all_tasks_blocked()
    assert (client.link, house.client_links()) == (None, [])


async def test_the_first_dial_makes_the_link(house: House, client: Client, echoes: Service) -> None:
    assert await talks(await dial(client, echoes.target))
    assert len(house.client_links()) == 1


async def test_dials_share_the_link(house: House, client: Client, echoes: Service) -> None:
    for _ in range(3):
        await dial(client, echoes.target)
    assert len(house.client_links()) == 1


async def test_many_first_dials_at_once_make_one_link(house: House, client: Client, echoes: Service) -> None:
    streams = []

    async def one() -> None:
        streams.append(await dial(client, echoes.target))

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(one)
    assert len(house.client_links()) == 1
    assert [await talks(stream) for stream in streams] == [True] * 50


async def test_a_link_that_is_lost_resets_its_streams_with_the_reason(
    house: House, client: Client, echoes: Service
) -> None:
    stream = await dial(client, echoes.target)
    lose(house)
    error = await reset_of(stream)
    assert (error.code, error.text) == ("link_lost", "the peer closed the connection")


async def test_the_first_dial_after_a_loss_makes_a_new_link(house: House, client: Client, echoes: Service) -> None:
    stream, first = await dial(client, echoes.target), client.link
    lose(house)
    await reset_of(stream)
    assert await talks(await dial(client, echoes.target))
    assert client.link is not first
    assert len(house.client_links()) == 1


async def test_a_dial_whose_link_is_lost_goes_over_a_new_one(
    house: House, held: Held, client: Client, echoes: Service
) -> None:
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            assert await talks(await dial(client, through(echoes.target)))

        nursery.start_soon(ask)
        await held.arrived.wait_value(1)
        lose(house)
        await held.arrived.wait_value(2)
        held.open.set()
    assert (held.given_up, echoes.opened.value) == (1, 1)


async def test_a_dial_whose_link_is_lost_twice_says_so(house: House, held: Held, client: Client) -> None:
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(LinkLost, match="the peer closed the connection"):
                await client.dial(HELD, 80)

        nursery.start_soon(ask)
        for time in (1, 2):
            await held.arrived.wait_value(time)
            lose(house)
    assert held.arrived.value == held.given_up == 2


async def test_a_dial_whose_agent_is_lost_is_not_asked_for_again_over_a_new_link(
    house: House, held: Held, agent: Agent, client: Client
) -> None:
    """The server has looked for another agent already."""
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(NoBackend):
                await client.dial(HELD, 80)

        nursery.start_soon(ask)
        await held.arrived.wait_value(1)
        house.kill(agent)
    assert (held.arrived.value, len(house.client_links())) == (1, 1)


async def test_a_dial_whose_agents_are_lost_one_after_the_other_says_so(
    house: House, held: Held, agent: Agent, client: Client
) -> None:
    agents = {"one": agent, "two": await house.agent("two")}
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(LinkLost):
                await client.dial(HELD, 80)

        nursery.start_soon(ask)
        for time in (1, 2):
            await held.arrived.wait_value(time)
            (asked,) = [name for name, agent in agents.items() if agent.life.open.value]
            house.kill(agents.pop(asked))
    assert (held.arrived.value, len(house.client_links())) == (2, 1)


async def test_a_client_says_what_it_is_called(house: House, agent: Agent) -> None:
    config = ClientConfig((Target("127.0.0.1", house.server.addresses["links"][0].port),), "toaster")
    client = await house.nursery.start(Client(config).run)
    await client.connect()
    assert [link.peer.name for link in house.client_links() if link.peer] == ["toaster"]
    await client.aclose()


async def test_a_clients_link_is_no_agent(house: House, client: Client) -> None:
    await client.connect()
    assert len(house.server.backends) == 1


# -- servers


async def _silent_port(house: House) -> Target:
    """Where connections are taken and nothing is ever said."""

    async def say_nothing(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    return (await house.service(say_nothing)).target


async def test_a_server_that_refuses_is_passed_over(house: House, echoes: Service) -> None:
    async with open_client(str(house.closed_port()), str(house.server.addresses["links"][0])) as client:
        assert await talks(await dial(client, echoes.target))


async def test_a_server_that_says_nothing_is_passed_over(
    house: House, echoes: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_PATIENCE", 0.01)
    async with open_client(str(await _silent_port(house)), str(house.server.addresses["links"][0])) as client:
        assert await talks(await dial(client, echoes.target))


async def test_the_first_server_that_takes_us_is_the_only_one_linked_to(house: House, echoes: Service) -> None:
    first = house.server
    second = await house.serve()
    addresses = [str(server.addresses["links"][0]) for server in (first, second)]
    async with open_client(*addresses) as client:
        await dial(client, echoes.target)
        assert [len(server._links) for server in (first, second)] == [2, 0]


async def test_the_order_of_servers_begins_anew_after_a_loss(house: House, echoes: Service) -> None:
    closed, address = house.closed_port(), house.server.addresses["links"][0]
    tried: list[int] = []
    async with open_client(str(closed), str(address)) as client:
        connect = client._connector.connect

        async def noted(host: str, port: int) -> socket.socket:
            tried.append(port)
            return await connect(host, port)

        client._connector.connect = noted  # type: ignore[method-assign]
        stream = await dial(client, echoes.target)
        lose(house)
        await reset_of(stream)
        await dial(client, echoes.target)
    assert tried == [closed.port, address.port] * 2


async def test_when_no_server_takes_us_each_is_named_with_its_cause(house: House) -> None:
    one, two = house.closed_port(), house.closed_port()
    async with open_client(str(one), str(two)) as client:
        with pytest.raises(NoServer) as caught:
            await client.dial("x", 1)
    assert caught.value.text == "; ".join(
        f"{server}: 127.0.0.1 port {server.port}: Connection refused" for server in (one, two)
    )


async def test_the_last_server_gets_more_patience_than_those_before(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async def hang(connector: Connector, host: str, port: int) -> socket.socket:
        await trio.sleep_forever()

    monkeypatch.setattr(Connector, "connect", hang)
    async with open_client("one.test:1", "two.test:2") as client:
        with pytest.raises(NoServer) as caught:
            await client.dial("x", 1, timeout=60)
    assert caught.value.text == "one.test:1: no link within 3 s; two.test:2: no link within 10 s"


async def test_a_server_that_is_none_is_named_with_its_cause(house: House) -> None:
    async def talk_nonsense(stream: trio.SocketStream) -> None:
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    service = await house.service(talk_nonsense)
    async with open_client(str(service.target)) as client:
        with pytest.raises(NoServer, match=str(service.target)):
            await client.dial("x", 1)


async def test_a_dial_that_found_no_server_tries_again_the_next_time(
    house: House, echoes: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(Connector, "connect", _refuse)
            with pytest.raises(NoServer):
                await dial(client, echoes.target)
        assert await talks(await dial(client, echoes.target))


async def _refuse(connector: Connector, host: str, port: int) -> socket.socket:
    raise Refused("no one listens")


async def test_a_dial_waits_for_a_link_no_longer_than_its_timeout(house: House) -> None:
    async with open_client(str(await _silent_port(house))) as client:
        with pytest.raises(DialTimeout, match=r"no answer within 0\.01 s"):
            await client.dial("x", 1, timeout=0.01)


@pytest.mark.parametrize("where", ["connect", "handshake", "link"])
async def test_a_fault_in_linking_is_told_to_the_dial_and_ends_nothing_else(
    where: str, house: House, echoes: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(*args: object) -> None:
        raise ZeroDivisionError("oops")

    async def async_fault(*args: object) -> None:
        fault()

    async with house.client() as client:
        with monkeypatch.context() as patch:
            if where == "connect":
                patch.setattr(Connector, "connect", async_fault)
            elif where == "handshake":
                patch.setattr(DiallingHandshake, "receive", fault)
            else:
                patch.setattr(Link, "_greet", async_fault)
            with pytest.raises(NoServer, match=r"internal fault: .*oops"):
                await dial(client, echoes.target)
        caplog.clear()
        assert await talks(await dial(client, echoes.target))


async def test_a_fault_of_a_link_that_is_up_ends_that_link_alone(
    house: House, echoes: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fault(link: Link) -> None:
        raise ZeroDivisionError("oops")

    async with house.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(Link, "_keep_alive", fault)
            with pytest.raises(DialError):
                await dial(client, echoes.target)
        caplog.clear()
        assert await talks(await dial(client, echoes.target))


# -- dials that fail


@pytest.mark.parametrize("kind", [Refused, Unreachable, DnsError, DialTimeout, Denied, DialProtocolError])
async def test_what_an_agent_answers_is_raised_as_its_kind_with_its_text(
    kind: type[DialError], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.connect()

    async def fail(connector: Connector, host: str, port: int) -> socket.socket:
        raise kind("because")

    monkeypatch.setattr(Connector, "connect", fail)
    with pytest.raises(DialError) as caught:
        await client.dial("x", 1)
    assert (type(caught.value), caught.value.code, caught.value.text) == (kind, kind.code, "because")


async def test_a_port_where_nobody_listens_is_refused(house: House, client: Client) -> None:
    target = house.closed_port()
    with pytest.raises(Refused, match=f"127.0.0.1 port {target.port}: Connection refused"):
        await dial(client, target)


async def test_a_name_without_address_is_a_dns_error(client: Client, names: Names) -> None:
    with pytest.raises(DnsError, match=r"nowhere\.test: no such name"):
        await client.dial("nowhere.test", 80)


async def test_a_dial_without_answer_is_a_timeout(client: Client, held: Held) -> None:
    with pytest.raises(DialTimeout):
        await client.dial(HELD, 80, timeout=0.05)


async def test_a_server_has_a_limit_of_its_own_for_dials(house: House, held: Held) -> None:
    await house.serve(dial_timeout=0.05)
    await house.agent()
    async with house.client() as client:
        with pytest.raises(DialTimeout):
            await client.dial(HELD, 80, timeout=1000)


async def test_a_server_without_agents_has_no_backend(house: House) -> None:
    await house.serve()
    async with house.client() as client:
        with pytest.raises(NoBackend, match="no agent is linked"):
            await client.dial("x", 1)


@pytest.mark.parametrize("host", ["", "a b", "x/y", "127.1", "0x7f.1", "[::1]", "a" * 300])
async def test_a_host_that_is_none_is_an_address_error_and_nothing_is_sent(client: Client, host: str) -> None:
    with pytest.raises(AddressError):
        await client.dial(host, 80)
    assert client.link is None


@pytest.mark.parametrize("port", [-1, 0, 65536])
async def test_a_port_that_is_none_is_an_address_error_and_nothing_is_sent(client: Client, port: int) -> None:
    with pytest.raises(AddressError):
        await client.dial("x", port)
    assert client.link is None


@pytest.mark.parametrize("name", ["", "a b", "a\nb", "x" * 129])
async def test_an_agent_name_that_is_none_is_a_config_error_and_nothing_is_sent(client: Client, name: str) -> None:
    with pytest.raises(ConfigError):
        await client.dial("x", 1, agent=name)
    assert client.link is None


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
async def test_a_timeout_that_is_none_is_a_config_error_and_nothing_is_sent(client: Client, seconds: float) -> None:
    with pytest.raises(ConfigError):
        await client.dial("x", 1, timeout=seconds)
    assert client.link is None


@pytest.mark.parametrize("servers", [(), ("x",), ("127.0.0.1:0",), ("127.0.0.1:1", "nonsense")])
async def test_servers_that_are_none_are_a_config_error(servers: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        async with open_client(*servers):
            pass


async def _ask_raw(client: Client, host: str, port: int, **options: object) -> TunnelStream:
    """A dial as a client would ask that checks nothing."""
    return await (await client.connect()).dial(host, port, seconds=10, options=options)


@pytest.mark.parametrize("options", [{"agent": 5}, {"agent": b"one"}, {"agent": "a b"}, {"agent": ""}])
async def test_a_server_takes_no_agent_name_that_is_none(client: Client, options: dict[str, object]) -> None:
    with pytest.raises(DialProtocolError):
        await _ask_raw(client, "x", 1, **options)


@pytest.mark.parametrize(("host", "port"), [("", 80), ("127.1", 80), ("x", 0), ("x", 65536)])
async def test_a_server_takes_no_target_that_is_none(client: Client, host: str, port: int) -> None:
    with pytest.raises(DialProtocolError):
        await _ask_raw(client, host, port)


async def test_a_server_ignores_what_it_does_not_know_of_a_dial(client: Client, echoes: Service) -> None:
    assert await talks(await _ask_raw(client, echoes.target.host, echoes.target.port, later=1))


# -- dials that succeed


@pytest.mark.parametrize("name", ["one", "two"])
async def test_a_dial_reaches_the_agent_it_names_and_no_other(
    house: House, client: Client, agent: Agent, echoes: Service, name: str
) -> None:
    two = await house.agent("two")
    for _ in range(5):
        await client.dial(echoes.target.host, echoes.target.port, agent=name)
    assert (agent.dials.served, two.dials.served) == ((5, 0) if name == "one" else (0, 5))


async def test_an_agent_that_nobody_is_called_is_no_backend(client: Client, echoes: Service) -> None:
    with pytest.raises(NoBackend, match="no agent named nobody"):
        await client.dial(echoes.target.host, echoes.target.port, agent="nobody")


class Names:
    """A resolver that knows a few names, all of this machine, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._getaddrinfo = socket.getaddrinfo

    def getaddrinfo(self, host: str, port: int, *args: object, **kwargs: object) -> object:
        self.asked.append(host)
        if host == "nowhere.test":
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return self._getaddrinfo("127.0.0.1", port, *args, **kwargs)  # type: ignore[arg-type]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    return names


@pytest.mark.parametrize(
    ("spelling", "asked"),
    [
        ("db.internal", "db.internal"),
        ("DB.Internal", "db.internal"),
        ("db.internal.", "db.internal"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
    ],
)
async def test_a_name_may_be_spelled_as_people_do(
    client: Client, echoes: Service, names: Names, spelling: str, asked: str
) -> None:
    assert await talks(await client.dial(spelling, echoes.target.port))
    assert names.asked[-1] == asked


@pytest.mark.parametrize("spelling", ["::1", "0:0:0:0:0:0:0:1", "::0:1"])
async def test_an_ipv6_address_may_be_spelled_as_people_do(house: House, client: Client, spelling: str) -> None:
    try:
        (listener,) = await trio.open_tcp_listeners(0, host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    service = Service(listener.socket.getsockname()[1], echo)
    await house.nursery.start(trio.serve_listeners, service.serve, [listener])
    assert await talks(await client.dial(spelling, service.target.port))


async def test_an_ipv4_address_wrapped_in_ipv6_is_the_same_target(client: Client, echoes: Service) -> None:
    assert await talks(await client.dial("::ffff:127.0.0.1", echoes.target.port))


async def test_a_target_that_speaks_first_is_heard(house: House, client: Client) -> None:
    service = await house.service(greet)
    assert await receive_exactly(await dial(client, service.target), 8) == b"welcome\n"


async def test_a_target_that_resets_is_a_reset(house: House, client: Client) -> None:
    service = await house.service(reset_after_one_piece)
    stream = await dial(client, service.target)
    await stream.send_all(b"x")
    assert (await reset_of(stream)).code == "reset"


async def test_a_client_that_ends_its_direction_still_hears_the_target(house: House, client: Client) -> None:
    async def count(stream: trio.SocketStream) -> None:
        size = len(await receive_all(stream))
        await stream.send_all(b"%d bytes" % size)

    service = await house.service(count)
    stream = await dial(client, service.target)
    await stream.send_all(bytes(3_000_000))
    await stream.send_eof()
    assert await receive_all(stream) == b"3000000 bytes"


async def test_one_stream_can_be_had_without_a_client(house: House, echoes: Service) -> None:
    address, target = str(house.server.addresses["links"][0]), echoes.target
    async with tunnel.dial(address, target.host, target.port, agent="one") as stream:
        assert await talks(stream)
    await echoes.open.wait_value(0)
    while house.client_links():
        await wait_all_tasks_blocked()


async def test_one_stream_that_cannot_be_had_is_a_dial_error(house: House, agent: Agent) -> None:
    target = house.closed_port()
    with pytest.raises(Refused):
        async with tunnel.dial(str(house.server.addresses["links"][0]), target.host, target.port):
            pass


# -- dials that are given up


async def test_a_dial_that_is_cancelled_leaves_nothing(house: House, agent: Agent, client: Client, held: Held) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.dial, HELD, 80)
            await held.arrived.wait_value(1)
            scope.cancel()
    await nothing_left(house, agent, client)
    assert held.given_up == 1


async def test_a_first_dial_that_is_cancelled_leaves_the_link_to_others(
    house: House, client: Client, echoes: Service
) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await dial(client, echoes.target)
    assert await talks(await dial(client, echoes.target))
    assert len(house.client_links()) == 1


class Callers:
    """Does something to the caller of a dial at the moment its target is connected."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
        self.then: Callable[[], None] = lambda: None
        begin = Connector.begin

        def connected(connector: Connector, host: str, port: int) -> Attempt | None:
            attempt = begin(connector, host, port)
            if port == target.port:
                self.then()
            return attempt

        monkeypatch.setattr(Connector, "begin", connected)


async def test_dials_that_are_cancelled_while_the_answer_is_on_its_way_leave_nothing(
    house: House, agent: Agent, client: Client, echoes: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers = Callers(monkeypatch, echoes.target)
    await client.connect()
    before = tasks(), descriptors()
    for _ in range(200):
        with trio.CancelScope() as scope:
            callers.then = scope.cancel
            await dial(client, echoes.target)
        assert scope.cancelled_caught
    await echoes.opened.wait_value(200)
    await nothing_left(house, agent, client)
    await echoes.open.wait_value(0)
    assert (tasks(), descriptors()) == before


async def test_a_client_that_is_killed_as_its_dial_succeeds_leaves_nothing(
    house: House, agent: Agent, client: Client, echoes: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = await client.connect()
    Callers(monkeypatch, echoes.target).then = lambda: link.drop("killed")
    with pytest.raises(LinkLost):
        await link.dial(echoes.target.host, echoes.target.port, seconds=10)
    await echoes.opened.wait_value(1)
    await nothing_left(house, agent, client)
    await echoes.open.wait_value(0)


# -- the end


async def test_a_client_that_has_ended_dials_no_more(house: House, agent: Agent) -> None:
    async with house.client() as client:
        await client.connect()
    with pytest.raises(trio.ClosedResourceError):
        await client.dial("x", 1)


async def test_a_client_may_be_closed_twice(house: House, client: Client) -> None:
    await client.connect()
    await client.aclose()
    await client.aclose()
    assert repr(client).endswith(" closed>")


async def test_a_client_that_never_linked_can_be_closed(client: Client) -> None:
    await client.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await client.dial("x", 1)


@pytest.mark.parametrize("linked", [True, False])
async def test_a_dial_that_waits_when_the_client_is_closed_says_so(
    house: House, client: Client, held: Held, linked: bool
) -> None:
    if not linked:
        client.config = ClientConfig((await _silent_port(house),))

    async def ask() -> None:
        with pytest.raises((trio.ClosedResourceError, NoServer), match="closed"):
            await client.dial(HELD, 80)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        if linked:
            await held.arrived.wait_value(1)
        else:
            await wait_all_tasks_blocked()
        await client.aclose()


async def test_what_was_sent_and_closed_arrives_although_the_client_leaves_at_once(house: House, agent: Agent) -> None:
    sizes: list[int] = []

    async def count(stream: trio.SocketStream) -> None:
        sizes.append(len(await receive_all(stream)))

    service = await house.service(count)
    async with house.client() as client, await dial(client, service.target) as stream:
        await stream.send_all(bytes(8 * MIB))
    await service.opened.wait_value(1)
    await service.open.wait_value(0)
    assert sizes == [8 * MIB]


class SlowServer:
    """A server made of frames that takes one link and one dial on it, and then reads nothing until it is told to.

    Attributes:
        dialled: set when it has answered the dial.
        received: bytes of DATA.
    """

    def __init__(self, listener: trio.SocketListener) -> None:
        self.address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
        self.dialled = trio.Event()
        self.received = 0
        self._listener = listener
        self._packets: list[Packet] = []
        self._decoder = Decoder(Limits().body, self._packets.append, self._count)

    async def run(self) -> None:
        self._stream = await self._listener.accept()
        await self._next()
        await self._stream.send_all(welcome(Identity("server", "slow"), 1).encode())
        dial = await self._next()
        assert isinstance(dial, DialReq)
        await self._stream.send_all(DialRsp(dial.stream, "ok", "", 16 * MIB).encode())
        self.dialled.set()

    async def _next(self) -> Packet:
        while not self._packets:
            self._decoder.feed(await self._stream.receive_some())
        return self._packets.pop(0)

    async def say(self, packet: Packet) -> None:
        await self._stream.send_all(packet.encode())

    async def rest(self) -> list[Packet]:
        """Everything to the end of the connection, but for DATA."""
        async with self._stream:
            async for data in self._stream:
                self._decoder.feed(data)
        return self._packets

    def _count(self, stream: int, data: memoryview) -> None:
        self.received += len(data)


@pytest.fixture
async def slow(nursery: trio.Nursery) -> AsyncIterator[SlowServer]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    async with listener:
        server = SlowServer(listener)
        nursery.start_soon(server.run)
        yield server


async def test_a_client_leaves_when_all_that_was_sent_has_gone_and_says_so(
    slow: SlowServer, nursery: trio.Nursery
) -> None:
    left = trio.Event()

    async def visit() -> None:
        limits = Limits(high_water=1 << 30)
        async with open_client(slow.address, limits=limits) as client, await client.dial("x", 1) as stream:
            await stream.send_all(bytes(8 * MIB))
        left.set()

    nursery.start_soon(visit)
    await slow.dialled.wait()
    await wait_all_tasks_blocked()
    assert not left.is_set()
    assert await slow.rest() == [Eof(1), Close(0, "leaving", "the client is leaving")]
    assert slow.received == 8 * MIB
    await left.wait()


async def test_a_client_that_is_cancelled_still_sends_what_was_closed(slow: SlowServer, nursery: trio.Nursery) -> None:
    visiting = trio.CancelScope()

    async def visit() -> None:
        with visiting:
            async with open_client(slow.address, limits=Limits(high_water=1 << 30)) as client:
                async with await client.dial("x", 1) as stream:
                    await stream.send_all(bytes(8 * MIB))
                await trio.sleep_forever()

    nursery.start_soon(visit)
    await slow.dialled.wait()
    await wait_all_tasks_blocked()
    visiting.cancel()
    assert await slow.rest() == [Eof(1), Close(0, "leaving", "the client is leaving")]
    assert slow.received == 8 * MIB


async def test_a_client_that_is_about_to_end_looks_for_no_other_server(slow: SlowServer, nursery: trio.Nursery) -> None:
    left = trio.Event()

    async def visit() -> None:
        limits = Limits(high_water=1 << 30)
        async with open_client(slow.address, limits=limits) as client, await client.dial("x", 1) as stream:
            await stream.send_all(bytes(8 * MIB))
        left.set()

    nursery.start_soon(visit)
    await slow.dialled.wait()
    await wait_all_tasks_blocked()
    await slow.say(GoAway("soft", 1000))
    await wait_all_tasks_blocked(0.01)
    assert not left.is_set()
    rest = await slow.rest()
    assert rest == [GoAwayAck("soft"), Eof(1), Close(0, "leaving", "the client is leaving")]
    assert slow.received == 8 * MIB
    await left.wait()


async def test_a_client_that_is_about_to_end_dials_no_more(slow: SlowServer, nursery: trio.Nursery) -> None:
    async with open_client(slow.address, limits=Limits(high_water=1 << 30)) as client:
        async with await client.dial("x", 1) as stream:
            await stream.send_all(bytes(8 * MIB))
        nursery.start_soon(client.aclose)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.ClosedResourceError):
            await client.dial("x", 1)
        await slow.rest()


async def test_a_target_hears_the_end_of_what_a_client_that_left_had_sent(house: House, agent: Agent) -> None:
    ends: list[bytes] = []

    async def answer_late(stream: trio.SocketStream) -> None:
        ends.append(await receive_all(stream))
        while house.client_links():
            await wait_all_tasks_blocked()
        await stream.send_eof()

    service = await house.service(answer_late)
    async with house.client() as client, await dial(client, service.target) as stream:
        await stream.send_all(b"last words")
    await service.opened.wait_value(1)
    await service.open.wait_value(0)
    await nothing_left(house, agent, client)
    assert ends == [b"last words"]


async def test_streams_that_are_open_when_the_client_leaves_are_reset(house: House, agent: Agent) -> None:
    ends: list[object] = []

    async def note_the_end(stream: trio.SocketStream) -> None:
        try:
            ends.append(await receive_all(stream))
        except trio.BrokenResourceError:
            ends.append("reset")

    service = await house.service(note_the_end)
    async with house.client() as client:
        stream = await dial(client, service.target)
    await service.open.wait_value(0)
    assert ends == ["reset"]
    assert (await reset_of(stream)).code == "link_lost"


async def test_a_client_that_leaves_while_it_dials_leaves_nothing(house: House, agent: Agent, held: Held) -> None:
    async with trio.open_nursery() as nursery, house.client() as client:

        async def ask() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await client.dial(HELD, 80)

        nursery.start_soon(ask)
        await held.arrived.wait_value(1)
    await nothing_left(house, agent, client)
    assert held.given_up == 1


async def test_a_dial_that_succeeds_when_its_client_has_left_is_undone(
    house: House, agent: Agent, echoes: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = Connector.connect
    arrived, gone = trio.Event(), trio.Event()

    async def too_late(connector: Connector, host: str, port: int) -> socket.socket:
        if port == echoes.target.port:
            arrived.set()
            with trio.CancelScope(shield=True):
                await gone.wait()
                return await connect(connector, host, port)
        return await connect(connector, host, port)

    monkeypatch.setattr(Connector, "connect", too_late)
    async with trio.open_nursery() as nursery, house.client() as client:

        async def ask() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await client.dial("localhost", echoes.target.port)

        nursery.start_soon(ask)
        await arrived.wait()
    while house.client_links():
        await wait_all_tasks_blocked()
    await wait_all_tasks_blocked()
    gone.set()
    await echoes.opened.wait_value(1)
    await echoes.open.wait_value(0)
    await nothing_left(house, agent, client)


async def test_a_thousand_streams_leave_nothing(house: House, agent: Agent, client: Client, echoes: Service) -> None:
    async def open_and_close(times: int) -> None:
        for _ in range(times):
            async with await dial(client, echoes.target) as stream:
                assert await talks(stream)

    async def settled() -> tuple[int, int]:
        await nothing_left(house, agent, client)
        await echoes.open.wait_value(0)
        await wait_all_tasks_blocked()
        return tasks(), descriptors()

    await open_and_close(1)
    before = await settled()
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(open_and_close, 50)
    assert await settled() == before
    assert echoes.opened.value == 1001


async def test_clients_that_come_and_go_leave_nothing(house: House, agent: Agent, echoes: Service) -> None:
    async def come_and_go() -> None:
        async with house.client() as client, await dial(client, echoes.target) as stream:
            assert await talks(stream)
        await echoes.open.wait_value(0)
        while house.client_links():
            await wait_all_tasks_blocked()
        await nothing_left(house, agent, client)
        await wait_all_tasks_blocked()

    await come_and_go()
    before = tasks(), descriptors()
    for _ in range(20):
        await come_and_go()
    assert (tasks(), descriptors()) == before


# -- errors in the caller's own code


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt("mine"), NoBackend("mine")], ids=repr)
@pytest.mark.parametrize("linked", [True, False])
async def test_what_fails_in_the_block_arrives_as_it_was_raised(
    house: House, agent: Agent, error: BaseException, linked: bool
) -> None:
    caught: BaseException | None = None
    try:
        async with house.client() as client:
            if linked:
                await client.connect()
            raise error
    except BaseException as found:
        caught = found
    assert caught is error
    assert client.link is None or client.link.ended.is_set()


async def test_a_cancellation_of_the_block_stops_at_its_own_scope(house: House, echoes: Service) -> None:
    with trio.CancelScope() as scope:
        async with house.client() as client:
            stream = await dial(client, echoes.target)
            scope.cancel()
            await receive_all(stream)
    assert scope.cancelled_caught
    assert client.link is not None
    assert client.link.ended.is_set()


async def test_a_stream_in_the_block_is_reset_when_the_block_is_cancelled(house: House, agent: Agent) -> None:
    ends: list[object] = []

    async def note_the_end(stream: trio.SocketStream) -> None:
        try:
            ends.append(await receive_all(stream))
        except trio.BrokenResourceError:
            ends.append("reset")

    service = await house.service(note_the_end)
    with trio.CancelScope() as scope:
        async with house.client() as client, await dial(client, service.target) as stream:
            await stream.send_all(b"half of it")
            await service.opened.wait_value(1)
            scope.cancel()
            await stream.receive_some()
    await service.open.wait_value(0)
    assert ends == ["reset"]


# -- servers that leave


async def test_a_server_that_leaves_takes_no_new_dial_and_finishes_what_runs(
    house: House, client: Client, echoes: Service
) -> None:
    stream = await dial(client, echoes.target)
    house.server.life.leave()
    await house.server.life.phase.wait_value(Phase.DRAINING)
    with pytest.raises(NoServer, match="the server is leaving"):  # no other one is known
        await dial(client, echoes.target)
    assert await talks(stream)
    await stream.send_eof()
    assert await receive_all(stream) == b""
    await house.server.life.phase.wait_value(Phase.EXIT)
    assert house.server.life.exit_code == 0


async def test_a_dial_that_is_pending_when_a_server_begins_to_leave_is_served(
    house: House, client: Client, held: Held, echoes: Service
) -> None:
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            async with await dial(client, through(echoes.target)) as stream:
                assert await talks(stream)

        nursery.start_soon(ask)
        await held.arrived.wait_value(1)
        house.server.life.leave()
        await house.server.life.phase.wait_value(Phase.DRAINING)
        held.open.set()
    await house.server.life.phase.wait_value(Phase.EXIT)


async def test_a_client_of_a_server_that_has_left_links_to_the_next(house: House, echoes: Service) -> None:
    first = house.server
    await house.serve()
    await house.agent()
    addresses = [str(server.addresses["links"][0]) for server in (first, house.server)]
    async with open_client(*addresses) as client:
        link = await client.connect()
        first.life.leave()
        await link.ended.wait()
        await first.life.phase.wait_value(Phase.EXIT)
        assert await talks(await dial(client, echoes.target))


async def test_clients_that_come_and_go_log_nothing_above_info(
    house: House, echoes: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tunnel")
    async with house.client() as client, await dial(client, echoes.target) as stream:
        assert await talks(stream)
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []
