"""Real SGLang on CPU with latent attention: its pages are the same on all ranks, and stored once (P1, P8).

The attention is that of SGLang for CPUs with AMX, with kernels of the stand-in: ``torch_native`` cannot compute it.
"""

import json
from pathlib import Path

import pytest
from conftest import cores_of_ranks, model, settings
from killed import PAGES, asked, check, contents, namespaces

from tools.lab.depot import DepotHome
from tools.make_model import POSITIONS_MAX
from tools.sglang.engine import depot_backend, depot_linker

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 2.0,
    "original_max_position_embeddings": POSITIONS_MAX // 2,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""Positions as DeepSeek's models have them: for latent attention SGLang has no others on a CPU."""
CONFIG = {"rope_parameters": YARN, "moe_layer_freq": 1}
LATENT = {
    # Without AMX, SGLang replaces the backend that is asked for by `attention_backend`.
    "prefill_attention_backend": "intel_amx",
    "decode_attention_backend": "intel_amx",
    "json_model_override_args": json.dumps(CONFIG),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("face", "ranks"),
    [
        ("linker", 1),
        pytest.param("hicache", 1, marks=pytest.mark.full),
        pytest.param("linker", 2, marks=pytest.mark.full),
        pytest.param("hicache", 2, marks=pytest.mark.full),
    ],
)
def test_the_first_rank_stores_latent_pages_and_every_rank_loads_them(
    tmp_path: Path, home: DepotHome, face: str, ranks: int
) -> None:
    keys = settings(home, load_policy="all")
    door = depot_linker(keys) if face == "linker" else depot_backend(keys)
    arguments = {**door, **LATENT, "tp_size": ranks}
    seen = asked(tmp_path, home, model("mla"), arguments, PAGES, **cores_of_ranks(ranks))
    check(seen, blocks=PAGES, ranks=ranks)
    (rank,) = namespaces(home)
    assert rank == (0, 1)
    assert len(set(contents(namespaces(home)[rank]).values())) == PAGES
