"""Pollers: what is ready is reported again and again, each for what it is watched for; whatever does it is the same."""

from __future__ import annotations

import select
import selectors
from typing import TYPE_CHECKING

import pytest

from tunnel.poller import HUNG_UP, READ, WRITE, Poller, SelectorPoller, new_poller

if TYPE_CHECKING:
    from conftest import Sockets, TcpPair

SOON = 10.0  # seconds; what is waited for is there long before


def by_selectors() -> SelectorPoller:
    return SelectorPoller(selectors.DefaultSelector())


@pytest.fixture(params=[new_poller, by_selectors])
def poller(request: pytest.FixtureRequest) -> Poller:
    poller: Poller = request.param()
    return poller


@pytest.fixture
def pair(tcp_pair: TcpPair) -> Sockets:
    return tcp_pair()


@pytest.fixture
def asked(pair: Sockets) -> int:
    """A socket that has something to read, and room to write."""
    one, other = pair
    other.send(b"?")
    assert select.select([one], [], [], SOON)[0]
    return one.fileno()


@pytest.mark.parametrize("mask", [READ, WRITE, READ | WRITE])
def test_a_socket_is_reported_for_what_it_is_watched_for(poller: Poller, asked: int, mask: int) -> None:
    poller.register(asked, mask)
    assert poller.poll(SOON, 10) == [(asked, mask)]


@pytest.mark.parametrize("mask", [READ, WRITE, READ | WRITE])
def test_a_socket_may_be_watched_for_something_else(poller: Poller, asked: int, mask: int) -> None:
    poller.register(asked, READ)
    poller.modify(asked, WRITE)
    poller.modify(asked, mask)
    assert poller.poll(SOON, 10) == [(asked, mask)]


def test_what_is_not_dealt_with_is_reported_again(poller: Poller, asked: int) -> None:
    poller.register(asked, READ)
    assert [poller.poll(SOON, 10) for _ in range(3)] == [[(asked, READ)]] * 3


def test_what_was_dealt_with_is_not_reported(poller: Poller, pair: Sockets, asked: int) -> None:
    poller.register(asked, READ)
    pair[0].recv(1)
    assert poller.poll(0, 10) == []


def test_nothing_is_reported_that_is_watched_for_nothing_and_it_may_be_again(poller: Poller, asked: int) -> None:
    poller.register(asked, READ)
    poller.modify(asked, 0)
    assert poller.poll(0, 10) == []
    poller.modify(asked, READ)
    assert poller.poll(SOON, 10) == [(asked, READ)]


def test_a_socket_may_be_watched_for_nothing_at_first(poller: Poller, asked: int) -> None:
    poller.register(asked, 0)
    assert poller.poll(0, 10) == []
    poller.modify(asked, WRITE)
    assert poller.poll(SOON, 10) == [(asked, WRITE)]


@pytest.mark.parametrize("mask", [0, READ, READ | WRITE])
def test_nothing_is_reported_that_is_watched_no_more(poller: Poller, asked: int, mask: int) -> None:
    poller.register(asked, mask)
    poller.unregister(asked)
    assert poller.poll(0, 10) == []


def test_by_selectors_what_is_not_watched_may_be_unregistered(asked: int) -> None:
    poller = by_selectors()
    poller.unregister(asked)
    poller.register(asked, READ)
    assert poller.poll(SOON, 10) == [(asked, READ)]


def test_no_one_is_left_out_when_more_are_ready_than_are_asked_for(poller: Poller, tcp_pair: TcpPair) -> None:
    pairs = [tcp_pair() for _ in range(5)]
    fds = {one.fileno() for one, _ in pairs}
    for fd in fds:
        poller.register(fd, WRITE)
    reported = [*poller.poll(SOON, 3), *poller.poll(SOON, 3)]
    assert set(reported) == {(fd, WRITE) for fd in fds}


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="needs epoll")
def test_epoll_reports_no_more_than_were_asked_for(tcp_pair: TcpPair) -> None:
    poller = new_poller()
    for one, _ in [tcp_pair() for _ in range(5)]:
        poller.register(one.fileno(), WRITE)
    assert len(poller.poll(SOON, 3)) == 3


def test_the_end_of_the_peer_is_something_to_read(poller: Poller, pair: Sockets) -> None:
    fd = pair[0].fileno()
    poller.register(fd, READ)
    pair[1].close()
    ((which, ready),) = poller.poll(SOON, 10)
    assert which == fd
    assert ready & READ


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="only epoll tells of it")
def test_epoll_reports_a_connection_that_is_over_even_if_it_is_watched_for_nothing(pair: Sockets) -> None:
    poller, (one, other) = new_poller(), pair
    poller.register(one.fileno(), 0)
    other.close()
    one.shutdown(1)
    ((which, ready),) = poller.poll(SOON, 10)
    assert which == one.fileno()
    assert ready & HUNG_UP


def test_its_own_descriptor_is_readable_while_a_socket_is_ready(poller: Poller, pair: Sockets, asked: int) -> None:
    def readable() -> bool:
        return select.select([poller.fileno()], [], [], 0)[0] != []

    assert not readable()
    poller.register(asked, READ)
    assert readable()
    pair[0].recv(1)
    poller.poll(0, 10)
    assert not readable()
