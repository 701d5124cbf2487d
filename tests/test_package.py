"""The package as others see it: its names, and that nothing is imported before it is needed."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import tunnel


def _promised() -> dict[str, str]:
    """What the type checker is told: each name, and the module that it comes from."""
    tree = ast.parse(Path(tunnel.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}


@pytest.mark.parametrize("name", tunnel.__all__)
def test_every_public_name_is_what_its_module_calls_so(name: str) -> None:
    assert getattr(tunnel, name) is getattr(importlib.import_module(_promised()[name]), name)


def test_the_public_names_are_those_that_the_type_checker_is_told_of() -> None:
    assert sorted(tunnel.__all__) == sorted(_promised())


def test_the_public_names_are_sorted_and_none_is_there_twice() -> None:
    assert tunnel.__all__ == sorted(set(tunnel.__all__))


@pytest.mark.parametrize("name", ["Link", "Session", "nothing", "__wrapped__"])
def test_any_other_name_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'tunnel' has no attribute '{name}'"):
        getattr(tunnel, name)


def test_a_star_import_gives_the_public_names() -> None:
    found: dict[str, object] = {}
    exec("from tunnel import *", found)
    assert set(tunnel.__all__) <= set(found)


def _loaded_by(code: str) -> set[str]:
    """Top-level packages that a new interpreter has after it ran ``code``."""
    script = f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(ran.stdout.split())


def test_importing_the_package_imports_nothing_that_is_not_the_standard_librarys() -> None:
    assert "tunnel" in _loaded_by("import tunnel")
    assert not {"trio", "click", "msgpack", "h11", "idna", "trio_util"} & _loaded_by("import tunnel")


def test_errors_and_addresses_can_be_had_without_trio() -> None:
    assert "trio" not in _loaded_by("from tunnel import Refused, StreamReset, Target, ServerConfig")


def test_the_library_can_be_had_without_click() -> None:
    loaded = _loaded_by("from tunnel import *")
    assert "trio" in loaded
    assert "click" not in loaded
