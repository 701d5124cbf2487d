"""Values made out of files: every way of replacing a file shows, and nothing bad ever takes a good value's place."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tunnel.errors import ConfigError
from tunnel.reload import Reloaded

LOOK = 1.0  # seconds, of a mock clock


def read(path: Path) -> str:
    """What a file holds, if that begins with ``good``."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not text.startswith("good"):
        raise ConfigError(f"{path}: holds {text}")
    return text


class Files:
    """Two files and the value made out of both, which must be ``good`` and of one kind.

    Attributes:
        changes: what subscribers heard.
        reads: how often the files were read.
    """

    def __init__(self, folder: Path) -> None:
        self.one, self.other = folder / "one", folder / "other"
        self.one.write_text("good A")
        self.other.write_text("good A")
        self.changes: list[str] = []
        self.reads = 0
        self.reloaded = Reloaded([self.one, self.other], self.read, self.changes.append)

    def read(self) -> str:
        self.reads += 1
        one, other = read(self.one), read(self.other)
        if one != other:
            raise ConfigError(f"{self.one} and {self.other} are no pair")
        return one

    @property
    def value(self) -> str:
        return self.reloaded.value

    def move_over(self, path: Path, text: str) -> None:
        new = path.with_suffix(".new")
        new.write_text(text)
        new.rename(path)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
async def running(files: Files, nursery: trio.Nursery) -> Files:
    nursery.start_soon(files.reloaded.run)
    await wait_all_tasks_blocked()
    return files


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What was logged."""
    caplog.set_level(logging.INFO)
    return caplog


def words(said: pytest.LogCaptureFixture) -> list[str]:
    return [f"{record.levelname} {dict(record.msg)['event']}" for record in said.records]  # type: ignore[arg-type]


def fact(said: pytest.LogCaptureFixture, name: str) -> str:
    return str(dict(said.records[0].msg)[name])  # type: ignore[arg-type]


async def one_look() -> None:
    await trio.sleep(LOOK)
    await wait_all_tasks_blocked()


def test_files_that_are_bad_at_first_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Reloaded([tmp_path / "none"], lambda: read(tmp_path / "none"))


async def test_files_that_do_not_change_are_read_once(
    running: Files, autojump_clock: MockClock, said: pytest.LogCaptureFixture
) -> None:
    await trio.sleep(10 * LOOK)
    assert (running.value, running.reads, running.changes, words(said)) == ("good A", 1, [], [])


async def test_files_that_are_renamed_over_are_read_again(
    running: Files, autojump_clock: MockClock, said: pytest.LogCaptureFixture
) -> None:
    running.move_over(running.one, "good B")
    running.move_over(running.other, "good B")
    await one_look()
    assert (running.value, running.changes, words(said)) == ("good B", ["good B"], ["INFO reloaded"])
    assert fact(said, "file") == f"{running.one}, {running.other}"


async def test_a_rename_shows_although_times_and_size_are_the_same(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    path, new = tmp_path / "file", tmp_path / "new"
    for each, text in (path, "good A"), (new, "good B"):
        each.write_text(text)
        os.utime(each, ns=(0, 0))
    reloaded = Reloaded([path], lambda: read(path))
    nursery.start_soon(reloaded.run)
    await wait_all_tasks_blocked()
    new.rename(path)
    await one_look()
    assert reloaded.value == "good B"


async def test_a_change_in_place_is_read_although_the_size_is_the_same(
    running: Files, autojump_clock: MockClock
) -> None:
    for path in running.one, running.other:
        path.write_text("good B")
        os.utime(path, ns=(1, 1))  # not in the same tick of the clock as what was there before
    await one_look()
    assert running.value == "good B"


async def test_a_symbolic_link_that_leads_elsewhere_is_followed(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    """As orchestrators mount secrets: file -> ..data/file, ..data -> a folder of each version."""
    for version in "AB":
        (tmp_path / version).mkdir()
        (tmp_path / version / "file").write_text(f"good {version}")
    data, path = tmp_path / "..data", tmp_path / "file"
    data.symlink_to("A")
    path.symlink_to("..data/file")
    reloaded = Reloaded([path], lambda: read(path))
    nursery.start_soon(reloaded.run)
    await wait_all_tasks_blocked()
    (tmp_path / "swap").symlink_to("B")
    (tmp_path / "swap").rename(data)
    await one_look()
    assert reloaded.value == "good B"


async def test_what_is_bad_is_not_taken_and_said_once(
    running: Files, autojump_clock: MockClock, said: pytest.LogCaptureFixture
) -> None:
    running.move_over(running.one, "rubbish")
    for _ in range(5):
        await one_look()
    assert (running.value, running.changes, words(said)) == ("good A", [], ["WARNING not taken"])
    assert fact(said, "cause") == f"{running.one}: holds rubbish"


async def test_another_cause_is_said_again(
    running: Files, autojump_clock: MockClock, said: pytest.LogCaptureFixture
) -> None:
    for text in "rubbish", "nonsense":
        running.move_over(running.one, text)
        await one_look()
    assert words(said) == ["WARNING not taken"] * 2


async def test_good_after_bad_is_taken_and_the_same_bad_is_said_again(
    running: Files, autojump_clock: MockClock, said: pytest.LogCaptureFixture
) -> None:
    for text in "rubbish", "good A", "rubbish":
        running.move_over(running.one, text)
        await one_look()
    assert words(said) == ["WARNING not taken", "INFO reloaded", "WARNING not taken"]
    assert running.changes == ["good A"]


async def test_a_pair_that_is_half_written_is_taken_when_it_is_whole(running: Files, autojump_clock: MockClock) -> None:
    running.move_over(running.one, "good B")
    await one_look()
    assert running.value == "good A"
    running.move_over(running.other, "good B")
    await one_look()
    assert running.value == "good B"


async def test_what_was_bad_is_tried_again_although_no_file_has_changed_since(
    running: Files, autojump_clock: MockClock
) -> None:
    short = False

    def read() -> str:
        if short:
            raise ConfigError("too many open files")
        return "good B"

    running.reloaded._read = read
    short = True
    running.move_over(running.one, "good B")
    await one_look()
    assert running.value == "good A"
    short = False
    await one_look()
    assert running.value == "good B"


async def test_what_changes_while_it_is_read_is_read_again(tmp_path: Path, nursery: trio.Nursery) -> None:
    path = tmp_path / "file"
    path.write_text("good A")

    def read_and_write() -> str:
        text = read(path)
        if text == "good A":
            path.write_text("good later")
        return text

    reloaded = Reloaded([path], read_and_write)
    assert reloaded.value == "good A"
    nursery.start_soon(reloaded.run)
    reloaded.look()
    await wait_all_tasks_blocked()
    assert reloaded.value == "good later"


async def test_a_file_that_goes_away_leaves_the_value_until_it_is_there_again(
    running: Files, autojump_clock: MockClock, said: pytest.LogCaptureFixture
) -> None:
    running.one.unlink()
    await one_look()
    assert (running.value, words(said)) == ("good A", ["WARNING not taken"])
    running.one.write_text("good A")
    await one_look()
    assert words(said)[1:] == ["INFO reloaded"]


async def test_who_asks_is_not_kept_waiting(files: Files, nursery: trio.Nursery, mock_clock: MockClock) -> None:
    nursery.start_soon(files.reloaded.run)
    await wait_all_tasks_blocked()
    for path in files.one, files.other:
        files.move_over(path, "good B")
    for _ in range(2):  # being asked ends with the look
        files.reloaded.look()
        await wait_all_tasks_blocked()
    assert (files.value, files.reads, mock_clock.current_time()) == ("good B", 2, 0.0)


async def test_no_look_reads_what_nobody_changed(files: Files, nursery: trio.Nursery) -> None:
    nursery.start_soon(files.reloaded.run)
    files.reloaded.look()
    await wait_all_tasks_blocked()
    assert files.reads == 1
