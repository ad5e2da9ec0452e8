"""The Object tier under a real vLLM: a new depot, on an empty disk or without one, serves what the bucket has.

Its blocks are small, so they are in packs.
"""

from pathlib import Path
from typing import Any

from engine_lab import EngineRun, Lab
from test_vllm import generate, hits

from tools.lab.bucket import Bucket

BLOCKS, PACKS = "/kv/blocks/", "/packs/"


def test_new_depots_serve_their_prompts_from_the_bucket(real_lab: Lab) -> None:
    """The tokens are those of an engine that computed them (P1), and the blocks came from the bucket."""
    runtime = real_lab.short_root()
    disk = real_lab.root / "disk"
    disk.mkdir()

    def run(bucket: Bucket, name: str, pipeline: str, **options: Any) -> EngineRun:
        socket = str(runtime / f"{name}.sock")
        node = {"socket": socket, "pipeline": pipeline, "directories": None, **bucket.options(), **options}
        # Silence of a bucket that is there: a busy machine must not reach it.
        node["object_timeout_ms"] = 60_000
        # Its depot is killed: the next one has nothing but the bucket.
        # One by one: nothing computes while the bucket is asked.
        ask = {**generate(name), "one_by_one": True}
        phases = [ask, {"do": "settle", "socket": socket}, {"do": "kill_depot", "socket": socket}]
        return real_lab.run("llama", phases, options=node)

    with Bucket(real_lab.root) as bucket:
        cold = run(bucket, "cold", "Cache|Object")["cold"]
        assert cold["cached"] == [0, 0, 0]
        packs = bucket.requests("PUT", PACKS)
        assert 1 <= packs < 37, "at least 37 blocks are in fewer objects"
        assert bucket.requests("GET", BLOCKS) == 0

        restarted = run(bucket, "restarted", "Cache|Object")["restarted"]
        assert (restarted["tokens"], restarted["cached"]) == (cold["tokens"], hits(True, "llama"))
        read = bucket.requests("GET", PACKS)
        assert packs + 1 <= read < packs + blocks(restarted), "their heads, and then many blocks by one request"

        elsewhere = {"directories": [str(disk)], "posix_promote": True}
        moved = run(bucket, "moved", "Cache|Posix|Object", **elsewhere)["moved"]
        assert (moved["tokens"], moved["cached"]) == (cold["tokens"], hits(True, "llama"))
        assert bucket.requests("GET", PACKS) >= read + packs + 1
        assert len(files(disk)) >= blocks(moved), "what came from the bucket is on the disk as well"


def blocks(result: dict[str, Any]) -> int:
    """Blocks that a result's hits are made of, of 32 tokens each."""
    return sum(result["cached"]) // 32


def files(disk: Path) -> list[Path]:
    return list(disk.rglob("*.kvb"))
