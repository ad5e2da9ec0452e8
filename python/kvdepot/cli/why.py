"""``kvdepot why``: why a request, or given blocks, were not found."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import click

from kvdepot.cli.output import print_json, print_table
from kvdepot.cli.running import BLOCK_BYTES, running_depots
from kvdepot.cli.status_door import ask_json
from kvdepot.config import load_config
from kvdepot.errors import ConfigError, UnavailableError
from kvdepot.stored.namespaces import fact_differences

LAST = 20
LAST_MAX = 256
NAME_DIGITS = 12
TEXT_MAX = 60
OTHERS_SHOWN = 4
DIFFERENCES_SHOWN = 12

REASONS: Mapping[str, str] = {
    "never_stored": "never stored, as far as this depot remembers",
    "evicted": "evicted",
    "other_namespace": "stored in another namespace only",
    "dropped": "the depot refused to store it: the pool was full of blocks not yet written to a tier",
    "write_failed": "no tier could write it, and it left the pool",
    "read_failed": "a tier could not read it",
    "checksum": "its checksum differed when a tier read it",
    "lost": "a tier found it damaged or gone",
    "unavailable": "a tier that may have it is switched off or out of reach",
    "too_slow": "a tier did not deliver it, or say whether it has it, in time",
    "not_worth_it": "a tier had it, and the engine computes it sooner",
    "no_room": "the pool had no room for it",
    "being_stored": "it was being stored",
    "reset": "its namespace was reset",
    "forgotten": "the depot dropped its namespace to make room for others, and no tier had it",
    "removed": "a client removed it",
    "over_budget": "a tier's budget of written bytes was used up, and it left the pool",
    "excluded": "neither the pool nor a tier that the request allows has it; the others were not asked",
}
"""What each reason of a depot means, in the words of this command."""


@click.command()
@click.argument("what", nargs=-1)
@click.option(
    "--last",
    type=click.IntRange(1, LAST_MAX),
    help=f"How many of the last misses are shown; {LAST} when left out.",
)
@click.option("--config", "file", type=click.Path(dir_okay=False), help="Configuration file of the depot.")
@click.option("--socket", type=click.Path(), help="Unix socket of the depot; the only depot that runs when left out.")
@BLOCK_BYTES
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    what: tuple[str, ...],
    last: int | None,
    file: str | None,
    socket: str | None,
    block_bytes: int | None,
    as_json: bool,
) -> None:
    """Says why requests or blocks were not found.

    Without WHAT: the last misses and partial hits. With one REQUEST: those of them whose id starts
    with it. With NAMESPACE (the first digits of its name) and HASHes: where these blocks are, and why they are missing.

    \b
    kvdepot why --last 20
    kvdepot why cmpl-7f3a
    kvdepot why 3f2a 00112233445566778899aabbccddeeff
    """
    path = _socket(file, socket, block_bytes)
    # Bytes of a command line that are no UTF-8 cannot be asked for.
    what = tuple(one.encode("utf-8", "replace").decode() for one in what)
    if len(what) > 1:
        if last is not None:
            raise ConfigError("--last is about requests: leave it out where blocks are named")
        _show_blocks(ask_json(path, "/why", [("namespace", what[0]), *(("hash", one) for one in what[1:])]), as_json)
        return
    asked = [("last", str(last or LAST)), *(("request", one) for one in what)]
    answer = ask_json(path, "/misses", asked)
    if what and not answer["misses"]:
        kept = answer["kept"]
        error = ConfigError(
            f"none of the depot's last {kept} misses has a request id that begins with {what[0]}: the request was a "
            "full hit, it was never looked up (the engine's debug log says why), or it is too old"
        )
        error.kind = "not_found"
        raise error
    _show_misses(answer, as_json)


def _socket(file: str | None, socket: str | None, block_bytes: int | None) -> str:
    if socket is not None:
        return socket
    if file is not None:
        return load_config(file, owns_pool=False).socket_path(block_bytes)
    found = [depot.socket for depot in running_depots()]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{len(found)} depots run: name one by --socket ({', '.join(found)}) or --config")
    raise UnavailableError("no depot of this user runs here: name --socket or --config")


def reason_text(miss: Mapping[str, Any]) -> str:
    """Says why a block is not there, with place and times as far as they are known, and the reason's name."""
    text = str(REASONS.get(miss["reason"], miss["reason"]))
    if miss["place"] is not None and miss["reason"] not in ("reset", "forgotten", "dropped", "removed"):
        text += f" ({miss['place']})" if miss["reason"] != "evicted" else f" from {miss['place']}"
    if miss["gone_s"] is not None:
        text += f", {_seconds(miss['gone_s'])} before"
    if miss["kept_s"] is not None:
        text += f", after {_seconds(miss['kept_s'])} in the pool"
    return f"{text} [{miss['reason']}]"


def _seconds(count: int) -> str:
    for unit, seconds in (("d", 86_400), ("h", 3600), ("min", 60)):
        if count >= 2 * seconds:
            return f"{count / seconds:.0f} {unit}"
    return f"{count} s"


def _show_misses(answer: Mapping[str, Any], as_json: bool) -> None:
    pairs = ((miss["namespace"], other) for miss in answer["misses"] for other in miss["other_namespaces"])
    differ = _differences(answer["namespaces"], pairs)
    if as_json:
        print_json({**answer, "differences": differ})
        return
    if not answer["misses"]:
        click.echo("no misses or partial hits since the depot started")
        return
    print_table(
        ["time", "client", "request", "namespace", "hit", "first block not found", "why"],
        [
            (
                f"{datetime.fromtimestamp(miss['at_unix_ms'] / 1e3, tz=timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
                miss["client_pid"],
                miss["request"],
                _short(miss["namespace"]),
                f"{miss['hit']} of {miss['asked']}",
                miss["hash"],
                reason_text(miss),
            )
            for miss in answer["misses"]
        ],
    )
    _show_differences(differ)


def _show_blocks(answer: Mapping[str, Any], as_json: bool) -> None:
    own = answer["namespace"]
    pairs = ((own, other) for block in answer["blocks"] for other in block.get("other_namespaces", ()))
    differ = _differences(answer["namespaces"], pairs)
    if as_json:
        print_json({**answer, "differences": differ})
        return
    rows = []
    for block in answer["blocks"]:
        why = "it is there" if block["at"] is not None else reason_text(block)
        rows.append((block["hash"], block["at"] or "nowhere", why))
    print_table(["block", "at", "why"], rows)
    _show_differences(differ)


def _short(name: str | None) -> str | None:
    return None if name is None else name[:NAME_DIGITS]


def _differences(
    namespaces: Mapping[str, Mapping[str, Any]], pairs: Iterable[tuple[str | None, str]]
) -> list[dict[str, Any]]:
    """What differs between each two namespaces that are named, the most alike ones first."""
    found = []
    for one, other in dict.fromkeys(pairs):
        if one is None or one not in namespaces or other not in namespaces:
            continue
        left, right = (({**namespaces[name]["facts"], "layout": namespaces[name]["layout"]}) for name in (one, other))
        facts = [{"fact": fact, one: mine, other: theirs} for fact, mine, theirs in fact_differences(left, right)]
        found.append({"namespace": one, "other": other, "facts": facts})
    return sorted(found, key=lambda pair: len(pair["facts"]))


def _show_differences(differ: Sequence[Mapping[str, Any]]) -> None:
    for pair in differ[:OTHERS_SHOWN]:
        one, other, facts = pair["namespace"], pair["other"], pair["facts"]
        click.echo(f"\n{_short(other)} has a block of the same hash. What differs from {_short(one)}:")
        print_table(
            ["fact", one[:NAME_DIGITS], other[:NAME_DIGITS]],
            [
                (fact["fact"], str(fact[one])[:TEXT_MAX], str(fact[other])[:TEXT_MAX])
                for fact in facts[:DIFFERENCES_SHOWN]
            ],
        )
    if len(differ) > OTHERS_SHOWN:
        click.echo(f"{len(differ) - OTHERS_SHOWN} more namespaces have such a block: --json shows them")
