"""``kvdepot config``: explain, check and list configurations."""

import dataclasses
import os
import sys
from collections.abc import Iterator

import click

from kvdepot.checks.directories import unusable
from kvdepot.checks.media import capacity_problem
from kvdepot.cli.output import print_json, print_table
from kvdepot.config import KVDepotConfig, load_config
from kvdepot.config.explain import Setting
from kvdepot.config.reference import reference_markdown
from kvdepot.config.token_files import token_warnings
from kvdepot.config.variables import unknown_variables, variable_of
from kvdepot.errors import ConfigError

FILE = click.argument("file", required=False, type=click.Path(dir_okay=False))
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def command() -> None:
    """Explains, checks and lists configurations.

    \b
    kvdepot config check /etc/kvdepot.yaml
    kvdepot config explain /etc/kvdepot.yaml
    """


@command.command()
@FILE
@JSON
def explain(file: str | None, as_json: bool) -> None:
    """Shows every key's value on this machine, and where it comes from. Without FILE it shows the defaults.

    \b
    kvdepot config explain
    kvdepot config explain /etc/kvdepot.yaml
    """
    config = load_config(file)
    settings = [_with_socket(one, config) for one in config.effective()]
    if as_json:
        print_json([dataclasses.asdict(setting) for setting in settings])
        return
    rows = [(one.key, spelled(one.value), one.unit, one.origin) for one in settings]
    print_table(["key", "value", "unit", "origin"], rows)


def _with_socket(setting: Setting, config: KVDepotConfig) -> Setting:
    """Returns the setting with the socket that the depot gets where none is set: which configurations share a depot."""
    # The size of a Staging pool, and an engine's own depot, depend on the engine.
    if setting.key != "socket" or config.socket or not config.share_depot or config.pool == "Staging":
        return setting
    return dataclasses.replace(setting, value=config.socket_path())


@command.command()
@click.argument("file", type=click.Path(dir_okay=False))
@JSON
def check(file: str, as_json: bool) -> None:
    """Checks FILE and prints each mistake on a line. Exits with 2 if there are mistakes.

    Directories that are missing, or that this user cannot write to, are warnings, because another machine may have
    them. So are a missing directory of slab_path, a missing dax_device_path, and files with secrets that are missing or
    that this user cannot read; environment variables that begin with KVDEPOT_ but belong to no key; and one file for
    the secrets of metrics_port and of the pool servers.

    \b
    kvdepot config check /etc/kvdepot.yaml
    """
    try:
        warnings = list(_warnings(_sound(file)))
    except ConfigError as error:
        if not as_json:
            raise
        print_json({"file": file, "ok": False, "problems": str(error).splitlines(), "warnings": []})
        sys.exit(2)
    if as_json:
        print_json({"file": file, "ok": True, "problems": [], "warnings": warnings})
        return
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"{file}: valid")


def _sound(file: str) -> KVDepotConfig:
    """Returns a configuration. Raises ``ConfigError`` also where a depot would find the mistake only at its start."""
    config = load_config(file)
    if (problem := capacity_problem(config)) is not None:
        raise ConfigError(f"{config.origins['slab_capacity_gb']}: {problem}")
    return config


def _warnings(config: KVDepotConfig) -> Iterator[str]:
    yield from unknown_variables(KVDepotConfig.key_table(), os.environ)
    others = {"remote_token_file": config.model_dump()["remote_token_file"]}
    for warning in token_warnings(config.metrics_token_file, others):
        yield f"{config.origins['metrics_token_file']}: {warning}"
    yield from _missing_media(config)
    yield from _missing_tokens(config)
    if "Posix" not in config.tiers or "directories" not in config.origins:
        return
    for directory in config.model_dump()["directories"] or ():
        if (problem := unusable(directory)) is not None:
            yield f"{config.origins['directories']}: directories: {problem[0]}: {problem[1]}"


def _missing_media(config: KVDepotConfig) -> Iterator[str]:
    values = config.model_dump()
    path = values["slab_path"]
    if path is not None and not os.path.isdir(folder := os.path.dirname(path) or "."):
        yield f"{config.origins['slab_path']}: slab_path: {folder} is not there: create it, or attach the device"
    path = values["dax_device_path"]
    if path is not None and not os.path.exists(path):
        yield f"{config.origins['dax_device_path']}: dax_device_path: {path} is not there: create or attach it"


def _missing_tokens(config: KVDepotConfig) -> Iterator[str]:
    values = config.model_dump()
    for key in ("remote_token_file", "metrics_token_file"):
        path = values[key]
        if path is not None and not os.access(path, os.R_OK):
            what = "cannot be read by this user" if os.path.exists(path) else "is not there"
            yield f"{config.origins[key]}: {key}: {path} {what}: a depot does not start without it"


@command.command()
@JSON
@click.option("--markdown", is_flag=True, help="Print docs/configuration.md.")
def keys(as_json: bool, markdown: bool) -> None:
    """Lists all keys with type, default, unit and meaning.

    \b
    kvdepot config keys
    """
    table = KVDepotConfig.key_table()
    if markdown:
        click.echo(reference_markdown(), nl=False)
    elif as_json:
        print_json([{**dataclasses.asdict(key), "variable": variable_of(key.name)} for key in table])
    else:
        rows = [(key.name, key.type, spelled(key.default), key.facts.unit, key.meaning) for key in table]
        print_table(["key", "type", "default", "unit", "meaning"], rows)


def spelled(value: object) -> object:
    """Returns a value with switches as a configuration file spells them."""
    return str(value).lower() if isinstance(value, bool) else value
