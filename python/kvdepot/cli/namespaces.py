"""``kvdepot namespaces``: lists the namespaces on disks and media, and the facts in which two of them differ."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from kvdepot.cli import places
from kvdepot.cli.output import print_json, print_table
from kvdepot.errors import ConfigError
from kvdepot.stored.blocks import contents
from kvdepot.stored.media import Medium, MediumNamespace
from kvdepot.stored.namespaces import StoredNamespace, differences, summary

TEXT_MAX = 60


@dataclass(frozen=True)
class _Known:
    """Everything that was found under one name: in the directories, and on media."""

    root: str
    stored: StoredNamespace | None
    on_media: tuple[MediumNamespace, ...]

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.stored.facts if self.stored else {}

    @property
    def problem(self) -> str | None:
        problems = [*([self.stored.problem] if self.stored else []), *(one.problem for one in self.on_media)]
        return "; ".join(filter(None, problems)) or None

    def with_facts(self) -> StoredNamespace:
        """Returns the namespace with its facts. Raises ``ConfigError`` if only media know it, which keep none."""
        if self.stored is None:
            raise ConfigError(
                f"{self.root}: {self.on_media[0].path} keeps no facts of its namespaces, so there is nothing to compare"
            )
        return self.stored


@click.command()
@click.argument("one", required=False)
@click.argument("other", required=False)
@places.options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    one: str | None,
    other: str | None,
    file: str | None,
    directories: tuple[str, ...],
    media: tuple[str, ...],
    as_json: bool,
) -> None:
    """Lists the namespaces in the Posix, Slab and Dax tiers. It needs no running depot.

    A namespace holds the blocks of one model, layout and rank. With ONE (the first digits of a name) it shows all facts
    of that namespace. With OTHER it shows the facts that differ, which is why one engine does not find the blocks of
    another. Media do not keep facts: those of a namespace on a medium are known if the directories hold it, too.

    \b
    kvdepot namespaces
    kvdepot namespaces 3f2a
    kvdepot namespaces 3f2a 91c0
    kvdepot namespaces --medium /dev/nvme1n1
    """
    chosen = places.chosen_places(file, directories, media)
    known = _known(chosen.namespaces(), chosen.open_media_or_tell())
    if one is None:
        _list(known, as_json)
    elif other is None:
        _show(known[places.one_root(known, one)], as_json)
    else:
        first, second = (known[places.one_root(known, prefix)].with_facts() for prefix in (one, other))
        _compare(first, second, as_json)


def _known(found: list[StoredNamespace], media: list[Medium]) -> dict[str, _Known]:
    stored = {one.root: one for one in found}
    on_media: dict[str, list[MediumNamespace]] = {}
    for medium in media:
        for one in medium.namespaces:
            on_media.setdefault(one.root, []).append(one)
    return {
        root: _Known(root, stored.get(root), tuple(on_media.get(root, ())))
        for root in sorted(stored.keys() | on_media.keys())
    }


def _list(known: dict[str, _Known], as_json: bool) -> None:
    rows = [row for one in known.values() for row in _rows(one)]
    if as_json:
        print_json(rows)
        return
    rows.sort(key=lambda row: -row["bytes"])
    has_media = any(row["medium"] for row in rows)
    print_table(
        ["namespace", "blocks", "size", "last used", *(["medium"] if has_media else []), "facts"],
        [
            (
                row["namespace"][:12],
                row["blocks"],
                places.size_text(row["bytes"]),
                places.age_text(row["last_used_unix_s"]),
                *([row["medium"] or "-"] if has_media else []),
                row["problem"] or (summary(row["facts"]) if row["facts"] else "-"),
            )
            for row in rows
        ],
    )


def _rows(known: _Known) -> list[dict[str, Any]]:
    """Returns a row for the directories, and one for each medium."""
    rows = []
    if known.stored is not None:
        held = contents(known.stored)
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
            "problem": one.problem or None,
        }
        for one in known.on_media
    )
    return [*rows, *on_media]


def _show(known: _Known, as_json: bool) -> None:
    stored = known.stored
    media = [
        {**dataclasses.asdict(one), "path": str(one.path), "problem": one.problem or None} for one in known.on_media
    ]
    shown = {
        "namespace": known.root,
        "epoch": max([*([stored.epoch] if stored else []), *(one.epoch for one in known.on_media)]),
        "directories": [str(directory) for directory in stored.directories] if stored else [],
        "media": [one["path"] for one in media],
        "block_bytes": sum(stored.shard_bytes) if stored else None,
        "shards": len(stored.shard_bytes) if stored else None,
        "problem": known.problem,
    }
    if as_json:
        print_json({**shown, "media": media, "facts": known.facts, "layout": stored.layout if stored else None})
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
