"""Real vLLM while its depot is upgraded: the new depot has the old one's blocks, and no token changes (P1, P11)."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from combinations import combinations
from engine_lab import Lab
from same import EXACT
from test_vllm import RESET, generate

from tools.lab.depot import depot_stats, wait_until_clean

PROMPTS = [[[1, 600]], [[2, 350]], [[3, 330]]]
FRESH = 5000
EXIT_S = 120
START_S = 120


def serve(lab: Lab, *more: str) -> list[str]:
    """Returns the command of a depot without tiers: all blocks after an upgrade came from the old one."""
    core = json.dumps({"pipeline": "Cache|Empty", "pool_bytes": 256 << 20})
    return [lab.python, "-m", "kvdepot", "serve", "--core-json", core, "--socket", lab.socket, *more]


@contextmanager
def served(lab: Lab) -> Iterator[subprocess.Popen[bytes]]:
    """A depot; at the end, whichever serves the socket is killed."""
    with (lab.root / "depot.log").open("w") as log:
        process = subprocess.Popen(serve(lab), stdout=log, stderr=log, cwd=lab.root)
    try:
        wait_until_clean(Path(lab.socket), START_S)  # otherwise the engine might start its own
        yield process
    finally:
        if (stats := depot_stats(Path(lab.socket))) is not None:
            os.kill(stats["pid"], signal.SIGKILL)
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("model", "ranks", "layerwise"),
    combinations(("llama", 1, True), kinds=EXACT),
)
def test_an_upgrade_under_load_keeps_hits_and_tokens(real_lab: Lab, model: str, ranks: int, layerwise: bool) -> None:
    """Prompts continue while ``kvdepot serve --take-over`` takes the pool over."""
    lab = real_lab
    with served(lab) as old:
        upgrade = {
            "do": "upgrade",
            "name": "during",
            "socket": lab.socket,
            "command": serve(lab, "--take-over"),
            "log": str(lab.root / "new.log"),
            "prompts": PROMPTS,
            "fresh": FRESH,
            "one_by_one": True,
        }
        run = lab.run(
            model,
            [
                {"do": "attached"},
                {**generate("cold", PROMPTS, 8), "one_by_one": True},
                RESET,
                {**generate("before", PROMPTS, 8), "one_by_one": True},
                upgrade,
                {"do": "attached"},
                RESET,
                {**generate("after", PROMPTS, 8), "one_by_one": True},
            ],
            tp=ranks,
            options={"use_layerwise": layerwise, "pipeline": "Cache|Empty", "directories": None},
        )
        assert old.wait(EXIT_S) == 0, (lab.root / "new.log").read_text()
    cold, before, during, after = (run[phase] for phase in ("cold", "before", "during", "after"))
    print("cached before", before["cached"], "during", [one["cached"] for one in during], "after", after["cached"])
    assert cold["cached"] == [0, 0, 0]
    assert min(before["cached"]) >= 288
    assert after["cached"] == before["cached"], "blocks were lost by the upgrade"
    # A process that gets no processor for long may miss some lookups.
    hits = [cached for one in during for cached in one["cached"][: len(PROMPTS)]]
    assert sum(hits) >= len(during) * sum(before["cached"]) / 2, f"hits during the upgrade: {hits}"
    for one in [before, *({**one, "tokens": one["tokens"][:-1]} for one in during), after]:
        assert one["tokens"] == cold["tokens"]
