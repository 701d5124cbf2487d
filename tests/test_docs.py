"""What docs/ shows as a whole program is one: it is type-checked, runs, and prints what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "library.md").read_text(encoding="utf-8")
PROGRAM, PRINTED = re.findall(r"```(?:python)?\n(.*?)```", PAGE, re.DOTALL)[:2]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "quick_start.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


def test_the_quick_start_prints_what_the_page_says(program: Path) -> None:
    argv = [sys.executable, "-W", "error", str(program)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, PRINTED, "")


def test_the_quick_start_passes_the_type_checker(program: Path) -> None:
    pytest.importorskip("mypy")
    argv = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", os.devnull, str(program)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, cwd=program.parent, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Success: no issues found in 1 source file\n", "")
