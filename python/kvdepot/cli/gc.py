"""``kvdepot gc``: removes files from a stopped depot's directories that no depot will read again."""

import dataclasses
import math
import sys
import time
from collections import Counter
from pathlib import Path

import click

from kvdepot.cli.output import print_json, print_table
from kvdepot.cli.places import age_text, chosen_directories, size_text
from kvdepot.cli.progress import counted, counting, progress
from kvdepot.cli.running import RunningDepot, user_of
from kvdepot.config import KVDepotConfig, load_config
from kvdepot.config.sizes import GIB
from kvdepot.errors import BusyError, ConfigError, storage_error
from kvdepot.stored.gc import COLD, UNKNOWN, Garbage, find_cold, find_garbage, forget_checkpoints, remove
from kvdepot.stored.ledger import LEASE_S, Member, find_ledgers

SHOWN = 20
CAPACITY_GB_MAX = 1 << 30
LOOK_AGAIN_S = 1.0


@click.command()
@click.argument("directories", nargs=-1, metavar="[DIR]...", type=click.Path(file_okay=False))
@click.option("--config", "file", type=click.Path(dir_okay=False), help="Configuration file that names directories.")
@click.option("--dry-run", is_flag=True, help="Only list the garbage; this is the default without --apply.")
@click.option("--apply", "apply_", is_flag=True, help="Remove the garbage.")
@click.option(
    "--unknown-namespaces",
    "unknown",
    is_flag=True,
    help="With --apply, also remove blocks whose namespace.json is missing; no depot can find them again.",
)
@click.option(
    "--capacity-gb",
    type=click.FloatRange(0, CAPACITY_GB_MAX, min_open=True),
    help="List the blocks, those used longest ago, for which a posix_capacity_gb of this value has no space. Default: "
    "that of the configuration, or a smaller one of a depot that shares the directories.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    directories: tuple[str, ...],
    file: str | None,
    dry_run: bool,
    apply_: bool,
    unknown: bool,
    capacity_gb: float | None,
    as_json: bool,
) -> None:
    """Finds garbage in a stopped depot's directories, and explains it; --apply removes it.

    Garbage is: blocks of earlier epochs, broken blocks that were set aside, temporary files whose writer has exited,
    and namespaces without blocks. Blocks that a depot would find are kept, and so are records of a namespace's resets.
    Blocks whose namespace.json is missing are listed, but removed only with --unknown-namespaces. The exit status is 1
    if something cannot be removed, or if --apply finds a depot that uses the directories.

    It also lists the blocks that do not fit into the capacity, those used longest ago first, as the next depot would
    evict them; --apply removes them, too. The capacity is posix_capacity_gb of the configuration, or of a depot that
    shares the directories (posix_capacity_shared) if that is smaller. --capacity-gb sets another one: to shrink a
    directory before its depot starts with a smaller posix_capacity_gb.

    It does not see depots inside another program's process, in a container or on another node, except those that share
    the capacity: stop them first. Name all directories of a tier.

    \b
    kvdepot gc /mnt/nvme0/kvdepot
    kvdepot gc --config /etc/kvdepot.yaml --apply
    kvdepot gc --capacity-gb 200 --dry-run /mnt/nvme0/kvdepot
    """
    _check_options(apply_, dry_run, capacity_gb)
    places = chosen_directories(file, directories)
    config = load_config(file, owns_pool=False) if file is not None or not directories else None
    user = user_of(places, config)
    if apply_:
        _check_unused(user)
    try:
        members = [member for ledger in find_ledgers(places) for member in ledger.members]
        if apply_ and members:
            raise BusyError(f"{_named(members[0])} shares these directories: stop it, and wait for {LEASE_S} s")
        capacity = _capacity(capacity_gb, config, members)
        found = list(counted(find_garbage(places), "garbage found", hidden=as_json))
        if capacity.bytes is not None:
            with counting("block files found", hidden=as_json) as told:
                found += find_cold(places, capacity.bytes, told=told)
    except OSError as error:
        raise storage_error(error) from error
    going = [one for one in found if unknown or one.kind != UNKNOWN]
    freed, failures = _remove(going, places, config, quiet=as_json) if apply_ else (0, [])
    if as_json:
        print_json(
            {
                "found": [{**dataclasses.asdict(one), "path": str(one.path)} for one in found],
                "bytes": sum(one.bytes for one in going),
                "removed": apply_,
                "freed_bytes": freed,
                "failures": failures,
                "capacity_bytes": capacity.bytes,
                "capacity_of": capacity.of,
                "depots": [dataclasses.asdict(member) for member in members],
            }
        )
    else:
        _print_capacity(capacity, members)
        _print(found, going, freed if apply_ else None)
        if user is not None:
            click.echo(f"the depot on {user.socket} uses these directories: stop it before --apply")
        for text in failures:
            click.echo(f"error: {text}", err=True)
    if failures:
        sys.exit(1)


def _check_options(apply_: bool, dry_run: bool, capacity_gb: float | None) -> None:
    if apply_ and dry_run:
        raise ConfigError("--dry-run: removes nothing, but --apply does: use one of them")
    if capacity_gb is not None and math.isnan(capacity_gb):
        raise ConfigError("--capacity-gb: nan is not a size")


@dataclasses.dataclass(frozen=True)
class _Capacity:
    """Bytes that blocks may take, ``None`` if that is not known, and who says so."""

    bytes: int | None
    of: str


def _capacity(given_gb: float | None, config: KVDepotConfig | None, members: list[Member]) -> _Capacity:
    """Returns the capacity that the command line names, else the smallest one that is in force."""
    if given_gb is not None:
        return _Capacity(int(given_gb * GIB), "--capacity-gb")
    known = [_Capacity(member.capacity_bytes, _named(member)) for member in members]
    # Where it is not set, it is a share of the disk, and blocks take a part of that.
    configured = getattr(config, "posix_capacity_gb", None)
    if isinstance(configured, int | float) and configured > 0:
        known.insert(0, _Capacity(int(configured * GIB), "the configuration"))
    return min(known, key=lambda one: one.bytes or 0, default=_Capacity(None, ""))


def _print_capacity(capacity: _Capacity, members: list[Member]) -> None:
    for member in members:
        click.echo(f"{_named(member)} shares these directories, with {size_text(member.capacity_bytes)}")
    if capacity.bytes is not None:
        click.echo(f"the capacity is {size_text(capacity.bytes)}, of {capacity.of}")


def _named(member: Member) -> str:
    where = "here" if member.here else f"on {member.host.split('.')[0]}"
    return f"the depot {where} with pid {member.pid}"


def _check_unused(user: RunningDepot | None) -> None:
    if user is not None:
        raise BusyError(
            f"the depot on {user.socket} (pid {user.pid}) uses these directories: stop it with `kvdepot stop`"
        )


def _remove(
    going: list[Garbage], places: list[Path], config: KVDepotConfig | None, *, quiet: bool
) -> tuple[int, list[str]]:
    """Removes garbage. Returns the bytes that were freed, and an error for each file that could not be removed."""
    freed, failures = 0, []
    if any(one.kind == COLD for one in going):
        forget_checkpoints(places)
    looked: float | None = None
    with progress("gc", sum(one.bytes for one in going), hidden=quiet) as done:
        for one in going:
            if looked is None or time.monotonic() - looked > LOOK_AGAIN_S:
                # Listing may have taken long, and so may removing.
                _check_unused(user_of(places, config))
                looked = time.monotonic()
            try:
                freed += remove(one, places)
            except OSError as error:
                failures.append(f"{error.filename or one.path}: cannot be removed: {error.strerror}")
            done(one.bytes)
    return freed, failures


def _print(found: list[Garbage], going: list[Garbage], freed: int | None) -> None:
    by_kind = Counter(one.kind for one in found)
    sizes = {kind: sum(one.bytes for one in found if one.kind == kind) for kind in by_kind}
    print_table(["what", "how many", "size"], [(kind, by_kind[kind], size_text(sizes[kind])) for kind in by_kind])
    _print_cold([one for one in found if one.kind == COLD])
    for one in found[:SHOWN]:
        click.echo(f"{one.path}: {one.kind}, {size_text(one.bytes)}: {one.why}")
    if len(found) > SHOWN:
        click.echo(f"… and {len(found) - SHOWN} more: --json lists all")
    if len(going) < len(found):
        click.echo("blocks without namespace.json are kept: --unknown-namespaces removes them, too")
    if freed is None:
        click.echo(f"{size_text(sum(one.bytes for one in going))} would be freed: add --apply to remove it")
    else:
        click.echo(f"{size_text(freed)} freed")


def _print_cold(cold: list[Garbage]) -> None:
    """Prints the blocks beyond the capacity by namespace: there may be millions."""
    if not cold:
        return
    by_root: dict[str, list[Garbage]] = {}
    for one in cold:
        by_root.setdefault(one.namespace, []).append(one)
    rows = []
    for root, blocks in by_root.items():
        # They are sorted by their last use.
        first, last = (age_text(one.used_ns / 1e9) for one in (blocks[0], blocks[-1]))
        rows.append((root, len(blocks), size_text(sum(one.bytes for one in blocks)), first, last))
    click.echo("\nbeyond the capacity, by namespace:")
    print_table(["namespace", "blocks", "size", "oldest use, ago", "newest use, ago"], rows)
    click.echo()
