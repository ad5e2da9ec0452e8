"""``kvdepot ls``: the blocks of a namespace."""

import dataclasses
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import click

from kvdepot.cli import places
from kvdepot.cli.output import print_json, print_table
from kvdepot.cli.progress import counted
from kvdepot.errors import ConfigError
from kvdepot.stored.blocks import block_files
from kvdepot.stored.media import Medium
from kvdepot.stored.namespaces import StoredNamespace


@dataclass(frozen=True)
class _Row:
    """A block: in a file, or at an offset of a medium, which does not know when blocks were used."""

    path: Path
    offset_bytes: int | None
    hash: str
    bytes: int
    used_unix_s: float | None
    order: int = 0

    @property
    def age(self) -> tuple[bool, float]:
        """Sorts blocks by their last use, then those of media by when they were written."""
        return (True, self.order) if self.used_unix_s is None else (False, self.used_unix_s)

    @property
    def recency(self) -> tuple[bool, float]:
        """The other way round; those of media come last as well."""
        return self.age[0], -self.age[1]


KEYS: dict[str, Callable[[_Row], tuple[bool, float]]] = {
    "age": lambda one: one.age,
    "recent": lambda one: one.recency,
    "size": lambda one: (False, -one.bytes),
}


@click.command()
@click.argument("namespace")
@places.options
@click.option(
    "--sort",
    "order",
    type=click.Choice(["age", "recent", "size"]),
    default="recent",
    show_default=True,
    help="Order: least recently used first (age), most recently used first (recent), or largest first (size). Of "
    "blocks on media, which follow, the time of writing counts instead.",
)
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Maximum number of blocks.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    namespace: str,
    file: str | None,
    directories: tuple[str, ...],
    media: tuple[str, ...],
    order: str,
    limit: int,
    as_json: bool,
) -> None:
    """Lists the blocks of NAMESPACE (the first digits of a name) in the Posix, Slab and Dax tiers.

    It needs no running depot. Blocks that only a pool or another tier holds are not listed. A block is listed once for
    each tier that holds it.

    \b
    kvdepot ls 3f2a
    kvdepot ls 3f2a --sort age --limit 100
    kvdepot ls 3f2a --medium /mnt/pmem0/kvdepot
    """
    chosen = places.chosen_places(file, directories, media)
    found, opened = chosen.namespaces(), chosen.open_media_or_tell()
    root = places.one_root(places.roots(found, opened), namespace)
    rows = list(counted(_rows(root, found, opened), "blocks found", hidden=as_json))
    count, total = len(rows), sum(one.bytes for one in rows)
    shown = heapq.nsmallest(limit, rows, key=KEYS[order])
    if as_json:
        print_json({"namespace": root, "blocks": count, "bytes": total, "shown": [_as_json(one) for one in shown]})
        return
    print_table(
        ["block", "size", "last used", "at", *(["place"] if opened else [])],
        [
            (
                one.hash,
                places.size_text(one.bytes),
                places.age_text(one.used_unix_s),
                _moment_text(one.used_unix_s),
                *([_place_text(one)] if opened else []),
            )
            for one in shown
        ],
    )
    click.echo(f"{len(shown)} of {count} blocks, {places.size_text(total)} in total")


def _rows(root: str, found: list[StoredNamespace], media: list[Medium]) -> Iterator[_Row]:
    for namespace in found:
        if namespace.root != root:
            continue
        if namespace.problem:
            raise ConfigError(f"namespace {root} cannot be read: {namespace.problem}")
        for file in block_files(namespace):
            yield _Row(file.path, None, file.hash, file.bytes, file.used_unix_s)
    for medium in media:
        for block in medium.blocks(root):
            yield _Row(block.path, block.offset_bytes, block.hash, block.bytes, None, block.order)


def _as_json(row: _Row) -> dict[str, object]:
    shown = {**dataclasses.asdict(row), "path": str(row.path)}
    del shown["order"]
    return shown


def _moment_text(moment_unix_s: float | None) -> str:
    if moment_unix_s is None:
        return "-"
    return f"{datetime.fromtimestamp(moment_unix_s, tz=timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def _place_text(row: _Row) -> str:
    return str(row.path.parent) if row.offset_bytes is None else f"{row.path} at {row.offset_bytes}"
