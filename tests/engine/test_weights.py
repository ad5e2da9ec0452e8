"""Weights that change in an engine's memory: no engine is served KV of other weights than its own (P1)."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from engine_lab import EngineRun, Lab
from test_vllm import RESET, generate, hits

from tools.lab.warm import Warm

OTHERS = [[[11, 330]], [[12, 290]]]
UPDATE = {"do": "update_weights"}
RESET_ALL = {"do": "reset_all"}


def beside(lab: Lab, warm: Warm, name: str) -> Lab:
    """The means to run another engine on the same depot concurrently."""
    root = lab.root / name
    root.mkdir()
    return replace(lab, root=root, warm=warm)


def shared(lab: Lab, layerwise: bool) -> dict[str, Any]:
    (lab.root / "blocks").mkdir(exist_ok=True)
    return {"socket": lab.socket, "directories": [str(lab.root / "blocks")], "use_layerwise": layerwise}


def reference(lab: Lab, model: str, ranks: int) -> EngineRun:
    """An engine without a connector, before and after the same change."""
    phases = [generate("old"), generate("old others", OTHERS), UPDATE, RESET, generate("new")]
    plain = lab.run(model, [*phases, generate("new others", OTHERS)], tp=ranks, connector=None)
    assert plain["old"]["tokens"] != plain["new"]["tokens"]
    assert plain["old others"]["tokens"] != plain["new others"]["tokens"]
    return plain


@pytest.mark.parametrize(
    ("model", "ranks", "layerwise"),
    [
        ("llama", 1, True),
        pytest.param("gemma3", 2, False, marks=pytest.mark.full),
        pytest.param("llama", 2, False, marks=pytest.mark.full),
    ],
)
def test_engines_with_old_and_new_weights_share_a_depot(real_lab: Lab, model: str, ranks: int, layerwise: bool) -> None:
    """One engine's weights change in place while another one runs on; then both restart from the disk.

    Each order: old KV is stored before the change and after it, new KV beside it, and both engines look up each.
    """
    lab = real_lab
    plain = reference(lab, model, ranks)
    options = shared(lab, layerwise)
    first_stored, changed, others_stored = (str(lab.root / name) for name in ("first", "changed", "others"))
    stays = [
        generate("old"),
        # An engine returns before its last dumps have ended.
        {"do": "settle", "socket": lab.socket},
        {"do": "touch", "file": first_stored},
        {"do": "wait_for", "file": changed},
        generate("old others", OTHERS),
        RESET,
        generate("old again"),
        {"do": "touch", "file": others_stored},
    ]
    changes = [
        {"do": "wait_for", "file": first_stored},
        generate("old"),
        UPDATE,
        RESET_ALL,
        generate("new"),
        {"do": "touch", "file": changed},
        {"do": "wait_for", "file": others_stored},
        generate("new others", OTHERS),
        RESET,
        generate("new again"),
    ]
    with Warm(lab.root / "warm.log", lab.python) as warm, ThreadPoolExecutor() as both:
        runs = [
            both.submit(one.run, model, phases, tp=ranks, options=options)
            for one, phases in ((beside(lab, lab.warm, "stays"), stays), (beside(lab, warm, "changes"), changes))
        ]
        stayed, moved = (run.result() for run in runs)
    found = hits(layerwise, model)
    assert stayed["old"]["cached"] == moved["new"]["cached"] == [0, 0, 0]
    assert moved["old"]["cached"] == stayed["old again"]["cached"] == moved["new again"]["cached"] == found
    assert stayed["old others"]["cached"] == moved["new others"]["cached"] == [0, 0]
    assert moved["reset_all"] is True
    for phase in ("old", "old others", "old again"):
        assert stayed[phase]["tokens"] == plain[phase.removesuffix(" again")]["tokens"], phase
    for phase in ("old", "new", "new others", "new again"):
        assert moved[phase]["tokens"] == plain[phase.removesuffix(" again")]["tokens"], phase

    restarted = lab.run(
        model,
        [generate("old"), generate("old others", OTHERS), UPDATE, RESET_ALL, generate("new")],
        tp=ranks,
        options=options,
    )
    for phase in ("old", "old others", "new"):
        assert restarted[phase]["tokens"] == plain[phase]["tokens"]
    # The weights of the disk find what was stored with them. The same change finds nothing: vLLM packs linear weights
    # on CPUs, where their bytes are inaccessible, so weights in memory are known only to the engine that has them.
    assert restarted["old"]["cached"] == found
    assert restarted["new"]["cached"] == [0, 0, 0]
    assert min(restarted["old others"]["cached"]) > 0


@pytest.mark.parametrize("layerwise", [True, pytest.param(False, marks=pytest.mark.full)])
def test_sleep_keeps_what_is_stored(real_lab: Lab, layerwise: bool) -> None:
    """vLLM resets its connector before it sleeps: the weights are the same afterwards, so everything is found again."""
    run = real_lab.run(
        "llama",
        [generate("cold"), {"do": "nap"}, generate("warm")],
        options={"use_layerwise": layerwise},
    )
    assert run["warm"]["cached"] == hits(layerwise, "llama")
    assert run["warm"]["tokens"] == run["cold"]["tokens"]
    assert "the weights are the same" in run.log


def test_an_engine_sleeps_and_is_reset_without_a_living_depot(real_lab: Lab) -> None:
    run = real_lab.run(
        "llama",
        [
            generate("cold"),
            {"do": "settle", "socket": real_lab.socket},
            {"do": "kill_depot", "socket": real_lab.socket},
            {"do": "nap"},
            RESET_ALL,
            generate("without"),
            {"do": "attached"},
            RESET,
            {**generate("warm"), "until_cached": 1},
        ],
    )
    assert run["reset_all"] is True
    assert run["without"]["tokens"] == run["warm"]["tokens"] == run["cold"]["tokens"]


def test_only_what_changes_the_bytes_keeps_engines_apart(real_lab: Lab) -> None:
    """Another path, another load format and a shorter context are the same model; dummy weights are not (P8)."""
    lab = real_lab
    first = lab.run("llama", [generate("cold")])
    copy = lab.root / "0123abc"
    shutil.copytree(lab.model("llama"), copy)
    elsewhere = {"model": str(copy), "load_format": "safetensors", "max_model_len": 1024}
    second = lab.run("llama", [generate("elsewhere")], engine=elsewhere)
    assert second["elsewhere"]["cached"] == hits(True, "llama")
    assert second["elsewhere"]["tokens"] == first["cold"]["tokens"]

    dummy = lab.run("llama", [generate("dummy")], engine={"load_format": "dummy"})
    assert dummy["dummy"]["cached"] == [0, 0, 0]
    again = lab.run("llama", [generate("dummy")], engine={"load_format": "dummy"})
    # As above: on CPUs weights in memory have no name that outlives the engine.
    assert again["dummy"]["cached"] == [0, 0, 0]
    assert again["dummy"]["tokens"] == dummy["dummy"]["tokens"] != first["cold"]["tokens"]


def test_weights_that_nobody_announced_are_not_served_from_the_depot(real_lab: Lab) -> None:
    """A trainer resets only vLLM's own cache: nothing is loaded or stored until the connector is reset as well."""
    plain = reference(real_lab, "llama", 1)
    run = real_lab.run(
        "llama",
        [
            generate("old"),
            UPDATE,
            # The pause after which the connector checks.
            {"do": "sleep", "s": 0.3},
            RESET,
            generate("new"),
            generate("new others", OTHERS),
            RESET_ALL,
            generate("new again"),
        ],
    )
    assert "the weights have changed" in run.log
    assert run["new again"]["cached"] == [0, 0, 0]
    assert run["new"]["tokens"] == run["new again"]["tokens"] == plain["new"]["tokens"]
    assert run["new others"]["tokens"] == plain["new others"]["tokens"]
    restarted = real_lab.run("llama", [generate("old"), generate("old others", OTHERS)])
    assert restarted["old"]["cached"] == hits(True, "llama")
    assert restarted["old others"]["cached"] == [0, 0]
    for phase in ("old", "old others"):
        assert restarted[phase]["tokens"] == plain[phase]["tokens"]


def test_vllm_s_own_reload_of_weights(real_lab: Lab) -> None:
    """``reload_weights``, of the same files and of others: what was stored with other weights is not found."""
    lab, other = real_lab, real_lab.model("llama-other")
    plain = lab.run("llama", [generate("own")], connector=None)
    others = lab.run("llama-other", [generate("other")], connector=None)
    phases: list[dict[str, Any]] = [generate("own")]
    for name, of_files in (("same files", {}), ("other files", {"model": other})):
        phases += [{"do": "reload_weights", **of_files}, RESET_ALL, generate(name), RESET, generate(f"{name} again")]
    run = lab.run("llama", phases)
    assert run["reset_all"] is True
    # On CPUs vLLM packs the weights anew, so their bytes cannot be compared: the same ones count as others, too.
    assert run["same files"]["cached"] == run["other files"]["cached"] == [0, 0, 0]
    assert run["same files again"]["cached"] == run["other files again"]["cached"] == hits(True, "llama")
    for phase in ("own", "same files", "same files again"):
        assert run[phase]["tokens"] == plain["own"]["tokens"], phase
    for phase in ("other files", "other files again"):
        assert run[phase]["tokens"] == others["other"]["tokens"], phase
    assert plain["own"]["tokens"] != others["other"]["tokens"]


def test_weights_reloaded_before_the_first_request_need_no_reset(real_lab: Lab) -> None:
    """VLLM has no KV of the weights on disk then: what is computed is stored, and is of the new ones."""
    lab, other = real_lab, real_lab.model("llama-other")
    others = lab.run("llama-other", [generate("other")], connector=None)
    run = lab.run("llama", [{"do": "reload_weights", "model": other}, generate("first"), RESET, generate("again")])
    assert run["first"]["cached"] == [0, 0, 0]
    assert run["again"]["cached"] == hits(True, "llama")
    assert run["first"]["tokens"] == run["again"]["tokens"] == others["other"]["tokens"]
    own = lab.run("llama", [generate("own")])
    assert own["own"]["cached"] == [0, 0, 0], "the files have another name"
