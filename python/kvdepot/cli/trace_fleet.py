"""``kvdepot trace fleet``: simulates many nodes, a router in front of them, and pool servers that they share."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kvdepot.cli.output import print_json, print_table
from kvdepot.cli.progress import counted, counting
from kvdepot.cli.trace_options import BAR_CHARACTERS, BLOCK_MIB, FILES, JSON
from kvdepot.errors import ConfigError

if TYPE_CHECKING:
    from kvdepot._native import Trace
    from kvdepot.traces.fleet import Fleet


@click.command()
@FILES
@click.option("--nodes", type=click.IntRange(1, 4096), default=8, show_default=True, help="Number of nodes.")
@click.option("--capacity", required=True, help="Size of each node's pool: blocks, or 64GB.")
@click.option("--policy", default="lhd", show_default=True, help="Eviction policy of the pools: lru, s3fifo, lhd.")
@click.option(
    "--tier", "tiers", multiple=True, help="A tier of each node: SIZE[:through|second_use|cold|demoted[:POLICY]]."
)
@click.option("--engines", type=click.IntRange(1, 4096), default=1, show_default=True, help="Engines on each node.")
@click.option("--engine-capacity", help="Size of each engine's own prefix cache: blocks, or 20GB; default: none.")
@click.option("--servers", type=click.IntRange(0, 4096), default=0, help="Number of shared pool servers.")
@click.option("--shared", help="The tier on these servers: as --tier, with the size of one server.")
@click.option("--route", "routes", multiple=True, help="random, round_robin, longest_prefix; default: all.")
@click.option("--copies", type=click.IntRange(1, 4096), default=1, help="Send each request as this many tenants.")
@click.option("--lose-node", multiple=True, help="NODE@PERCENT: lose this node after this share of the requests.")
@click.option("--add-node", multiple=True, help="NODE@PERCENT: it comes back empty; the next number joins the fleet.")
@click.option("--lose-server", multiple=True, help="SERVER@PERCENT: lose this pool server.")
@click.option("--add-server", multiple=True, help="SERVER@PERCENT: it comes back empty.")
@click.option("--reset", multiple=True, help="TENANT@PERCENT: its cache is reset, as after an update of its weights.")
@click.option("--upgrade", help="FROM-TO: restart every node's depot once, between these shares in percent.")
@click.option("--take-over", is_flag=True, help="With --upgrade: each new depot takes the pool over.")
@click.option("--windows", type=click.IntRange(1, 4096), default=20, show_default=True, help="Parts of the trace.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Determines random routes.")
@BLOCK_MIB
@click.option("--plot", is_flag=True, help="Draw the hit rate of each part as a bar.")
@JSON
def fleet(
    files: tuple[str, ...],
    nodes: int,
    capacity: str,
    policy: str,
    tiers: tuple[str, ...],
    engines: int,
    engine_capacity: str | None,
    servers: int,
    shared: str | None,
    routes: tuple[str, ...],
    copies: int,
    lose_node: tuple[str, ...],
    add_node: tuple[str, ...],
    lose_server: tuple[str, ...],
    add_server: tuple[str, ...],
    reset: tuple[str, ...],
    upgrade: str | None,
    take_over: bool,
    windows: int,
    seed: int,
    block_mib: float | None,
    plot: bool,
    as_json: bool,
) -> None:
    """Simulates a fleet of nodes over FILES: hit rates, traffic between nodes, effects of losses and upgrades.

    Each node has a depot with a pool and, with --tier, tiers of its own; --servers and --shared add pool servers for
    all nodes. A router sends each request to one engine of a node. With --engine-capacity, each engine has a prefix
    cache of its own, and asks its depot only for the rest. Numbers of nodes, servers and tenants begin with 0.

    \b
    kvdepot trace fleet chat.jsonl --nodes 8 --capacity 2000 --servers 2 --shared 20000 --plot
    kvdepot trace fleet chat.jsonl --nodes 8 --capacity 2000 --lose-node 3@50 --add-node 3@75
    kvdepot trace fleet chat.jsonl --nodes 8 --capacity 2000 --engines 4 --engine-capacity 500
    """
    from kvdepot.traces.files import read_traces
    from kvdepot.traces.fleet import Fleet, change_at, upgrades
    from kvdepot.traces.sizes import MIB, blocks_of, tier_of
    from kvdepot.traces.sweep import POLICIES

    block_bytes = None if block_mib is None else block_mib * MIB
    check_options(routes, policy, servers=bool(servers), shared=bool(shared), restarts=bool(upgrade) or not take_over)
    asked = {"lose_node": lose_node, "add_node": add_node, "lose_server": lose_server, "add_server": add_server}
    asked["reset"] = reset
    changes = [change_at(name, text) for name, texts in asked.items() for text in texts]
    changes += upgrades(upgrade, nodes, takes_over=take_over) if upgrade else []
    with counting("lines read", hidden=as_json) as told:
        trace, notes = read_traces(files, told)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    if not trace.counts()[1]:
        raise ConfigError("the trace names no block: there is nothing to replay")
    simulated = Fleet(
        nodes=nodes,
        pool=blocks_of(capacity, block_bytes),
        policy=policy,
        tiers=[tier_of(text, block_bytes, POLICIES) for text in tiers],
        engines=engines,
        engine_capacity=blocks_of(engine_capacity, block_bytes) if engine_capacity else 0,
        servers=servers,
        shared=tier_of(shared, block_bytes, POLICIES) if shared else None,
        copies=copies,
        changes=sorted(changes, key=lambda change: change[0]),
        windows=windows,
        seed=seed,
    )
    show(simulated, trace, routes, block_bytes, plot=plot, as_json=as_json)


def check_options(routes: Sequence[str], policy: str, *, servers: bool, shared: bool, restarts: bool) -> None:
    """Checks options that no option's type checks.

    Raises:
        ConfigError: one is wrong.
    """
    from kvdepot.traces.fleet import ROUTES
    from kvdepot.traces.sweep import POLICIES

    if wrong := [route for route in routes if route not in ROUTES]:
        raise ConfigError(f"--route {wrong[0]}: known are {', '.join(ROUTES)}")
    if policy not in POLICIES:
        raise ConfigError(f"--policy {policy}: known are {', '.join(POLICIES)}")
    if servers != shared:
        raise ConfigError("--servers and --shared belong together: give both, or neither")
    if not restarts:
        raise ConfigError("--take-over says how --upgrade restarts depots: give --upgrade, too")


def show(
    simulated: "Fleet",
    trace: "Trace",
    routes: Sequence[str],
    block_bytes: float | None,
    *,
    plot: bool,
    as_json: bool,
) -> None:
    """Simulates each route and prints the results."""
    from kvdepot.traces.fleet import ROUTES, together

    asked = list(routes or ROUTES)
    each = counted(asked, "routes simulated", len(dict.fromkeys(asked)), hidden=as_json)
    found = {route: simulated.simulate(trace, route) for route in each}
    requests, references, distinct = trace.counts()
    ceiling = (references - distinct) / references
    requests, references = requests * simulated.copies, references * simulated.copies
    names = ["pool", *(f"tier {number}" for number in range(1, len(simulated.tiers) + 1))]
    names += ["servers"] if simulated.shared else []
    if as_json:
        routed = {route: [{**asdict(part), "hit": part.hit} for part in parts] for route, parts in found.items()}
        counts = {"requests": requests, "references": references, "ceiling": ceiling}
        print_json({**counts, "levels": names, "routes": routed})
        return
    click.echo(f"{requests:,} requests name {references:,} blocks; an endless cache for all nodes hits {ceiling:.1%}")
    unit, scale = ("blocks", 1.0) if block_bytes is None else ("GiB", block_bytes / (1 << 30))
    own = ["engines"] if simulated.engine_capacity else []
    columns = ["route", "hit %", "worst part %", *(f"{name} %" for name in own + names), "busiest node"]
    columns += [f"{unit} from servers", f"{unit} to servers"] if simulated.shared else []
    rows = []
    for route, parts in found.items():
        whole = together(parts)
        row = [route, f"{whole.hit:.1%}"[:-1], f"{min(part.hit for part in parts):.1%}"[:-1]]
        shares = [whole.engine_hits, *whole.hits] if own else whole.hits
        row += [f"{hits / max(1, whole.references):.1%}"[:-1] for hits in shares] + [f"{whole.busiest:.2f}x"]
        if simulated.shared:
            row += [f"{moved * scale:,.0f}" for moved in (whole.hits[-1], whole.written[-1])]
        rows.append(row)
    print_table(columns, rows)
    for route, parts in found.items() if plot else ():
        click.echo(f"\n{route}: hit rate of each part")
        for number, part in enumerate(parts):
            bar = "█" * round(part.hit * BAR_CHARACTERS)
            click.echo(f"{100 * (number + 1) // len(parts):>4} % {part.nodes:>5} nodes {bar} {part.hit:.1%}")
