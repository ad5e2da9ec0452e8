"""What a clear of LMCache's storage plug-in stops, and what it does not, with stand-ins for LMCache and the stores."""

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot.engines.clearing import UNSETTLED
from kvdepot.engines.lmcache import backend
from kvdepot.engines.lmcache.backend import KVDepotBackend

UNTIL_S = 60.0
DTYPE = type("BFloat16", (), {"itemsize": 2, "__str__": lambda _: "torch.bfloat16"})()


class Depot:
    """Has every chunk, and answers a reset when it is let."""

    def __init__(self, *_: Any) -> None:
        self.resets: list[str] = []
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.confirms = False

    def reset(self, layout: Any) -> bool:
        self.resets.append(threading.current_thread().name)
        self.begun.set()
        assert self.may_end.wait(UNTIL_S)
        return self.confirms

    def lookup(self, rows: Sequence[Any]) -> list[bool]:
        return [True] * len(rows)

    def open(self, layout: Any) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[KVDepotBackend]:
    monkeypatch.setattr(backend, "Stores", Depot)
    monkeypatch.setattr(backend, "lmcache_version", lambda: "0.5.6")
    config = SimpleNamespace(
        use_layerwise=False,
        save_unfull_chunk=False,
        chunk_size=16,
        pre_caching_hash_algorithm="builtin",
        extra_config={"kvdepot.pipeline": "Cache|Empty", "kvdepot.weights_version": "v1"},
    )
    metadata = SimpleNamespace(
        model_name="m",
        kv_dtype=DTYPE,
        use_mla=False,
        get_shapes=lambda tokens: [(2, 2, tokens, 8)],
        get_dtypes=lambda: [DTYPE],
    )
    one = KVDepotBackend(config, metadata)
    yield one
    one._stores.may_end.set()
    one.close()


def key(number: int) -> Any:
    return SimpleNamespace(
        model_name="m", world_size=1, worker_id=0, chunk_hash=number, dtype=DTYPE, tags=None, request_configs=None
    )


def test_a_reset_that_a_tier_delays_delays_no_lookup(made: KVDepotBackend) -> None:
    """It may take as long as ``timeout_ms``, and the engine's scheduler waits for its lookups (P2)."""
    depot: Any = made._stores
    assert made.batched_contains([key(1)]) == 1
    made.clear()
    assert depot.begun.wait(UNTIL_S)
    assert made.batched_contains([key(1), key(2)]) == 0
    assert made.get_blocking(key(1)) is None
    assert not made.contains(key(1))
    depot.may_end.set()
    assert not made._clearing.settled()
    depot.confirms = True
    assert made._clearing.confirmed(UNTIL_S)
    assert made.batched_contains([key(1), key(2)]) == 2
    assert set(depot.resets) == {"kvdepot-clear"}


def test_a_clear_that_was_never_confirmed_is_an_error_at_the_end(
    made: KVDepotBackend, caplog: pytest.LogCaptureFixture
) -> None:
    depot: Any = made._stores
    depot.may_end.set()
    made.clear()
    made.close()
    assert [record.levelname for record in caplog.records if record.getMessage() == UNSETTLED] == ["ERROR"]
