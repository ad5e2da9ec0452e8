"""``kvdepot doctor``: what this machine has of what kvdepot can use."""

import json
from typing import Any

import click

from kvdepot.cli.output import print_json, print_table
from kvdepot.config.machine import Machine


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Says which devices and copy engines this machine has, and what was measured on them."""
    from kvdepot import _native

    report: dict[str, Any] = json.loads(_native.describe_devices(device_cache()))
    if as_json:
        print_json(report)
        return
    click.echo(f"CUDA driver: {report['driver'] or 'none'}")
    if report["problem"]:
        click.echo(report["problem"])
    if report["devices"]:
        print_table(("device", "name", "bus", "copy engines", "measured"), [row(one) for one in report["devices"]])


def device_cache() -> str:
    """Where engines keep what they measured."""
    return f"{Machine.here().cache_directory()}-devices"


def row(one: dict[str, Any]) -> list[object]:
    """A device as a line of the table."""
    device = one["device"]
    measured = "yes" if one["calibration"] else "not yet"
    return [device["ordinal"], device["name"], device["pci_bus_id"], ", ".join(one["engines"]), measured]
