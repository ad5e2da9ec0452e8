"""Real vLLM over a depot in trouble: small pools, failing reads, damaged files, kills, neighbours. The tokens stay."""

import json
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_lab import Lab
from test_vllm import DECODED, PROMPTS, RESET, generate

BLOCK_BYTES = 131_072
KINDS = ("llama", "gemma3")
MANY = [[[seed, 600]] for seed in range(40, 50)]
BLOCKS_OF_MANY = 10 * 18


def settle(lab: Lab) -> dict[str, Any]:
    """A phase that ends when everything dumped is in files."""
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
            yield
        finally:
            process.kill()
            process.wait()


def block_files(lab: Lab) -> list[Path]:
    """Every block on disk, in a fixed order."""
    return sorted((lab.root / "blocks").rglob("*.kvb"))


@pytest.mark.parametrize("layerwise", [True, pytest.param(False, marks=pytest.mark.full)])
def test_pool_of_a_tenth_of_the_working_set(lab: Lab, layerwise: bool) -> None:
    """Blocks are evicted and fetched all the time; hits larger than the pool are cut, not thrashed."""
    options = {"use_layerwise": layerwise, "pool_gb": BLOCKS_OF_MANY * BLOCK_BYTES / 10 / 1e9}
    run = lab.run(
        "llama",
        [
            {**generate("cold", MANY, 8), "one_by_one": True},
            settle(lab),
            RESET,
            {**generate("warm", MANY, 8), "one_by_one": True},
            RESET,
            generate("together", MANY, 8),
        ],
        options=options,
    )
    assert run["warm"]["tokens"] == run["together"]["tokens"] == run["cold"]["tokens"]
    assert all(cached >= 256 for cached in run["warm"]["cached"]), run["warm"]["cached"]
    assert all(cached >= 256 for cached in run["together"]["cached"]), run["together"]["cached"]


def test_failing_reads_and_damaged_files(lab: Lab) -> None:
    """One read in ten fails, then files are truncated and bits flipped between runs: misses, never other tokens."""
    with depot(lab, {}):
        cold = lab.run("llama", [generate("cold"), settle(lab)])["cold"]
    with depot(lab, {"faults": "read_eio=0.1,seed=3"}):
        failing = lab.run("llama", [generate("failing"), RESET, generate("again")])
    assert failing["failing"]["tokens"] == failing["again"]["tokens"] == cold["tokens"]
    assert sum(failing["failing"]["cached"]) > 0
    chosen = random.Random(5)
    files = block_files(lab)
    assert len(files) > 40
    for file in chosen.sample(files, len(files) // 4):
        content = bytearray(file.read_bytes())
        if chosen.random() < 0.5:
            del content[chosen.randrange(len(content)) :]
        else:
            content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
        file.write_bytes(content)
    with depot(lab, {}):
        damaged = lab.run("llama", [generate("damaged"), RESET, generate("mended")])
    assert damaged["damaged"]["tokens"] == damaged["mended"]["tokens"] == cold["tokens"]
    assert sum(damaged["mended"]["cached"]) > sum(damaged["damaged"]["cached"])


@pytest.mark.parametrize("layerwise", [True, False])
def test_depot_killed_between_requests(lab: Lab, layerwise: bool) -> None:
    """kill -9: requests in between are computed, the next depot finds what its predecessor had written."""
    kill = {"do": "kill_depot", "socket": lab.socket}
    run = lab.run(
        "llama",
        [generate("cold"), settle(lab), RESET, kill, generate("dead"), settle(lab), RESET, generate("back")],
        options={"use_layerwise": layerwise},
    )
    assert run["dead"]["tokens"] == run["back"]["tokens"] == run["cold"]["tokens"]
    assert run["back"]["cached"][0] == 576


def test_two_models_share_a_depot_and_nothing_else(lab: Lab) -> None:
    """The same prompts to two models, one directory: each gets its own bytes (P8)."""
    plain = {kind: lab.run(kind, [generate("plain")], connector=None)["plain"] for kind in KINDS}
    for name in ("first", "second"):
        for kind in KINDS:
            run = lab.run(kind, [generate(name), settle(lab)])
            assert run[name]["tokens"] == plain[kind]["tokens"], (name, kind)
            assert (sum(run[name]["cached"]) > 0) == (name == "second"), (name, kind)
    assert len(list((lab.root / "blocks").rglob("namespace.json"))) >= 2


def test_seed_launch_line_and_log_line(lab: Lab) -> None:
    """The seeds' class name, configuration file and log line, as documented."""
    blocks = lab.root / "blocks"
    blocks.mkdir()
    file = lab.root / "ucm.yaml"
    file.write_text(
        "ucm_connectors:\n"
        '  - ucm_connector_name: "UcmPipelineStore"\n'
        "    ucm_connector_config:\n"
        '      store_pipeline: "Cache|Posix"\n'
        f'      storage_backends: "{blocks}"\n'
        "      io_direct: false\n"
        "      cache_buffer_capacity_gb: 1\n"
        "      use_gdr: false\n"
        "enable_event_sync: true\n"
        "use_layerwise: true\n"
        "enable_record_traces: false\n"
        "use_lite: false\n"
        "persist_token_threshold: 0\n"
    )
    engine = {
        "enable_prefix_caching": False,
        "kv_transfer_config": {
            "kv_connector": "UCMConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "kvdepot.engines.vllm",
            "kv_connector_extra_config": {"UCM_CONFIG_FILE": str(file)},
        },
    }
    run = lab.run("llama", [generate("cold"), generate("warm")], engine=engine, connector=None)
    assert run["warm"]["tokens"] == run["cold"]["tokens"]
    assert "total_blocks_num: 18, hit hbm: 0, hit external: 0" in run.log
    assert "total_blocks_num: 18, hit hbm: 0, hit external: 18" in run.log
    assert len(run["cold"]["tokens"]) == len(PROMPTS)
    assert all(len(tokens) == DECODED for tokens in run["cold"]["tokens"])
