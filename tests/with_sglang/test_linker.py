"""Real SGLang on CPU with kvdepot as its external linker, without a host pool of its own (P1, P3, P4)."""

from pathlib import Path

import pytest
from conftest import model, settings
from test_engine import NOTHING, PROMPT, TOKENS, WHOLE, stored, until

from tools.lab.depot import DepotHome
from tools.sglang.engine import Engine, depot_linker

PAGES = sum(WHOLE) // 32


@pytest.mark.full
@pytest.mark.timeout(900)
def test_two_models_in_one_directory(tmp_path: Path, home: DepotHome) -> None:
    """Both have the same configuration and get the same tokens, so SGLang's hashes are the same (P8)."""
    linker = depot_linker(settings(home, load_policy="all"))
    found = []
    with home.start() as depot:
        for seed in (0, 1):
            with Engine(tmp_path / str(seed), model(seed=seed), linker) as sglang:
                found.append(sglang.ask(**PROMPT))
                stored(depot, (seed + 1) * PAGES)
                sglang.flush()
                found.append(sglang.ask(**PROMPT))
    assert [one["from_depot"] for one in found] == [NOTHING, WHOLE, NOTHING, WHOLE]
    assert found[0]["tokens"] == found[1]["tokens"]
    assert found[2]["tokens"] == found[3]["tokens"]
    assert found[0]["tokens"] != found[2]["tokens"]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "pool_mb"), [(8, 16), (20, 8)], ids=["a half", "a tenth"])
def test_a_pool_smaller_than_the_work(tmp_path: Path, home: DepotHome, count: int, pool_mb: int) -> None:
    """Prompts of 4 MiB each: a hit comes from the disk, and is as long as what can be held, a quarter of the pool."""
    asked = {"seed": 2, "count": count, "tokens": TOKENS}
    home.configure({"pool_gb": pool_mb / 1024})
    linker = depot_linker(settings(home, pool_gb=pool_mb / 1024, load_policy="all"))
    with home.start() as depot, Engine(tmp_path, model(), {**linker, "max_total_tokens": 32768}) as sglang:
        cold = sglang.ask(**asked)
        stored(depot, count * WHOLE[0] // 32)
        depot.wait_until_clean(60)
        sglang.flush()
        flushed = sglang.ask(**asked)
        until(lambda: (depot.stats() or {}).get("pool_leased_bytes") == 0, "nothing is held any more")
    print(flushed["from_depot"])
    assert flushed["tokens"] == cold["tokens"]
    assert all(0 < tokens <= WHOLE[0] * pool_mb // 4 // 4 for tokens in flushed["from_depot"])
