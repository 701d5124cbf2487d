"""Tokens, certificates and users of real processes: who gets in, what both sides say of it, and rotation under load."""

from __future__ import annotations

import re
import signal
import ssl
from pathlib import Path

import pytest
import trustme
from click.testing import CliRunner
from endpoints import NewTarget, check_echo, connect, connect_head, echo, read_head, read_refusal
from programs import Program, StartProgram, eventually, free_port

from tunnel import cli
from tunnel.credentials import read_tokens
from tunnel.errors import HandshakeRefused
from tunnel.frames import Decoder
from tunnel.handshake import DiallingHandshake
from tunnel.identity import Identity
from tunnel.packets import Packet

SERVER = ("server", "--listen", "127.0.0.1:0", "--connect", "127.0.0.1:0")


def token(token_id: str, role: str, *flags: str) -> str:
    result = CliRunner().invoke(cli.program, ["token", "new", token_id, "--role", role, *flags])
    assert result.exit_code == 0
    return result.stdout


EDGE = ("agent", "--agent", "edge-*", "--identifier", "suffix=.internal")


def secret_of(text: str) -> str:
    found = re.search(r'secret = "(.*)"', text)
    assert found
    return found[1]


class Files:
    """Files of tokens, each for its owner alone; they are replaced by renaming."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str, *tokens: str) -> str:
        path, new = self._folder / name, self._folder / f"{name}.new"
        new.touch(0o600)
        new.write_text("".join(tokens))
        new.rename(path)
        return str(path)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def links(server: Program) -> str:
    return f"127.0.0.1:{server.port('links')}"


def warnings(program: Program) -> list[str]:
    return [event["event"] for event in program.log if event["level"] == "warning"]


def test_a_token_lets_an_agent_in_and_its_secret_is_nowhere_to_be_seen(
    start: StartProgram, files: Files, target: NewTarget
) -> None:
    edge = token("edge", *EDGE)
    server = start(*SERVER, "--token-file", files("server", edge), "--log-level", "debug")
    agent = start("agent", "--server", links(server), "--name", "edge-7", "--token-file", files("agent", edge))
    agent.wait_for("linked")
    with connect(server.port("connect")) as sock:
        sock.sendall(connect_head("127.0.0.1", target(echo).port))
        assert read_head(sock).startswith(b"HTTP/1.1 200 ")
        check_echo(sock)
    secret = secret_of(edge)
    for program in (server, agent):
        assert program.stop() == 0
        assert secret not in str(program)
        assert secret not in " ".join(program.arguments)


def test_another_secret_is_named_by_its_fingerprint_on_both_sides_and_not_tried_in_a_loop(
    start: StartProgram, files: Files
) -> None:
    ours, theirs = token("edge", *EDGE), token("edge", *EDGE)
    server = start(*SERVER, "--token-file", files("server", ours))
    agent = start("agent", "--server", links(server), "--name", "edge-7", "--token-file", files("agent", theirs))
    failed, refused = agent.wait_for("link failed"), server.wait_for("link refused")
    assert (failed["token"], refused["token"]) == ("edge", "edge")
    assert (Path(failed["source"]).name, Path(refused["source"]).name) == ("agent", "server")
    assert failed["fingerprint"] != refused["fingerprint"]
    assert failed["cause"].endswith("the token is not known here, or its secret is another one (auth)")
    assert float(failed["delay"].removesuffix("s")) >= 15
    assert not {secret_of(ours), secret_of(theirs)} & set(re.findall(r"[\w-]{32,}", f"{server}{agent}"))


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (("--name", "core"), "an agent called core; allowed: edge-*"),
        (("--name", "edge-1", "--identifier", "host=db.example"), "may not claim host=db.example"),
        (("--name", "edge-1", "--default-route"), "may not claim the default route"),
    ],
)
def test_an_agent_is_what_its_token_says(start: StartProgram, files: Files, flags: tuple[str, ...], cause: str) -> None:
    edge = token("edge", *EDGE)
    server = start(*SERVER, "--token-file", files("server", edge))
    arguments = ("--token-file", files("agent", edge), "--exit-on-failure")
    agent = start("agent", "--server", links(server), *flags, *arguments)
    assert agent.ended() == 5
    assert cause in agent.said("cannot link")[0]["cause"]
    assert cause in server.wait_for("link refused")["cause"]


def test_a_token_that_is_removed_loses_its_link_and_no_other(
    start: StartProgram, files: Files, target: NewTarget
) -> None:
    one, other = token("one", *EDGE), token("other", *EDGE)
    server = start(*SERVER, "--token-file", files("server", one, other))
    agents = [
        start("agent", "--server", links(server), "--name", f"edge-{name}", "--token-file", files(name, text))
        for name, text in (("one", one), ("other", other))
    ]
    for agent in agents:
        agent.wait_for("linked")
    files("server", other)
    server.signal(signal.SIGHUP)
    assert server.wait_for("token gone")["peer"] == "edge-one"
    assert "not taken any more" in agents[0].wait_for("link lost")["cause"]
    with connect(server.port("connect")) as sock:
        sock.sendall(connect_head("127.0.0.1", target(echo).port))
        assert read_head(sock).startswith(b"HTTP/1.1 200 ")
        check_echo(sock)
    assert agents[1].said("link lost") == []
    files("server", one, other)
    server.signal(signal.SIGHUP)
    server.wait_for("reloaded", nth=2)
    files("one", one + "\n")
    agents[0].signal(signal.SIGHUP)  # and so it need not wait any longer
    agents[0].wait_for("linked", nth=2)


def test_tokens_are_rotated_by_rolling_agents_and_no_stream_is_lost(
    start: StartProgram, files: Files, target: NewTarget
) -> None:
    old, new = token("2026", *EDGE), token("2027", *EDGE)
    server = start(*SERVER, "--token-file", files("server", old))
    before = start("agent", "--server", links(server), "--name", "edge-1", "--token-file", files("old", old))
    before.wait_for("linked")
    port = target(echo).port
    with connect(server.port("connect")) as long, connect(server.port("connect")) as later:
        long.sendall(connect_head("127.0.0.1", port))
        assert read_head(long).startswith(b"HTTP/1.1 200 ")
        files("server", old, new)
        server.wait_for("reloaded")
        after = start("agent", "--server", links(server), "--name", "edge-1", "--token-file", files("new", new))
        after.wait_for("linked")
        before.signal(signal.SIGTERM)
        before.wait_for("leaving")
        later.sendall(connect_head("127.0.0.1", port))
        assert read_head(later).startswith(b"HTTP/1.1 200 ")
        check_echo(later)
        check_echo(long, b"on the old agent all the same")
    assert before.ended() == 0
    files("server", new)
    server.wait_for("reloaded", nth=2)
    assert after.said("link lost") == []
    assert warnings(server) == []


def test_a_bad_file_changes_nothing(start: StartProgram, files: Files) -> None:
    edge = token("edge", *EDGE)
    path = files("server", edge)
    server = start(*SERVER, "--token-file", path)
    agent = start("agent", "--server", links(server), "--name", "edge-7", "--token-file", files("agent", edge))
    agent.wait_for("linked")
    files("server", edge.replace("suffix=", "suffix"))
    server.signal(signal.SIGHUP)
    assert "'suffix.internal' is not an identifier" in server.wait_for("not taken")["cause"]
    assert server.said("token gone") == []


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--token-file", "{missing}"], "No such file"),
        (["--token-file", "{open}"], "others than its owner"),
        (["--connect-auth", "{open}"], "others than its owner"),
        (["--tls-cert", "{missing}", "--tls-key", "{missing}"], "No such file"),
        (["--tls-cert", "{open}"], "go together"),
    ],
)
def test_what_cannot_be_used_ends_in_exit_2(
    start: StartProgram, files: Files, tmp_path: Path, flags: list[str], text: str
) -> None:
    path = Path(files("open", token("edge", *EDGE)))
    path.chmod(0o644)
    server = start(*SERVER, *(flag.format(open=path, missing=tmp_path / "none") for flag in flags))
    assert server.ended() == 2
    assert text in " ".join("".join(server.noise).split())
    server.noise.clear()


# -- users


def test_users_of_connect_show_their_password(start: StartProgram, tmp_path: Path, target: NewTarget) -> None:
    users = tmp_path / "users"
    users.touch(0o600)
    users.write_text("me:s3cret\n")
    server = start(*SERVER, "--connect-auth", str(users))
    start("agent", "--server", links(server)).wait_for("linked")
    head = connect_head("127.0.0.1", target(echo).port)
    with connect(server.port("connect")) as sock:
        sock.sendall(head)
        assert read_refusal(sock)[0] == 407
    with connect(server.port("connect")) as sock:
        sock.sendall(head.replace(b"\r\n\r\n", b"\r\nProxy-Authorization: Basic bWU6czNjcmV0\r\n\r\n"))
        assert read_head(sock).startswith(b"HTTP/1.1 200 ")
        check_echo(sock)
    assert "s3cret" not in str(server)


# -- TLS


class Certificates:
    """An authority's certificate, and a server's for 127.0.0.1 and its key; the latter two may be made anew."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.ca, self.cert, self.key = (str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem"))
        self.authority.cert_pem.write_to_path(self.ca)
        Path(self.key).touch(0o600)
        self.make()

    def make(self) -> None:
        made = self.authority.issue_cert("127.0.0.1")
        Path(self.key).write_bytes(made.private_key_pem.bytes())
        made.cert_chain_pems[0].write_to_path(self.cert)

    @property
    def served(self) -> tuple[str, ...]:
        return ("--tls-cert", self.cert, "--tls-key", self.key)

    @property
    def trusted(self) -> tuple[str, ...]:
        return ("--tls", "--tls-ca", self.ca)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def test_links_run_over_tls_with_tokens_and_certificates_are_replaced_while_streams_go_on(
    start: StartProgram, files: Files, certificates: Certificates, target: NewTarget
) -> None:
    edge, laptop = token("edge", *EDGE), token("laptop", "client", "--target", "127.0.0.1:*")
    server = start(*SERVER, *certificates.served, "--token-file", files("server", edge, laptop))
    own = ("--token-file", files("agent", edge), *certificates.trusted)
    start("agent", "--server", links(server), "--name", "edge-1", *own).wait_for("linked")
    mine = ("--token-file", files("client", laptop), *certificates.trusted)
    echoes = target(echo).port
    forward = start("forward", f"{free_port()}=127.0.0.1:{echoes}", "--server", links(server), *mine)
    shown = ssl.get_server_certificate(("127.0.0.1", server.port("links")))
    with connect(forward.port("forward")) as sock:
        check_echo(sock)
        certificates.make()
        server.signal(signal.SIGHUP)
        eventually(
            lambda: ssl.get_server_certificate(("127.0.0.1", server.port("links"))) != shown, "the new certificate"
        )
        check_echo(sock, b"over the old certificate")
    start("agent", "--server", links(server), "--name", "edge-2", *own).wait_for("linked")


def test_a_certificate_of_nobody_is_refused_with_the_reason(
    start: StartProgram, certificates: Certificates, tmp_path: Path
) -> None:
    server = start(*SERVER, *certificates.served)
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    agent = start("agent", "--server", links(server), "--tls", "--tls-ca", str(other))
    assert "certificate is not taken" in agent.wait_for("link failed")["cause"]


def test_a_plain_agent_at_a_tls_port_hears_nothing_it_could_misread(
    start: StartProgram, certificates: Certificates
) -> None:
    server = start(*SERVER, *certificates.served)
    agent = start("agent", "--server", links(server))
    agent.wait_for("link failed")
    assert "does not speak TLS" in server.wait_for("link refused")["cause"]


# -- whose process it is


class RawAgent:
    """Links as an agent, with any instance that it likes to have."""

    def __init__(self, server: Program, text: str, path: str, name: str, instance: str) -> None:
        handshake = DiallingHandshake(Identity("agent", name, instance), read_tokens(path, own="agent")[_id_of(text)])
        self.handshake, self.refusal = handshake, ""
        self._decoder = Decoder(4096, self._take, lambda _stream, _data: None)
        self._decoder.strict = True
        self.sock = connect(server.port("links"))
        self._say(handshake.first())
        while handshake.peer is None and not self.refusal:
            data = self.sock.recv(4096)
            assert data
            self._decoder.feed(data)

    def _say(self, packet: Packet) -> None:
        self.sock.sendall(packet.encode())

    def _take(self, packet: Packet) -> None:
        try:
            for answer in self.handshake.receive(packet, self._decoder.body):
                self._say(answer)
        except HandshakeRefused as error:
            self.refusal = error.text


def _id_of(text: str) -> str:
    found = re.search(r'id = "(.*)"', text)
    assert found
    return found[1]


@pytest.mark.parametrize(("name", "own"), [("edge-2", True), ("edge-1", False)], ids=["name", "token"])
def test_nobody_takes_the_place_of_a_process_that_is_linked(
    start: StartProgram, files: Files, name: str, own: bool
) -> None:
    one, other = token("one", *EDGE), token("other", *EDGE)
    server = start(*SERVER, "--token-file", files("server", one, other))
    agent = start("agent", "--server", links(server), "--name", "edge-1", "--token-file", files("one", one))
    agent.wait_for("linked")
    instance = server.wait_for("agent linked")["instance"]
    text = one if own else other
    with RawAgent(server, text, files("theirs", text), name, instance).sock as sock:
        assert sock.recv(1) == b""
    assert "another name or token" in server.wait_for("link refused")["cause"]
    assert agent.said("link lost") == []
