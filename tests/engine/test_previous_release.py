"""The release of vLLM before the newest one, in an environment of its own (`make vllm-previous-env`)."""

from dataclasses import replace

import pytest
from engine_lab import Lab
from test_vllm import RESET, generate, hits

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("model", "tp", "layerwise"),
    [("llama", 1, False), ("llama", 2, True), ("gemma3", 1, True), ("gemma3", 2, False)],
)
def test_same_tokens_cold_warm_and_after_a_restart(previous: Lab, model: str, tp: int, layerwise: bool) -> None:
    options = {"use_layerwise": layerwise}
    plain = previous.run(model, [generate("cold")], tp=tp, connector=None)["cold"]
    first = previous.run(model, [generate("cold"), RESET, generate("warm")], tp=tp, options=options)
    second = previous.run(model, [generate("restarted")], tp=tp, options=options)
    assert first["cold"]["tokens"] == first["warm"]["tokens"] == second["restarted"]["tokens"] == plain["tokens"]
    assert first["cold"]["cached"] == [0, 0, 0]
    assert first["warm"]["cached"] == second["restarted"]["cached"] == hits(layerwise, model)


def test_releases_do_not_share_blocks(previous: Lab, lab: Lab) -> None:
    """A block of one release may mean something else to another one: the release is a fact of the namespace (P8)."""
    newest = replace(lab, root=previous.root)
    first = previous.run("llama", [generate("cold")])
    other = newest.run("llama", [generate("cold"), RESET, generate("warm")])
    assert other["cold"]["cached"] == [0, 0, 0]
    assert other["cold"]["tokens"] == other["warm"]["tokens"] == first["cold"]["tokens"]
    assert other["warm"]["cached"] == hits(False, "llama") or other["warm"]["cached"] == hits(True, "llama")
