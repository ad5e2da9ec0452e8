"""``kv_transfer_params`` of requests to real vLLM: what is loaded and what is stored."""

from pathlib import Path
from typing import Any

from engine_lab import Lab
from test_vllm import RESET

from tools.lab.depot import depot_stats

PROMPT_TOKENS, BLOCK = 320, 32
ALL = PROMPT_TOKENS - BLOCK  # a token stays to be computed


def ask(name: str, seed: int, params: Any = None) -> dict[str, Any]:
    prompts = [[[seed, PROMPT_TOKENS]]]
    return {"do": "generate", "name": name, "prompts": prompts, "max_tokens": 4, "kv_transfer_params": params}


def test_requests_are_loaded_and_stored_as_they_ask(lab: Lab) -> None:
    settled = {"do": "settle", "socket": lab.socket}
    run = lab.run(
        "llama",
        [
            ask("secret", 1, {"kvdepot.no_store": True}),
            ask("begun", 2, {"max_offload_tokens": 3 * BLOCK + 4}),
            ask("open", 3),
            ask("last", 4),
            settled,
            RESET,
            ask("open again", 3),
            ask("begun again", 2),
            ask("secret again", 1),
            ask("last again", 4),
            settled,
            RESET,
            ask("not loaded", 1, {"kvdepot.no_load": True}),
            RESET,
            ask("two blocks", 1, {"max_load_tokens": 3 * BLOCK - 1}),
            RESET,
            ask("host memory", 1, {"kv_load_tiers": []}),
            RESET,
            ask("everything", 1, {"max_load_tokens": 10**6, "kvdepot.no_load": False}),
            RESET,
            ask("misspelt", 1, {"kvdepot.noload": True, "do_remote_prefill": False}),
            RESET,
            ask("malformed", 1, {"max_load_tokens": -1}),
            ask("batch", 5, {"kvdepot.priority": "low"}),
            ask("other batch", 6, {"kvdepot.priority": "low"}),
            ask("important", 7, {"kvdepot.priority": "high"}),
            RESET,
            ask("other batch again", 6, {"kvdepot.priority": "low"}),
            ask("stored by now", 8, {"kvdepot.no_store": True}),
            settled,
        ],
    )
    cached = {name: result["cached"][0] for name, result in run.results.items() if name != "metrics"}
    assert cached == {
        "secret": 0,
        "begun": 0,
        "open": 0,
        "last": 0,
        "open again": ALL,
        "begun again": 3 * BLOCK,
        "secret again": 0,
        "last again": ALL,
        "not loaded": 0,
        "two blocks": 2 * BLOCK,
        "host memory": ALL,
        "everything": ALL,
        "misspelt": ALL,
        "malformed": 0,
        "batch": 0,
        "other batch": 0,
        "important": 0,
        "other batch again": ALL,
        "stored by now": 0,
    }
    same = ("secret again", "not loaded", "two blocks", "host memory", "everything", "misspelt", "malformed")
    assert [run[name]["tokens"] for name in same] == [run["secret"]["tokens"]] * len(same)
    assert run.log.count("unknown key 'kvdepot.noload': did you mean kvdepot.no_load?") == 1
    assert run.log.count("max_load_tokens of a request must be a whole number of tokens, 0 or more, got -1") == 1
    metrics = run["metrics"]
    assert metrics["vllm:kvdepot_params_unknown"] == 2
    assert metrics["vllm:kvdepot_params_malformed"] == 1
    assert metrics["vllm:kvdepot_misses/asked"] == 2
    assert metrics["vllm:kvdepot_misses/unknown"] == 9
    stats = depot_stats(Path(lab.socket))
    assert stats is not None
    assert stats["high_priority_blocks"] == PROMPT_TOKENS // BLOCK
    # What was loaded is not of low priority any more; only the block of its last token, which was computed, is.
    assert stats["low_priority_blocks"] == PROMPT_TOKENS // BLOCK + 1


def test_a_request_is_loaded_from_the_tiers_that_it_allows(real_lab: Lab) -> None:
    """The blocks are in files; the memory of the other tier is empty."""
    stored = real_lab.run("llama", [ask("stored", 1), {"do": "settle", "socket": real_lab.socket}])
    medium, socket = real_lab.root / "dax", str(real_lab.short_root() / "depot.sock")
    with medium.open("wb") as file:
        file.truncate(1 << 28)
    both = {"socket": socket, "pipeline": "Cache|Dax|Posix", "dax_device_path": str(medium), "dax_max_size_gb": 0.25}
    memory, files = ({"kv_load_tiers": [{"medium": medium}], "kvdepot.no_store": True} for medium in ("CPU", "STORAGE"))
    phases = [ask("memory", 1, memory), RESET, ask("files", 1, files), RESET, ask("pool", 1, memory)]
    run = real_lab.run("llama", phases, options=both)
    assert [run[name]["cached"][0] for name in ("memory", "files", "pool")] == [0, ALL, ALL]
    assert {tuple(run[name]["tokens"][0]) for name in ("memory", "files", "pool")} == {
        tuple(stored["stored"]["tokens"][0])
    }
    assert run["metrics"]["vllm:kvdepot_misses/excluded"] == 1
