"""Numbers of batches of SGLang's linker over flushes, after which SGLang begins at 0 again."""

from typing import Any

from kvdepot.engines.sglang.batches import Batches

LAYERS = 2


class Counter:
    """SGLang's counter, as far as it is called."""

    def __init__(self) -> None:
        self.index = -1
        self.calls: list[Any] = []

    def update_producer(self) -> int:
        self.index += 1
        return self.index

    def complete(self, index: int, layer: int) -> None:
        self.calls.append((index, layer))

    def fail(self, index: int, error: BaseException) -> None:
        self.calls.append((index, str(error)))

    def reset(self) -> None:
        self.index = -1
        self.calls.append("reset")


def made() -> tuple[Counter, Batches]:
    counter = Counter()
    return counter, Batches(counter, LAYERS)


def test_layers_and_failures_are_reported() -> None:
    counter, batches = made()
    first, second = batches.queue(), batches.queue()
    assert batches.begin(first)
    batches.complete(first, 0)
    batches.complete(first, 1)
    batches.end(first)
    batches.fail(second, ValueError("why"))
    batches.flush()
    assert batches.reuse() == 0
    assert counter.calls == [(0, 0), (0, 1), (1, "why"), "reset"], "nothing is left to fail"
    assert not batches.doubtful


def test_what_ends_during_a_flush_is_reported() -> None:
    counter, batches = made()
    batch, queued = batches.queue(), batches.queue()
    assert batches.begin(batch)
    assert batches.late == 0
    batches.flush()
    assert not batches.begin(queued)
    batches.complete(batch, 0)
    batches.end(batch)
    assert batches.reuse() == 0
    assert counter.calls[0] == (0, 0)
    assert sorted(counter.calls[1:3]) == [(0, "SGLang has cleared its cache"), (1, "SGLang has cleared its cache")]


def test_what_ends_after_a_flush_is_not_reported_and_casts_doubt() -> None:
    counter, batches = made()
    late = batches.queue()
    assert batches.begin(late)
    batches.flush()
    assert batches.reuse() == batches.late == 1
    assert batches.doubtful
    calls = list(counter.calls)
    later = batches.queue()
    assert later.number == late.number == 0
    batches.complete(late, 0)
    batches.fail(late, ValueError("late"))
    assert counter.calls == calls
    batches.flush()
    assert batches.reuse() == 1, "it outlives this one, too"
    batches.end(late)
    assert batches.late == 0
    assert batches.doubtful, "until a flush that no load outlives"
    batches.flush()
    assert batches.reuse() == 0
    assert not batches.doubtful
