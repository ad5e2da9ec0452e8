"""Real vLLM over a depot in trouble: small pools, failing reads, damaged files, kills, neighbours. Same tokens."""

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from combinations import combinations
from engine_lab import Lab
from same import EXACT, KINDS, assert_likely, assert_same, engine_of
from test_vllm import RESET, generate

from tools.lab.depot import wait_until_clean

MANY = [[[seed, 300]] for seed in range(40, 60)]
BYTES_OF_MANY = {"llama": 20 * 9 * 131_072, "gemma3": 20 * 9 * 131_072, "mla": 20 * 9 * 147_456}
THREE = [[[1, 600]], [[2, 350]], [[3, 330]]]
START_S = 120
ON_TWO_RANKS = [1, pytest.param(2, marks=pytest.mark.full)]


def one_by_one(name: str, prompts: list[Any], max_tokens: int = 16) -> dict[str, Any]:
    return {**generate(name, prompts, max_tokens), "one_by_one": True}


def settle(lab: Lab) -> dict[str, Any]:
    """A phase that ends when all dumps are in files."""
    return {"do": "settle", "socket": lab.socket}


@contextmanager
def depot(lab: Lab, posix: dict[str, Any], pool_bytes: int = 64 << 20) -> Iterator[None]:
    """A depot whose tier has the given settings, in place of the one that the engine would start."""
    (lab.root / "blocks").mkdir(exist_ok=True)
    posix = {"directories": [str(lab.root / "blocks")], **posix}
    core = json.dumps({"pipeline": "Cache|Posix", "pool_bytes": pool_bytes, "posix": posix})
    command = [lab.python, "-m", "kvdepot", "serve", "--core-json", core, "--socket", lab.socket]
    with (lab.root / "depot.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=lab.root)
        try:
            wait_until_clean(Path(lab.socket), START_S)  # otherwise the engine might start its own
            yield
        finally:
            process.kill()
            process.wait()


def block_files(lab: Lab) -> list[Path]:
    """Returns every block on disk, in a fixed order."""
    return sorted((lab.root / "blocks").rglob("*.kvb"))


def damage(files: list[Path], seed: int) -> None:
    """Truncates files or flips a bit in them."""
    chosen = random.Random(seed)
    for file in files:
        content = bytearray(file.read_bytes())
        if chosen.random() < 0.5:
            del content[chosen.randrange(len(content)) :]
        else:
            content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
        file.write_bytes(content)


@pytest.mark.parametrize(("kind", "ranks", "layerwise"), combinations(("gemma3", 1, False)))
def test_pool_of_a_tenth_of_the_working_set(lab: Lab, kind: str, ranks: int, layerwise: bool) -> None:
    """Blocks are evicted and fetched all the time; many concurrent hits that need the pool are all served.

    A prompt's blocks take half of the pool, and its dumps are in files before the next one comes: blocks that no tier
    has yet may take 70 % of the pool, and how many of the others would be dropped depends on the disk's speed.
    """
    options = {"use_layerwise": layerwise, "pool_gb": BYTES_OF_MANY[kind] / 10 / (1 << 30)}
    run = lab.run(
        kind,
        [
            {**one_by_one("cold", MANY, 8), "settle": lab.socket},
            RESET,
            one_by_one("warm", MANY, 8),
            RESET,
            generate("together", MANY, 8),
        ],
        tp=ranks,
        options=options,
        engine=engine_of(kind),
    )
    assert run["warm"]["cached"] == [288] * len(MANY), run["metrics"]
    assert run["together"]["cached"] == [288] * len(MANY), run["metrics"]
    assert_same(lab, kind, MANY, run["warm"], run["cold"], ranks)
    if kind in EXACT:
        assert run["together"]["tokens"] == run["cold"]["tokens"]
    else:
        assert_likely(lab, kind, MANY, run["cold"]["tokens"], run["together"]["tokens"])


@pytest.mark.parametrize(("kind", "ranks", "layerwise"), combinations(("gemma3", 1, False)))
def test_failing_reads_and_damaged_files(lab: Lab, kind: str, ranks: int, layerwise: bool) -> None:
    """One read in ten fails, then files are truncated and bits flipped between runs: misses, never other tokens."""

    def run(posix: dict[str, Any], *phases: dict[str, Any]) -> Any:
        with depot(lab, posix):
            options = {"use_layerwise": layerwise}
            return lab.run(kind, list(phases), tp=ranks, options=options, engine=engine_of(kind))

    cold = run({}, one_by_one("cold", THREE), settle(lab))["cold"]
    kept = lab.root / "kept"
    shutil.copytree(lab.root / "blocks", kept)
    failing = run({"faults": "read_eio=0.1,seed=3"}, one_by_one("failing", THREE), RESET, one_by_one("again", THREE))
    # Where a window of three groups and two ranks has to be read completely, one failure in ten may leave no hit.
    assert sum(failing["failing"]["cached"]) < 576 + 320 + 320
    assert sum(failing["again"]["cached"]) > 0
    assert_same(lab, kind, THREE, failing["failing"], cold, ranks)
    # Blocks computed after shorter hits are in files by now; the files that the cold run left are damaged.
    shutil.rmtree(lab.root / "blocks")
    shutil.copytree(kept, lab.root / "blocks")
    files = block_files(lab)
    assert len(files) >= 38
    damage(random.Random(5).sample(files, len(files) // 4), seed=5)
    damaged = run({}, one_by_one("damaged", THREE), RESET, one_by_one("mended", THREE))
    assert sum(damaged["mended"]["cached"]) > sum(damaged["damaged"]["cached"])
    assert_same(lab, kind, THREE, damaged["damaged"], cold, ranks)
    if kind in EXACT:
        assert failing["again"]["tokens"] == damaged["mended"]["tokens"] == cold["tokens"]
    else:
        assert_likely(lab, kind, THREE, cold["tokens"], failing["again"]["tokens"], damaged["mended"]["tokens"])


@pytest.mark.parametrize(("kind", "ranks", "layerwise"), combinations(("llama", 1, False)))
def test_depot_killed_between_requests(lab: Lab, kind: str, ranks: int, layerwise: bool) -> None:
    """kill -9: requests in between are computed, and the next depot finds what the previous one had written."""
    kill = {"do": "kill_depot", "socket": lab.socket}
    run = lab.run(
        kind,
        [
            one_by_one("cold", THREE),
            settle(lab),
            RESET,
            kill,
            one_by_one("dead", THREE[:1]),
            {"do": "attached"},
            settle(lab),
            RESET,
            one_by_one("back", THREE),
        ],
        tp=ranks,
        options={"use_layerwise": layerwise},
        engine=engine_of(kind),
    )
    assert run["back"]["cached"][0] == 576
    assert_same(lab, kind, THREE[:1], run["dead"], {"tokens": run["cold"]["tokens"][:1]}, ranks)
    assert_same(lab, kind, THREE, run["back"], run["cold"], ranks)


@pytest.mark.parametrize("ranks", ON_TWO_RANKS)
def test_three_models_share_a_depot_and_nothing_else(lab: Lab, ranks: int) -> None:
    """The same prompts to three models, one directory: each gets its own bytes (P8)."""
    plain = {
        kind: lab.run(kind, [one_by_one("plain", THREE)], tp=ranks, connector=None, engine=engine_of(kind))["plain"]
        for kind in KINDS
    }
    for name in ("first", "second"):
        for kind in KINDS:
            run = lab.run(kind, [one_by_one(name, THREE), settle(lab)], tp=ranks, engine=engine_of(kind))
            assert (sum(run[name]["cached"]) > 0) == (name == "second"), (name, kind)
            if name == "first":
                assert run[name]["tokens"] == plain[kind]["tokens"], kind
            else:
                assert_same(lab, kind, THREE, run[name], plain[kind], ranks)
    assert len(list((lab.root / "blocks").rglob("namespace.json"))) >= len(KINDS)
