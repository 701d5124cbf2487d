"""TLS: who takes whom and hears what when not, and links that do not notice any of it."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
from authorities import NAME, Authority, der
from transports import Ends, TransportContract, receive_all, receive_once, send_all
from trio.testing import wait_all_tasks_blocked

from tunnel.certificates import ClientTls, ServerContext, binding_of
from tunnel.errors import LinkClosed
from tunnel.handshake import AcceptingHandshake, DiallingHandshake
from tunnel.identity import Identity
from tunnel.limits import Limits, Timeouts
from tunnel.link import Link
from tunnel.packets import VERSION, Hello
from tunnel.stream import TunnelStream
from tunnel.tls import TlsTransport, accept_tls, dial_tls
from tunnel.transport import SocketTransport

if TYPE_CHECKING:
    from conftest import TcpPair

SERVER, AGENT = Identity("server", "server"), Identity("agent", "agent")
YESTERDAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    (tmp_path / "stranger").mkdir()
    return Authority(tmp_path / "stranger")


# -- handshakes


@dataclass
class Outcome:
    """How a handshake ended at each end."""

    accepted: tuple[TlsTransport, bytes] | str = "cancelled"
    dialled: tuple[TlsTransport, bytes] | str = "cancelled"

    @property
    def ends(self) -> Ends:
        assert not isinstance(self.accepted, str), self
        assert not isinstance(self.dialled, str), self
        return self.accepted[0], self.dialled[0]


Handshake = Callable[..., Awaitable[Outcome]]


@pytest.fixture
def shake_hands(tcp_pair: TcpPair) -> Handshake:
    async def shake_hands(server: ServerContext, client: ssl.SSLContext, name: str = NAME) -> Outcome:
        left, right = tcp_pair()
        outcome = Outcome()

        async def accept() -> None:
            try:
                outcome.accepted = await accept_tls(left, server)
            except LinkClosed as error:
                outcome.accepted = str(error)

        async def dial() -> None:
            try:
                outcome.dialled = await dial_tls(right, client, name)
            except LinkClosed as error:
                outcome.dialled = str(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            nursery.start_soon(dial)
        return outcome

    return shake_hands


@pytest.fixture
async def ends(authority: Authority, shake_hands: Handshake) -> Ends:
    return (await shake_hands(authority.server().load(), ClientTls(authority.ca).load())).ends


async def _send_on(send: Callable[[Any], Awaitable[None]], what: object) -> None:
    while True:
        await send(what)


def only_1_2(context: ssl.SSLContext) -> ssl.SSLContext:
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def only_1_1(context: ssl.SSLContext) -> ssl.SSLContext:
    with warnings.catch_warnings(action="ignore"):  # it is old, and that is the point
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("DEFAULT@SECLEVEL=0")
    return context


class TestHandshake:
    @pytest.mark.parametrize("change", [lambda context: context, only_1_2])
    async def test_both_ends_know_the_same_binding(
        self,
        authority: Authority,
        shake_hands: Handshake,
        change: Callable[[ssl.SSLContext], ssl.SSLContext],
    ) -> None:
        server = authority.server()
        outcome = await shake_hands(server.load(), change(ClientTls(authority.ca).load()))
        assert outcome.accepted[1] == outcome.dialled[1] == binding_of(der(Path(server.cert)))

    async def test_a_certificate_may_be_for_an_address(self, authority: Authority, shake_hands: Handshake) -> None:
        server = authority.server(name="127.0.0.1").load()
        assert (await shake_hands(server, ClientTls(authority.ca).load(), "127.0.0.1")).ends

    async def test_clients_that_show_a_good_certificate_are_taken(
        self, authority: Authority, shake_hands: Handshake
    ) -> None:
        server = replace(authority.server(), client_ca=authority.ca).load()
        near, far = (await shake_hands(server, authority.client().load())).ends
        await send_all(near, [b"welcome"])
        assert await receive_once(far, 100) == b"welcome"

    async def test_the_transport_knows_where_the_peer_is(
        self, authority: Authority, tcp_pair: TcpPair, nursery: trio.Nursery
    ) -> None:
        left, right = tcp_pair()
        host, port = left.getsockname()
        nursery.start_soon(accept_tls, left, authority.server().load())
        transport, _ = await dial_tls(right, ClientTls(authority.ca).load(), NAME)
        assert transport.address == f"{host}:{port}"

    async def test_the_socket_is_set_up_as_one_without_tls(
        self, authority: Authority, tcp_pair: TcpPair, nursery: trio.Nursery
    ) -> None:
        plain, _ = tcp_pair()
        SocketTransport(plain)
        left, right = tcp_pair()
        right.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        nursery.start_soon(accept_tls, left, authority.server().load())
        await dial_tls(right, ClientTls(authority.ca).load(), NAME)
        for option in socket.TCP_NODELAY, getattr(socket, "TCP_NOTSENT_LOWAT", 25):
            wanted = plain.getsockopt(socket.IPPROTO_TCP, option)
            assert wanted
            assert right.getsockopt(socket.IPPROTO_TCP, option) == wanted


class TestRefusals:
    async def test_an_authority_that_is_unknown(
        self, authority: Authority, stranger: Authority, shake_hands: Handshake
    ) -> None:
        outcome = await shake_hands(stranger.server().load(), ClientTls(authority.ca).load())
        assert outcome == Outcome(
            accepted="TLS: the peer refuses: unknown ca",
            dialled="TLS: the peer's certificate is not taken: unable to get local issuer certificate",
        )

    async def test_a_certificate_for_another_name(self, authority: Authority, shake_hands: Handshake) -> None:
        outcome = await shake_hands(authority.server(name="other.test").load(), ClientTls(authority.ca).load())
        assert outcome == Outcome(
            accepted="TLS: the peer refuses: bad certificate",
            dialled="TLS: the peer's certificate is not taken: "
            "Hostname mismatch, certificate is not valid for 'server.test'",
        )

    async def test_a_certificate_that_has_expired(self, authority: Authority, shake_hands: Handshake) -> None:
        outcome = await shake_hands(authority.server(expires=YESTERDAY).load(), ClientTls(authority.ca).load())
        assert outcome == Outcome(
            accepted="TLS: the peer refuses: certificate expired",
            dialled="TLS: the peer's certificate is not taken: certificate has expired",
        )

    async def test_a_client_that_is_too_old(self, authority: Authority, shake_hands: Handshake) -> None:
        outcome = await shake_hands(authority.server().load(), only_1_1(ClientTls(authority.ca).load()))
        assert outcome == Outcome(
            accepted="TLS: the peer speaks no version of TLS that is taken; taken: 1.2 and later",
            dialled="TLS: the peer refuses: protocol version",
        )

    async def test_a_server_that_is_too_old(self, authority: Authority, shake_hands: Handshake) -> None:
        server = authority.server().load()
        only_1_1(server.context)
        outcome = await shake_hands(server, ClientTls(authority.ca).load())
        assert outcome.dialled == "TLS: the peer refuses: protocol version"

    async def test_a_client_without_a_certificate(self, authority: Authority, shake_hands: Handshake) -> None:
        server = replace(authority.server(), client_ca=authority.ca).load()
        outcome = await shake_hands(server, only_1_2(ClientTls(authority.ca).load()))
        assert outcome == Outcome(
            accepted="TLS: the peer shows no certificate", dialled="TLS: the peer refuses: handshake failure"
        )

    async def test_a_client_with_a_certificate_of_an_authority_that_is_unknown(
        self, authority: Authority, stranger: Authority, shake_hands: Handshake
    ) -> None:
        server = replace(authority.server(), client_ca=stranger.ca).load()
        outcome = await shake_hands(server, only_1_2(authority.client().load()))
        assert str(outcome.accepted).startswith(
            "TLS: the peer's certificate is not taken: self"
        )  # its chain has its root
        assert outcome.dialled == "TLS: the peer refuses: unknown ca"

    async def test_where_the_client_is_refused_after_its_handshake_it_hears_so_when_it_receives(
        self, authority: Authority, tcp_pair: TcpPair, nursery: trio.Nursery
    ) -> None:
        """As TLS 1.3 has it: the client is through before the server has looked. What it sends loses no alert."""
        left, right = tcp_pair()
        refused: list[str] = []

        async def accept() -> None:
            with pytest.raises(LinkClosed) as caught:
                await accept_tls(left, replace(authority.server(), client_ca=authority.ca).load())
            refused.append(str(caught.value))

        async with trio.open_nursery() as inner:
            inner.start_soon(accept)
            transport, _ = await dial_tls(right, ClientTls(authority.ca).load(), NAME)
            await send_all(transport, [bytes(100_000)])
            with pytest.raises(trio.BrokenResourceError, match=r"^TLS: the peer refuses: certificate required$"):
                await receive_all(transport)
            await transport.aclose()
        assert refused == ["TLS: the peer shows no certificate"]

    @pytest.mark.parametrize("first", [b"SSH-2.0-whatever\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
    async def test_a_server_that_does_not_speak_tls(
        self, authority: Authority, tcp_pair: TcpPair, first: bytes
    ) -> None:
        left, right = tcp_pair()
        left.send(first)
        left.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkClosed, match=r"^TLS: the peer does not speak TLS$"):
            await dial_tls(right, ClientTls(authority.ca).load(), NAME)

    @pytest.mark.parametrize(
        "first",
        [Hello(VERSION, AGENT.to_info()).encode(), b"GET / HTTP/1.1\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n"],
        ids=["hello", "get", "connect"],
    )
    async def test_a_client_that_does_not_speak_tls(
        self, authority: Authority, tcp_pair: TcpPair, first: bytes
    ) -> None:
        left, right = tcp_pair()
        right.send(first)
        right.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkClosed, match=r"^TLS: the peer does not speak TLS$"):
            await accept_tls(left, authority.server().load())

    async def test_a_peer_that_goes_away(self, authority: Authority, tcp_pair: TcpPair) -> None:
        left, right = tcp_pair()
        left.close()
        with pytest.raises(LinkClosed, match=r"^TLS: the (peer closed the connection|connection broke: .*)$"):
            await dial_tls(right, ClientTls(authority.ca).load(), NAME)
        assert right.fileno() == -1

    async def test_a_peer_that_looks_only_whether_the_port_is_open(
        self, authority: Authority, tcp_pair: TcpPair
    ) -> None:
        left, right = tcp_pair()
        right.close()
        with pytest.raises(LinkClosed, match=r"^TLS: the peer closed the connection$"):
            await accept_tls(left, authority.server().load())
        assert left.fileno() == -1

    async def test_a_peer_that_resets_the_connection(self, authority: Authority, tcp_pair: TcpPair) -> None:
        left, right = tcp_pair()
        right.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        right.close()
        with pytest.raises(LinkClosed, match=r"^TLS: the connection broke: .*reset by peer$"):
            await accept_tls(left, authority.server().load())

    @pytest.mark.parametrize("side", ["accept", "dial"])
    async def test_a_handshake_that_is_cancelled_leaves_nothing_open(
        self, authority: Authority, tcp_pair: TcpPair, nursery: trio.Nursery, side: str
    ) -> None:
        sock, _ = tcp_pair()
        if side == "accept":
            nursery.start_soon(accept_tls, sock, authority.server().load())
        else:
            nursery.start_soon(dial_tls, sock, ClientTls(authority.ca).load(), NAME)
        await wait_all_tasks_blocked()
        assert sock.fileno() != -1
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
        assert sock.fileno() == -1


# -- the transport


class TestTransport(TransportContract):
    async def test_it_takes_nothing_without_waiting(self, ends: Ends) -> None:
        buffers = [b"abc", b"d"]
        assert ends[0].send_now(buffers) == buffers

    async def test_lingering_ends_tls_with_its_own_goodbye(
        self, authority: Authority, tcp_pair: TcpPair, nursery: trio.Nursery
    ) -> None:
        """So that a peer which tells an end from a cut, unlike ours, sees an end."""
        left, right = tcp_pair()
        peer = trio.SSLStream(
            trio.SocketStream(trio.socket.from_stdlib_socket(right)),
            ClientTls(authority.ca).load(),
            server_hostname=NAME,
        )
        nursery.start_soon(peer.do_handshake)
        transport, _ = await accept_tls(left, authority.server().load())
        nursery.start_soon(transport.linger)
        assert await peer.receive_some() == b""
        await peer.aclose()

    async def test_lingering_on_a_broken_connection_is_over_at_once(
        self, authority: Authority, tcp_pair: TcpPair, nursery: trio.Nursery
    ) -> None:
        left, right = tcp_pair()
        nursery.start_soon(accept_tls, left, authority.server().load())
        transport, _ = await dial_tls(right, ClientTls(authority.ca).load(), NAME)
        await wait_all_tasks_blocked()
        left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        left.close()
        await transport.linger()


# -- links


class Links:
    """Two links over TLS; what is dialled at ``server`` is in ``dialled``."""

    def __init__(self, ends: Ends) -> None:
        self.dialled: list[TunnelStream] = []
        limits, timeouts = Limits(), Timeouts()
        self.server = Link(ends[0], AcceptingHandshake(SERVER), limits=limits, timeouts=timeouts)
        self.agent = Link(
            ends[1], DiallingHandshake(AGENT), limits=limits, timeouts=timeouts, on_dial=lambda s, _: self._take(s)
        )

    def _take(self, stream: TunnelStream) -> None:
        stream.core.accept()
        self.dialled.append(stream)

    async def open(self) -> tuple[TunnelStream, TunnelStream]:
        stream = await self.server.dial("target", 80, seconds=10)
        return stream, self.dialled.pop()


@pytest.fixture
async def links(ends: Ends, nursery: trio.Nursery) -> Links:
    pair = Links(ends)
    nursery.start_soon(pair.agent.run)
    await nursery.start(pair.server.run)
    return pair


class TestLinks:
    async def test_each_direction_ends_by_itself(self, links: Links) -> None:
        for one, other in [await links.open(), (await links.open())[::-1]]:
            await one.send_all(b"question")
            await one.send_eof()
            assert [piece async for piece in other] == [b"question"]
            await other.send_all(b"answer")
            await other.send_eof()
            assert [piece async for piece in one] == [b"answer"]

    async def test_a_reset_arrives_as_a_reset(self, links: Links) -> None:
        one, other = await links.open()
        one.reset("why", "because")
        with pytest.raises(trio.BrokenResourceError, match="because"):
            await other.receive_some()

    async def test_8_mib_both_ways(self, links: Links) -> None:
        data = [os.urandom(8 << 20), os.urandom(8 << 20)]
        ends = await links.open()
        received = [bytearray(), bytearray()]

        async def send(index: int) -> None:
            await ends[index].send_all(data[index])
            await ends[index].send_eof()

        async def receive(index: int) -> None:
            async for piece in ends[index]:
                received[index] += piece

        async with trio.open_nursery() as nursery:
            for index in range(2):
                nursery.start_soon(send, index)
                nursery.start_soon(receive, index)
        assert received[0] == data[1]
        assert received[1] == data[0]

    @pytest.mark.parametrize("leaving", ["server", "agent"])
    async def test_a_goodbye_arrives_although_the_other_end_is_sending(
        self, links: Links, nursery: trio.Nursery, leaving: str
    ) -> None:
        near, far = (links.server, links.agent) if leaving == "server" else (links.agent, links.server)
        streams = await links.open()
        sending, reading = streams[::-1] if leaving == "server" else streams

        async def send() -> None:
            with pytest.raises(trio.BrokenResourceError):
                await _send_on(sending.send_all, bytes(1 << 20))

        async with trio.open_nursery() as inner:
            inner.start_soon(send)
            await reading.receive_some()
            await near.close("leaving", "all the best")
            await far.ended.wait()
            await near.ended.wait()
        assert str(far.why) == "the peer said: all the best (leaving)"

    async def test_a_peer_that_dies_is_a_connection_that_was_closed(self, links: Links, ends: Ends) -> None:
        await ends[1].aclose()
        await links.server.ended.wait()
        assert str(links.server.why) == "the peer closed the connection"

    async def test_a_client_without_a_certificate_is_told_on_its_link(
        self, authority: Authority, tcp_pair: TcpPair, nursery: trio.Nursery
    ) -> None:
        left, right = tcp_pair()

        async def accept() -> None:
            with pytest.raises(LinkClosed, match="the peer shows no certificate"):
                await accept_tls(left, replace(authority.server(), client_ca=authority.ca).load())

        nursery.start_soon(accept)
        transport, _ = await dial_tls(right, ClientTls(authority.ca).load(), NAME)
        link = Link(transport, DiallingHandshake(AGENT), limits=Limits(), timeouts=Timeouts())
        with pytest.raises(LinkClosed, match=r"^the link broke: TLS: the peer refuses: certificate required$"):
            await link.run()
