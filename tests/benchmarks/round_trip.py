"""What a tunnel makes of a link that is long: bulk, echoes beside bulk, and ten streams that share it.

    python tests/benchmarks/round_trip.py [--rtts 50,100] [--mbits 1000,200] [--seconds 10] [--json FILE]

Each figure is of programs that were started for it: a wire (``delay.py``) between an agent and a server, and, for
``client``, also a client beside the server. ``straight`` is the wire alone, with the load's own connections on it: what
this machine can carry. Load and targets are threads of this process. Linux only, for the CPU time of the programs.

Rules that hold here:

- Bulk counts what arrived, in the last half of the time: the first is for windows to grow in. The share is of what the
  wire carries, in payload.
- Echoes are of 64 bytes, one at a time, in the last half likewise; times are milliseconds.
- Fairness is Jain's index of what ten downloads got in the last half: 1 is all the same, 0.1 one has it all.
- Where the CPU of a program is near 100 %, it is that which bounds the figure, and not the tunnel's windows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from processes import ANY, Program, running, tunnel

_CHUNK = 256 * 1024
_WIRE = str(Path(__file__).with_name("delay.py"))
_ZEROS = bytes(_CHUNK)
_WORD = bytes(64)
_EVERY = 0.1  # seconds between two looks at what has arrived
_STREAMS = 10
_TARGET = 0.8  # the share of a wire that "grown" waits for
KINDS = ("source", "sink", "echo")
WAYS = ("straight", "forward", "client")


# -- load and targets


def pour(sock: socket.socket) -> None:
    """Send until it breaks."""
    with contextlib.suppress(OSError):
        while True:
            sock.sendall(_ZEROS)


class Meter:
    """Reads one connection, and counts."""

    def __init__(self) -> None:
        self.bytes = 0

    def drain(self, sock: socket.socket) -> None:
        room = bytearray(_CHUNK)
        with contextlib.suppress(OSError):
            while size := sock.recv_into(room):
                self.bytes += size


class Targets:
    """A source, a sink and an echo, each on a port of its own; what arrived at the sink is in ``meters``."""

    def __init__(self) -> None:
        self.meters: list[Meter] = []
        self.ports = {kind: self._listen(getattr(self, "_" + kind)) for kind in KINDS}

    def _source(self, sock: socket.socket) -> None:
        pour(sock)

    def _sink(self, sock: socket.socket) -> None:
        meter = Meter()
        self.meters.append(meter)
        meter.drain(sock)

    def _echo(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := sock.recv(_CHUNK):
                sock.sendall(data)

    def _listen(self, serve: Callable[[socket.socket], None]) -> int:
        listener = socket.create_server(("127.0.0.1", 0))

        def connection(sock: socket.socket) -> None:
            with sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                serve(sock)

        def accept() -> None:
            while True:
                threading.Thread(target=connection, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return int(listener.getsockname()[1])


@dataclass
class Way:
    """One way to the targets.

    Attributes:
        ports: where each kind of target is reached.
        programs: what carries the bytes, by name.
    """

    targets: Targets
    ports: dict[str, int]
    programs: dict[str, Program]

    def connect(self, kind: str) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.ports[kind]), 30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    @contextlib.contextmanager
    def bulk(self, kind: str, count: int) -> Iterator[list[Meter]]:
        """So many streams from a source or into a sink, and who counts what arrives."""
        self.targets.meters = meters = []
        socks = [self.connect(kind) for _ in range(count)]
        for sock in socks:
            work: Callable[[socket.socket], None] = pour
            if kind == "source":
                meters.append(Meter())
                work = meters[-1].drain
            threading.Thread(target=work, args=(sock,), daemon=True).start()
        yield meters
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@contextlib.contextmanager
def opened(way: str, wire: list[str], targets: Targets) -> Iterator[Way]:
    """Start what a way needs; ``wire``: options of ``delay.py``."""
    with running() as programs:

        def start(program: Program) -> Program:
            programs.append(program)
            return program

        def long_wire(port: int) -> Program:
            return start(Program(_WIRE, "--to", str(port), *wire))

        if way == "straight":
            wires = {kind: long_wire(port) for kind, port in targets.ports.items()}
            yield Way(targets, {kind: each.port("wire") for kind, each in wires.items()}, wires)
            return
        forwards = [f"{ANY}=127.0.0.1:{targets.ports[kind]}" for kind in KINDS]
        own = [word for forward in forwards for word in ("--forward", forward)] if way == "forward" else []
        server = front = start(tunnel("server", "--listen", ANY, "--connect", "off", *own))
        wire_ = long_wire(server.port("links"))
        agent = start(tunnel("agent", "--server", f"127.0.0.1:{wire_.port('wire')}", "--name", "far"))
        server.wait_for("agent linked")
        carriers = {"wire": wire_, "server": server, "agent": agent}
        if way == "client":
            front = carriers["client"] = start(
                tunnel("forward", *forwards, "--server", f"127.0.0.1:{server.port('links')}")
            )
        yield Way(targets, {kind: front.port("forward", nth) for nth, kind in enumerate(KINDS, 1)}, carriers)


# -- measurements


def bulk(path: Way, kind: str, count: int, rate: float, seconds: float) -> dict[str, Any]:
    """Share of the wire and fairness in the last half; CPU of the programs; when the share was first reached."""
    with path.bulk(kind, count) as meters:
        seen = [(time.monotonic(), [0] * count)]
        cpu: dict[str, float] = {}
        for step in range(round(seconds / _EVERY)):
            if step * 2 == round(seconds / _EVERY):
                cpu = {name: program.cpu() for name, program in path.programs.items()}
            time.sleep(max(0.0, seen[0][0] + (step + 1) * _EVERY - time.monotonic()))
            seen.append((time.monotonic(), [meter.bytes for meter in meters]))
        cpu = {name: program.cpu() - cpu[name] for name, program in path.programs.items()}
    half = len(seen) // 2
    (then, before), (now, after) = seen[half], seen[-1]
    moved = [late - early for early, late in zip(before, after, strict=True)]
    return {
        "share": sum(moved) / (now - then) / rate,
        "grown": grown(seen, rate),
        "jain": sum(moved) ** 2 / (count * sum(each**2 for each in moved)) if any(moved) else 0.0,
        "cpu": {name: used / (now - then) for name, used in cpu.items() if used},
    }


def grown(seen: list[tuple[float, list[int]]], rate: float) -> float | None:
    """Seconds until half a second's bytes were as many as they should be; None: never."""
    for (then, before), (now, after) in zip(seen, seen[5:], strict=False):
        if (sum(after) - sum(before)) / (now - then) >= rate * _TARGET:
            return now - seen[0][0]
    return None


def echo(sock: socket.socket) -> None:
    """There and back."""
    sock.sendall(_WORD)
    left = len(_WORD)
    while left:
        left -= len(sock.recv(left))


def echoes(path: Way, kind: str | None, seconds: float) -> dict[str, float]:
    """Milliseconds per echo, beside one bulk stream or alone."""
    with contextlib.ExitStack() as stack:
        if kind is not None:
            stack.enter_context(path.bulk(kind, 1))
            time.sleep(seconds / 2)
        sock = stack.enter_context(path.connect("echo"))
        echo(sock)  # the first waits for the dial too
        times = []
        end = time.monotonic() + seconds / 2
        while (began := time.monotonic()) < end:
            echo(sock)
            times.append((time.monotonic() - began) * 1000)
    times.sort()
    return {
        "p50": times[len(times) // 2],
        "p99": times[math.ceil(len(times) * 0.99) - 1],
        "worst": times[-1],
        "count": len(times),
    }


def measure(way: str, rtt: float, mbit: float, seconds: float, queue: float, targets: Targets) -> dict[str, Any]:
    """All figures of one way over one wire."""
    wire = ["--rtt", str(rtt), "--mbit", str(mbit), "--queue", str(queue)]
    rate = mbit * 125_000

    def fresh(take: Callable[..., Any], *arguments: Any) -> Any:
        with opened(way, wire, targets) as path:
            return take(path, *arguments)

    row = {"way": way, "rtt": rtt, "mbit": mbit}
    row["down"] = fresh(bulk, "source", 1, rate, seconds)
    row["up"] = fresh(bulk, "sink", 1, rate, seconds)
    row["alone"] = fresh(echoes, None, min(seconds, 4))
    if way != "straight":  # there each connection has a wire of its own: nothing is beside anything
        row["beside_down"] = fresh(echoes, "source", seconds * 2)
        row["beside_up"] = fresh(echoes, "sink", seconds * 2)
        row["ten"] = fresh(bulk, "source", _STREAMS, rate, seconds)
    return row


# -- words


def show(row: dict[str, Any]) -> str:
    """A row of the table."""

    def share(name: str) -> str:
        figures = row[name]
        when = "never" if figures["grown"] is None else f"{figures['grown']:.1f} s"
        return f"{figures['share'] * 100:4.0f} % ({when})".ljust(15)

    def times(name: str) -> str:
        return f"{row[name]['p50']:.0f} / {row[name]['p99']:.0f}".ljust(10) if name in row else "".ljust(10)

    jain = f"{row['ten']['jain']:.3f} at {row['ten']['share'] * 100:.0f} %" if "ten" in row else ""
    cpu = ", ".join(f"{name} {used * 100:.0f}" for name, used in row["down"]["cpu"].items())
    words = [f"{row['way']:8} {row['rtt']:4g} ms {row['mbit']:5g}", share("down"), share("up"), times("alone")]
    return "  ".join([*words, times("beside_down"), times("beside_up"), jain.ljust(15), cpu])


HEAD = (
    (
        "way      rtt     Mbit/s  down (80 % at)   up (80 % at)     "
        "alone       beside down beside up   Jain of ten      CPU %, down\n"
    ).replace("Mbit/s  ", "Mbit/s ")
    + " " * 57
    + "milliseconds, p50 / p99"
)


def numbers(text: str) -> list[float]:
    """A comma list."""
    return [float(word) for word in text.split(",")]


def main() -> None:
    """Measure, print the table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description="Measure a tunnel over long wires.")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help=", ".join(WAYS))
    parser.add_argument("--rtts", type=numbers, default=[50, 100], help="milliseconds")
    parser.add_argument("--mbits", type=numbers, default=[1000, 200], help="Mbit/s in each direction")
    parser.add_argument("--queue", type=float, default=10, help="milliseconds of queue before the wire")
    parser.add_argument("--seconds", type=float, default=10, help="of each bulk transfer; twice that for echoes")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    targets, rows = Targets(), []
    print(HEAD)
    for mbit, rtt, way in product(options.mbits, options.rtts, options.ways):
        rows.append(measure(way, rtt, mbit, options.seconds, options.queue, targets))
        print(show(rows[-1]), flush=True)
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
