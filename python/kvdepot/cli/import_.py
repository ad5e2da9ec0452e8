"""``kvdepot import``: stores the blocks of an export."""

import dataclasses
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from kvdepot.cli import targets
from kvdepot.cli.known import known_to
from kvdepot.cli.output import print_json
from kvdepot.cli.places import age_text, size_text, stored_in
from kvdepot.cli.progress import progress
from kvdepot.errors import ConfigError, KVDepotError, storage_error
from kvdepot.stored.blocks import block_files
from kvdepot.stored.export import ExportHeader, ExportReader, Totals
from kvdepot.stored.namespaces import StoredNamespace, differences, summary
from kvdepot.stored.restore import known_blocks, open_namespace, restore

FACTS_SHOWN = 6
LOOKUP_TIMEOUT_MS = 30_000


@click.command()
@click.argument("file_in", metavar="FILE", type=click.Path(dir_okay=False))
@targets.options
@click.option("--dry-run", is_flag=True, help="Check FILE and report what an import would do, but store nothing.")
@click.option(
    "--any-epoch",
    is_flag=True,
    help="Store blocks even if the namespace was, or may have been, reset since.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.1),
    default=60.0,
    show_default=True,
    help="Longest time without progress, in s.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    file_in: str,
    file: str | None,
    socket: str | None,
    directories: tuple[str, ...],
    dry_run: bool,
    any_epoch: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Stores the blocks of FILE, made by `kvdepot export`, that the depot does not have.

    All checksums of FILE are compared before the first block is stored, so a truncated or damaged file changes nothing.
    The blocks are stored by the depot that runs with this configuration, or in a stopped depot's directories. The exit
    status is 1 if blocks could not be stored.

    A reset means that earlier blocks are no longer valid, for example after a change of weights. Blocks from before a
    reset are refused without --any-epoch. Do not reset the namespace while an import is running.

    \b
    kvdepot import llama.kvx --dry-run
    kvdepot import llama.kvx --config /etc/kvdepot.yaml
    """
    try:
        opened = open(file_in, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise storage_error(error, path=file_in) from error
    with opened:
        reader = ExportReader(opened, file_in)
        with progress("check", reader.file_bytes, hidden=as_json) as done:
            totals = reader.check(done)
        target = targets.find(file, socket, directories)
        stored = _stored(target)
        refused = _refusal(reader.header, target, _epoch(stored, reader.header))
        if dry_run:
            _report(reader, totals, target, stored, refused, as_json)
            return
        _check(file_in, refused, any_epoch)
        with progress("import", totals.bytes, hidden=as_json) as done, target.open(reader.header.block_bytes) as depot:
            # Opening a namespace raises all directories to the epoch of the tier that knows the latest.
            open_namespace(depot, reader)
            epoch = _epoch(_stored(target), reader.header)
            _check(file_in, _refusal(reader.header, target, epoch), any_epoch)
            result = restore(depot, reader, timeout_s=timeout, done=done)
    reset = _epoch(_stored(target), reader.header) != epoch
    failed = result.missing + sum(result.failures.values())
    if as_json:
        print_json({"file": file_in, "namespace": reader.header.root, **dataclasses.asdict(result), "reset": reset})
    else:
        click.echo(
            f"{file_in}: {result.blocks} blocks: {result.stored} stored, {result.had} already stored, {failed} failed"
        )
        if result.failures:
            click.echo("failed: " + ", ".join(f"{count} {kind}" for kind, count in sorted(result.failures.items())))
        if result.missing:
            click.echo(f"{result.missing} were stored and evicted again: the depot has too little space for the file")
        if reset:
            click.echo(f"the namespace was reset meanwhile: run kvdepot reset {reader.header.root[:12]} once more")
    if failed or reset:
        sys.exit(1)


def _check(file_in: str, refused: str, any_epoch: bool) -> None:
    if refused and not any_epoch:
        raise ConfigError(f"{file_in}: {refused}. --any-epoch stores them anyway")


def _epoch(stored: list[StoredNamespace], header: ExportHeader) -> int:
    """Returns the namespace's epoch; 0 if it is not known."""
    return next((one.epoch for one in stored if one.root == header.root), 0)


def _stored(target: targets.Target) -> list[StoredNamespace]:
    """Returns the namespaces in the directories or, without any, those that the running depot knows."""
    if target.running is not None and not target.directories:
        with suppress(KVDepotError):  # then none is known: the depot itself takes the blocks all the same
            return [one.namespace for one in known_to(target.running.socket).values()]
    return stored_in(one for one in target.directories if one.is_dir())


def _refusal(header: ExportHeader, target: targets.Target, epoch: int) -> str:
    """Returns why blocks of this epoch must not be stored; empty if they may be."""
    if not target.directories:
        return f"{target.text} has no directories that show whether the namespace was reset since the export"
    if not target.sure:
        return f"it is unknown whether {target.text} uses the directories that show whether it was reset since"
    if epoch > header.epoch:
        return (
            f"the namespace was reset since the export (epoch {header.epoch} then, {epoch} now), so its blocks may be "
            "those of other weights"
        )
    return ""


def _report(
    reader: ExportReader,
    totals: Totals,
    target: targets.Target,
    stored: list[StoredNamespace],
    refused: str,
    as_json: bool,
) -> None:
    """Prints what an import would do."""
    header = reader.header
    known = next((one for one in stored if one.root == header.root), None)
    with progress("compare", totals.bytes, hidden=as_json) as done:
        # Opening a namespace creates it. If the directories do not know it, no depot has blocks of it.
        if target.running is not None and (known is not None or not target.directories):
            with target.open(header.block_bytes) as depot:
                store = depot.store(open_namespace(depot, reader), timeout_ms=LOOKUP_TIMEOUT_MS)
                had = known_blocks(store, reader, done)[1]
                store.close()
        else:
            names = {bytes.fromhex(file.hash) for file in block_files(known)} if known is not None else set()
            had = sum(block.hash in names for block in reader.blocks())
    nearest = _nearest(header, stored) if known is None else None
    shown: dict[str, Any] = {
        "file": str(Path(reader.name)),
        "namespace": header.root,
        "facts": dict(header.facts),
        "blocks": totals.blocks,
        "bytes": totals.bytes,
        "created_unix_s": header.created_unix_s,
        "writer": header.writer,
        "target": target.text,
        "namespace_known": known is not None,
        "had": had,
        "would_store": totals.blocks - had,
        "refused": refused or None,
        "nearest": None if nearest is None else {"namespace": nearest[0].root, "differ": nearest[1]},
    }
    if as_json:
        print_json(shown)
        return
    click.echo(f"{reader.name}: complete: {totals.blocks} blocks, {size_text(totals.bytes)}")
    click.echo(f"namespace {header.root}: {summary(header.facts)}")
    click.echo(f"exported {age_text(header.created_unix_s)} ago by {header.writer}")
    click.echo(f"{target.text}: has {had} of the blocks, would store {totals.blocks - had}")
    if refused:
        click.echo(f"refused without --any-epoch: {refused}")
    if known is None:
        click.echo("the namespace is new there: an engine finds the blocks only if all of its facts are the same")
    if nearest is not None:
        click.echo(f"the most similar namespace there is {nearest[0].root[:12]}; it differs in")
        for name, mine, theirs in nearest[1][:FACTS_SHOWN]:
            click.echo(f"  {name}: {mine} in the file, {theirs} there")


def _nearest(
    header: ExportHeader, stored: list[StoredNamespace]
) -> tuple[StoredNamespace, list[tuple[str, object, object]]] | None:
    own = StoredNamespace(header.root, (), header.facts, header.layout, header.epoch)
    pairs = [(one, differences(own, one)) for one in stored if not one.problem]
    return min(pairs, key=lambda pair: len(pair[1]), default=None)
