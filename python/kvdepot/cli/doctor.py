"""``kvdepot doctor``: what this machine has of what kvdepot can use."""

import json
from datetime import datetime
from typing import Any

import click

from kvdepot.cli.output import print_json, print_table
from kvdepot.config.machine import Machine

METHODS = ("memcpy", "batch", "kernel")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Says which devices and copy engines this machine has, and what was measured on them."""
    from kvdepot import _native

    report: dict[str, Any] = json.loads(_native.describe_devices(Machine.here().device_cache_directory()))
    if as_json:
        print_json(report)
        return
    click.echo(f"CUDA driver: {report['driver'] or 'none'}")
    if report["problem"]:
        click.echo(report["problem"])
    if not report["devices"]:
        return
    print_table(("device", "name", "bus", "copy engines"), [row(one) for one in report["devices"]])
    for one in report["devices"]:
        print_measurements(one)


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
