"""Configuration files of the seeds, unchanged except for paths, and the class name and log line that they imply."""

from pathlib import Path
from typing import Any

import pytest
from engine_lab import Lab
from test_vllm import DECODED, PROMPTS, RESET, generate, hits

PIPELINE_STORE = """\
ucm_connectors:
  - ucm_connector_name: "UcmPipelineStore"
    ucm_connector_config:
      store_pipeline: "Cache|Posix"
      storage_backends: "/mnt/test"
      io_direct: false
      cache_buffer_capacity_gb: 1
      # posix_capacity_gb: 1024
      use_gdr: false
enable_event_sync: true
use_layerwise: true
enable_record_traces: false
use_lite: false
persist_token_threshold: 0
"""
NFS_STORE = """\
ucm_connectors:
  - ucm_connector_name: "UcmNfsStore"
    ucm_connector_config:
      storage_backends: "/mnt/test"
      io_direct: false
"""
NFS_STORE_WITH_ALL_KEYS = """\
ucm_connectors:
  - ucm_connector_name: "UcmNfsStore"
    ucm_connector_config:
      storage_backends: "/mnt/test"
      io_direct: true
      stream_number: 4
      timeout_ms: 10000
      buffer_number: 64
      shard_data_dir: false
enable_event_sync: false
use_layerwise: false
"""


def launch(file: Path) -> dict[str, Any]:
    """Returns the seeds' launch command, except for the module's path and the size of the model."""
    return {
        "enable_prefix_caching": False,
        "kv_transfer_config": {
            "kv_connector": "UCMConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "kvdepot.engines.vllm",
            "kv_connector_extra_config": {"UCM_CONFIG_FILE": str(file)},
        },
    }


@pytest.mark.parametrize(
    ("text", "tp", "block_size"),
    [
        (PIPELINE_STORE, 1, 32),
        (NFS_STORE, 1, 32),
        (NFS_STORE_WITH_ALL_KEYS, 1, 32),
        pytest.param(NFS_STORE, 2, 128, marks=pytest.mark.full),
    ],
    ids=["pipeline store", "nfs store", "nfs store with all keys", "nfs store on two ranks"],
)
def test_seed_configuration_and_log_line(real_lab: Lab, text: str, tp: int, block_size: int) -> None:
    """The second time all full blocks come from the depot; a new engine finds them on disk."""
    blocks = real_lab.root / "blocks"
    blocks.mkdir()
    file = real_lab.root / "ucm.yaml"
    file.write_text(text.replace("/mnt/test", str(blocks)))
    engine = {**launch(file), "block_size": block_size}
    # A separate socket for this test, since the file names none; a socket's path must be short.
    environment = {"XDG_RUNTIME_DIR": str(real_lab.short_root()), "KVDEPOT_ATTACH_TIMEOUT_MS": "60000"}
    plain = real_lab.run("llama", [generate("plain")], connector=None)
    total = 600 // block_size
    warm = {**generate("warm"), "until_cached": total * block_size}
    first, second = (
        real_lab.run("llama", phases, tp=tp, engine=engine, connector=None, environment=environment)
        for phases in ([generate("cold"), warm], [warm])
    )
    assert first["cold"]["tokens"] == plain["plain"]["tokens"]
    for run in (first, second):
        assert run["warm"]["tokens"] == plain["plain"]["tokens"]
        assert run["warm"]["cached"][0] == total * block_size
        assert f"total_blocks_num: {total}, hit hbm: 0, hit external: {total}" in run.log
    assert f"total_blocks_num: {total}, hit hbm: 0, hit external: 0" in first.log
    assert len(first["cold"]["tokens"]) == len(PROMPTS)
    assert all(len(tokens) == DECODED for tokens in first["cold"]["tokens"])
    assert list(blocks.rglob("*.kvb"))


@pytest.mark.parametrize("layerwise", [True, False])
def test_staging_pool_over_a_directory(real_lab: Lab, layerwise: bool) -> None:
    """The pool keeps nothing: hits come from files, even when all requests come concurrently."""
    # Space for one prompt's blocks, of which 70 % may be unsaved, but not for three: loads wait for each other's slots.
    options = {"pipeline": "Staging|Posix", "pool_gb": None, "pool_slots": 32, "use_layerwise": layerwise}
    run = real_lab.run(
        "llama",
        [
            {**generate("cold"), "one_by_one": True, "settle": str(real_lab.socket)},
            RESET,
            {**generate("warm"), "one_by_one": True},
            RESET,
            generate("together"),
        ],
        options=options,
    )
    assert run["warm"]["tokens"] == run["together"]["tokens"] == run["cold"]["tokens"]
    assert run["warm"]["cached"] == hits(layerwise, "llama")
