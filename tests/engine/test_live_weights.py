"""A digest of the weights in memory: every bit of every tensor counts, and two models with the same weights agree."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot.engines.vllm import live
from kvdepot.engines.vllm.live import LiveWeights, device_sum
from kvdepot.engines.vllm.versions import WeightsVersion

torch = pytest.importorskip("torch")


def model(dtype: Any = None) -> Any:
    made = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.Linear(17, 9)).to(dtype or torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    made.register_buffer("scale", torch.ones(3), persistent=False)
    return made


class Runner:
    """The part of a worker that holds an engine's models."""

    def __init__(self, *models: Any) -> None:
        self.model = models[0]
        self.drafter = SimpleNamespace(model=models[1]) if len(models) > 1 else None

    def get_model(self) -> Any:
        return self.model

    def start(self, config: Any) -> LiveWeights:
        return Face().register(config)


class Face:
    """A connector that a worker calls."""

    def register(self, config: Any) -> LiveWeights:
        return LiveWeights.of(config)


def digest(*models: Any) -> str:
    runner = Runner(*models)
    return LiveWeights(runner).digest()


def flip(model: Any) -> None:
    """Flips one bit of one value."""
    model[1].weight.data.view(torch.int32)[3, 4] ^= 1


def exchange(model: Any) -> None:
    """Swaps two values, which no sum of them would reveal."""
    row = model[0].weight.data[0]
    row[0], row[1] = row[1].clone(), row[0].clone()


def negate(model: Any) -> None:
    """Flips two signs: the highest bits of two words."""
    model[0].weight.data[2, 2] *= -1
    model[0].weight.data[4, 4] *= -1


def scale(model: Any) -> None:
    model.scale[2] = 2


CHANGES = [flip, exchange, negate, scale]


@pytest.fixture(params=["host", "device"])
def _memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both digests; the one for devices runs on any tensor."""
    if request.param == "device":
        monkeypatch.setattr(live, "_host_digest", lambda tensor, threads: device_sum(live._as_bytes(tensor), 64))


@pytest.mark.usefixtures("_memory")
def test_models_of_the_same_weights_have_one_digest() -> None:
    assert digest(model()) == digest(model()) != ""
    assert digest(model(), model()) != digest(model())
    assert digest(model(torch.bfloat16)) == digest(model(torch.bfloat16)) != digest(model())


@pytest.mark.usefixtures("_memory")
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_in_place_is_seen(change: Callable[[Any], None]) -> None:
    made = model()
    before = digest(made)
    change(made)
    after = digest(made)
    assert after != before
    assert after == digest(made)
    assert digest(model(), made) != digest(model(), model())


@pytest.mark.parametrize("change", [flip, exchange])
def test_every_change_is_seen_in_a_weight_that_several_threads_hash(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = digest(model())
    monkeypatch.setattr(live, "PART_BYTES", 12)
    made = model()
    before = digest(made)
    assert before not in ("", whole)
    assert digest(model()) == before
    change(made)
    assert digest(made) != before


def test_the_order_of_a_weight_s_parts_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PART_BYTES", 4)
    one, other = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32)
    assert live.tensors_digest({"weight": one}, {}) != live.tensors_digest({"weight": other}, {})


@pytest.mark.parametrize("change", [negate, exchange])
def test_a_sample_sees_what_changes_a_small_model(change: Callable[[Any], None]) -> None:
    runner = Runner(model())
    weights = LiveWeights(runner)
    before = weights.sample()
    assert before == LiveWeights(other := Runner(model())).sample() != ""
    change(runner.model)
    assert weights.sample() != before
    assert LiveWeights(other, settled=False).sample() == ""


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000])
def test_every_byte_counts_on_a_device(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    data = torch.randint(0, 256, (size + 3,), dtype=torch.uint8, generator=generator)
    sums = set()
    for begin in (0, 3):  # also where words are not aligned
        part = data[begin : begin + size]
        sums.add(int(device_sum(part, 16)))
        for index in range(0, size, 37):
            part[index] ^= 16
            changed = int(device_sum(part, 16))
            part[index] ^= 16
            assert changed not in sums
    assert int(device_sum(torch.zeros(16, dtype=torch.uint8))) != int(device_sum(torch.zeros(24, dtype=torch.uint8)))


def test_a_transposed_weight_is_digested_as_it_lies_in_memory() -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    assert live._as_bytes(weight.t()).data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("limit", [10, 1 << 30])
def test_weights_that_take_too_long_to_read_are_not_known(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "HOST_BYTES_MAX", limit)
    assert bool(digest(model())) == (limit > 10)


@pytest.mark.parametrize("part", ["model", "draft"])
def test_weights_that_were_packed_again_are_others(part: str) -> None:
    """A CPU's kernels have their own copy, and the tensor is empty: the bytes are inaccessible."""

    def packed() -> Any:
        return lambda x: x

    models = {"model": model(), "draft": model()}
    runner = Runner(*models.values())
    layer = models[part][0]
    layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    layer.cpu_linear = packed()
    first = LiveWeights(runner).digest()
    assert first
    assert LiveWeights(runner).digest() == first
    layer.cpu_linear = packed()
    assert LiveWeights(runner).digest() != first


def test_a_draft_without_a_model_leaves_the_weights_unknown_if_nothing_else_names_it() -> None:
    """A user's own proposer (``custom_class``) may hold its weights anywhere."""
    runner = Runner(model())
    runner.drafter = SimpleNamespace(propose=lambda: None)
    assert LiveWeights(runner).digest() != ""
    assert LiveWeights(runner, unnamed_draft=True).digest() == ""
    assert "weights_version" in WeightsVersion(1).begin({0: ""}, named=False)
    runner.drafter.model = model()
    assert LiveWeights(runner, unnamed_draft=True).digest() == digest(model(), model()) != ""


def test_a_model_that_is_gone_is_not_known() -> None:
    runner = Runner(model())
    weights = LiveWeights(runner)
    del runner
    assert weights.digest() == ""
    assert LiveWeights(None, "why").digest() == ""


def config(**values: Any) -> Any:
    known = {"data_parallel_size": 1, "enable_eplb": False, "is_moe": False, **values}
    moe = SimpleNamespace(is_moe=known.pop("is_moe"))
    return SimpleNamespace(parallel_config=SimpleNamespace(**known), model_config=moe)


def test_the_model_is_found_through_whoever_calls() -> None:
    runner = Runner(model())
    assert runner.start(config()).digest() == digest(model())
    assert Face().register(config()).digest() == ""


@pytest.mark.parametrize("values", [{"enable_eplb": True}, {"data_parallel_size": 2, "is_moe": True}])
def test_weights_that_other_engines_hold_or_that_move_are_not_known(values: dict[str, Any]) -> None:
    runner = Runner(model())
    assert runner.start(config(**values)).digest() == ""
