"""Real SGLang on CPU over a depot: the same answers whatever is flushed, killed or failing (P1, P4)."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import cores_of_ranks, interpreter, model, settings

from tools.lab.depot import Depot, DepotHome
from tools.make_model import SLIDING_WINDOW
from tools.sglang.engine import Engine, depot_backend, depot_linker
from tools.sglang.engine_child import ANSWER_TOKENS

PAGE = 32
TOKENS = 1030
PROMPT = {"seed": 1, "count": 2, "tokens": TOKENS}
WHOLE = [TOKENS // PAGE * PAGE] * 2
NOTHING = [0, 0]
UNTIL_S = 120.0


def until(done: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + UNTIL_S
    while not done():
        assert time.monotonic() < end_s, f"not after {UNTIL_S:.0f} s: {what}"
        time.sleep(0.05)


def stored(depot: Depot, pages: int) -> None:
    """Waits until the depot has stored this many pages since its start."""

    def taken() -> bool:
        stats = depot.stats()
        return stats is not None and stats["dump_blocks_sealed"] >= pages

    until(taken, f"{pages} pages are stored")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("face", ["hicache", "linker"])
def test_answers_are_the_same_whatever_is_killed(tmp_path: Path, home: DepotHome, face: str) -> None:
    is_linker = face == "linker"
    door = depot_linker(settings(home, load_policy="all")) if is_linker else depot_backend(settings(home))
    seen: dict[str, Any] = {}
    with home.start() as depot, Engine(tmp_path / "first", model(), door) as sglang:
        seen["cold"] = sglang.ask(**PROMPT)
        stored(depot, sum(WHOLE) // PAGE)
        seen["on the device"] = sglang.ask(**PROMPT)
        sglang.flush()
        seen["flushed"] = sglang.ask(**PROMPT)
        depot.wait_until_clean(60)
        # Both are killed here.
    # In this order: SGLang has found the depot when it answers.
    with home.start() as depot, Engine(tmp_path / "second", model(), door) as sglang:
        seen["restarted"] = sglang.ask(**PROMPT)
        sglang.flush()
        depot.kill()
        seen["depot dead"] = sglang.ask(**PROMPT)
        sglang.flush()
        with home.start() as another:
            until(lambda: "attached to the depot" in said_since(sglang, "the depot was lost"), "the depot is found")
            seen["depot back"] = sglang.ask(**PROMPT)
            if is_linker:
                until(lambda: (another.stats() or {}).get("pool_leased_bytes") == 0, "nothing is held any more")
    print(json.dumps(seen))
    assert [one["tokens"] for one in seen.values()] == [seen["cold"]["tokens"]] * len(seen)
    assert seen["on the device"]["cached"] == WHOLE
    missed = {"cold", "on the device", "depot dead"}
    assert {name: one["from_depot"] for name, one in seen.items()} == {
        name: NOTHING if name in missed else WHOLE for name in seen
    }


def said_since(sglang: Engine, mark: str) -> str:
    """Returns SGLang's log after the last line that contains ``mark``; nothing before there is one."""
    before, _, after = sglang.log.read_text(errors="replace").rpartition(mark)
    return after if before else ""


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("architecture", "arguments"),
    [
        ("llama", {"hicache_mem_layout": "layer_first"}),
        ("llama", {"hicache_mem_layout": "page_first", "hicache_io_backend": "kernel"}),
        ("llama", {"hicache_host_memory_mode": "buffer_only"}),
        ("gemma3", {}),
    ],
    ids=lambda one: one if isinstance(one, str) else next(iter(one.values()), "page_first_direct"),
)
def test_every_layout(tmp_path: Path, home: DepotHome, architecture: str, arguments: dict[str, Any]) -> None:
    backend = depot_backend(settings(home))
    with home.start() as depot, Engine(tmp_path, model(architecture), {**arguments, **backend}) as sglang:
        cold = sglang.ask(**PROMPT)
        stored(depot, sum(WHOLE) // PAGE)
        sglang.flush()
        flushed = sglang.ask(**PROMPT)
    assert flushed["tokens"] == cold["tokens"]
    assert (cold["from_depot"], flushed["from_depot"]) == (NOTHING, WHOLE)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("face", ["hicache", "linker"])
def test_other_page_sizes(tmp_path: Path, home: DepotHome, face: str, page: int) -> None:
    """SGLang computes a prompt's last token itself, so a hit ends before it."""
    keys = settings(home, load_policy="all")
    door = depot_linker(keys) if face == "linker" else depot_backend(keys)
    with home.start() as depot, Engine(tmp_path, model(), {**door, "page_size": page}) as sglang:
        cold = sglang.ask(**PROMPT)
        # The last token of an answer has no KV.
        stored(depot, 2 * ((TOKENS + ANSWER_TOKENS - 1) // page))
        sglang.flush()
        flushed = sglang.ask(**PROMPT)
    assert flushed["tokens"] == cold["tokens"]
    assert (cold["from_depot"], flushed["from_depot"]) == (NOTHING, [(TOKENS - 1) // page * page] * 2)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("face", ["hicache", "linker"])
def test_replicas_share_pages(tmp_path: Path, home: DepotHome, face: str) -> None:
    """Two schedulers take turns, and the count of prompts is odd: the second time each has the other one's."""
    asked = {"seed": 1, "count": 3, "tokens": TOKENS}
    keys = settings(home, load_policy="all")
    door = depot_linker(keys) if face == "linker" else depot_backend(keys)
    replicas = {"dp_size": 2, "load_balance_method": "round_robin"}
    with home.start() as depot, Engine(tmp_path, model(), {**door, **replicas}, **cores_of_ranks(2)) as sglang:
        first = sglang.ask(**asked)
        stored(depot, 3 * WHOLE[0] // PAGE)
        second = sglang.ask(**asked)
        third = sglang.ask(**asked)
    assert [one["tokens"] for one in (second, third)] == [first["tokens"]] * 2
    assert (first["from_depot"], second["from_depot"]) == ([0] * 3, [WHOLE[0]] * 3)
    # Now both have all of them on their devices.
    assert (third["from_depot"], third["cached"]) == ([0] * 3, [WHOLE[0]] * 3)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_older_release(tmp_path: Path, home: DepotHome) -> None:
    """0.5.17: another prefix tree, and other host pools."""
    python = interpreter("KVDEPOT_SGLANG_OLD_PYTHON", ".venv-sglang-old", "sglang-old-env")
    backend = depot_backend(settings(home))
    found = []
    with home.start() as depot:
        for name in ("first", "second"):
            with Engine(tmp_path / name, model(), backend, python=python) as sglang:
                found.append(sglang.ask(**PROMPT))
                stored(depot, sum(WHOLE) // PAGE)
                sglang.flush()
                found.append(sglang.ask(**PROMPT))
    assert [one["tokens"] for one in found] == [found[0]["tokens"]] * 4
    assert [one["from_depot"] for one in found] == [NOTHING, WHOLE, WHOLE, WHOLE]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_engines_with_other_layouts_share_pages(tmp_path: Path, home: DepotHome) -> None:
    backend = depot_backend(settings(home))
    found = []
    with home.start() as depot:
        for number, layout in enumerate(("layer_first", "page_first_direct")):
            with Engine(tmp_path / layout, model(), {**backend, "hicache_mem_layout": layout}) as sglang:
                found.append(sglang.ask(**PROMPT))
                if number == 0:
                    stored(depot, sum(WHOLE) // PAGE)
    assert found[0]["tokens"] == found[1]["tokens"]
    assert found[1]["from_depot"] == WHOLE


@pytest.mark.full
@pytest.mark.timeout(600)
def test_two_models_in_one_directory(tmp_path: Path, home: DepotHome) -> None:
    """Both have the same configuration and get the same tokens, so SGLang's hashes are the same (P8)."""
    backend = depot_backend(settings(home))
    found = []
    with home.start() as depot:
        for seed in (0, 1):
            with Engine(tmp_path / str(seed), model(seed=seed), backend) as sglang:
                found.append(sglang.ask(**PROMPT))
                stored(depot, (seed + 1) * sum(WHOLE) // PAGE)
                sglang.flush()
                found.append(sglang.ask(**PROMPT))
    assert [one["from_depot"] for one in found] == [NOTHING, WHOLE, NOTHING, WHOLE]
    assert found[0]["tokens"] == found[1]["tokens"]
    assert found[2]["tokens"] == found[3]["tokens"]
    assert found[0]["tokens"] != found[2]["tokens"]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_pool_of_a_tenth_of_the_work(tmp_path: Path, home: DepotHome) -> None:
    """20 prompts of 4 MiB each: pages that do not fit in the pool come back from the disk."""
    asked = {"seed": 2, "count": 20, "tokens": TOKENS}
    home.configure({"pool_gb": 8 / 1024})
    backend = depot_backend(settings(home, pool_gb=8 / 1024))
    with home.start() as depot, Engine(tmp_path, model(), {**backend, "max_total_tokens": 32768}) as sglang:
        cold = sglang.ask(**asked)
        stored(depot, 20 * WHOLE[0] // PAGE)
        sglang.flush()
        flushed = sglang.ask(**asked)
        stats = depot.stats()
        log = sglang.log.read_text(errors="replace")
    assert flushed["tokens"] == cold["tokens"]
    assert flushed["from_depot"] == [WHOLE[0]] * 20
    assert stats is not None
    assert stats["pool_bytes"] <= 20 * 4 * (1 << 20) // 10
    assert stats["claims"] > 0
    assert "Write page to storage" not in log


@pytest.mark.full
@pytest.mark.timeout(900)
def test_half_of_all_calls_fail(tmp_path: Path, home: DepotHome) -> None:
    """SGLang's own fault injector: whatever fails is computed."""
    backend = depot_backend(settings(home))
    failing = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.5"}
    asked = {"seed": 3, "count": 12, "tokens": TOKENS}
    rounds = []
    with home.start(), Engine(tmp_path, model(), backend, **failing) as sglang:
        for _ in range(4):
            rounds.append(sglang.ask(**asked))
            sglang.flush()
    print([one["from_depot"] for one in rounds])
    assert [one["tokens"] for one in rounds] == [rounds[0]["tokens"]] * 4
    later = [tokens for one in rounds[1:] for tokens in one["from_depot"]]
    assert 0 in later
    assert any(later)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["wait_complete", "best_effort"])
def test_every_call_is_late(tmp_path: Path, home: DepotHome, policy: str) -> None:
    """SGLang's own fault injector: a hit that it waits for is whole, and another one is dropped."""
    backend = {**depot_backend(settings(home)), "hicache_storage_prefetch_policy": policy}
    delayed = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.5"}
    asked = {"seed": 3, "count": 6, "tokens": TOKENS}
    rounds = []
    with home.start() as depot, Engine(tmp_path, model(), backend, **delayed) as sglang:
        rounds.append(sglang.ask(**asked))
        stored(depot, 6 * WHOLE[0] // PAGE)
        for _ in range(2):
            sglang.flush()
            rounds.append(sglang.ask(**asked))
        log = sglang.log.read_text(errors="replace")
    print([one["from_depot"] for one in rounds])
    assert "random_delay_limit=0.5s" in log
    assert [one["tokens"] for one in rounds] == [rounds[0]["tokens"]] * 3
    if policy == "wait_complete":
        assert [one["from_depot"] for one in rounds[1:]] == [[WHOLE[0]] * 6] * 2


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("face", ["hicache", "linker"])
def test_sliding_windows_in_a_pool_of_their_own(tmp_path: Path, home: DepotHome, face: str) -> None:
    """A hit needs all pages of full attention, and of the windows those at its end."""
    own_pool = {"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 1, 1, 0]}
    keys = settings(home, load_policy="all")
    door = depot_linker(keys) if face == "linker" else depot_backend(keys)
    arguments = {**door, "json_model_override_args": json.dumps(own_pool)}
    with home.start() as depot, Engine(tmp_path, model("cohere2"), arguments) as sglang:
        cold = sglang.ask(**PROMPT)
        stored(depot, (sum(WHOLE) + 2 * SLIDING_WINDOW) // PAGE)
        on_device = sglang.ask(**PROMPT)
        sglang.flush()
        flushed = sglang.ask(**PROMPT)
    assert [one["tokens"] for one in (on_device, flushed)] == [cold["tokens"]] * 2
    assert [one["from_depot"] for one in (cold, on_device, flushed)] == [NOTHING, NOTHING, WHOLE]
