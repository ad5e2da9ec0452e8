"""``kvdepot namespaces``: lists the namespaces on disks, on media and at a depot, and facts in which two differ."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from kvdepot.cli import places, targets
from kvdepot.cli.known import KnownNamespace, known_to
from kvdepot.cli.output import print_json, print_table
from kvdepot.cli.progress import counting
from kvdepot.config import load_config
from kvdepot.errors import ConfigError, KVDepotError, UnavailableError
from kvdepot.stored.blocks import contents
from kvdepot.stored.media import Medium, MediumNamespace
from kvdepot.stored.namespaces import StoredNamespace, differences, summary

TEXT_MAX = 60


@dataclass(frozen=True)
class _Known:
    """Everything that was found under one name: in the directories, on media, and at the running depot."""

    root: str
    stored: StoredNamespace | None
    on_media: tuple[MediumNamespace, ...]
    at_depot: KnownNamespace | None

    @property
    def described(self) -> StoredNamespace | None:
        """The namespace with its facts; ``None`` if only media have it, which keep none."""
        if self.stored is not None and not self.stored.problem:
            return self.stored
        return self.at_depot.namespace if self.at_depot else self.stored

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.described.facts if self.described else {}

    @property
    def problem(self) -> str | None:
        problems = [*([self.stored.problem] if self.stored else []), *(one.problem for one in self.on_media)]
        return "; ".join(filter(None, problems)) or None

    def with_facts(self) -> StoredNamespace:
        """Returns the namespace with its facts. Raises ``ConfigError`` if only media know it, which keep none."""
        if self.described is None:
            raise ConfigError(
                f"{self.root}: {self.on_media[0].path} keeps no facts of its namespaces, so there is nothing to compare"
            )
        return self.described


@click.command()
@click.argument("one", required=False)
@click.argument("other", required=False)
@places.options
@click.option("--socket", type=click.Path(), help="Unix socket of a running depot, which is asked, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    one: str | None,
    other: str | None,
    file: str | None,
    directories: tuple[str, ...],
    media: tuple[str, ...],
    socket: str | None,
    as_json: bool,
) -> None:
    """Lists the namespaces in the Posix, Slab and Dax tiers, and those that a running depot knows.

    A namespace holds the blocks of one model, layout and rank. With ONE (the first digits of a name) it shows all facts
    of that namespace. With OTHER it shows the facts that differ, which is why one engine does not find the blocks of
    another.

    Directories and media are read without a depot. The depot at --socket is asked, too, and without a Posix tier that
    of the configuration: it knows the namespaces that were opened since it started. Those that neither directories nor
    media hold are listed with their blocks in its pool; pool servers and buckets are not listed. Media do not keep
    facts: those of a namespace on a medium are known if the directories hold it, or the depot knows it.

    \b
    kvdepot namespaces
    kvdepot namespaces 3f2a
    kvdepot namespaces 3f2a 91c0
    kvdepot namespaces --medium /dev/nvme1n1
    kvdepot namespaces --socket /run/user/1000/kvdepot/depot-0123456789ab.sock
    """
    chosen, at_depot = _sources(file, directories, media, socket)
    known = _known(chosen.namespaces(), chosen.open_media_or_tell(), at_depot)
    if one is None:
        _list(known, as_json)
    elif other is None:
        _show(known[places.one_root(known, one)], as_json)
    else:
        first, second = (known[places.one_root(known, prefix)].with_facts() for prefix in (one, other))
        _compare(first, second, as_json)


def _sources(
    file: str | None, directories: tuple[str, ...], media: tuple[str, ...], socket: str | None
) -> tuple[places.Places, dict[str, KnownNamespace]]:
    """Returns what to read, and what the running depot knows, if it is to be asked.

    Raises:
        UnavailableError: no depot answers at ``socket``, or there is nothing else to read.
    """
    if directories or media:
        return places.chosen_places(file, directories, media), {} if socket is None else known_to(socket)
    if socket is None and "Posix" in load_config(file, owns_pool=False).tiers:
        return places.chosen_places(file, (), ()), {}  # they list all that a depot opens
    target = targets.find(file, socket, ())
    chosen = places.Places(target.directories, target.media)
    if target.running is None:
        if target.media:
            return chosen, {}
        raise UnavailableError(
            f"{target.config.pipeline} has no tier that lists namespaces (Posix, Slab, Dax), and no depot runs with "
            "this configuration: start it with kvdepot serve, or name its --socket, or --directory or --medium"
        )
    try:
        return chosen, known_to(target.running.socket)
    except KVDepotError as error:
        if socket is not None or not target.media:
            raise
        click.echo(f"{target.text} is left out: {error}", err=True)
        return chosen, {}


def _known(
    found: list[StoredNamespace], media: list[Medium], at_depot: Mapping[str, KnownNamespace]
) -> dict[str, _Known]:
    stored = {one.root: one for one in found}
    on_media: dict[str, list[MediumNamespace]] = {}
    for medium in media:
        for one in medium.namespaces:
            on_media.setdefault(one.root, []).append(one)
    return {
        root: _Known(root, stored.get(root), tuple(on_media.get(root, ())), at_depot.get(root))
        for root in sorted(stored.keys() | on_media.keys() | at_depot.keys())
    }


def _list(known: dict[str, _Known], as_json: bool) -> None:
    with counting("block files found", hidden=as_json) as told:
        rows = [row for one in known.values() for row in _rows(one, told)]
    if as_json:
        print_json(rows)
        return
    rows.sort(key=lambda row: -row["bytes"])
    has_media, has_depot = any(row["medium"] for row in rows), any(row["depot"] for row in rows)
    print_table(
        [
            "namespace",
            "blocks",
            "size",
            "last used",
            *(["medium"] if has_media else []),
            *(["depot"] if has_depot else []),
            "facts",
        ],
        [
            (
                row["namespace"][:12],
                row["blocks"],
                places.size_text(row["bytes"]),
                places.age_text(row["last_used_unix_s"]),
                *[row["medium"]] * has_media,
                *[row["depot"]] * has_depot,
                row["problem"] or (summary(row["facts"]) if row["facts"] else "-"),
            )
            for row in rows
        ],
    )


def _rows(known: _Known, told: Callable[[int], object]) -> list[dict[str, Any]]:
    """Returns a row for the directories and one for each medium; if there are none, one for the depot's pool."""
    rows: list[dict[str, Any]] = []
    if known.stored is not None:
        held = contents(known.stored, told)
        rows.append(
            {
                "namespace": known.root,
                "facts": known.stored.facts,
                "epoch": known.stored.epoch,
                "blocks": held.blocks,
                "bytes": held.bytes,
                "first_used_unix_s": held.first_used_unix_s,
                "last_used_unix_s": held.last_used_unix_s,
                "set_aside": held.aside,
                "medium": None,
                "depot": None,
                "problem": known.stored.problem or None,
            }
        )
    on_media = (
        {
            "namespace": known.root,
            "facts": known.facts,
            "epoch": one.epoch,
            "blocks": one.blocks,
            "bytes": one.bytes,
            "first_used_unix_s": None,
            "last_used_unix_s": None,
            "set_aside": 0,
            "medium": str(one.path),
            "depot": None,
            "problem": one.problem or None,
        }
        for one in known.on_media
    )
    rows.extend(on_media)
    if not rows and known.at_depot is not None:
        rows.append(
            {
                "namespace": known.root,
                "facts": known.facts,
                "epoch": known.at_depot.namespace.epoch,
                "blocks": known.at_depot.pool_blocks,
                "bytes": known.at_depot.pool_bytes,
                "first_used_unix_s": None,
                "last_used_unix_s": known.at_depot.used_unix_s,
                "set_aside": 0,
                "medium": None,
                "depot": known.at_depot.socket,
                "problem": None,
            }
        )
    return rows


def _show(known: _Known, as_json: bool) -> None:
    described, depot = known.described, known.at_depot
    media = [
        {**dataclasses.asdict(one), "path": str(one.path), "problem": one.problem or None} for one in known.on_media
    ]
    shown = {
        "namespace": known.root,
        "epoch": max(one.epoch for one in (known.stored, *known.on_media, depot and depot.namespace) if one),
        "directories": [str(directory) for directory in known.stored.directories] if known.stored else [],
        "media": [one["path"] for one in media],
        "depot": depot.socket if depot else None,
        "pool_blocks": depot.pool_blocks if depot else None,
        "block_bytes": sum(described.shard_bytes) if described else None,
        "shards": len(described.shard_bytes) if described else None,
        "problem": known.problem,
    }
    if as_json:
        print_json({**shown, "media": media, "facts": known.facts, "layout": described.layout if described else None})
        return
    print_table(["", ""], ((name, "-" if value is None else value) for name, value in shown.items()))
    click.echo(json.dumps(known.facts, indent=2, sort_keys=True, ensure_ascii=False))


def _compare(one: StoredNamespace, other: StoredNamespace, as_json: bool) -> None:
    differ = differences(one, other)
    if as_json:
        print_json([{"fact": name, one.root: left, other.root: right} for name, left, right in differ])
        return
    print_table(
        ["fact", one.root[:12], other.root[:12]],
        [(name, str(left)[:TEXT_MAX], str(right)[:TEXT_MAX]) for name, left, right in differ],
    )
