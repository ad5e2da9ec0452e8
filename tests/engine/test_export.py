"""Blocks that were exported, deleted and imported are hits in a real vLLM, with the tokens that were computed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine_lab import Lab

from tools.lab.child import kill_process
from tools.lab.depot import depot_stats

PROMPTS = [[[1, 200], [chat, 150]] for chat in (10, 11)]
HITS = [320, 320]
"""Of 350 tokens; a hit leaves the last block, which is not full."""
CLI_S = 120


def command(*words: object) -> Any:
    """Runs ``kvdepot``, and returns what it says in JSON."""
    whole = [sys.executable, "-m", "kvdepot", *map(str, words), "--json"]
    done = subprocess.run(whole, capture_output=True, text=True, check=False, timeout=CLI_S, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def served(lab: Lab) -> tuple[list[int], list[list[int]]]:
    """Serves the prompts with a depot that has only its disk; returns hits and answers. The depot is then killed."""
    phases = [
        {"do": "generate", "name": "answers", "prompts": PROMPTS, "max_tokens": 8, "one_by_one": True},
        {"do": "settle", "socket": lab.socket},
    ]
    run = lab.run("llama", phases, engine={"enable_prefix_caching": False})
    stats = depot_stats(Path(lab.socket))
    assert stats is not None
    kill_process(int(stats["pid"]))
    answers = run["answers"]
    assert sum(value for name, value in run["metrics"].items() if "kvdepot_hit_tokens" in name) == sum(
        answers["cached"]
    )
    return answers["cached"], answers["tokens"]


def test_export_delete_import_hit_with_identical_tokens(real_lab: Lab, tmp_path: Path) -> None:
    blocks, file = real_lab.root / "blocks", tmp_path / "namespace.kvx"
    first_hits, first = served(real_lab)
    assert first_hits[0] == 0
    # Beside that of the self-test, which is empty.
    (namespace,) = (one for one in command("namespaces", "--directory", blocks) if one["blocks"])
    root = namespace["namespace"]
    exported = command("export", root, file, "--directory", blocks)
    assert (exported["broken"], exported["gone"]) == (0, 0)
    # 11 of each prompt with its answer; the first 6 are common to both.
    assert exported["blocks"] == 2 * 11 - 6
    command("rm", root, "--directory", blocks, "--yes")
    assert not list(blocks.rglob("*.kvb"))
    imported = command("import", file, "--directory", blocks)
    assert (imported["stored"], imported["failures"]) == (exported["blocks"], {})
    hits, again = served(real_lab)
    assert (hits, again) == (HITS, first)
