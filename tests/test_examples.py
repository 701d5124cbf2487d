"""Every example as a program of its own, started as its head says, before a tunnel in this process."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import trio
from house import House, echo, expect, receive_all, receive_exactly, refusal, reset, talks

import tunnel

EXAMPLES = Path(__file__).parents[1] / "examples"
SIGNALS = [signal.SIGINT, signal.SIGTERM]
FILE = bytes(range(251)) * (3 * 1024 * 1024 // 251)
OPEN, SUCCESS = b"\x05\x01\x00", b"\x05\x00\x05\x00\x00\x01" + bytes(6)


class Program:
    """A running example."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self._said = b""

    async def line(self) -> str:
        """The next line on stdout, or what there is before it ends."""
        assert self.process.stdout is not None
        while b"\n" not in self._said and (data := await self.process.stdout.receive_some()):
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    async def listening(self) -> tunnel.Target:
        """Where it says that it listens."""
        return tunnel.Target.parse((await self.line()).removeprefix("listening on "))

    async def ended(self) -> tuple[int, str]:
        """The exit code, and all that is on stderr."""
        assert self.process.stderr is not None
        text = b"".join([data async for data in self.process.stderr]).decode()
        return await self.process.wait(), text

    async def close(self) -> None:
        self.process.kill()
        await self.ended()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            await stream.aclose()


Start = Callable[..., Awaitable[Program]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts an example."""
    started: list[Program] = []

    async def start(name: str, *arguments: object) -> Program:
        argv = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
        process = await trio.lowlevel.open_process(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(Program(process))
        return started[-1]

    yield start
    for program in started:
        await program.close()


@pytest.fixture
async def house(house: House) -> House:
    """A tunnel with a server; agents come when they are called."""
    await house.serve()
    return house


@pytest.fixture
def links(house: House) -> tunnel.ListenAddress:
    """Where the server takes links."""
    return house.server.addresses["links"][0]


async def connect(where: tunnel.Target) -> trio.SocketStream:
    return await trio.open_tcp_stream(where.host, where.port)


async def through_socks(proxy: tunnel.Target, target: tunnel.Target) -> trio.SocketStream:
    stream = await connect(proxy)
    address = socket.inet_aton(target.host) + target.port.to_bytes(2)
    await stream.send_all(OPEN + b"\x05\x01\x00\x01" + address)
    await expect(stream, SUCCESS)
    return stream


async def until_refused(where: tunnel.Target) -> None:
    """Call again and again until nobody listens any more."""
    while True:
        try:
            await (await connect(where)).aclose()
        except OSError:
            return


# -- the SOCKS front-end


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_signal_ends_an_idle_socks_front_end(start: Start, house: House, number: int) -> None:
    proxy = await start("socks5_frontend", "--listen", "127.0.0.1:0", "--server", house.closed_port())
    await proxy.listening()
    proxy.process.send_signal(number)
    assert await proxy.ended() == (0, "")


async def test_a_leaving_socks_front_end_lets_an_open_connection_end(
    start: Start, house: House, links: tunnel.ListenAddress
) -> None:
    await house.agent()
    service = await house.service(echo)
    proxy = await start("socks5_frontend", "--listen", "127.0.0.1:0", "--server", links)
    where = await proxy.listening()
    async with await through_socks(where, service.target) as stream:
        proxy.process.terminate()
        await until_refused(where)
        assert await talks(stream, bytes(1_000_000))
    code, _ = await proxy.ended()
    assert code == 0


async def test_a_second_signal_cuts_the_connections_of_the_socks_front_end(
    start: Start, house: House, links: tunnel.ListenAddress
) -> None:
    await house.agent()
    service = await house.service(echo)
    proxy = await start("socks5_frontend", "--listen", "127.0.0.1:0", "--server", links)
    where = await proxy.listening()
    async with await through_socks(where, service.target) as stream:
        proxy.process.terminate()
        await until_refused(where)
        proxy.process.terminate()
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
    code, text = await proxy.ended()
    assert code == 3
    assert "Traceback" not in text
    await service.open.wait_value(0)


async def test_the_second_server_serves_if_the_first_is_not_there(
    start: Start, house: House, links: tunnel.ListenAddress
) -> None:
    await house.agent()
    service = await house.service(echo)
    servers = ("--server", house.closed_port(), "--server", links)
    proxy = await start("socks5_frontend", "--listen", "127.0.0.1:0", *servers)
    async with await through_socks(await proxy.listening(), service.target) as stream:
        assert await talks(stream)


@pytest.mark.parametrize(("password", "answer"), [(b"s3cret", 0), (b"s3cret\n", 1), (b"guess", 1)])
async def test_the_password_is_the_file_without_its_final_newline(
    start: Start, house: House, tmp_path: Path, password: bytes, answer: int
) -> None:
    file = tmp_path / "password"
    file.write_bytes(b"s3cret\n")
    login = ("--user", "ann", "--password-file", file)
    proxy = await start("socks5_frontend", "--listen", "0.0.0.0:0", "--server", house.closed_port(), *login)
    where = await proxy.listening()
    async with await connect(tunnel.Target("127.0.0.1", where.port)) as stream:
        await stream.send_all(b"\x05\x01\x02\x01\x03ann" + bytes((len(password),)) + password)
        assert await receive_exactly(stream, 4) == b"\x05\x02\x01" + bytes((answer,))
    proxy.process.terminate()
    assert await proxy.ended() == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--listen", "0.0.0.0:0"], 2, ["--listen", "0.0.0.0:0", "--user"]),
        (["--listen", "nowhere"], 2, ["--listen", "nowhere"]),
        (["--server", "nowhere"], 2, ["--server", "nowhere"]),
        (["--user", "ann"], 2, ["--user", "--password-file"]),
        (["--password-file", "/dev/null"], 2, ["--user", "--password-file"]),
        (["--user", "ann", "--password-file", "/dev/null"], 2, ["--password-file", "bytes"]),
        (["--listen", "192.0.2.1:0", "--user", "ann", "--password-file", __file__], 2, ["255"]),
    ],
)
async def test_a_socks_front_end_that_would_not_be_safe_or_sound_does_not_start(
    start: Start, arguments: list[str], code: int, words: list[str]
) -> None:
    proxy = await start("socks5_frontend", "--server", "127.0.0.1:1", *arguments)
    ended, text = await proxy.ended()
    assert ended == code
    assert all(word in text for word in words), text


async def test_a_port_in_use_is_named(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for name, *arguments in [("socks5_frontend", "--server", "127.0.0.1:1"), ("echo_target",)]:
            code, text = await (await start(name, "--listen", address, *arguments)).ended()
            assert (code, text) == (1, f"Error: cannot listen on {address}: Address already in use\n")


async def test_curl_reaches_an_embedded_service_through_socks(
    start: Start, house: House, links: tunnel.ListenAddress
) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    agent = await start("embedded_agent", "--server", links)
    proxy = await start("socks5_frontend", "--listen", "127.0.0.1:0", "--server", links)
    where = await proxy.listening()
    await agent.line()
    argv = [curl, "--silent", "--socks5-hostname", str(where), "http://hello.internal/"]
    done = await trio.run_process(argv, capture_stdout=True)
    assert done.stdout == b"hello from inside a Python program\n"


# -- the embedded agent


@pytest.mark.parametrize("number", SIGNALS)
async def test_an_embedded_agent_answers_and_leaves(
    start: Start, house: House, links: tunnel.ListenAddress, number: int
) -> None:
    agent = await start("embedded_agent", "--server", links, "--name", "snake")
    assert await agent.line() == "snake is linked"
    async with await house.connect("hello.internal:80", "Tunnel-Agent: snake") as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: hello.internal\r\n\r\n")
        status, _, body = await refusal(stream, "GET")
    assert (status, body) == (200, "hello from inside a Python program\n")
    agent.process.send_signal(number)
    code, text = await agent.ended()
    assert code == 0
    assert "Traceback" not in text


async def test_an_embedded_agent_connects_nowhere(start: Start, house: House, links: tunnel.ListenAddress) -> None:
    agent = await start("embedded_agent", "--server", links)
    await agent.line()
    service = await house.service(echo)
    status, _, _ = await refusal(await house.ask(service.target))
    assert status == 502
    assert not service.opened.value


async def test_a_signal_ends_an_embedded_agent_that_has_no_server(start: Start, house: House) -> None:
    agent = await start("embedded_agent", "--server", house.closed_port())
    assert agent.process.stderr is not None
    await agent.process.stderr.receive_some()  # it has begun to complain
    agent.process.send_signal(signal.SIGINT)
    code, text = await agent.ended()
    assert code == 0
    assert "Traceback" not in text


# -- the echo target


async def test_an_echo_target_echoes_all_of_what_ends(start: Start, house: House) -> None:
    await house.agent()
    target = await start("echo_target", "--listen", "127.0.0.1:0")
    stream = await house.connect(await target.listening())
    heard: list[bytes] = []

    async def hear() -> None:
        heard.append(await receive_all(stream))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hear)
        await stream.send_all(FILE)
        await stream.send_eof()
    assert heard == [FILE]
    target.process.send_signal(signal.SIGINT)
    assert await target.ended() == (0, "")


async def test_an_echo_target_survives_clients_that_reset(start: Start) -> None:
    target = await start("echo_target", "--listen", "127.0.0.1:0")
    where = await target.listening()
    async with await connect(where) as stream:
        assert await talks(stream)
        reset(stream)
    async with await connect(where) as stream:
        assert await talks(stream)


# -- the download


def http_answer(head: str, body: bytes) -> Callable[[trio.SocketStream], Awaitable[None]]:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(f"HTTP/1.1 {head}\r\n\r\n".encode() + body)

    return answer


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


CHUNKED = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (FILE[:1000], FILE[1000:])) + b"0\r\n\r\n"
ANSWERS = {
    "length": (f"200 OK\r\nContent-Length: {len(FILE)}", FILE),
    "chunks": ("200 OK\r\nTransfer-Encoding: chunked", CHUNKED),
    "end": ("200 OK", FILE),
}


@pytest.mark.parametrize("kind", ANSWERS)
async def test_a_download_is_the_file_byte_for_byte(
    start: Start, house: House, links: tunnel.ListenAddress, tmp_path: Path, kind: str
) -> None:
    await house.agent()
    service = await house.service(http_answer(*ANSWERS[kind]))
    url = f"http://{service.target}/a b?c=\u00fc"
    download = await start("download", "--server", links, url, tmp_path / "file")
    assert await download.ended() == (0, "file\n")
    assert contents(tmp_path) == {"file": FILE}


@pytest.mark.parametrize(
    ("head", "body", "words"),
    [
        ("404 Not Found\r\nContent-Length: 2", b"no", "404"),
        ("301 Moved\r\nLocation: /elsewhere\r\nContent-Length: 0", b"", "301"),
        ("200 OK\r\nContent-Length: 1000", b"half", "peer closed connection"),
        ("nonsense", b"", "Error: "),
    ],
)
async def test_an_answer_that_is_no_whole_file_is_exit_1_and_leaves_what_was_there(
    start: Start, house: House, links: tunnel.ListenAddress, tmp_path: Path, head: str, body: bytes, words: str
) -> None:
    await house.agent()
    service = await house.service(http_answer(head, body))
    output = tmp_path / "file"
    output.write_text("an older one")
    code, text = await (await start("download", "--server", links, f"http://{service.target}/", output)).ended()
    assert code == 1
    assert words in text
    assert "Traceback" not in text
    assert contents(tmp_path) == {"file": b"an older one"}


async def test_a_download_that_cannot_be_dialled_ends_with_the_exit_code_of_the_error(
    start: Start, house: House, links: tunnel.ListenAddress, tmp_path: Path
) -> None:
    url = f"http://{house.closed_port()}/"
    code, text = await (await start("download", "--server", links, url, tmp_path / "file")).ended()
    assert (code, text) == (75, f"Error: {url}: no agent is linked\n")
    await house.agent()
    code, text = await (await start("download", "--server", links, url, tmp_path / "file")).ended()
    assert code == 69
    assert "Connection refused" in text
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("url", ["https://a.test/", "a.test/file", "http://", "http://a.test:0/", "http://me@a.test/"])
async def test_what_is_no_http_url_is_exit_2(start: Start, tmp_path: Path, url: str) -> None:
    code, text = await (await start("download", "--server", "127.0.0.1:1", url, tmp_path / "file")).ended()
    assert code == 2
    assert url in text
    assert contents(tmp_path) == {}
