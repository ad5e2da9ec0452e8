"""``kvdepot doctor``: what this machine has of what kvdepot can use."""

import json
from datetime import datetime
from typing import Any

import click

from kvdepot.cli.output import print_json, print_table
from kvdepot.config import KVDepotConfig, load_config
from kvdepot.config.machine import Machine

METHODS = ("memcpy", "batch", "kernel")


@click.command()
@click.option("--config", "file", type=click.Path(dir_okay=False), help="Configuration file; defaults without one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(file: str | None, as_json: bool) -> None:
    """Says which devices and copy engines this machine has, which are allowed and tested, and what was measured."""
    from kvdepot import _native

    config = load_config(file, owns_pool=False)
    report: dict[str, Any] = json.loads(_native.describe_devices(Machine.here().device_cache_directory()))
    for one in report["devices"]:
        one["ways"] = ways(one, report, config)
    if as_json:
        print_json(report)
        return
    click.echo(f"CUDA driver: {report['driver'] or 'none'}")
    if report["problem"]:
        click.echo(report["problem"])
    click.echo(f"RDMA adapters: {', '.join(report['adapters']) or report['adapters_problem'] or 'none'}")
    if not report["devices"]:
        return
    print_table(("device", "name", "bus", "copy engines"), [row(one) for one in report["devices"]])
    for one in report["devices"]:
        click.echo(f"\ndevice {one['device']['ordinal']}: copy engines")
        columns = ("engine", "found", "allowed", "trusted")
        print_table(columns, [[way[column] for column in columns] for way in one["ways"]])
        print_measurements(one)


def ways(one: dict[str, Any], report: dict[str, Any], config: KVDepotConfig) -> list[dict[str, str]]:
    """Each copy engine of a device: whether it is found, allowed by the configuration, and passed its test."""
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
    """What the last attach made of a way of copying."""
    measured = one["calibration"]
    if method not in one["engines"]:
        return "no"
    for wrong in measured["distrusted"] if measured else ():
        if wrong["method"] == method:
            return f"no: {wrong['reason']}"
    return "yes" if measured and method in measured["methods"] else "not tested yet"


def row(one: dict[str, Any]) -> list[object]:
    """A device as a line of the table."""
    device = one["device"]
    return [device["ordinal"], device["name"], device["pci_bus_id"], ", ".join(one["engines"])]


def print_measurements(one: dict[str, Any]) -> None:
    """What was measured on a device, and what the engine ``auto`` makes of it."""
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
    columns = ("direction", "copies", "KiB each", *methods, "auto takes", "while decoding")
    print_table(columns, [choice_row(choice, methods) for choice in one["choices"]])


def choice_row(choice: dict[str, Any], methods: list[str]) -> list[object]:
    """One direction, size and count as a line of the table."""
    rates = [choice["gb_per_s"].get(method) for method in methods]
    return [
        "load" if choice["to_device"] else "dump",
        choice["ops"],
        choice["op_bytes"] / 1024,
        *rates,
        choice["auto"],
        choice["auto_decoding"],
    ]
