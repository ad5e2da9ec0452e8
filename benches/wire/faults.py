"""Malformed and awkward traffic against our server and InfiniStore's own: who lives, keeps its data, and says what.

Run as ``-m benches.wire.faults`` by the interpreter of .venv-infinistore.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tools.wire.faults import Fault, Outcome, all_faults, run
from tools.wire.servers import KINDS, NoServerError, Server, standin_verbs

Table = dict[str, dict[str, Outcome | None]]


def verdict(outcome: Outcome | None) -> str:
    """Returns the outcome in a few words."""
    if outcome is None:
        return "not run: needs RDMA"
    end = "" if outcome.survived else "HUNG" if outcome.alive else "DIED"
    # The error that a dead server's client gets says no more than that the server died.
    broken = outcome.broken if outcome.broken and (outcome.survived or "Error" not in outcome.broken) else None
    words = [end, broken and f"BROKEN: {broken}", "LOST DATA" if outcome.survived and not outcome.kept_data else ""]
    return ", ".join(filter(None, words)) or f"ok: {outcome.answer}"


def attempt(fault: Fault, kind: str, log: Path | None) -> Outcome | None:
    """Runs one fault on a server of its own."""
    if fault.rdma and standin_verbs() is None:
        return None
    with Server(kind, rdma=fault.rdma, keep_log=log / f"{kind}-{fault.name}.log" if log else None) as server:
        return run(fault, server)


def measure(kinds: Sequence[str], faults: Sequence[Fault], log: Path | None) -> Table:
    """Runs all faults on all servers, in sequence."""
    table: Table = {}
    for fault in faults:
        table[fault.name] = {kind: attempt(fault, kind, log) for kind in kinds}
        print(f"{fault.name}: {fault.promise}", file=sys.stderr)
        for kind, outcome in table[fault.name].items():
            print(f"    {kind:11} {verdict(outcome)}", file=sys.stderr, flush=True)
    return table


def as_json(table: Table) -> str:
    """Returns the table for programs."""
    rows = {
        name: {kind: outcome and {**asdict(outcome), "good": outcome.good} for kind, outcome in outcomes.items()}
        for name, outcomes in table.items()
    }
    return json.dumps(rows, indent=2)


def as_text(table: Table, kinds: Sequence[str]) -> str:
    """Returns the table for people, in Markdown, and the totals."""
    lines = ["| fault | " + " | ".join(kinds) + " |", "| --- |" + " --- |" * len(kinds)]
    for name, outcomes in table.items():
        lines.append(f"| {name.replace('_', ' ')} | " + " | ".join(verdict(outcomes[kind]) for kind in kinds) + " |")
    for kind in kinds:
        outcomes_of = [outcomes[kind] for outcomes in table.values()]
        ran = [outcome for outcome in outcomes_of if outcome]
        died = sum(not outcome.survived for outcome in ran)
        lines.append(
            f"{kind}: {sum(outcome.good for outcome in ran)} of {len(ran)} kept, {died} ended or hung the server"
        )
    return "\n".join(lines)


def main() -> None:
    """Runs it; fails when our server does not pass everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", help="names; all when none is given")
    parser.add_argument("--server", choices=KINDS, action="append", help="again for more; all by default")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--logs", type=Path, help="directory for the servers' logs")
    arguments = parser.parse_args()
    known = {fault.name: fault for fault in all_faults()}
    if unknown := set(arguments.faults) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    kinds = arguments.server or list(KINDS)
    try:
        table = measure(kinds, [known[name] for name in arguments.faults or known], arguments.logs)
    except NoServerError as error:
        parser.exit(2, f"{error}\n")
    print(as_json(table) if arguments.json else as_text(table, kinds))
    ours = [outcomes.get("kvdepot") for outcomes in table.values()]
    sys.exit(any(outcome is not None and not outcome.good for outcome in ours))


if __name__ == "__main__":
    main()
