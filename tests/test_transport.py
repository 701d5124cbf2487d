"""Transports over sockets and over any stream; what holds for both is in ``transports``."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest
import trio
from stream_transport import StreamTransport
from transports import Ends, TransportContract, receive_all, receive_once, send_all
from trio.testing import memory_stream_pair

from tunnel.transport import BROKEN, SocketTransport, unsent

if TYPE_CHECKING:
    from conftest import TcpPair


@pytest.fixture
async def ends(kind: str, tcp_pair: TcpPair) -> Ends:
    if kind == "memory":
        one, other = memory_stream_pair()
        return StreamTransport(one), StreamTransport(other)
    left, right = tcp_pair()
    return SocketTransport(left), SocketTransport(right)


@pytest.mark.parametrize("sent", range(8))
def test_unsent_is_what_follows_the_bytes_sent(sent: int) -> None:
    whole = b"abcdefg"
    assert b"".join(unsent([b"abc", memoryview(b"d"), b"efg"], sent)) == whole[sent:]


class TestTransport(TransportContract):
    """Over memory and over sockets."""


async def test_a_stream_takes_nothing_without_waiting() -> None:
    one, _ = memory_stream_pair()
    buffers = [b"abc", b"d"]
    assert StreamTransport(one).send_now(buffers) == buffers


async def test_a_full_socket_gives_back_exactly_what_it_did_not_take(tcp_pair: TcpPair) -> None:
    left, right = tcp_pair(8192)
    sender, receiver = SocketTransport(left), SocketTransport(right)
    buffers = [os.urandom(100_000) for _ in range(8)]
    rest = sender.send_now(buffers)
    assert rest
    received = b""

    async def send_rest() -> None:
        await send_all(sender, rest)
        await sender.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_rest)
        received = await receive_all(receiver)
    assert received == b"".join(buffers)


async def test_a_reset_connection_is_broken(tcp_pair: TcpPair) -> None:
    left, right = tcp_pair()
    right.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    right.close()
    with pytest.raises(BROKEN):
        await receive_once(SocketTransport(left), 8)


async def test_lingering_on_a_broken_connection_is_over_at_once(tcp_pair: TcpPair) -> None:
    left, right = tcp_pair()
    right.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    right.close()
    await SocketTransport(left).linger()


async def test_a_socket_sends_small_packets_at_once(tcp_pair: TcpPair) -> None:
    left, _ = tcp_pair()
    left.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
    SocketTransport(left)
    assert left.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
