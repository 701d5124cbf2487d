"""The OpenAPI document is true: what it says is taken is taken, and every answer is one that it names.

Schemathesis makes up requests from the document, and compares each answer with it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import schemathesis
import trio
from house import echo, open_house, talks
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tunnel.address import ListenAddress
from tunnel.admin.serve import serve
from tunnel.config import AdminConfig
from tunnel.desk import AgentDesk, ServerDesk
from tunnel.lifecycle import Lifecycle

EXAMPLES = 8


@contextmanager
def operated(role: str) -> Iterator[str]:
    """The interface of a program that carries a stream, in a thread of its own; where it is."""
    addresses: list[dict[str, str]] = []
    ready, over = threading.Event(), threading.Event()

    async def main() -> None:
        async with open_house() as house:
            await house.serve()
            agent = await house.agent("one")
            service = await house.service(echo)
            assert await talks(await house.connect(service.target))
            desk = ServerDesk(house.server) if role == "server" else AgentDesk(agent)
            async with trio.open_nursery() as nursery:
                config = AdminConfig(ListenAddress("127.0.0.1", 0))
                addresses.append(await nursery.start(serve, desk, config, trio.Event()))
                ready.set()
                await trio.to_thread.run_sync(over.wait)
                nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    try:
        assert ready.wait(30)
        yield f"http://{addresses[0]['admin']}"
    finally:
        over.set()
        thread.join()


@pytest.fixture(params=["server", "agent"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Lifecycle, "leave", lambda *_: None)  # it is asked to, and there is more to ask
    with operated(request.param) as url:
        yield url


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_answer_is_one_that_the_document_names(url: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for found in schema.get_all_operations():
        operation: Any = found.ok()  # type: ignore[union-attr]  # or the test fails, as it should
        if operation.path == "/api/v1/events":  # has no end
            continue

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            phases=[Phase.generate],
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        def check(case: Any) -> None:
            case.call_and_validate(timeout=30)

        with suppress(Unsatisfiable):  # where nothing can be wrong with a request
            check()
