"""Answers of a real SGLang that is flushed and then killed together with its depot, and what the depot counted."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from test_engine import NOTHING, PROMPT, WHOLE, stored

from kvdepot.stored.blocks import block_files
from kvdepot.stored.namespaces import StoredNamespace, find_namespaces
from tools.lab.depot import Depot, DepotHome
from tools.sglang.engine import Engine

PAGES = sum(WHOLE) // 32


@dataclass(frozen=True)
class Seen:
    """Answers by what happened before them, and the counters of the depot that was there."""

    answers: dict[str, dict[str, Any]]
    counters: dict[str, dict[str, Any]]


def counters(depot: Depot) -> dict[str, Any]:
    found = depot.stats()
    assert found is not None
    return found


def asked(root: Path, home: DepotHome, model: str, arguments: Mapping[str, Any], blocks: int, **environ: str) -> Seen:
    """Asks for the same prompts cold, after a flush, and after a kill -9 of SGLang and depot.

    Args:
        root: directory of SGLang's logs.
        home: the depots' home.
        model: directory of the model.
        arguments: SGLang's.
        blocks: number of blocks that all ranks together store.
        environ: SGLang's environment.
    """
    answers, counted = {}, {}
    with home.start() as depot, Engine(root / "first", model, arguments, **environ) as sglang:
        answers["cold"] = sglang.ask(**PROMPT)
        stored(depot, blocks)
        # Ends all writes, also those of a rank that should have written nothing.
        sglang.flush()
        counted["cold"] = counters(depot)
        answers["flushed"] = sglang.ask(**PROMPT)
        counted["flushed"] = counters(depot)
        depot.wait_until_clean(60)
        # Both are killed here.
    with home.start() as depot, Engine(root / "second", model, arguments, **environ) as sglang:
        answers["restarted"] = sglang.ask(**PROMPT)
        counted["restarted"] = counters(depot)
    return Seen(answers, counted)


def check(seen: Seen, *, blocks: int, ranks: int) -> None:
    """Checks the answers, that nothing was stored twice, and that every rank has loaded every page."""
    cold = seen.answers["cold"]
    assert [one["tokens"] for one in seen.answers.values()] == [cold["tokens"]] * 3
    assert len({tuple(tokens) for tokens in cold["tokens"]}) == len(cold["tokens"])
    assert [one["from_depot"] for one in seen.answers.values()] == [NOTHING, WHOLE, WHOLE]
    first, second, third = (seen.counters[name] for name in ("cold", "flushed", "restarted"))
    assert (first["dump_blocks"], first["dump_blocks_sealed"], first["load_blocks"]) == (blocks, blocks, 0)
    for counted in (second, third):
        assert (counted["load_blocks"], counted["load_blocks_missed"]) == (ranks * PAGES, 0)
    assert (second["dump_blocks_sealed"], third["dump_blocks_sealed"]) == (blocks, 0)
    assert (second["fetch_blocks"], third["fetch_blocks"]) == (0, blocks)


def namespaces(home: DepotHome) -> dict[tuple[int, int], StoredNamespace]:
    """Returns what is on disk by tensor-parallel rank and size."""
    found = find_namespaces([home.blocks])
    by_rank = {(one.facts["tp"][0], one.facts["tp"][1]): one for one in found}
    assert len(by_rank) == len(found)
    return by_rank


def contents(namespace: StoredNamespace) -> dict[str, bytes]:
    """Returns the bytes of each block by its hash, without its header."""
    size = sum(namespace.shard_bytes)
    return {one.hash: one.path.read_bytes()[-size:] for one in block_files(namespace)}
