"""``kvdepot verify``: reads all blocks on disks and media and compares their checksums."""

import dataclasses
import sys
from collections.abc import Callable

import click

from kvdepot.cli import places
from kvdepot.cli.output import print_json
from kvdepot.cli.progress import counting, progress
from kvdepot.errors import KVDepotError
from kvdepot.stored.blocks import contents
from kvdepot.stored.media import Medium
from kvdepot.stored.namespaces import StoredNamespace
from kvdepot.stored.verify import Finding, Pace, verify

MIB = 1 << 20


@click.command()
@click.argument("namespace", required=False)
@places.options
@click.option(
    "--rate-mib", type=click.FloatRange(min=0, min_open=True), help="Maximum MiB read per second; default: no limit."
)
@click.option(
    "--set-aside",
    is_flag=True,
    help="Rename broken files to .bad, as a depot does when it reads one. Media are only read: a depot that reads a "
    "broken block there drops it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    namespace: str | None,
    file: str | None,
    directories: tuple[str, ...],
    media: tuple[str, ...],
    rate_mib: float | None,
    set_aside: bool,
    as_json: bool,
) -> None:
    """Reads every block of the Posix, Slab and Dax tiers and compares its checksums. Depots may be running.

    The exit status is 1 if a block is broken, or a namespace or medium cannot be read. A broken block is harmless to
    engines: a depot that reads it detects that and answers with a miss. NAMESPACE (the first digits of a name) limits
    the check to one namespace.

    \b
    kvdepot verify
    kvdepot verify --rate-mib 200 --set-aside
    kvdepot verify --medium /dev/nvme1n1
    """
    chosen = places.chosen_places(file, directories, media)
    found = chosen.namespaces()
    opened, errors = chosen.open_media()
    unread_media = {path: str(error) for path, error in errors.items()}
    root: str | None = None
    if namespace is not None:
        known = places.roots(found, opened)
        if unread_media and not any(one.startswith(namespace.lower()) for one in known):
            # It may be on a medium that cannot be read, which is reported.
            found, opened = [], []
        else:
            root = places.one_root(known, namespace)
            found = [one for one in found if one.root == root]
    if set_aside and chosen.media:
        click.echo("--set-aside: media are only read; a depot that reads a broken block there drops it", err=True)
    with counting("block files found", hidden=as_json) as told:
        total = sum(contents(one, told).bytes for one in found if not one.problem)
    total += sum(one.bytes for medium in opened for one in medium.namespaces if root in (None, one.root))
    with progress("verify", total, hidden=as_json) as done:
        report = _Report(unread_media, Pace(rate_mib * MIB if rate_mib else None), done)
        for one in found:
            report.check_namespace(one, set_aside)
        for medium in opened:
            report.check_medium(medium, root)
    report.show(as_json)
    if report.findings or report.unread or report.unread_media or report.problems:
        sys.exit(1)


class _Report:
    """What a check has found.

    Args:
        unread_media: media that cannot be opened, and why.
        pace: rate limit.
        checked: called with the bytes of checked blocks.
    """

    def __init__(self, unread_media: dict[str, str], pace: Pace, checked: Callable[[int], object]) -> None:
        self.unread_media, self._pace, self._told = unread_media, pace, checked
        self.findings: list[Finding] = []
        self.unread: dict[str, str] = {}
        self.problems: dict[str, str] = {}
        self.blocks = self.bytes = 0

    def check_namespace(self, namespace: StoredNamespace, set_aside: bool) -> None:
        """Checks a namespace in the directories."""
        if namespace.problem:
            self._skip(namespace.root, namespace.problem)
            return
        try:
            self.findings += verify(
                namespace, pace=self._pace, set_aside=set_aside, checked=lambda file: self._checked(1, file.bytes)
            )
        except (KVDepotError, OSError) as error:  # a directory that cannot be read leaves the others to check
            self._skip(namespace.root, str(error))

    def check_medium(self, medium: Medium, root: str | None) -> None:
        """Checks all namespaces of a medium, or one."""
        if medium.problem and root is None:
            self.problems[str(medium.path)] = medium.problem
        for lost in medium.namespaces:
            if lost.problem and root in (None, lost.root):
                self._skip(lost.root, f"{lost.path}: {lost.problem}")
        try:
            for finding in medium.verify(root, pace=self._pace, checked=self._checked):
                self.findings.append(finding)
        except KVDepotError as error:
            self.unread_media[str(medium.path)] = str(error)

    def _checked(self, blocks: int, count: int) -> None:
        self.blocks += blocks
        self.bytes += count
        self._told(count)

    def _skip(self, root: str, problem: str) -> None:
        before = self.unread.get(root)
        self.unread[root] = f"{before}; {problem}" if before else problem

    def show(self, as_json: bool) -> None:
        """Prints everything."""
        if as_json:
            broken = [{**dataclasses.asdict(finding), "path": str(finding.path)} for finding in self.findings]
            print_json(
                {
                    "blocks": self.blocks,
                    "bytes": self.bytes,
                    "broken": broken,
                    "unread_namespaces": self.unread,
                    "unread_media": self.unread_media,
                    "damaged_media": self.problems,
                }
            )
            return
        for finding in self.findings:
            click.echo(f"{finding.place}: {finding.reason} ({finding.done})")
        for root, problem in self.unread.items():
            click.echo(f"namespace {root} was skipped: {problem}")
        for path, problem in self.unread_media.items():
            click.echo(f"medium {path} was skipped: {problem}")
        for path, problem in self.problems.items():
            click.echo(f"medium {path} was checked, but {problem}")
        click.echo(f"{self.blocks} blocks, {places.size_text(self.bytes)}: {len(self.findings)} broken")
