"""``kvdepot namespaces``: lists the namespaces in the directories, and the facts in which two of them differ."""

import json

import click

from kvdepot.cli import places
from kvdepot.cli.output import print_json, print_table
from kvdepot.stored.blocks import contents
from kvdepot.stored.namespaces import StoredNamespace, differences, summary

TEXT_MAX = 60


@click.command()
@click.argument("one", required=False)
@click.argument("other", required=False)
@places.options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(one: str | None, other: str | None, file: str | None, directories: tuple[str, ...], as_json: bool) -> None:
    """Lists the namespaces in the directories of the Posix tier. It needs no running depot.

    A namespace holds the blocks of one model, layout and rank. With ONE (the first digits of a name) it shows all facts
    of that namespace. With OTHER it shows the facts that differ, which is why one engine does not find the blocks of
    another.

    \b
    kvdepot namespaces
    kvdepot namespaces 3f2a
    kvdepot namespaces 3f2a 91c0
    """
    found = places.stored_namespaces(file, directories)
    if one is None:
        _list(found, as_json)
    elif other is None:
        _show(places.one_namespace(found, one), as_json)
    else:
        _compare(places.one_namespace(found, one), places.one_namespace(found, other), as_json)


def _list(namespaces: list[StoredNamespace], as_json: bool) -> None:
    rows = [(namespace, contents(namespace)) for namespace in namespaces]
    if as_json:
        print_json(
            [
                {
                    "namespace": namespace.root,
                    "facts": namespace.facts,
                    "epoch": namespace.epoch,
                    "blocks": held.blocks,
                    "bytes": held.bytes,
                    "first_used_unix_s": held.first_used_unix_s,
                    "last_used_unix_s": held.last_used_unix_s,
                    "set_aside": held.aside,
                    "problem": namespace.problem or None,
                }
                for namespace, held in rows
            ]
        )
        return
    rows.sort(key=lambda row: -row[1].bytes)
    print_table(
        ["namespace", "blocks", "size", "last used", "facts"],
        [
            (
                namespace.root[:12],
                held.blocks,
                places.size_text(held.bytes),
                places.age_text(held.last_used_unix_s),
                namespace.problem or summary(namespace.facts),
            )
            for namespace, held in rows
        ],
    )


def _show(namespace: StoredNamespace, as_json: bool) -> None:
    shown = {
        "namespace": namespace.root,
        "epoch": namespace.epoch,
        "directories": [str(directory) for directory in namespace.directories],
        "block_bytes": sum(namespace.shard_bytes),
        "shards": len(namespace.shard_bytes),
        "problem": namespace.problem or None,
    }
    if as_json:
        print_json({**shown, "facts": namespace.facts, "layout": namespace.layout})
        return
    print_table(["", ""], shown.items())
    click.echo(json.dumps(namespace.facts, indent=2, sort_keys=True, ensure_ascii=False))


def _compare(one: StoredNamespace, other: StoredNamespace, as_json: bool) -> None:
    differ = differences(one, other)
    if as_json:
        print_json([{"fact": name, one.root: left, other.root: right} for name, left, right in differ])
        return
    print_table(
        ["fact", one.root[:12], other.root[:12]],
        [(name, str(left)[:TEXT_MAX], str(right)[:TEXT_MAX]) for name, left, right in differ],
    )
