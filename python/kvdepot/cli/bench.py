"""``kvdepot bench``: speed of the store on this machine, as ratios."""

import json
import os
from collections.abc import Iterator

import click

from kvdepot.cli.output import print_json, print_table
from kvdepot.config.machine import Machine


@click.group()
def command() -> None:
    """Measures this machine. Figures of a busy machine are noise: compare the ratios, and check the load average.

    \b
    kvdepot bench store
    kvdepot bench copy
    """


@command.command()
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Interleaved repetitions.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Threads of each copy.")
@click.option("--io-threads", type=click.IntRange(min=1), default=4, show_default=True, help="Threads of disk reads.")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, exists=True),
    help="Where to write; default: a temporary one.",
)
@click.option("--only", type=click.Choice(["memory", "door", "disk", "traces"]), help="Run only this part.")
@click.option("--smoke", is_flag=True, help="Use small sizes to see that everything runs; the figures mean nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def store(
    rounds: int, threads: int, io_threads: int, directory: str | None, only: str | None, smoke: bool, as_json: bool
) -> None:
    """Measures the pool against memcpy, the Unix socket, cold loads against fio (if installed), and what traces cost.

    The last part is the cost of traces and lite mode, and of metrics that are scraped once a second.

    \b
    kvdepot bench store
    kvdepot bench store --only disk --directory /mnt/nvme0
    """
    from kvdepot.bench import disk, memory, shapes, traces

    results: dict[str, object] = {"load_average": os.getloadavg()[0], "cores": os.cpu_count()}
    sections: list[tuple[str, list[dict[str, object]]]] = []
    if only in {None, "memory"}:
        warm = memory.warm(shapes.SMOKE_SHAPES if smoke else shapes.SHAPES, rounds=rounds, threads=threads)
        sections.append(("memory", progress("pool against memcpy", warm)))
    if only in {None, "door"}:
        door = memory.door(rounds=rounds, keys=memory.SMOKE_KEYS if smoke else memory.KEYS)
        sections.append(("door", progress("Unix socket", iter([door]))))
    if only in {None, "disk"}:
        cold = disk.cold(shapes.SMOKE_SHAPES if smoke else disk.SHAPES, directory, rounds=rounds, threads=io_threads)
        sections.append(("disk", progress("cold loads", cold)))
    if only in {None, "traces"}:
        shape = traces.SMOKE_SHAPE if smoke else traces.SHAPE
        cost = traces.cost(rounds=rounds, shape=shape)
        sections.append(("traces", progress("metrics, traces and lite mode", iter([cost]))))
    results |= dict(sections)
    if as_json:
        print_json(results)
        return
    for name, rows in sections:
        click.echo(f"\n{name} (load average {results['load_average']:.1f} on {results['cores']} cores)")
        print_table(list(rows[0]), [[round(v, 3) if isinstance(v, float) else v for v in row.values()] for row in rows])


@command.command()
@click.option("--device", default="0", show_default=True, help="CUDA device: its number, GPU-… or PCI bus id.")
@click.option(
    "--kernel-blocks", type=click.IntRange(1, 1024), help="Number of the kernel's blocks of 256 threads; default: 64."
)
@click.option("--smoke", is_flag=True, help="Use small sizes to see that everything runs; the figures mean nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def copy(device: str, kernel_blocks: int | None, smoke: bool, as_json: bool) -> None:
    """Copy engines of a CUDA device: 4 KiB to 1 MiB in both directions, and the slowdown of a concurrent kernel.

    \b
    kvdepot bench copy --device 1
    """
    from kvdepot import _native

    click.echo("measuring; this takes some seconds for each engine", err=True)
    cache = Machine.here().device_cache_directory()
    result = json.loads(_native.bench_copies(device, cache, smoke=smoke, kernel_blocks=kernel_blocks))
    if as_json:
        print_json(result)
        return
    click.echo(f"{result['device']['name']}, CUDA driver {result['driver']}; {result['note'] or 'rates in GB/s'}")
    rows = result["rows"]
    print_table(list(rows[0]), [[round(v, 3) if isinstance(v, float) else v for v in row.values()] for row in rows])
    for missing in result["missing"]:
        click.echo(f"{missing['engine']}: not measured: {missing['reason']}")


def progress(text: str, rows: Iterator[dict[str, object]]) -> list[dict[str, object]]:
    """Collects rows, showing their number on standard error."""
    out: list[dict[str, object]] = []
    for row in rows:
        out.append(row)
        click.echo(f"\r{text}: {len(out)} done", err=True, nl=False)
    click.echo("", err=True)
    return out
