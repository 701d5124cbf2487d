"""The status page in a real browser, driven through the DevTools protocol over a pipe, with keys and clicks.

Whatever a test is about, the browser must have nothing to complain of at its end: no error, no blocked script.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import Program, StartProgram, eventually, free_port, needs

_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
_QUIET = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"]
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}


class Browser:
    """A headless Chromium. It reads commands from descriptor 3, and writes answers and events to descriptor 4."""

    def __init__(self, program: str, folder: Path) -> None:
        argv = ["sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null', "sh", program, *_FLAGS, *_QUIET]
        self._process = subprocess.Popen(
            [*argv, f"--user-data-dir={folder}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._last = 0
        self._read = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: object) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        assert self._process.stdin
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        while (answer := self._next()).get("id") != self._last:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        assert self._process.stdout
        while b"\0" not in self._read:
            more = self._process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
            assert more, "the browser is gone"
            self._read += more
        message, _, self._read = self._read.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def close(self) -> None:
        with self._process:
            self.call("Browser.close")


class Page:
    """One tab, with a memory of its own, that shows the page at an address and has had its first news."""

    def __init__(self, browser: Browser, address: str) -> None:
        self._browser = browser
        context = browser.call("Target.createBrowserContext")["browserContextId"]
        self._target = browser.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call("Page.navigate", url=f"http://{address}/")
        self.sees("#live", "live")

    def _call(self, method: str, **params: object) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def run(self, script: str) -> Any:
        """What an expression comes to."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str) -> str | None:
        """What people read there; None if there is no such thing, or it is hidden."""
        found: str | None = self.run(
            f"(node => node?.checkVisibility() ? node.innerText : null)(document.querySelector({json.dumps(selector)}))"
        )
        return found

    def sees(self, selector: str, text: str | None, seconds: float = 30.0) -> None:
        eventually(lambda: self.text(selector) == text, f"{text!r} in {selector}", seconds)

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of it."""
        node = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{node}.scrollIntoView({{ block: 'center', behavior: 'instant' }})")
        box = self.run(f"{node}.getBoundingClientRect().toJSON()")
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, **at)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        self._call("Input.dispatchKeyEvent", type="keyDown", text="\r" if key == "Enter" else "", **code)
        self._call("Input.dispatchKeyEvent", type="keyUp", **code)

    def resize(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=True)

    def overflow(self, selector: str) -> int:
        """By how many pixels something is wider than there is room for it."""
        hidden: int = self.run(f"(n => n.scrollWidth - n.clientWidth)(document.querySelector({json.dumps(selector)}))")
        return hidden

    def complaints(self) -> list[str]:
        """What the browser has complained of since it was asked last."""
        self.run("0")  # so that all that came before has been read
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        self._browser.events = [event for event in self._browser.events if event not in mine]
        return [str(event["params"]) for event in mine if _is_complaint(event)]

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)


def _is_complaint(event: dict[str, Any]) -> bool:
    params = event["params"]
    if event["method"] == "Log.entryAdded":
        return params["entry"]["level"] in {"error", "warning"}
    if event["method"] == "Runtime.consoleAPICalled":
        return params["type"] in {"error", "warning", "assert"}
    return bool(event["method"] == "Runtime.exceptionThrown")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = needs("chromium")
    with contextlib.closing(Browser(program, tmp_path_factory.mktemp("chromium"))) as browser:
        yield browser


OpenPage = Callable[[Program], Page]


@pytest.fixture
def open_page(browser: Browser, start: StartProgram) -> Iterator[OpenPage]:
    """Opens the page of one of our programs."""
    pages: list[Page] = []

    def open_page(program: Program) -> Page:
        pages.append(Page(browser, program.wait_for("listening", use="admin")["address"]))
        return pages[-1]

    yield open_page
    complaints = [complaint for page in pages for complaint in page.complaints()]
    for page in pages:
        page.close()
    assert complaints == []


ADMIN = ("--admin", "127.0.0.1:0")
STATE, BUTTON = "#rows .chip", "#rows button"
_SERVER = ("server", "--listen", "127.0.0.1:0", "--connect", "off")
NewAgent = Callable[..., Program]


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[Program]:
    """One for many tests: each has agents of its own, which are gone when it ends."""
    server = Program(*_SERVER, *ADMIN)
    yield server
    code = server.stop()
    print(server)  # noqa: T201  # pytest shows it when the test failed
    assert code == 0
    assert server.noise == []


@pytest.fixture
def page(server: Program, open_page: OpenPage) -> Page:
    """The server's, on which no agent is left from the test before."""
    page = open_page(server)
    page.sees("#none", "No agent is linked.")
    return page


@pytest.fixture
def agent(start: StartProgram, server: Program) -> NewAgent:
    """Starts an agent, and waits for its link."""

    def agent(name: str, *options: str, server: Program = server) -> Program:
        links = server.wait_for("listening", use="links")["address"]
        agent = start("agent", "--server", links, "--name", name, *(options or ("--admin", "off")))
        agent.wait_for("linked")
        return agent

    return agent


def test_a_new_agent_is_shown_within_two_seconds(page: Page, agent: NewAgent) -> None:
    assert page.text("#reasons") == "no agent"
    agent("edge")
    page.sees("#rows bdi", "edge", seconds=2)
    assert page.text(STATE) == "active"
    assert page.text("#none") is None
    assert page.text("#ready") == "ready"


def test_the_buttons_ask_and_then_drain_and_undrain(server: Program, page: Page, agent: NewAgent) -> None:
    agent("edge")
    page.sees(STATE, "active")
    page.click(BUTTON)
    assert page.text("#ask-title") == "Drain edge?"
    page.type("new kernel")
    page.press("Enter")
    page.sees(STATE, "drained")
    assert page.text("#ask") is None
    assert page.text("#reasons") == "fallback only"
    assert server.said("asked", change="drain", agent="edge", reason="new kernel")
    page.click(BUTTON)
    assert page.text("#ask-title") == "Undrain edge?"
    page.click("#yes")
    page.sees(STATE, "active")


def test_a_question_that_is_called_off_changes_nothing(server: Program, page: Page, agent: NewAgent) -> None:
    agent("quiet")
    page.sees(STATE, "active")
    page.click(BUTTON)
    page.type("never mind")
    page.press("Escape")
    assert page.text("#ask") is None
    page.click(BUTTON)
    assert page.run("get('reason').value") == ""
    page.click("#ask .no")
    assert page.text("#ask") is None
    assert server.said("asked", agent="quiet") == []


def test_a_question_says_how_many_agents_of_the_name_it_is_about(page: Page, agent: NewAgent) -> None:
    for _ in range(2):
        agent("edge")
    page.sees("#sums", "2 active")
    page.click(BUTTON)
    assert "All 2 agents of this name are told." in str(page.text("#ask-text"))
    page.click("#yes")
    page.sees("#sums", "2 draining")


def test_what_was_refused_is_said_in_the_dialog(page: Page, agent: NewAgent) -> None:
    edge = agent("edge")
    page.sees(STATE, "active")
    page.click(BUTTON)
    edge.kill()
    page.sees("#rows bdi", None)
    page.click("#yes")
    page.sees("#ask-error", "Not done: no agent edge is linked")
    assert ["404" in complaint for complaint in page.complaints()] == [True]  # as browsers report each of those


HOSTILE = "\"'><img/src=x/onerror=document.title='taken'><script>alert(1)</script>&lt;%2f..?#"


def test_a_hostile_name_is_text_and_nothing_else(page: Page, agent: NewAgent) -> None:
    agent(HOSTILE)
    page.sees("#rows bdi", HOSTILE)
    page.click(BUTTON)
    assert page.text("#ask-title") == f"Drain {HOSTILE}?"
    page.click("#yes")
    page.sees(STATE, "drained")
    assert page.run("document.querySelectorAll('img, #rows script, dialog script').length") == 0
    assert page.run("document.title") == "server ready"


def test_a_phone_never_has_to_scroll_sideways(page: Page, agent: NewAgent) -> None:
    page.resize(360, 640)
    longest = "W" * 128
    agent(longest)
    page.sees("#rows bdi", longest)
    assert page.overflow("html") == 0
    page.click(BUTTON)
    assert page.text("#ask-title") == f"Drain {longest}?"
    assert page.overflow("html") == page.overflow("#ask") == 0


def test_a_token_is_asked_for_once_and_kept_nowhere_else(
    start: StartProgram, open_page: OpenPage, agent: NewAgent, tmp_path: Path
) -> None:
    file, secret = tmp_path / "tokens.toml", "open-sesame" * 3
    file.touch(mode=0o600)
    agents = f'[[token]]\nid = "edge"\nrole = "agent"\nsecret = "{"x" * 32}"\nagents = ["edge"]\n'
    file.write_text(f'[[token]]\nid = "ops"\nrole = "admin"\nsecret = "{secret}"\n{agents}')
    server = start(*_SERVER, *ADMIN, "--token-file", str(file))
    agent("edge", "--token-file", str(file), "--admin", "off", server=server)
    page = open_page(server)
    page.sees(STATE, "active")
    page.click(BUTTON)
    page.click("#yes")
    page.sees("#token-title", "A token is needed")
    page.type("wrong")
    page.press("Enter")
    page.sees("#token-error", "That token was not taken.")
    page.type(secret)
    page.press("Enter")
    page.sees(STATE, "drained")
    page.click(BUTTON)
    page.click("#yes")
    page.sees(STATE, "active")
    assert page.run("localStorage.length + sessionStorage.length + document.cookie + get('token').value") == "0"
    assert ["401" in complaint for complaint in page.complaints()] == [True, True]


def test_an_agent_has_a_page_of_its_own(agent: NewAgent, open_page: OpenPage) -> None:
    page = open_page(agent("edge", *ADMIN))
    assert page.text("#who") == "edge"
    assert page.text("#state") == "ready"
    assert page.text("#pool") is None
    page.click("#self")
    page.type("new kernel")
    page.press("Enter")
    page.sees("#state", "drained")
    assert page.text("#ready") == "not ready"
    assert page.text("#reasons") == "draining"
    page.click("#self")
    page.click("#yes")
    page.sees("#state", "ready")


def test_a_lost_connection_is_said_and_comes_back_by_itself(start: StartProgram, open_page: OpenPage) -> None:
    options = (*_SERVER, "--admin", f"127.0.0.1:{free_port()}")
    server = start(*options)
    page = open_page(server)
    before = page.text("#where")
    server.kill()
    eventually(lambda: str(page.text("#live")).startswith("no news since "), "word of the loss")
    start(*options)
    page.sees("#live", "live")
    assert page.text("#where") != before
    assert all("net::ERR_" in complaint for complaint in page.complaints())
