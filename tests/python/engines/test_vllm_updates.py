"""Updates of the weights between two steps, of which no release of vLLM notifies a connector (P1)."""

from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import FakeStore, geometry, options

from kvdepot.engines.vllm import compute
from kvdepot.engines.vllm.meta import Blocks, Load, LoadReport, StepMetadata
from kvdepot.engines.vllm.releases.updates import watch_updates
from kvdepot.engines.vllm.worker import WorkerSide


class Weights:
    """Weights in a rank's memory. An update changes a few values, which the sample does not have."""

    now = "first"

    def digest(self) -> str:
        return self.now

    def sample(self) -> str:
        return "of some other values"


class VllmWorker:
    """The part of vLLM's worker that writes weights."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, str]) -> None:
        self.weights.now = update_info["weights"]

    def finish_weight_update(self) -> None:
        pass

    def reload_weights(self, weights_path: str | None = None) -> str:
        self.weights.now = weights_path or ""
        return "reloaded"


class Rank:
    """One rank, whose steps follow each other without a pause."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compute, "_cuda", lambda: None)
        monkeypatch.setattr("kvdepot.engines.vllm.worker.time.monotonic", lambda: 100.0)
        self.side = WorkerSide(SimpleNamespace(), options(), geometry())  # type: ignore[arg-type]
        self.store = FakeStore()
        self.store.set_decoding = lambda decoding: None  # type: ignore[attr-defined]
        self.store.of_version = lambda *_: self.store  # type: ignore[attr-defined]
        self.side._stores[0] = self.store  # type: ignore[assignment]
        self.side._weights = weights = Weights()  # type: ignore[assignment]
        self.side._sampled = weights.sample()
        self.worker = VllmWorker(weights)
        watch_updates(self.worker, self.side.weights_updated)
        self.run()

    def run(self, **values: Any) -> tuple[LoadReport, list[str]]:
        """Runs a step that loads and saves. Returns its report, and the kinds of copies that it began."""
        blocks = {0: Blocks([b"x"], [1])}
        step = StepMetadata(**{"loads": [Load(1, "r", True, blocks)], "saves": {0: Blocks([b"y"], [2])}, **values})
        self.store.calls.clear()
        self.side.prepare(step)
        self.side.start_loads(step)
        self.side.finish_saves(step)
        return self.side.report() or LoadReport(), [kind for kind, _ in self.store.calls]

    def examined(self, generation: int) -> str:
        report, _ = self.run(generation=generation, version=None, examine=True, loads=[], saves={})
        return report.weights[0]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def test_nothing_is_used_after_an_update_between_two_steps(rank: Rank) -> None:
    """What the next step loads and saves belongs to the earlier version."""
    assert rank.run()[1] == ["load", "dump"]
    assert rank.worker.reload_weights(weights_path="second") == "reloaded"
    report, copies = rank.run()
    assert copies == []
    assert (report.moved, report.failed) == (0, {1})
    assert rank.run()[1] == []
    assert rank.examined(1) == "second"
    report, copies = rank.run(generation=1, version="v")
    assert (report.moved, copies) == (None, ["load", "dump"])


@pytest.mark.parametrize("first", [{"loads": [], "computes": False}, {"loads": []}, {"computes": False}])
def test_an_update_before_anything_was_computed_or_loaded_is_told_as_such(rank: Rank, first: dict[str, Any]) -> None:
    """Steps without tokens precede the first request: nothing of the earlier weights is in vLLM's own cache."""
    rank.side._weights_used = False
    rank.run(**first, saves={})
    rank.worker.reload_weights(weights_path="second")
    report, copies = rank.run()
    assert (report.moved, report.moved_unused) == (0, first == {"loads": [], "computes": False})
    assert copies == []


def test_a_load_of_another_connector_may_have_come_before_the_update(rank: Rank) -> None:
    rank.side._weights_used, rank.side._has_siblings = False, True
    rank.worker.reload_weights(weights_path="second")
    report, _ = rank.run(loads=[], saves={}, computes=False)
    assert (report.moved, report.moved_unused) == (0, False)


def test_an_update_before_the_reset_s_answer_costs_nothing(rank: Rank) -> None:
    rank.worker.start_weight_update()
    rank.worker.update_weights({"weights": "second"})
    rank.worker.finish_weight_update()
    assert rank.examined(1) == "second"
    report, copies = rank.run(generation=1, version="v")
    assert (report.moved, copies) == (None, ["load", "dump"])


def test_an_update_after_the_reset_s_answer_is_noticed(rank: Rank) -> None:
    assert rank.examined(1) == "first"
    rank.worker.update_weights({"weights": "second"})
    report, copies = rank.run(generation=1, version="")
    assert (report.moved, copies) == (1, [])


def test_weights_have_no_digest_while_they_arrive(rank: Rank) -> None:
    """An engine for transfers may return before they are on the device."""
    rank.worker.start_weight_update()
    assert rank.examined(1) == ""
    report, copies = rank.run(generation=1, version="nobody else's")
    assert (report.moved, copies) == (1, [])
    rank.worker.finish_weight_update()
    assert rank.examined(2) == "first"
    assert rank.run(generation=2, version="")[1] == ["load", "dump"]


def test_an_update_that_fails_has_ended(rank: Rank) -> None:
    rank.worker.start_weight_update()
    with pytest.raises(KeyError):
        rank.worker.update_weights({})
    assert rank.run()[0].moved == 0
    assert rank.examined(1) == "first"


def test_a_worker_of_a_release_without_some_methods_is_watched_by_the_others() -> None:
    told: list[bool] = []
    worker = SimpleNamespace(reload_weights=lambda: "reloaded")
    watch_updates(worker, told.append)
    watch_updates(None, told.append)
    assert list(vars(worker)) == ["reload_weights"]
    assert worker.reload_weights() == "reloaded"
    assert told == [True, False]
