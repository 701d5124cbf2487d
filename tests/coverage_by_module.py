"""How much of each module its own tests cover: ``python tests/coverage_by_module.py [NAME...]``.

For each ``tunnel/NAME.py`` that has a ``tests/test_NAME.py``, that alone is run, in one process, and measured. What
only other tests cover is not counted: a low number says that a fault in the module is found from afar, if at all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def tests_of(module: Path) -> Path:
    return ROOT / "tests" / f"test_{module.stem}.py"


def covered(module: Path) -> float:
    """Percent of its lines and branches, also if a test fails."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        environment = {**os.environ, "COVERAGE_FILE": str(Path(folder) / "data")}

        def coverage(*arguments: str) -> int:
            argv = [sys.executable, "-m", "coverage", *arguments]
            return subprocess.run(argv, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False).returncode

        if coverage("run", "-m", "pytest", "-n0", "-p", "no:cacheprovider", str(tests_of(module))):
            print(f"not all of {tests_of(module).name} passed", file=sys.stderr)  # noqa: T201
        coverage("combine", "--quiet")
        coverage("json", "--quiet", "-o", str(report))
        files = json.loads(report.read_text())["files"]
        return float(files[str(module.relative_to(ROOT))]["summary"]["percent_covered"])


def main(names: list[str]) -> None:
    modules = sorted((ROOT / "tunnel").rglob("*.py"))
    if unknown := set(names) - {module.stem for module in modules}:
        sys.exit(f"no such module: {', '.join(sorted(unknown))}")
    for module in modules:
        if module.stem in names or not names:
            figure = f"{covered(module):5.1f} %" if tests_of(module).exists() else "no tests of its own"
            print(f"{module.relative_to(ROOT)!s:30} {figure}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
