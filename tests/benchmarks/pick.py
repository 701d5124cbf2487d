"""How long it takes to decide who serves a dial: with few and with very many agents, none to all of them draining.

    python tests/benchmarks/pick.py [--sizes 10,1000,100000] [--draining 0,50,99,100] [--picks 2000] [--json FILE]

Rules that hold here:

- Only ``Backends.decide`` is timed; links are stand-ins that carry no bytes. Each figure is the best of some rounds.
- With ``destHost`` every agent claims the same host, with the others all are under the one key of the strategy: this is
  the worst case, since every agent is a candidate.
- The ratio of the largest size to the smallest is what should stay flat; the microseconds are this machine's.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import sys
from itertools import product
from time import perf_counter
from types import SimpleNamespace

from tunnel.address import Identifier, Target
from tunnel.backends import Backend, Backends
from tunnel.config import STRATEGIES, Claims
from tunnel.identity import Identity

_ROUNDS = 25
_TARGET = Target("db.internal", 5432)
_CLAIMS = {
    "destHost": Claims((Identifier.parse("host=db.internal"),)),
    "defaultRoute": Claims(default_route=True),
    "default": Claims(),
}


def crowd(strategy: str, size: int, draining: int) -> Backends:
    """So many agents, ``draining`` per cent of them draining, with a few streams each."""
    backends = Backends((strategy,))
    members = []
    for number in range(size):
        backend = Backend(backends)
        peer = Identity("agent", f"agent-{number}", f"{number:032x}", claims=_CLAIMS[strategy])
        backend.link = SimpleNamespace(peer=peer, session=SimpleNamespace(streams=random.randrange(4)), why=None)
        backend.on_linked()
        members.append(backend)
    for backend in members[: size * draining // 100]:
        backends.mark(backend)
    return backends


def seconds(backends: Backends, picks: int) -> float:
    """For so many picks."""
    began = perf_counter()
    for _ in range(picks):
        backends.decide(_TARGET)
    return perf_counter() - began


def microseconds(crowds: list[Backends], picks: int) -> list[float]:
    """Per pick, in the best round of each; they take turns, so that a busy machine is as unfair to all."""
    gc.collect()
    gc.disable()
    rounds = [[seconds(backends, picks) for backends in crowds] for _ in range(_ROUNDS)]
    gc.enable()
    return [min(column) / picks * 1e6 for column in zip(*rounds, strict=True)]


def numbers(text: str) -> list[int]:
    """A comma list."""
    return [int(word) for word in text.split(",")]


def main() -> None:
    """Measure, print the table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description="Time Backends.decide.")
    parser.add_argument("--sizes", type=numbers, default=[10, 1_000, 100_000], help="numbers of agents")
    parser.add_argument("--draining", type=numbers, default=[0, 50, 99, 100], help="per cent of them that are draining")
    parser.add_argument("--picks", type=int, default=2_000, help=f"picks in each of {_ROUNDS} rounds")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    logging.disable()
    say = sys.stdout.write
    rows = []
    say("us per pick        " + "".join(f"{size:12,}" for size in options.sizes) + "    ratio\n")
    for strategy, draining in product(STRATEGIES, options.draining):
        figures = microseconds([crowd(strategy, size, draining) for size in options.sizes], options.picks)
        ratio = figures[-1] / figures[0]
        say(f"{strategy:12} {draining:4} % " + "".join(f"{us:12.2f}" for us in figures) + f"{ratio:9.2f}\n")
        us = dict(zip(options.sizes, figures, strict=True))
        rows.append({"strategy": strategy, "draining": draining, "us": us, "ratio": ratio})
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
