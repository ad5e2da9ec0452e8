"""``kvdepot trace``: simulates a depot of another size or eviction order, and sends traces as load."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from kvdepot.cli.output import print_json, print_table
from kvdepot.cli.progress import counted, counting
from kvdepot.cli.trace_fleet import fleet
from kvdepot.cli.trace_options import BAR_CHARACTERS, BLOCK_MIB, FILES, JSON
from kvdepot.errors import ConfigError, CorruptError, StorageError, storage_error

if TYPE_CHECKING:
    from kvdepot._native import Trace


@click.group()
def command() -> None:
    """Replays, generates and plays traces of requests.

    A trace has one request per line: {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}, as
    Mooncake published them and as `enable_record_traces` records them.

    \b
    kvdepot trace generate agents --requests 2000 --output agents.jsonl
    kvdepot trace replay agents.jsonl --capacity 64GB,256GB --block-mib 10
    """


command.add_command(fleet)


@command.command()
@FILES
@click.option("--capacity", "capacities", multiple=True, help="Size of the pool: blocks, or 64GB; also a,b,c.")
@click.option("--policy", "policies", multiple=True, help="Eviction policy: lru, s3fifo, lhd, belady; default: all.")
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    help="A tier below: SIZE[:through|second_use|cold|demoted[+promote][:POLICY[:BUDGET]]]; "
    "BUDGET: maximum written per day.",
)
@click.option(
    "--keeps-nothing", is_flag=True, help="The pool keeps nothing, as Staging: every block goes to every tier."
)
@click.option("--more", help="Show the effect of this much more of each level: blocks, or 16GB.")
@BLOCK_MIB
@click.option("--plot", is_flag=True, help="Draw the hit rates as bars.")
@JSON
def replay(
    files: tuple[str, ...],
    capacities: tuple[str, ...],
    policies: tuple[str, ...],
    tiers: tuple[str, ...],
    keeps_nothing: bool,
    more: str | None,
    block_mib: float | None,
    plot: bool,
    as_json: bool,
) -> None:
    """Runs the depot's own eviction and placement over FILES: hit rates by size.

    The hit rate is the share of all requested blocks that would have been loaded: a request hits up to its first
    missing block.

    \b
    kvdepot trace replay chat.jsonl --capacity 1000,5000,20000
    kvdepot trace replay chat.jsonl --capacity 64GB --tier 1024GB:second_use --block-mib 10 --plot
    """
    from kvdepot.traces.sizes import MIB, blocks_of, tier_of
    from kvdepot.traces.sweep import BELADY, POLICIES, Sweep, usual_sizes

    block_bytes = None if block_mib is None else block_mib * MIB
    below = [tier_of(text, block_bytes, POLICIES) for text in tiers]
    if keeps_nothing and (capacities or not below):
        raise ConfigError("--keeps-nothing: there is no pool to give a --capacity, but at least one --tier")
    known = POLICIES if below else (*POLICIES, BELADY)
    wrong = [policy for policy in policies if policy not in known]
    if wrong:
        raise ConfigError(f"--policy {wrong[0]}: known here are {', '.join(known)}")
    sizes = [blocks_of(part, block_bytes) for text in capacities for part in text.split(",")]
    more_blocks = blocks_of(more, block_bytes) if more else 0
    trace = _read(files, as_json)
    requests, references, distinct = trace.counts()
    if not references:
        raise ConfigError("the trace names no block: there is nothing to replay")
    if keeps_nothing:
        # The pool's policy has no effect.
        sizes, policies = [0], (policies or known)[:1]
    sweep = Sweep(policies or known, sizes or usual_sizes(distinct), below, more_blocks)
    ceiling = (references - distinct) / references
    replays = len(sweep.sizes) * len(sweep.policies)
    points = list(counted(sweep.points(trace), "replays", replays, hidden=as_json))
    if as_json:
        print_json(
            {
                "requests": requests,
                "references": references,
                "distinct": distinct,
                "ceiling": ceiling,
                "more_blocks": more_blocks,
                "points": [point.json(block_bytes) for point in points],
            }
        )
        return
    click.echo(
        f"{requests:,} requests name {references:,} blocks, {distinct:,} different ones; an endless cache hits "
        f"{ceiling:.1%}"
    )
    names = ["pool", *(f"tier {number}" for number in range(1, len(below) + 1))]
    columns = ["blocks", *(["GiB"] if block_bytes else []), "policy", "hit %"]
    columns += [f"{name} %" for name in names] if below else []
    columns += [f"writes to {name}" for name in names[1:]]
    has_budget = any(tier.writes_per_day for tier in below)
    columns += [f"over budget of {name}" for name in names[1:]] if has_budget else []
    columns += [f"{more} more {name}" for name in names] if more else []
    rows = []
    for point in points:
        row = [f"{point.blocks:,}", *([f"{point.blocks * block_bytes / (1 << 30):.1f}"] if block_bytes else [])]
        row += [point.policy, f"{point.hit:.1%}"[:-1]]
        row += [f"{part:.1%}"[:-1] for part in point.levels] if below else []
        row += [f"{count:,}" for count in point.written[1:]]
        row += [f"{count:,}" for count in point.over_budget[1:]] if has_budget else []
        row += [f"{part:+.1%}"[:-1] for part in point.more] if more else []
        rows.append(row)
    print_table(columns, rows)
    if plot:
        click.echo()
        wide = max(len(f"{point.blocks:,} {point.policy}") for point in points)
        for point in points:
            name = f"{point.blocks:,} {point.policy}"
            click.echo(f"{name:>{wide}} {'█' * round(point.hit * BAR_CHARACTERS)} {point.hit:.1%}")
        click.echo(f"{'endless':>{wide}} {'█' * round(ceiling * BAR_CHARACTERS)} {ceiling:.1%}")


@command.command()
@FILES
@click.option("--output", required=True, type=click.Path(dir_okay=False), help="File to write.")
@JSON
def convert(files: tuple[str, ...], output: str, as_json: bool) -> None:
    """Writes FILES as one trace in Mooncake's format, with small numbers for blocks and times from 0.

    The output has no hashes: it shows which requests share blocks, but it cannot be compared with other traces.

    \b
    kvdepot trace convert recorded.jsonl --output public.jsonl
    """
    from kvdepot.traces.files import line_of

    requests = _read(files, as_json).requests()
    begin = requests[0][0] if requests else 0
    lines = (line_of((at - begin, tokens, answer, blocks)) for at, tokens, answer, blocks in requests)
    write_lines(output, counted(lines, "requests written", len(requests), hidden=as_json))
    _tell(output, len(requests), as_json)


@command.command()
@click.argument("family", type=click.Choice(("agents", "chat", "documents", "scan")))
@click.option("--output", required=True, type=click.Path(dir_okay=False), help="File to write.")
@click.option("--requests", type=click.IntRange(min=1), default=10_000, show_default=True, help="Number of requests.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed makes the same trace.")
@click.option(
    "--per-second", type=click.FloatRange(min=0.001), default=3.0, show_default=True, help="Requests per second."
)
@JSON
def generate(family: str, output: str, requests: int, seed: int, per_second: float, as_json: bool) -> None:
    """Generates a trace: conversations, questions about documents, agents, or a scan with recurring prompts.

    \b
    kvdepot trace generate chat --requests 20000 --output chat.jsonl
    """
    from kvdepot.traces.files import line_of
    from kvdepot.traces.generate import generate as make

    lines = map(line_of, make(family, requests=requests, seed=seed, per_second=per_second))
    write_lines(output, counted(lines, "requests written", requests, hidden=as_json))
    _tell(output, requests, as_json)


@command.command()
@FILES
@click.option("--config", "file", type=click.Path(dir_okay=False), help="Configuration of the depot to use.")
@click.option("--block-kib", type=click.IntRange(min=1), default=64, show_default=True, help="Size of a block.")
@click.option("--clients", type=click.IntRange(1, 256), default=4, show_default=True, help="Concurrent requests.")
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    help="Replay at this multiple of the trace's speed. Default: a closed loop.",
)
@click.option("--requests", "limit", type=click.IntRange(min=1), help="Play only the first N requests.")
@JSON
def play(
    files: tuple[str, ...],
    file: str | None,
    block_kib: int,
    clients: int,
    speed: float | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """Sends FILES as load to a depot: each request looks up, loads its hit, and dumps the rest.

    Without --config it uses a depot inside this process with a pool of 1 GiB. The first and last word of each block
    identify it and are checked. The exit status is 1 if a block did not hold the bytes that were dumped.

    \b
    kvdepot trace play chat.jsonl --clients 8
    kvdepot trace play chat.jsonl --config /etc/kvdepot.yaml --speed 2 --requests 1000
    """
    from kvdepot.depot import open_store
    from kvdepot.traces.play import play as send

    requests = _read(files, as_json).requests()[:limit]
    if not requests:
        raise ConfigError("the trace has no request: there is nothing to send")
    block_bytes = block_kib << 10
    source = file if file is not None else {"pipeline": "Cache", "pool_gb": 1.0}
    with (
        open_store(source, layout=[block_bytes], namespace={"trace": "play"}) as store,
        counting("requests served", len(requests), hidden=as_json) as served,
    ):
        played = send(store, requests, block_bytes=block_bytes, clients=clients, speed=speed, served=served)
    found = played.json(block_bytes)
    if as_json:
        print_json(found)
    else:
        print_table(["name", "value"], found.items())
    if played.wrong:
        raise CorruptError(f"{played.wrong} blocks held other bytes than were dumped: kvdepot verify checks the disks")


def _read(files: Iterable[str], as_json: bool) -> "Trace":
    """Reads traces, and tells which lines were skipped."""
    from kvdepot.traces.files import read_traces

    with counting("lines read", hidden=as_json) as told:
        trace, notes = read_traces(files, told)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    return trace


def _tell(output: str, requests: int, as_json: bool) -> None:
    if as_json:
        print_json({"output": output, "requests": requests})
    else:
        click.echo(f"{output}: {requests:,} requests")


def write_lines(path: str, lines: Iterable[str]) -> None:
    """Writes a file of these lines.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        failed = storage_error(error, "written", path)
        raise StorageError(f"{failed}: name a file in an existing directory with free space, with --output") from error
