"""Runs one fuzz target under atheris, which looks at what is covered and goes where it has not been.

    python tests/fuzz/run.py TARGET [--seconds N] [--keep FOLDER]

The seeds are ``corpus/TARGET``. What covers more than they do, and what failed (``crash-...``), is written into a new
temporary folder, or ``FOLDER``. At the end the number of cases is printed; the exit code is 0 if none failed. One case
is run again by ``--case FILE``, which needs no atheris.

atheris is no dependency of this project, and the tests do not need it: ``pip install atheris`` (wheels for Linux and
some versions of CPython only), if need be elsewhere: ``pip install --target FOLDER atheris`` and ``PYTHONPATH=FOLDER``.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_LONGEST = 4096  # bytes of a case
_SLOWEST = 25  # seconds that one case may take
_MOST_MEMORY = 2048  # MiB
_OBSERVED = ["tunnel", "h11", "idna", "tomllib"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fuzz one parser.")
    parser.add_argument("target", choices=sorted(path.name for path in (HERE / "corpus").iterdir()))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--keep", type=Path, help="where finds are written")
    parser.add_argument("--case", type=Path, help="run this file only")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _targets() -> Any:
    sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
    return importlib.import_module("fuzz_targets").TARGETS


def _fuzz(name: str, seconds: int, keep: Path) -> None:
    """Never returns: the fuzzer ends the process."""
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=_OBSERVED):
        target = _targets()[name]
        importlib.import_module("tunnel.cli")
    logging.disable()
    flags = [
        f"-max_total_time={seconds}",
        f"-max_len={_LONGEST}",
        f"-timeout={_SLOWEST}",
        f"-rss_limit_mb={_MOST_MEMORY}",
        f"-artifact_prefix={keep}/",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *flags, str(keep), str(HERE / "corpus" / name)], target)
    atheris.Fuzz()


def main() -> int:
    arguments = _arguments()
    if arguments.case:
        _targets()[arguments.target](arguments.case.read_bytes())
        return 0
    if arguments.inside:
        _fuzz(arguments.target, arguments.seconds, arguments.keep)
    keep = arguments.keep or Path(tempfile.mkdtemp(prefix=f"fuzz-{arguments.target}-"))
    keep.mkdir(parents=True, exist_ok=True)
    command = [arguments.target, "--seconds", str(arguments.seconds), "--keep", str(keep), "--inside"]
    with subprocess.Popen(
        [sys.executable, __file__, *command], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True
    ) as fuzzer:
        assert fuzzer.stdout
        cases = "no"
        for line in fuzzer.stdout:
            print(line, end="", flush=True)
            found = re.match(r"stat::number_of_executed_units: +(\d+)", line)
            cases = found[1] if found else cases
        code = fuzzer.wait()
    print(f"{arguments.target}: {cases} cases, {'none failed' if code == 0 else 'FAILED'}; finds are in {keep}")
    return 0 if code == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
