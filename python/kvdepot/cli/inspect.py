"""``kvdepot inspect``: shows a block file's header, and whether the file is intact."""

import dataclasses
import sys
from datetime import datetime, timezone
from pathlib import Path

import click

from kvdepot.cli.output import print_json, print_table
from kvdepot.errors import ConfigError, storage_error
from kvdepot.stored.header import BrokenBlockError, check_block, parse_header
from kvdepot.stored.namespaces import find_namespaces

SUFFIXES = (".kvb", ".bad")


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(file: str, as_json: bool) -> None:
    """Shows the header of a block FILE, and checks the file as a depot does. Exits with 1 if it is broken.

    \b
    kvdepot inspect /mnt/nvme0/kvdepot/3f2a…/e0/5c/5c17….kvb
    """
    path = Path(file)
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{file}: not a block file: those end in .kvb, or in .bad if they were set aside")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise storage_error(error, path=file) from error
    try:
        header = parse_header(data)
    except BrokenBlockError as error:
        if as_json:
            print_json({"file": file, "whole": False, "problem": str(error)})
        else:
            click.echo(f"{file}: {error}")
        sys.exit(1)
    directory = _namespace_directory(path)
    problem = _problem(directory, path, data)
    checked = {"file_bytes": len(data), "whole": not problem, "problem": problem or None}
    shown = {"namespace": directory.name if directory else None} | dataclasses.asdict(header) | checked
    if as_json:
        print_json({"file": file, **shown})
    else:
        created = datetime.fromtimestamp(header.created_unix_s, tz=timezone.utc)
        shown["created_unix_s"] = f"{header.created_unix_s} ({created:%Y-%m-%dT%H:%M:%SZ})"
        shown["shard_checksums"] = f"{len(header.shard_checksums)} of CRC-64/NVME"
        print_table(["", ""], shown.items())
    if problem:
        sys.exit(1)


def _namespace_directory(path: Path) -> Path | None:
    """Returns the directory of the file's namespace; ``None`` if the file lies in no directory of a depot."""
    return next((parent for parent in path.absolute().parents if (parent / "namespace.json").is_file()), None)


def _problem(directory: Path | None, path: Path, data: bytes) -> str:
    """Returns what is wrong with the file, by its namespace's description; empty if nothing is."""
    if directory is None:
        return "there is no namespace.json above the file, so its payload was not checked"
    namespace = next(one for one in find_namespaces([directory.parent]) if one.root == directory.name)
    if namespace.problem:
        return namespace.problem
    try:
        check_block(data, path.stem, namespace.key_id(), namespace.shard_bytes)
    except BrokenBlockError as error:
        return str(error)
    return ""
