"""The floors: what docs/architecture.md shows is what import-linter keeps, and every module has its place there."""

from __future__ import annotations

import re
import tomllib
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
_TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
_ROWS = [row.split("|")[1:3] for row in _TEXT.split("## Floors", 1)[1].split("##", 1)[0].splitlines() if "|" in row][2:]
_LAYERS, _PURE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
    "contracts"
]
_IN_LAYERS = [[name.strip().removeprefix("tunnel.") for name in layer.split("|")] for layer in _LAYERS["layers"]]


def floors() -> dict[str, int]:
    """The floor of each module in the table."""
    found: dict[str, int] = {}
    floor = 0
    for number, modules in _ROWS:
        floor = int(number) if number.strip() else floor
        for module in re.findall(r"`(\w+)`", modules):
            assert module not in found, f"{module} is there twice"
            found[module] = floor
    return found


def test_every_module_is_in_the_table_and_in_a_layer() -> None:
    there = {
        path.stem for path in (ROOT / "tunnel").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    there.discard("__init__")
    assert set(floors()) == there
    assert {name for layer in _IN_LAYERS for name in layer} == there


def test_no_layer_is_above_one_of_a_higher_floor() -> None:
    floor = floors()
    for higher, lower in pairwise(_IN_LAYERS):
        assert min(floor[name] for name in higher) >= max(floor[name] for name in lower), (higher, lower)


def test_what_is_below_the_line_is_kept_from_trio_and_sockets() -> None:
    line = next(place for place, (_, modules) in enumerate(_ROWS) if not modules.strip())
    below = {module for _, modules in _ROWS[line:] for module in re.findall(r"`(\w+)`", modules)}
    kept = {name.removeprefix("tunnel.") for name in _PURE["source_modules"]}
    assert below - kept == {"notify"}, "which talks to systemd"
