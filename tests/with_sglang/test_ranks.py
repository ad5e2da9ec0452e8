"""Real SGLang on CPU with two tensor-parallel ranks: each has pages of its own, and both use the same hits (P1, P8)."""

from pathlib import Path
from typing import Any

import pytest
from conftest import cores_of_ranks, model, settings
from killed import PAGES, asked, check, contents, namespaces
from test_engine import PAGE, TOKENS, until

from kvdepot.stored.blocks import block_files
from tools.lab.depot import DepotHome
from tools.sglang.engine import Engine, depot_backend, depot_linker

RANKS = 2
LEADING = TOKENS // 2 // PAGE * PAGE
SHORT = {"seed": 1, "count": 1, "tokens": LEADING + 1}
LONG = {"seed": 1, "count": 1, "tokens": TOKENS}
"""Begins with ``SHORT``."""


def two_ranks(face: str, home: DepotHome) -> dict[str, Any]:
    keys = settings(home, load_policy="all")
    return {**(depot_linker(keys) if face == "linker" else depot_backend(keys)), "tp_size": RANKS}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("face", ["hicache", "linker"])
def test_each_rank_stores_and_loads_its_own_pages(tmp_path: Path, home: DepotHome, face: str) -> None:
    blocks = RANKS * PAGES
    seen = asked(tmp_path, home, model(), two_ranks(face, home), blocks, **cores_of_ranks(RANKS))
    check(seen, blocks=blocks, ranks=RANKS)
    found = {rank: contents(one) for rank, one in namespaces(home).items()}
    assert found.keys() == {(0, RANKS), (1, RANKS)}
    first, second = found[0, RANKS], found[1, RANKS]
    assert len(first) == PAGES
    assert first.keys() == second.keys()
    assert all(first[name] != second[name] for name in first), "both ranks have the same heads"


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("face", ["hicache", "linker"])
def test_a_hit_is_what_both_ranks_have(tmp_path: Path, home: DepotHome, face: str) -> None:
    """The second rank loses the end of a prompt: both compute it, and store it again."""
    arguments, environ = two_ranks(face, home), cores_of_ranks(RANKS)

    def on_disk() -> list[int]:
        return [len(list(block_files(one))) for one in namespaces(home).values()]

    with home.start() as depot, Engine(tmp_path / "first", model(), arguments, **environ) as sglang:
        sglang.ask(**SHORT)
        until(lambda: on_disk() == [LEADING // PAGE] * RANKS, "the leading pages are on disk")
        leading = {one.path for one in block_files(namespaces(home)[1, RANKS])}
        cold = sglang.ask(**LONG)
        until(lambda: on_disk() == [TOKENS // PAGE] * RANKS, "all pages are on disk")
        depot.wait_until_clean(60)
    for one in block_files(namespaces(home)[1, RANKS]):
        if one.path not in leading:
            one.path.unlink()
    with home.start() as depot, Engine(tmp_path / "second", model(), arguments, **environ) as sglang:
        shorter = sglang.ask(**LONG)
        until(lambda: on_disk() == [TOKENS // PAGE] * RANKS, "all pages are on disk again")
        sglang.flush()
        whole = sglang.ask(**LONG)
        until(lambda: (depot.stats() or {}).get("pool_leased_bytes") == 0, "nothing is held any more")
    assert [one["tokens"] for one in (shorter, whole)] == [cold["tokens"]] * 2
    assert [one["from_depot"] for one in (shorter, whole)] == [[LEADING], [TOKENS // PAGE * PAGE]]
