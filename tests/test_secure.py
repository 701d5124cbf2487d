"""What two ends put below a link and show in its handshake: TLS and tokens, as their files are now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
from authorities import NAME, Authority, der
from transports import Ends, receive_once, send_all
from trio.testing import wait_all_tasks_blocked

from tunnel.certificates import ClientTls, ServerTls, binding_of
from tunnel.credentials import Tokens, new_token
from tunnel.errors import ConfigError, LinkClosed
from tunnel.secure import Accepting, Dialling, Files
from tunnel.tls import TlsTransport
from tunnel.transport import SocketTransport, Transport

if TYPE_CHECKING:
    from conftest import TcpPair


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    """One token of each role; its id is its role."""
    return str(write(tmp_path / "tokens.toml", "agent", "client", "admin"))


def write(path: Path, *ids: str) -> Path:
    """Move a file of new tokens over what there is; roles are what ids begin with."""
    new = path.with_suffix(".new")
    new.touch(0o600)
    new.write_text("".join(new_token(token_id, token_id.partition("-")[0], {}) for token_id in ids))
    return new.rename(path)


async def look(files: Files) -> None:
    """Have the files looked at, once."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(files.run)
            files.look()
            await wait_all_tasks_blocked()
            scope.cancel()


async def meet(accepting: Accepting, dialling: Dialling, tcp_pair: TcpPair, host: str = NAME) -> Ends:
    """Transports over a new connection: the accepting end and the dialling one."""
    left, right = tcp_pair()
    ends: dict[str, Transport] = {}

    async def accept() -> None:
        ends["accepted"] = await accepting.transport(left)

    async def dial() -> None:
        ends["dialled"] = await dialling.transport(right, host)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        nursery.start_soon(dial)
    return ends["accepted"], ends["dialled"]


# -- nothing configured


async def test_without_tls_links_are_plain_and_bound_to_nothing(tcp_pair: TcpPair) -> None:
    for end in await meet(Accepting(None, None), Dialling("agent", None, None), tcp_pair):
        assert isinstance(end, SocketTransport)
        assert end.binding == b""


def test_without_tokens_nobody_proves_anything() -> None:
    accepting, dialling = Accepting(None, None), Dialling("agent", None, None)
    assert (accepting.tokens, accepting.admins) == (None, ())
    assert (dialling.token, dialling.admins) == (None, ())


def test_without_files_nothing_is_followed() -> None:
    assert Accepting(None, None).followed == Dialling("agent", None, None).followed == []


# -- TLS


async def test_with_tls_both_ends_are_bound_to_the_servers_certificate(authority: Authority, tcp_pair: TcpPair) -> None:
    server = authority.server()
    for end in await meet(Accepting(None, server), Dialling("agent", None, ClientTls(authority.ca)), tcp_pair):
        assert isinstance(end, TlsTransport)
        assert end.binding == binding_of(der(Path(server.cert)))


async def test_the_certificate_may_be_for_a_name_that_is_not_dialled(authority: Authority, tcp_pair: TcpPair) -> None:
    dialling = Dialling("agent", None, ClientTls(authority.ca, name=NAME))
    assert await meet(Accepting(None, authority.server()), dialling, tcp_pair, "10.0.0.7")


async def test_the_certificate_must_be_for_the_name_that_is_dialled(
    authority: Authority, tcp_pair: TcpPair, nursery: trio.Nursery
) -> None:
    left, right = tcp_pair()

    async def accept() -> None:
        with pytest.raises(LinkClosed):
            await Accepting(None, authority.server()).transport(left)

    nursery.start_soon(accept)
    with pytest.raises(LinkClosed, match="Hostname mismatch"):
        await Dialling("agent", None, ClientTls(authority.ca)).transport(right, "other.test")


# -- certificates that change


class TestReload:
    @pytest.fixture
    def tls(self, authority: Authority) -> ServerTls:
        return authority.server()

    @pytest.fixture
    def accepting(self, tls: ServerTls) -> Accepting:
        return Accepting(None, tls)

    @pytest.fixture
    def dialling(self, authority: Authority) -> Dialling:
        return Dialling("agent", None, ClientTls(authority.ca))

    @staticmethod
    def _move(which: tuple[Path, ...], tls: ServerTls) -> None:
        for old, new in zip((tls.cert, tls.key), which, strict=False):
            new.rename(old)

    async def test_new_connections_use_the_new_pair_and_old_ones_go_on(
        self, authority: Authority, tcp_pair: TcpPair, tls: ServerTls, accepting: Accepting, dialling: Dialling
    ) -> None:
        before = await meet(accepting, dialling, tcp_pair)
        pair = authority.issue("new")
        binding = binding_of(der(pair[0]))
        self._move(pair, tls)
        await look(accepting)
        after = await meet(accepting, dialling, tcp_pair)
        assert after[0].binding == after[1].binding == binding != before[1].binding
        await send_all(before[0], [b"still here"])
        assert await receive_once(before[1], 100) == b"still here"

    async def test_a_pair_that_is_half_there_changes_nothing_until_it_is_whole(
        self, authority: Authority, tcp_pair: TcpPair, tls: ServerTls, accepting: Accepting, dialling: Dialling
    ) -> None:
        old, new = binding_of(der(Path(tls.cert))), authority.issue("new")
        binding = binding_of(der(new[0]))
        self._move(new[:1], tls)
        await look(accepting)
        assert (await meet(accepting, dialling, tcp_pair))[1].binding == old
        new[1].rename(tls.key)
        await look(accepting)
        assert (await meet(accepting, dialling, tcp_pair))[1].binding == binding


# -- tokens


@pytest.mark.parametrize("role", ["agent", "client"])
def test_who_dials_shows_the_token_of_its_role(token_file: str, role: str) -> None:
    token = Dialling(role, token_file, None).token
    assert token
    assert token.id == role


def test_operators_may_show_any_token_of_theirs(tmp_path: Path) -> None:
    path = str(write(tmp_path / "tokens.toml", "agent", "admin-1", "admin-2"))
    for files in Accepting(path, None), Dialling("agent", path, None):
        assert [token.id for token in files.admins] == ["admin-1", "admin-2"]


def test_a_file_without_a_token_of_the_own_role_is_not_taken_by_who_dials(tmp_path: Path) -> None:
    path = str(write(tmp_path / "tokens.toml", "client"))
    with pytest.raises(ConfigError, match="holds 0 tokens of the role agent"):
        Dialling("agent", path, None)


@pytest.mark.parametrize("make", [lambda path: Accepting(path, None), lambda path: Dialling("agent", path, None)])
def test_a_file_that_is_bad_at_first_is_not_taken(tmp_path: Path, make: Callable[[str], Files]) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        make(str(tmp_path / "missing"))


async def test_who_dials_shows_the_token_that_is_in_the_file_now(token_file: str) -> None:
    dialling = Dialling("agent", token_file, None)
    write(Path(token_file), "agent-2")
    await look(dialling)
    assert dialling.token
    assert dialling.token.id == "agent-2"


async def test_who_accepts_takes_the_tokens_that_are_in_the_file_now(token_file: str) -> None:
    accepting = Accepting(token_file, None)
    taken = accepting.tokens
    assert taken
    assert [*taken()] == ["agent", "client", "admin"]
    write(Path(token_file), "agent-2")
    await look(accepting)
    assert [*taken()] == ["agent-2"]


# -- who is told


async def test_who_accepts_is_given_the_tokens_when_they_have_changed(token_file: str) -> None:
    heard: list[Tokens] = []
    accepting = Accepting(token_file, None, heard.append)
    write(Path(token_file), "agent-2")
    await look(accepting)
    assert [[*tokens] for tokens in heard] == [["agent-2"]]


@pytest.mark.parametrize("which", ["tokens", "TLS"])
async def test_who_dials_hears_that_something_was_read_again(authority: Authority, token_file: str, which: str) -> None:
    heard: list[None] = []
    tls = authority.client()
    dialling = Dialling("agent", token_file, tls, lambda: heard.append(None))
    if which == "tokens":
        write(Path(token_file), "agent-2")
    else:
        authority.issue("client")
    await look(dialling)
    assert len(heard) == 1
