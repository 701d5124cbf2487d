"""What a service says to its manager, if there is one: it arrives as it is, and whatever fails has no effect."""

from __future__ import annotations

import socket
import sys
import uuid
from pathlib import Path

import pytest
from service_manager import service_manager

from tunnel.notify import notify


def test_what_is_said_arrives_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", path := str(tmp_path / "notify"))
    with service_manager(path) as manager:
        notify("WATCHDOG=1\nSTATUS=ready, 0 open")
        assert manager.heard() == ["WATCHDOG=1", "STATUS=ready, 0 open"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs names without a file")
def test_the_manager_may_have_a_name_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"tunnel-{uuid.uuid4()}"
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    with service_manager(f"\0{name}") as manager:
        notify("READY=1")
        assert manager.heard() == ["READY=1"]


@pytest.mark.parametrize("path", [None, ""])
def test_without_a_manager_nothing_is_said(monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    def no_socket(*_: object) -> None:
        raise AssertionError("a socket")

    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if path is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", path)
    monkeypatch.setattr(socket, "socket", no_socket)
    notify("READY=1")


def test_a_manager_that_has_gone_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", path := str(tmp_path / "notify"))
    with service_manager(path):
        pass
    notify("READY=1")


def test_a_manager_that_does_not_listen_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", path := str(tmp_path / "notify"))
    with service_manager(path) as manager:
        for _ in range(10_000):  # more than any system keeps
            notify("STATUS=" + "x" * 1000)
        assert 0 < len(manager.heard()) < 10_000
