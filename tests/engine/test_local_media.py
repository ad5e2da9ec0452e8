"""The Slab and the Dax tier under a real vLLM: after kill -9 of the depot the next one serves what the medium has."""

from pathlib import Path
from typing import Any

import pytest
from engine_lab import EngineRun, Lab
from test_vllm import generate, hits

MEDIUM = {
    "Cache|Slab": {"slab_path": "slab", "slab_capacity_gb": 0.25, "slab_segment_mb": 8},
    "Cache|Dax": {"dax_device_path": "dax", "dax_max_size_gb": 0.25},
    # The pool only passes the blocks on.
    # Workers copy from the medium, which they map, once a first load has told the depot that they can.
    "Dax": {
        "dax_device_path": "dax",
        "dax_max_size_gb": 0.25,
        "dax_lease_in_place": True,
        "pool_gb": None,
        "pool_slots": 64,
    },
}


@pytest.mark.parametrize("pipeline", ["Cache|Slab", "Dax", pytest.param("Cache|Dax", marks=pytest.mark.full)])
def test_a_killed_depot_s_blocks_are_served_from_the_medium(real_lab: Lab, pipeline: str) -> None:
    """The tokens are those of the engine that computed them (P1), and every prompt has its complete hit."""
    paths = {key: value for key, value in MEDIUM[pipeline].items() if key.endswith("path")}
    places = {key: str(real_lab.root / str(name)) for key, name in paths.items()}
    if "dax_device_path" in places:
        with Path(places["dax_device_path"]).open("wb") as medium:
            medium.truncate(1 << 28)
    runtime = real_lab.short_root()

    def run(name: str) -> EngineRun:
        socket = str(runtime / f"{name}.sock")
        node: dict[str, Any] = {
            "socket": socket,
            "pipeline": pipeline,
            "directories": None,
            **MEDIUM[pipeline],
            **places,
        }
        ask = {**generate(name), "one_by_one": True}
        phases = [ask, {"do": "settle", "socket": socket}, {"do": "kill_depot", "socket": socket}]
        return real_lab.run("llama", phases, options=node)

    cold = run("cold")["cold"]
    assert cold["cached"] == [0, 0, 0]
    restarted = run("restarted")["restarted"]
    assert (restarted["tokens"], restarted["cached"]) == (cold["tokens"], hits(True, "llama"))
