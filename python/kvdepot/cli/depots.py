"""``kvdepot depots``: lists the running depots."""

import click

from kvdepot.cli.output import print_json, print_table
from kvdepot.cli.places import size_text
from kvdepot.cli.running import RunningDepot, running_depots


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Lists this user's running depots with their pools and sockets.

    It finds depots at default sockets, and those of this user's processes `kvdepot serve` at a socket that their
    configuration names (`socket:`). It does not find those inside a container whose sockets have other paths here;
    `kvdepot stat --socket PATH` shows them.

    \b
    kvdepot depots
    """
    found = list(running_depots())
    if as_json:
        print_json([{"socket": one.socket, "pid": one.pid or None, **_facts(one)} for one in found])
        return
    if not found:
        click.echo("no depot of this user runs; kvdepot stat --socket shows one of another user or in a container")
        return
    print_table(
        ["pid", "pipeline", "pool", "in use", "blocks", "on disk", "socket"],
        [
            (
                one.pid or "-",
                one.stats["pipeline"],
                size_text(one.stats["pool_bytes"]),
                size_text(one.stats["pool_bytes"] - one.stats["pool_free_bytes"]),
                one.stats["pool_blocks"],
                size_text(sum(int(tier.get("bytes", 0)) for tier in one.stats["tiers"])),
                one.socket,
            )
            for one in found
        ],
    )


def _facts(one: RunningDepot) -> dict[str, object]:
    keys = ("pipeline", "pool_bytes", "pool_free_bytes", "pool_blocks", "tiers")
    return {key: one.stats[key] for key in keys}
