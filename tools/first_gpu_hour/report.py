"""Results of the steps, for programs (JSON) and for people (text)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.first_gpu_hour.machine import Machine

SPREAD_BAD = 1.2
"""If runs of one benchmark differ by more than this factor, the machine was busy, or the choice is a guess."""


def spread(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rates of all runs for each engine and size, and their spread (the largest by the smallest)."""
    table: list[dict[str, Any]] = []
    for row in runs[0]["rows"] if runs else []:
        same = [
            other
            for run in runs
            for other in run["rows"]
            if (other["engine"], other["op_bytes"]) == (row["engine"], row["op_bytes"])
        ]
        line: dict[str, Any] = {"engine": row["engine"], "op_bytes": row["op_bytes"]}
        for name in ("load_gb_per_s", "dump_gb_per_s"):
            rates = [other[name] for other in same]
            line[name] = rates
            line[f"{name}_spread"] = round(max(rates) / max(min(rates), 1e-9), 3)
        table.append(line)
    return table


def losses(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns where ``auto`` was slower than the fastest single engine, and by how much: 0.1 is a tenth."""
    found = []
    for name in ("load_gb_per_s", "dump_gb_per_s"):
        for row in run["rows"]:
            if row["engine"] != "auto":
                continue
            others = [r for r in run["rows"] if r["op_bytes"] == row["op_bytes"] and r["engine"] not in {"auto", "gdr"}]
            best = max(others, key=lambda r: r[name], default=row)
            if best[name] > row[name]:
                loss = round(1 - row[name] / best[name], 3)
                found.append({"rate": name, "op_bytes": row["op_bytes"], "best": best["engine"], "loss": loss})
    return found


def report(machine: Machine, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns everything as one object."""
    runs = [one["result"] for one in outcomes if one["name"] in {"bench 1", "bench 2", "bench 3"} and one["result"]]
    return {
        "devices": list(machine.devices),
        "problem": machine.problem,
        "stand_in": machine.is_standin,
        "adapters": list(machine.adapters),
        "steps": outcomes,
        "spread": spread(runs),
        "auto_losses": losses(runs[-1]) if runs else [],
    }


def lines(whole: dict[str, Any]) -> Iterator[str]:
    """Yields the report for people."""
    devices = ", ".join(whole["devices"][:8])
    yield f"devices: {devices}" if devices else f"no GPU: {whole['problem']}"
    if whole["stand_in"]:
        yield "The driver is a stand-in: the figures say nothing about any device."
    yield f"RDMA adapters: {', '.join(whole['adapters']) or 'none'}"
    yield ""
    for step in whole["steps"]:
        why = f": {step['reason']}" if step["reason"] else ""
        yield f"{step['outcome']:8} {step['name']}{why}"
        yield f"         tells: {step['tells']}"
        if step["file"]:
            yield f"         see {step['file']}"
    wide = [line for line in whole["spread"] if max(line[k] for k in line if k.endswith("_spread")) > SPREAD_BAD]
    if whole["spread"]:
        yield ""
        yield f"three runs: {len(wide)} of {len(whole['spread'])} rows differ by more than {SPREAD_BAD}"
    for loss in whole["auto_losses"]:
        yield f"auto loses {loss['loss']:.0%} to {loss['best']} at {loss['op_bytes']} bytes ({loss['rate']})"


def write(folder: Path, whole: dict[str, Any]) -> None:
    """Writes ``report.json`` and ``report.txt``."""
    (folder / "report.json").write_text(json.dumps(whole, indent=2) + "\n")
    (folder / "report.txt").write_text("\n".join(lines(whole)) + "\n")
