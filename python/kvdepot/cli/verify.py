"""``kvdepot verify``: reads all blocks on disk and compares their checksums."""

import dataclasses
import sys

import click

from kvdepot.cli import places
from kvdepot.cli.output import print_json
from kvdepot.errors import KVDepotError
from kvdepot.stored.blocks import BlockFile, contents
from kvdepot.stored.verify import Finding, Pace, verify

MIB = 1 << 20


@click.command()
@click.argument("namespace", required=False)
@places.options
@click.option(
    "--rate-mib", type=click.FloatRange(min=0, min_open=True), help="Maximum MiB read per second; default: no limit."
)
@click.option("--set-aside", is_flag=True, help="Rename broken files to .bad, as a depot does when it reads one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    namespace: str | None,
    file: str | None,
    directories: tuple[str, ...],
    rate_mib: float | None,
    set_aside: bool,
    as_json: bool,
) -> None:
    """Reads every block in the directories of the Posix tier and compares its checksums. Depots may be running.

    The exit status is 1 if a block is broken or a namespace cannot be read. A broken block is harmless to engines: a
    depot that reads it detects that and answers with a miss. NAMESPACE (the first digits of a name) limits the check to
    one namespace.

    \b
    kvdepot verify
    kvdepot verify --rate-mib 200 --set-aside
    """
    found = places.stored_namespaces(file, directories)
    if namespace is not None:
        found = [places.one_namespace(found, namespace)]
    held = {one.root: contents(one) for one in found if not one.problem}
    pace = Pace(rate_mib * MIB if rate_mib else None)
    findings: list[Finding] = []
    unread = {one.root: one.problem for one in found if one.problem}
    total, seen = sum(one.bytes for one in held.values()), [0, 0]

    with click.progressbar(
        length=max(1, total), label="verify", file=sys.stderr, hidden=as_json or not sys.stderr.isatty()
    ) as bar:

        def checked(block: BlockFile) -> None:
            seen[0] += 1
            seen[1] += block.bytes
            bar.update(block.bytes)

        for one in found:
            if one.problem:
                continue
            try:
                findings += verify(one, pace=pace, set_aside=set_aside, checked=checked)
            except KVDepotError as error:
                unread[one.root] = str(error)
    if as_json:
        broken = [{**dataclasses.asdict(finding), "path": str(finding.path)} for finding in findings]
        print_json({"blocks": seen[0], "bytes": seen[1], "broken": broken, "unread_namespaces": unread})
    else:
        for finding in findings:
            click.echo(f"{finding.path}: {finding.reason} ({finding.done})")
        for root, problem in unread.items():
            click.echo(f"namespace {root} was skipped: {problem}")
        click.echo(f"{seen[0]} blocks, {places.size_text(seen[1])}: {len(findings)} broken")
    if findings or unread:
        sys.exit(1)
