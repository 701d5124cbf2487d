"""TLS: what files are taken, who takes whom and hears what when not, and links that do not notice any of it."""

from __future__ import annotations

import datetime
import hashlib
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
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from transports import Ends, TransportContract, receive_all, receive_once, send_all
from trio.testing import wait_all_tasks_blocked

from tunnel.certificates import ClientTls, ServerContext, ServerTls, binding_of
from tunnel.errors import ConfigError, LinkClosed
from tunnel.handshake import AcceptingHandshake, DiallingHandshake
from tunnel.identity import Identity
from tunnel.limits import Limits, Timeouts
from tunnel.link import Link
from tunnel.packets import VERSION, Hello
from tunnel.reload import Reloaded
from tunnel.stream import TunnelStream
from tunnel.tls import TlsTransport, accept_tls, dial_tls
from tunnel.transport import SocketTransport

if TYPE_CHECKING:
    from conftest import TcpPair

NAME = "server.test"
SERVER, AGENT = Identity("server", "server"), Identity("agent", "agent")
YESTERDAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)


class Authority:
    """Issues certificates into files."""

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        self._folder = folder
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(self, file: str, name: str = NAME, expires: datetime.datetime | None = None) -> tuple[Path, Path]:
        """A certificate and its key."""
        issued = self._authority.issue_cert(name, not_after=expires)
        cert, key = self._folder / f"{file}.pem", self._folder / f"{file}.key"
        cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        key.chmod(0o600)
        return cert, key

    def server(self, file: str = "server", name: str = NAME, expires: datetime.datetime | None = None) -> ServerTls:
        return ServerTls(*self.issue(file, name, expires))

    def client(self, file: str = "client") -> ClientTls:
        return ClientTls(self.ca, *self.issue(file, "client.test"))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    (tmp_path / "stranger").mkdir()
    return Authority(tmp_path / "stranger")


def der(cert: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(cert.read_text())


# -- files


class TestServerFiles:
    @pytest.fixture
    def tls(self, authority: Authority) -> ServerTls:
        return authority.server()

    def test_the_binding_is_the_hash_of_the_certificate(self, tls: ServerTls) -> None:
        assert tls.load().binding == hashlib.sha256(der(Path(tls.cert))).digest()

    def test_what_is_older_than_tls_1_2_is_not_spoken(self, tls: ServerTls) -> None:
        assert tls.load().context.minimum_version is ssl.TLSVersion.TLSv1_2

    def test_clients_need_a_certificate_only_where_there_is_an_authority_for_them(
        self, tls: ServerTls, authority: Authority
    ) -> None:
        assert tls.load().context.verify_mode is ssl.CERT_NONE
        assert replace(tls, client_ca=authority.ca).load().context.verify_mode is ssl.CERT_REQUIRED

    def test_its_paths_are_all_that_is_read(self, tls: ServerTls, authority: Authority) -> None:
        assert tls.paths == (tls.cert, tls.key)
        assert replace(tls, client_ca=authority.ca).paths == (tls.cert, tls.key, authority.ca)

    @pytest.mark.parametrize("which", ["cert", "key", "client_ca"])
    def test_a_file_that_is_missing_is_named(self, tls: ServerTls, tmp_path: Path, which: str) -> None:
        missing = tmp_path / "missing"
        with pytest.raises(ConfigError, match=f"^{missing}: No such file or directory$"):
            replace(tls, **{which: missing}).load()

    @pytest.mark.parametrize("content", [b"", b"rubbish\n", b"\xff\xfe\0", b"half"])
    @pytest.mark.parametrize("which", ["cert", "key", "client_ca"])
    def test_a_file_that_holds_something_else_is_named(
        self, tls: ServerTls, authority: Authority, tmp_path: Path, which: str, content: bytes
    ) -> None:
        tls, bad = replace(tls, client_ca=authority.ca), tmp_path / "bad"
        whole = Path(getattr(tls, which)).read_bytes()
        bad.write_bytes(whole[: len(whole) // 4] if content == b"half" else content)
        bad.chmod(0o600)
        what = "private key" if which == "key" else "certificate"
        with pytest.raises(ConfigError, match=f"^{bad}: holds no {what}; taken: PEM"):
            replace(tls, **{which: bad}).load()

    @pytest.mark.parametrize("kind", trustme.KeyType)
    def test_the_key_of_another_certificate_is_named(
        self, tls: ServerTls, tmp_path: Path, kind: trustme.KeyType
    ) -> None:
        key = tmp_path / "other.key"
        key.write_bytes(trustme.CA(key_type=kind).issue_cert(NAME, key_type=kind).private_key_pem.bytes())
        key.chmod(0o600)
        with pytest.raises(ConfigError, match=f"^{key}: is not the key of the certificate in {tls.cert}$"):
            replace(tls, key=key).load()

    def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked(self, tls: ServerTls) -> None:
        key = Path(tls.key)
        private = load_pem_private_key(key.read_bytes(), None)
        key.write_bytes(
            private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"open sesame"))
        )
        with pytest.raises(ConfigError, match=f"^{key}: has a passphrase"):
            tls.load()

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
    def test_a_key_that_others_may_use_is_refused(self, tls: ServerTls, mode: int) -> None:
        Path(tls.key).chmod(mode)
        with pytest.raises(ConfigError, match=f"^{tls.key}: others than its owner may use it"):
            tls.load()

    def test_a_certificate_that_is_replaced_while_it_is_read_is_not_taken(
        self, tls: ServerTls, authority: Authority, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The context would show another certificate than the one that the binding names."""
        other, _ = authority.issue("other")
        load = ssl.SSLContext.load_cert_chain

        def load_and_replace(context: ssl.SSLContext, *args: object) -> None:
            load(context, *args)  # type: ignore[arg-type]
            other.rename(tls.cert)

        monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load_and_replace)
        with pytest.raises(ConfigError, match=f"^{tls.cert}: was replaced while it was read$"):
            tls.load()


class TestClientFiles:
    def test_the_systems_authorities_are_taken_where_none_is_given(
        self, authority: Authority, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
        assert ClientTls().load().get_ca_certs(binary_form=True) == [der(authority.ca)]

    def test_no_other_authority_is_taken_where_one_is_given(self, authority: Authority, stranger: Authority) -> None:
        assert ClientTls(stranger.ca).load().get_ca_certs(binary_form=True) == [der(stranger.ca)]

    def test_certificate_and_name_of_the_server_are_checked(self, authority: Authority) -> None:
        context = ClientTls(authority.ca).load()
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2

    def test_its_paths_are_all_that_is_read_but_for_what_the_system_has(self, authority: Authority) -> None:
        assert ClientTls().paths == ()
        tls = authority.client()
        assert tls.paths == (authority.ca, tls.cert, tls.key)

    @pytest.mark.parametrize("which", ["ca", "cert", "key"])
    def test_a_file_that_is_missing_is_named(self, authority: Authority, tmp_path: Path, which: str) -> None:
        missing = tmp_path / "missing"
        with pytest.raises(ConfigError, match=f"^{missing}: No such file or directory$"):
            replace(authority.client(), **{which: missing}).load()  # type: ignore[arg-type]

    @pytest.mark.parametrize("half", [{"cert": "c.pem"}, {"key": "c.pem"}])
    def test_a_certificate_without_a_key_is_none_nor_is_a_key_without_a_certificate(self, half: dict[str, str]) -> None:
        with pytest.raises(ConfigError, match=r"^c\.pem: taken: a certificate and its key, or neither"):
            ClientTls(**half)

    def test_a_name_is_one_that_could_be_dialled(self) -> None:
        assert ClientTls(name="Server.Test.").name == "server.test"
        with pytest.raises(ConfigError, match="is not a host"):
            ClientTls(name=".test")


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


# -- certificates that change


class TestReload:
    @pytest.fixture
    def tls(self, authority: Authority) -> ServerTls:
        return authority.server()

    @pytest.fixture
    def reloaded(self, tls: ServerTls, nursery: trio.Nursery) -> Reloaded[ServerContext]:
        reloaded = Reloaded(tls.paths, tls.load)
        nursery.start_soon(reloaded.run)
        return reloaded

    @staticmethod
    async def _move(which: tuple[Path, ...], tls: ServerTls, reloaded: Reloaded[ServerContext]) -> None:
        for old, new in zip((tls.cert, tls.key), which, strict=False):
            new.rename(old)
        reloaded.look()
        await wait_all_tasks_blocked()

    async def test_new_connections_use_the_new_pair_and_old_ones_go_on(
        self, authority: Authority, shake_hands: Handshake, tls: ServerTls, reloaded: Reloaded[ServerContext]
    ) -> None:
        client = ClientTls(authority.ca).load()
        before = await shake_hands(reloaded.value, client)
        pair = authority.issue("new")
        binding = binding_of(der(pair[0]))
        await self._move(pair, tls, reloaded)
        after = await shake_hands(reloaded.value, client)
        assert after.accepted[1] == after.dialled[1] == binding != before.dialled[1]
        await send_all(before.ends[0], [b"still here"])
        assert await receive_once(before.ends[1], 100) == b"still here"

    async def test_a_pair_that_is_half_there_changes_nothing_until_it_is_whole(
        self, authority: Authority, shake_hands: Handshake, tls: ServerTls, reloaded: Reloaded[ServerContext]
    ) -> None:
        client = ClientTls(authority.ca).load()
        old = reloaded.value.binding
        cert, key = authority.issue("new")
        new = binding_of(der(cert))
        await self._move((cert,), tls, reloaded)
        assert (await shake_hands(reloaded.value, client)).dialled[1] == old
        key.rename(tls.key)
        reloaded.look()
        await wait_all_tasks_blocked()
        assert (await shake_hands(reloaded.value, client)).dialled[1] == new
