"""``kvdepot doctor``: finds problems of this machine and a configuration, and shows its devices."""

import dataclasses
import json
import os
import sys
from datetime import datetime
from typing import Any

import click

from kvdepot.checks.directories import check_directories
from kvdepot.checks.finding import Finding, bounded, worst
from kvdepot.checks.host import Host, check_host
from kvdepot.checks.media import check_media
from kvdepot.checks.network import check_network
from kvdepot.checks.software import (
    DirectoryUser,
    check_depots,
    check_devices,
    check_shared_directories,
    check_software,
)
from kvdepot.cli.output import print_json, print_table
from kvdepot.cli.processes import posix_directories
from kvdepot.cli.running import directory_users, running_depots
from kvdepot.config import KVDepotConfig, load_config
from kvdepot.config.machine import Machine
from kvdepot.errors import ConfigError

DIRECTORIES_S = 60.0
"""Time limit of the checks of all directories, and of all media, in seconds."""
NETWORK_S = 20.0
"""Time limit of all connections, names included, in seconds."""
METHODS = ("memcpy", "batch", "kernel")
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@click.option("--config", "file", type=click.Path(dir_okay=False), help="Configuration file; default: the defaults.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(file: str | None, as_json: bool) -> None:
    """Checks this machine and a configuration, and shows devices and copy engines. Exits with 1 if a check fails.

    It needs neither root nor a running depot. It writes a few temporary files to each directory of the Posix tier, to
    test which kinds of I/O work there, and looks at the media of the Slab and Dax tiers without changing them. It
    connects to pool servers and the bucket's store, and sends nothing. Every line that is not ok says why it matters
    and how to fix it.

    \b
    kvdepot doctor
    kvdepot doctor --config /etc/kvdepot.yaml
    kvdepot doctor --json
    """
    from kvdepot import _native

    config = load_config(file, owns_pool=False)
    report: dict[str, Any] = json.loads(_native.describe_devices(Machine.here().device_cache_directory()))
    for one in report["devices"]:
        one["ways"] = ways(one, report, config)
    findings = checks(config, report)
    if as_json:
        print_json({**report, "state": worst(findings), "checks": [dataclasses.asdict(one) for one in findings]})
    else:
        print_findings(findings)
        print_devices(report)
    if worst(findings) == "fail":
        sys.exit(1)


def checks(config: KVDepotConfig, report: dict[str, Any]) -> list[Finding]:
    """Runs all checks, in the order of the output."""
    rdma_wanted = config.use_gdr is True or config.copy_engine == "gdr"
    of_directories = bounded(check_directories(config), "directories", DIRECTORIES_S)
    socket = None if any(one.check == "directories" for one in of_directories) else own_socket(config)
    running = [{"socket": one.socket, "pid": one.pid, "pipeline": one.stats["pipeline"]} for one in running_depots()]
    runs = any(one["socket"] == socket for one in running)
    return [
        *check_host(config, Host.here(), bool(report["adapters"])),
        *of_directories,
        *bounded(check_media(config, runs=runs), "media", DIRECTORIES_S),
        *bounded(check_network(config), "network", NETWORK_S),
        *check_devices(report, rdma_wanted=rdma_wanted),
        *check_software(),
        *check_depots(running, socket),
        *check_shared_directories(directory_users_with(config, socket)),
    ]


def directory_users_with(config: KVDepotConfig, socket: str | None) -> list[DirectoryUser]:
    """Returns the running depots with a Posix tier, and the one that the configuration would start at its socket.

    If the socket depends on an engine's block size, the configuration's depot may be one of those that run.
    """
    running = dict(directory_users())
    users = list(running.values())
    directories = posix_directories(config)
    one_limit = any(one.key == "posix_capacity_shared" and one.value is True for one in config.effective())
    if directories and socket is not None and socket not in running:
        resolved = tuple(os.path.realpath(one) for one in directories)
        users.append(DirectoryUser("this configuration's depot", resolved, one_limit))
    return users


def own_socket(config: KVDepotConfig) -> str | None:
    """Returns the socket of the configuration's depot; ``None`` if it depends on an engine's id or block size."""
    try:
        return config.socket_path()
    except ConfigError:
        return None


def print_findings(findings: list[Finding]) -> None:
    """Prints a line for each check, and two more for each that is not ok."""
    for one in findings:
        click.echo(f"{click.style(f'{one.state:<5}', fg=COLOURS[one.state])}{one.check}: {one.found}")
        if one.state != "ok":
            click.echo(f"     why: {one.why}")
            click.echo(f"     fix: {one.mend}")


def print_devices(report: dict[str, Any]) -> None:
    """Prints the devices with their copy engines. The checks show driver and adapters."""
    if not report["devices"]:
        return
    click.echo()
    print_table(("device", "name", "bus", "copy engines"), [row(one) for one in report["devices"]])
    for one in report["devices"]:
        click.echo(f"\ndevice {one['device']['ordinal']}: copy engines")
        columns = ("engine", "found", "allowed", "trusted")
        print_table(columns, [[way[column] for column in columns] for way in one["ways"]])
        print_measurements(one)


def ways(one: dict[str, Any], report: dict[str, Any], config: KVDepotConfig) -> list[dict[str, str]]:
    """Returns for each copy engine of a device whether it was found, is allowed, and passed its test."""
    forbidden = config.copy_engines_forbidden or ()
    table = [
        {
            "engine": method,
            "found": "yes" if method in one["engines"] else "no",
            "allowed": "no: copy_engines_forbidden" if method in forbidden else "yes",
            "trusted": trust(method, one),
        }
        for method in METHODS
    ]
    by_adapter = "no: copy_engines_forbidden" if "gdr" in forbidden else "yes"
    if config.use_gdr is False and config.copy_engine != "gdr":
        by_adapter = "no: use_gdr is false"
    found = "yes" if report["adapters"] else f"no: {report['adapters_problem']}"
    trusted = "tested by an engine's self-test when it attaches"
    return [*table, {"engine": "gdr", "found": found, "allowed": by_adapter, "trusted": trusted}]


def trust(method: str, one: dict[str, Any]) -> str:
    """Returns whether a copy engine passed its test at the last attachment."""
    measured = one["calibration"]
    if method not in one["engines"]:
        return "no"
    for wrong in measured["distrusted"] if measured else ():
        if wrong["method"] == method:
            return f"no: {wrong['reason']}"
    return "yes" if measured and method in measured["methods"] else "not tested yet"


def row(one: dict[str, Any]) -> list[object]:
    """Returns a device as a row of the table."""
    device = one["device"]
    return [device["ordinal"], device["name"], device["pci_bus_id"], ", ".join(one["engines"])]


def print_measurements(one: dict[str, Any]) -> None:
    """Prints the measurements of a device, and the choices that the engine ``auto`` derives from them."""
    ordinal, measured = one["device"]["ordinal"], one["calibration"]
    if not measured:
        click.echo(
            f"\ndevice {ordinal}: not measured yet: run kvdepot bench copy --device {ordinal}, or start an engine with "
            "it (copy_engine auto measures when it first attaches)"
        )
        return
    when = datetime.fromtimestamp(measured["measured_unix_s"]).astimezone().isoformat(" ", "seconds")
    methods = [method for method in METHODS if method in measured["methods"]]
    click.echo(f"\ndevice {ordinal}: measured {when}, in {measured['elapsed_ms']:.0f} ms; GB/s, submission included")
    columns = ("direction", "copies", "KiB each", *methods, "auto takes", "for 32 MiB", "while decoding")
    print_table(columns, [choice_row(choice, methods) for choice in one["choices"]])


def choice_row(choice: dict[str, Any], methods: list[str]) -> list[object]:
    """Returns one direction, size and count as a row of the table."""
    rates = [choice["gb_per_s"].get(method) for method in methods]
    return [
        "load" if choice["to_device"] else "dump",
        choice["ops"],
        choice["op_bytes"] / 1024,
        *rates,
        choice["auto"],
        choice["auto_large"],
        choice["auto_decoding"],
    ]
