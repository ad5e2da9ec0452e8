"""The release of vLLM before the newest one, in an environment of its own (`make vllm-previous-env`)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_lab import REPOSITORY, Lab
from test_vllm import RESET, generate, hits

from tools.lab.warm import Warm

pytestmark = pytest.mark.full
PYTHON = REPOSITORY / ".venv-vllm-previous" / "bin" / "python"


@pytest.fixture(scope="module")
def previous_warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    if not PYTHON.exists():
        pytest.skip("no environment of the previous release: make vllm-previous-env")
    with Warm(tmp_path_factory.mktemp("previous") / "warm.log", str(PYTHON)) as started:
        yield started


@pytest.fixture
def previous(tmp_path: Path, previous_warm: Warm, request: pytest.FixtureRequest) -> Iterator[Lab]:
    option: Callable[[str], Any] = request.config.getoption
    made = Lab(tmp_path, "real", str(PYTHON), Path(option("--models")), previous_warm)
    yield made
    made.close()


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
