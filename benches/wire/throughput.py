"""Puts and gets over TCP by InfiniStore's own client: our server beside InfiniStore's, and beside a bare stream.

Run as ``-m benches.wire.throughput`` by the interpreter of .venv-infinistore. In every round each cell is measured on
one server right after the other, in changing order, and the loopback just before: compare ratios, not figures.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

from tools.lab.machine import load_average, machine
from tools.wire.client import Peer
from tools.wire.servers import KINDS, NoServerError, Server
from tools.wire.yardstick import round_trip_s, stream_bytes_per_s

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB]
CLIENTS = [1, 8]
POOL_GIB = 2
# Bytes that all clients together store at a time; far below what makes a server evict.
HELD_BYTES = 512 * MIB
MOST_KEYS = 4000
START_IN_S = 0.02
ROUND_TRIPS = 200
DELETE_AT_ONCE = 500
# Nagle's algorithm against delayed acknowledgement: about 40 ms for an answer sent in two parts.
STALL_S = 0.030


@dataclass(frozen=True)
class Cell:
    """Parameters of a measurement."""

    clients: int
    nbytes: int
    op: str


@dataclass
class Samples:
    """A server's figures in a cell, one entry per round; and the time of every operation."""

    bytes_per_s: list[float] = field(default_factory=list)
    of_stream: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)


Results = dict[Cell, dict[str, Samples]]


@dataclass(frozen=True)
class Row:
    """A cell's medians."""

    clients: int
    nbytes: int
    op: str
    server: str
    mib_per_s: float
    operations_per_s: float
    p50_us: float
    p99_us: float
    of_stream: float
    of_infinistore: float | None


class Bench:
    """Servers and clients, for all rounds."""

    def __init__(self, stack: ExitStack, kinds: Sequence[str], clients: int, limit_s: float) -> None:
        self.limit_s = limit_s
        self.kinds = list(kinds)
        self.peers: dict[str, list[Peer]] = {}
        for kind in kinds:
            server = stack.enter_context(Server(kind, pool_gib=POOL_GIB))
            self.peers[kind] = [stack.enter_context(Peer(server)) for _ in range(clients)]

    def measure(self, round_: int, clients: int, nbytes: int, results: Results) -> None:
        """Measures one round of one size: puts and gets, on each server."""
        stream = stream_bytes_per_s(self.limit_s / 2)
        for kind in self.kinds[:: 1 if round_ % 2 else -1]:
            for op, took in self._put_and_get(self.peers[kind][:clients], round_, nbytes):
                seconds = max(whole_s for whole_s, _ in took)
                every_s = [one_s for _, ones_s in took for one_s in ones_s]
                samples = results.setdefault(Cell(clients, nbytes, op), {}).setdefault(kind, Samples())
                samples.bytes_per_s.append(len(every_s) * nbytes / seconds)
                samples.of_stream.append(samples.bytes_per_s[-1] / stream)
                samples.took_s += every_s

    def _put_and_get(
        self, peers: list[Peer], round_: int, nbytes: int
    ) -> Iterator[tuple[str, list[tuple[float, list[float]]]]]:
        count = max(2, min(MOST_KEYS, HELD_BYTES // nbytes) // len(peers))
        keys = [[f"{round_}/{nbytes}/{number}/{i}" for i in range(count)] for number in range(len(peers))]
        for op in ("put", "get"):
            start_s = time.monotonic() + START_IN_S
            for peer, names in zip(peers, keys, strict=True):
                peer.send("timed", op, names, nbytes, start_s, self.limit_s)
            took = [peer.receive("timed") for peer in peers]
            # A key that was not put in time is missing, and the client never returns from a get of it.
            keys = [names[: len(ones_s)] for names, (_, ones_s) in zip(keys, took, strict=True)]
            yield op, took
        for peer, names in zip(peers, keys, strict=True):
            for at in range(0, len(names), DELETE_AT_ONCE):
                peer.delete(names[at : at + DELETE_AT_ONCE])


def quantile(values: Sequence[float], part: float) -> float:
    """Returns the value below which ``part`` of the values lie."""
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def rows(results: Results) -> Iterator[Row]:
    """Yields medians over rounds; ratios are medians of each round's ratio."""
    for cell, servers in results.items():
        peer = servers.get("infinistore")
        for kind, samples in servers.items():
            rate = statistics.median(samples.bytes_per_s)
            ratios = [a / b for a, b in zip(samples.bytes_per_s, peer.bytes_per_s, strict=True)] if peer else []
            yield Row(
                **asdict(cell),
                server=kind,
                mib_per_s=round(rate / MIB, 1),
                operations_per_s=round(rate / cell.nbytes, 1),
                p50_us=round(statistics.median(samples.took_s) * 1e6, 1),
                p99_us=round(quantile(samples.took_s, 0.99) * 1e6, 1),
                of_stream=round(statistics.median(samples.of_stream), 3),
                of_infinistore=round(statistics.median(ratios), 2) if ratios and kind != "infinistore" else None,
            )


def print_table(table: Sequence[Row]) -> None:
    """Prints the table for people."""
    print("| clients | bytes | op | server | MiB/s | op/s | p50 us | p99 us | of stream | of infinistore |")
    print("| --- " * 10 + "|")
    for row in table:
        shown = ["" if value is None else str(value) for value in asdict(row).values()]
        print("| " + " | ".join(shown) + " |")


def main() -> None:
    """Runs it; fails when a small get of ours has the 40 ms stall."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=KINDS, action="append", help="again for more; all by default")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of a value")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="client processes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="longest time of one operation in one round")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results: Results = {}
    loads = [load_average()]
    try:
        with ExitStack() as stack:
            bench = Bench(stack, arguments.server or KINDS, max(arguments.clients), arguments.seconds)
            # Round 0 warms up, and does not count.
            for round_ in range(arguments.rounds + 1):
                into: Results = results if round_ else {}
                for clients in arguments.clients:
                    for nbytes in arguments.sizes:
                        bench.measure(round_, clients, nbytes, into)
                loads.append(load_average())
                print(f"round {round_} of {arguments.rounds}", file=sys.stderr, flush=True)
    except NoServerError as error:
        parser.exit(2, f"{error}\n")
    table = list(rows(results))
    stream, trip_s = stream_bytes_per_s(arguments.seconds), round_trip_s(min(arguments.sizes), ROUND_TRIPS)
    stalled = [row for row in table if row.op == "get" and row.clients == 1 and row.p50_us > STALL_S * 1e6]
    if arguments.json:
        facts = {"stream_mib_per_s": round(stream / MIB), "round_trip_us": round(trip_s * 1e6, 1), "load": loads}
        print(json.dumps({"machine": machine(), **facts, "rows": [asdict(row) for row in table]}, indent=2))
    else:
        print_table(table)
        print(f"loopback now: stream {stream / MIB:.0f} MiB/s; {min(arguments.sizes)} bytes there and back", end=" ")
        print(f"{trip_s * 1e6:.0f} us; load {loads[0]} at first, {loads[-1]} at last")
        for row in stalled:
            print(f"{row.server}: a get of {row.nbytes} bytes takes {row.p50_us / 1000:.0f} ms: answers in two parts")
    sys.exit(any(row.server == "kvdepot" for row in stalled))


if __name__ == "__main__":
    main()
