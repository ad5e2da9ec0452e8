"""The first hour on a GPU, without one: steps that cannot run are reported, the others run on the stand-in."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_flow import REAL, ROOT, library  # noqa: F401 - a fixture

from tools.first_gpu_hour.__main__ import carry_out
from tools.first_gpu_hour.machine import Machine
from tools.first_gpu_hour.report import losses, spread
from tools.first_gpu_hour.steps import Step

RUN_S = 600

pytestmark = pytest.mark.timeout(RUN_S + 60)


def hour(out: Path, *options: str, environ: dict[str, str] | None = None) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "tools.first_gpu_hour", "--smoke", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report = json.loads((out / "report.json").read_text())
    assert (out / "report.txt").read_text() in done.stdout
    return report, done.stdout


@pytest.mark.skipif(REAL, reason="there is a GPU")
def test_without_a_gpu_the_report_says_so_and_why(tmp_path: Path) -> None:
    report, text = hour(tmp_path / "hour")
    assert text.startswith("no GPU: CUDA driver not found")
    steps = {step["name"]: step for step in report["steps"]}
    assert steps["kernel"]["outcome"] == steps["doctor"]["outcome"] == "done"
    for name in ("bench 1", "measurements", "ping", "schedules", "vLLM", "vLLM's sleep"):
        assert steps[name]["outcome"] == "skipped"
    assert steps["ping"]["reason"].startswith("no GPU: CUDA driver not found")
    assert steps["schedules"]["reason"].startswith("no GPU: ")
    assert report["spread"] == []


@pytest.mark.skipif(REAL, reason="looks at what the stand-in says")
def test_on_the_stand_in_everything_runs_that_needs_no_real_gpu(library: Path, tmp_path: Path) -> None:  # noqa: F811
    report, text = hour(tmp_path / "hour", "--driver", str(library))
    assert "The driver is a stand-in: the figures say nothing about any device." in text
    steps = {step["name"]: step for step in report["steps"]}
    ran = {name for name, step in steps.items() if step["outcome"] == "done"}
    benches = {f"bench {run}" for run in (1, 2, 3)} | {f"bench with {blocks} blocks" for blocks in (8, 16, 32, 64)}
    pings = {"ping", "ping beside copies", "ping beside registration"}
    assert ran == {"kernel", "huge pages", "doctor", "measurements"} | pings | benches
    assert {choice["auto_large"] for choice in steps["measurements"]["result"]["devices"][0]["choices"]}
    assert steps["schedules"]["reason"] == "the driver is a stand-in"
    assert {row["engine"] for row in report["spread"]} >= {"memcpy", "batch", "kernel", "auto"}
    assert all(len(row["load_gb_per_s"]) == 3 for row in report["spread"])
    for name in ("ping", "ping beside copies", "ping beside registration"):
        assert steps[name]["result"]["to_device"]["p99_us"] > 0
    attached = (tmp_path / "hour" / steps["ping beside registration"]["file"]).read_text()
    assert attached.count("attached in ") == 2


def test_a_step_that_fails_or_hangs_is_told(tmp_path: Path) -> None:
    machine = Machine((), "", (), (), {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    fails = Step("fails", "nothing", (sys.executable, "-c", "print(7); raise SystemExit(3)"))
    told = carry_out(fails, machine, tmp_path, 1)
    assert (told["outcome"], told["status"], told["reason"], told["result"]) == ("failed", 3, "status 3", 7)
    hangs = Step("hangs", "nothing", (sys.executable, "-c", "input()"), timeout_s=0)
    told = carry_out(hangs, machine, tmp_path, 2)
    assert told["outcome"] == "failed"
    assert "timed out" in told["reason"]


def test_rates_that_differ_and_choices_that_lose_are_found() -> None:
    def run(auto: float) -> dict[str, Any]:
        rates = {"memcpy": 10.0, "batch": 20.0, "auto": auto}
        rows = [{"engine": e, "op_bytes": 4096, "load_gb_per_s": r, "dump_gb_per_s": 5.0} for e, r in rates.items()]
        return {"rows": rows}

    table = {line["engine"]: line for line in spread([run(20.0), run(10.0), run(15.0)])}
    assert table["auto"]["load_gb_per_s_spread"] == 2.0
    assert table["batch"]["load_gb_per_s_spread"] == table["auto"]["dump_gb_per_s_spread"] == 1.0
    assert losses(run(15.0)) == [{"rate": "load_gb_per_s", "op_bytes": 4096, "best": "batch", "loss": 0.25}]
    assert losses(run(20.0)) == []
