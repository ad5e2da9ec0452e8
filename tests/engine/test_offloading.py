"""Real vLLM with its own offloading on a CPU, and the depot below it: the same tokens, and hits where there must be."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from engine_lab import REPOSITORY, EngineRun, Lab
from offloading_lab import FORGET, IDLE, ON_A_CPU, offloading
from test_vllm import RESET, generate

PROMPTS = [[[1, 600]], [[2, 350]], [[3, 320]]]
HITS = [576, 320, 320]
WINDOWED_HITS = [576, 320, 288]
"""vLLM leaves a token to be computed where a layer has a window."""
CHUNKS = sum(HITS) // 32
ATTACHED = {"do": "tier_attached"}
UPDATE = {"do": "update_weights"}
PAUSE = {"do": "pause"}
RESUME = {"do": "resume"}
RESET_ALL = {"do": "reset_all"}
COUNTS = {"do": "tier_counts", "name": "counts"}


def prompts(name: str) -> dict[str, Any]:
    return generate(name, PROMPTS, 8)


def settled(lab: Lab) -> list[dict[str, Any]]:
    """All that was computed is in the depot's files."""
    return [IDLE, {"do": "settle", "socket": lab.socket}]


def run(
    lab: Lab,
    *phases: dict[str, Any],
    model: str = "llama",
    tp: int = 1,
    options: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    **extra: Any,
) -> EngineRun:
    wrap = offloading(**extra)
    # Stores begin a step late and are copied by a thread: they are counted when they have ended.
    return lab.run(model, [*phases, IDLE, COUNTS], tp=tp, options=options, engine=engine, beside=wrap)


@pytest.mark.parametrize(
    ("model", "tp"),
    [
        pytest.param("llama", 1, marks=pytest.mark.full),
        pytest.param("llama", 2, marks=pytest.mark.full),
        pytest.param("gemma3", 1, marks=pytest.mark.full),
        ("gemma3", 2),
    ],
)
def test_same_tokens_cold_warm_and_after_a_restart(real_lab: Lab, model: str, tp: int) -> None:
    """Outputs do not depend on where the KV came from (P1), and a request asks the depot once, not once a chunk."""
    lab, hits = real_lab, HITS if model == "llama" else WINDOWED_HITS
    first = run(lab, ATTACHED, prompts("cold"), FORGET, prompts("warm"), *settled(lab), model=model, tp=tp)
    cold = first["cold"]
    assert cold["cached"] == [0, 0, 0]
    assert first["warm"]["tokens"] == cold["tokens"]
    assert first["warm"]["cached"] == hits
    assert first["counts"]["loaded"] > 0
    # Six requests; those that wait for the engine longer than an answer holds ask again.
    assert first["counts"]["lookups"] < CHUNKS
    assert first["metrics"]["vllm:kvdepot_offload_loaded_chunks"] == first["counts"]["loaded"]
    assert "attached to the depot (pid" in first.log

    second = run(lab, ATTACHED, prompts("restarted"), model=model, tp=tp)
    assert second["restarted"]["tokens"] == cold["tokens"]
    assert second["restarted"]["cached"] == hits
    assert "dumped" not in second["counts"]


def test_a_depot_that_is_killed_is_a_miss_and_comes_back(real_lab: Lab) -> None:
    """kill -9 between requests: nothing fails, and what was in files is found again (P2)."""
    lab = real_lab
    kill = {"do": "kill_depot", "socket": lab.socket}
    found = run(
        lab,
        ATTACHED,
        prompts("cold"),
        *settled(lab),
        FORGET,
        kill,
        prompts("killed"),
        FORGET,
        ATTACHED,
        prompts("back"),
        FORGET,
        kill,
        generate("others", [[[7, 330]]], 8),
        ATTACHED,
        FORGET,
        prompts("back again"),
    )
    for name in ("killed", "back", "back again"):
        assert found[name]["tokens"] == found["cold"]["tokens"]
    assert found["back"]["cached"] == HITS
    assert found["back again"]["cached"] == HITS


def test_without_a_depot_everything_is_computed(real_lab: Lab) -> None:
    """None answers from the start: requests are computed, and what could not be stored is counted."""
    options = {"start_depot": False, "attach_timeout_ms": 100}
    found = run(real_lab, prompts("cold"), FORGET, prompts("again"), options=options)
    assert found["again"]["tokens"] == found["cold"]["tokens"]
    assert found["again"]["cached"] == [0, 0, 0]
    assert found["counts"]["miss_no_depot"] > 0
    assert found["counts"]["dump_no_depot"] == 2 * CHUNKS
    assert "lookups" not in found["counts"]
    assert "no depot answers" in found.log


def other_weights(lab: Lab) -> str:
    """A model that differs from the usual one in its weights alone."""
    from safetensors.torch import load_file, save_file

    path = lab.root / "other"
    shutil.copytree(lab.model("llama"), path)
    (file,) = path.glob("*.safetensors")
    tensors = {name: tensor if tensor.dim() == 1 else tensor.flip(0) for name, tensor in load_file(file).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    return str(path)


def test_two_models_in_one_depot(real_lab: Lab) -> None:
    """The same shape under other weights is found by nobody else (P8)."""
    lab = real_lab
    other = {"model": other_weights(lab)}
    one = run(lab, ATTACHED, prompts("cold"), *settled(lab))
    two = run(lab, ATTACHED, prompts("cold"), FORGET, prompts("warm"), engine=other)
    assert two["cold"]["cached"] == [0, 0, 0]
    assert two["cold"]["tokens"] != one["cold"]["tokens"]
    assert two["warm"]["cached"] == HITS
    assert two["warm"]["tokens"] == two["cold"]["tokens"]


def damage(blocks: Path) -> int:
    """Changes a byte in the middle of every second block's file; how many."""
    files = sorted(path for path in blocks.rglob("*") if path.is_file() and path.stat().st_size > 1 << 16)
    for path in files[::2]:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 0x10]))
    return len(files[::2])


def test_damaged_files_are_misses(real_lab: Lab) -> None:
    """A chunk that the disk has changed is computed, and the request goes on (P1, P2)."""
    lab = real_lab
    first = run(lab, ATTACHED, prompts("cold"), *settled(lab), {"do": "kill_depot", "socket": lab.socket})
    assert damage(lab.root / "blocks") > CHUNKS // 4
    second = run(lab, ATTACHED, prompts("damaged"), *settled(lab), FORGET, prompts("mended"))
    assert second["damaged"]["tokens"] == first["cold"]["tokens"]
    assert sum(second["damaged"]["cached"]) < sum(HITS)
    assert second["mended"]["tokens"] == first["cold"]["tokens"]
    assert second["mended"]["cached"] == HITS


def test_weights_that_change_in_place_have_a_namespace_of_their_own(real_lab: Lab) -> None:
    """As documented: nothing from before the pause is served, and engines with the files' weights get nothing new."""
    lab = real_lab
    plain = lab.run("llama", [prompts("old"), UPDATE, RESET, prompts("new")], connector=None)
    assert plain["old"]["tokens"] != plain["new"]["tokens"]
    changed = run(
        lab,
        ATTACHED,
        prompts("old"),
        IDLE,
        PAUSE,
        UPDATE,
        RESUME,
        prompts("new"),
        FORGET,
        prompts("new again"),
        *settled(lab),
    )
    assert changed["old"]["tokens"] == plain["old"]["tokens"]
    assert changed["new"]["tokens"] == plain["new"]["tokens"]
    assert changed["new"]["cached"] == [0, 0, 0]
    assert changed["new again"]["tokens"] == plain["new"]["tokens"]
    assert changed["new again"]["cached"] == HITS
    assert changed["counts"]["resets"] == 1
    again = run(lab, ATTACHED, prompts("old"))
    assert again["old"]["tokens"] == plain["old"]["tokens"]
    assert again["old"]["cached"] == HITS


def documented_transfer() -> dict[str, Any]:
    """The transfer configuration of the start line in docs/offloading.md."""
    text = (REPOSITORY / "docs" / "offloading.md").read_text("utf-8")
    found: dict[str, Any] = json.loads(text.split("--kv-transfer-config '", 1)[1].split("'", 1)[0])
    return found


def test_the_documented_line_starts_an_engine(real_lab: Lab) -> None:
    """As written, but for the file's name and what copies on a CPU."""
    file = real_lab.root / "kvdepot.yaml"
    file.write_text(json.dumps(real_lab.options({})))

    def documented(_: dict[str, Any]) -> dict[str, Any]:
        transfer = documented_transfer()
        extra = transfer["kv_connector_extra_config"]
        assert extra.pop("spec_name") == "TieringOffloadingSpec"
        extra["secondary_tiers"][0]["config"] = str(file)
        return {**transfer, "kv_connector_extra_config": {**extra, **ON_A_CPU}}

    engine = {"kv_offloading_size": 1 / 16}
    found = real_lab.run("llama", [prompts("cold"), FORGET, prompts("warm")], engine=engine, beside=documented)
    assert found["warm"]["tokens"] == found["cold"]["tokens"]
    assert found["warm"]["cached"] == HITS
    assert "(KVDepotTier)" in found.log


def test_a_reset_may_keep_what_is_stored(real_lab: Lab) -> None:
    """From the first chunk on that is stored after it."""
    others = generate("others", [[[7, 330]]], 8)
    found = run(real_lab, ATTACHED, prompts("cold"), IDLE, RESET_ALL, others, IDLE, prompts("warm"), on_reset="keep")
    assert found["warm"]["tokens"] == found["cold"]["tokens"]
    assert found["warm"]["cached"] == HITS
