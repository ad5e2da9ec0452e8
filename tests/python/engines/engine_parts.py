"""Parts of an engine and of the core, reduced to what the connector's logic needs."""

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvdepot.engines.vllm.adapters import Adapters
from kvdepot.engines.vllm.compute import ComputePoint
from kvdepot.engines.vllm.drafts import Drafts
from kvdepot.engines.vllm.groups import Geometry, Group
from kvdepot.engines.vllm.meta import RankNamespaces
from kvdepot.engines.vllm.scheduler import SchedulerSide
from kvdepot.engines.vllm.shares import ALONE, Share
from kvdepot.engines.vllm.step_order import StepOrder
from kvdepot.engines.vllm.worker import WorkerSide
from kvdepot.task import TaskResult

BLOCK = 16


class FakeClaim:
    def __init__(self, units: int, settled: bool, skip: int, limit: int) -> None:
        self.units, self.settled, self.skip, self.limit, self.released = units, settled, skip, limit, False
        self.polls, self.openings = 0, 1
        self.label = ""
        self.tiers: Any = None
        self.declined = False
        self.waits: list[int] = []
        self.on_their_way: tuple[int, int, int, int, int] | None = None
        self.told_times: Any = None
        self.times_asked = 0

    def poll(self) -> tuple[bool, int, int]:
        self.polls += 1
        return self.settled, min(max(self.units, self.skip), self.limit) if self.settled else 0, 0

    def wait(self, timeout_ms: int) -> tuple[bool, int, int]:
        self.waits.append(timeout_ms)
        return self.poll()

    def arriving(self) -> tuple[int, int, int, int, int] | None:
        return self.on_their_way

    def settle(self) -> tuple[bool, int, int]:
        self.settled = True
        return self.poll()

    def decline(self) -> tuple[bool, int, int]:
        self.declined = True
        return self.settle()

    def release(self, *, tell_times: bool = False) -> Any:
        known = self.told_times if tell_times and not self.released else None
        self.times_asked += tell_times
        self.released = True
        return known


@dataclass(eq=False)
class FakeNamespace:
    description: str
    id: str
    uses: "list[FakeNamespace]"

    def close(self) -> None:
        self.uses.remove(self)


class FakeDepot:
    """Has the first ``units`` hash units of everything."""

    attached = True

    def __init__(self, units: int = 0, settled: bool = True) -> None:
        self.units, self.settled = units, settled
        self.claims: list[FakeClaim] = []
        self.resets: list[Any] = []
        self.uses: list[FakeNamespace] = []

    @property
    def opened(self) -> set[str]:
        return {namespace.id for namespace in self.uses}

    def open_namespace(self, description: str) -> FakeNamespace:
        self.uses.append(FakeNamespace(description, description, self.uses))
        return self.uses[-1]

    def claim(
        self, groups: Any, hashes: Any, *, skip: int, limit: int, tiers: Any = None, label: str = ""
    ) -> FakeClaim:
        assert len(hashes) >= limit > skip
        self.claims.append(FakeClaim(self.units, self.settled, skip, limit))
        self.claims[-1].label, self.claims[-1].tiers = label, tiers
        return self.claims[-1]

    def reset(self, namespaces: Any) -> None:
        self.resets.append(namespaces)


class FakeTask:
    def __init__(self, failed: tuple[int, ...] = (), done: bool = True, shards_in_time: bool = True) -> None:
        self.bad, self.is_done, self.waits, self.shards = failed, done, 0, []
        self.shards_in_time = shards_in_time
        self.events: list[int] = []
        self.streams: list[tuple[int, int]] = []

    def done(self) -> bool:
        return self.is_done

    def wait_done(self, timeout_ms: int | None = None) -> bool:
        self.waits += 1
        if timeout_ms is None:
            self.is_done = True
        return self.is_done

    def wait_shard(self, shard: int, *, timeout_ms: int | None = None) -> bool:
        self.shards.append(shard)
        return self.shards_in_time

    def wait_shard_on(self, shard: int, *, stream: int, timeout_ms: int | None = None) -> bool:
        self.streams.append((shard, stream))
        return self.shards_in_time

    def submit_shard(self, shard: int, *, wait_event: int = 0, keep: object = None) -> None:
        self.shards.append(shard)
        self.events.append(wait_event)

    def result(self) -> TaskResult:
        return TaskResult(np.array(self.bad, dtype=np.int64), {"timeout": len(self.bad)} if self.bad else {})


@dataclass
class FakeStore:
    """A ``GroupStore`` with one layer per name."""

    layers: tuple[str, ...] = ("a", "b")
    share: Share = ALONE
    next_task: FakeTask = field(default_factory=FakeTask)
    calls: list[tuple[str, list[int]]] = field(default_factory=list)
    patience_ms: list[int | None] = field(default_factory=list)
    priorities: list[str] = field(default_factory=list)

    @property
    def shard_of_layer(self) -> dict[str, int]:
        return {name: shard for shard, name in enumerate(self.layers)}

    @property
    def shard_count(self) -> int:
        return len(self.layers)

    block_bytes = 100

    def dump(self, blocks: Any, after: ComputePoint, priority: str = "normal") -> FakeTask:
        self.calls.append(("dump", blocks.pages))
        self.priorities.append(priority)
        self.next_task.events.append(after.handle)
        return self.next_task

    def begin_dump(self, blocks: Any, priority: str = "normal") -> FakeTask:
        self.calls.append(("begin", blocks.pages))
        self.priorities.append(priority)
        return self.next_task

    def load(self, blocks: Any, after: ComputePoint, patience_ms: int | None = None) -> FakeTask:
        self.patience_ms.append(patience_ms)
        self.calls.append(("load", blocks.pages))
        self.next_task.events.append(after.handle)
        return self.next_task


def options(**values: Any) -> Any:
    known = {
        "use_layerwise": True,
        "hit_ratio": None,
        "persist_token_threshold": 0,
        "wait_ms": 60_000,
        "waits_for_all": True,
        "waits_while_faster": True,
        "timeout_ms": 1000,
        "enable_event_sync": True,
        "drop_at_reset": False,
        "tiers": ("Posix",),
        "may_share_a_tier": True,
        "kv_head_slices": 0,
        "shares_prefixes": True,
    }
    known["loads_in_steps"] = values.get("use_layerwise", True)
    known["step_order"] = order = values.get("step_order", StepOrder())
    known["saves_in_steps"] = known["loads_in_steps"] and not order.microbatches and not order.clears_first
    return SimpleNamespace(**{**known, **values})


def geometry(*windows: int) -> Geometry:
    groups = tuple(Group(i, (f"layer{i}",), None, BLOCK, 1, window) for i, window in enumerate(windows or (0,)))
    return Geometry(groups, BLOCK, BLOCK)


def found(rank: int, groups: int = 1) -> RankNamespaces:
    """Returns a rank's report."""
    return RankNamespaces({index: (f"group{index}/{rank}",) for index in range(groups)})


def scheduler(
    depot: Any,
    ranks: int = 1,
    windows: tuple[int, ...] = (0,),
    *,
    loads: bool = True,
    dumps: bool = True,
    drafts: Drafts | None = None,
    has_siblings: bool = False,
    adapters: Adapters | None = None,
    **values: Any,
) -> SchedulerSide:
    """``adapters``: by default those whose files are read at once."""
    side = SchedulerSide(
        depot,
        options(**values),
        geometry(*windows),
        ranks,
        loads=loads,
        dumps=dumps,
        drafts=drafts,
        has_siblings=has_siblings,
        adapters=adapters or Adapters(begin=lambda work: work()),
    )
    side.open_namespaces([found(rank, len(windows)) for rank in range(ranks)])
    return side


def registered(
    monkeypatch: pytest.MonkeyPatch,
    depot: Any,
    stores: Any,
    kv_cache_config: Any = None,
    kv_caches: Any = None,
    *,
    has_siblings: bool = False,
    **model_config: Any,
) -> WorkerSide:
    """Returns the only rank of an engine, which has allocated its KV cache; ``stores`` are those that it opens."""
    alone = SimpleNamespace(rank_in_group=0)
    groups = SimpleNamespace(get_pp_group=lambda: alone, get_tp_group=lambda: alone)
    monkeypatch.setattr(sys.modules["vllm.distributed"], "parallel_state", groups, raising=False)
    monkeypatch.setattr(WorkerSide, "_open_stores", lambda side, *_: side._stores.update(stores))
    side = WorkerSide(depot, options(), geometry(), has_siblings=has_siblings)
    sizes = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes), model_config=SimpleNamespace(**model_config), speculative_config=None
    )
    side.register(config, kv_cache_config, kv_caches or {})
    return side


def request(name: str, tokens: int, known: int | None = None, **params: Any) -> Any:
    """``params``: its ``kv_transfer_params``."""
    hashes = [f"{name}/{index}".encode() for index in range((known or tokens) // BLOCK)]
    return SimpleNamespace(
        request_id=name,
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        block_hashes=hashes,
        kv_transfer_params=params or None,
    )


def pages(*by_group: list[int]) -> Any:
    return SimpleNamespace(get_block_ids=lambda: by_group)


@dataclass
class Step:
    """Builds a ``SchedulerOutput``."""

    new: list[Any] = field(default_factory=list)
    cached: list[tuple[str, int, Any]] = field(default_factory=list)
    resumed: set[str] = field(default_factory=set)
    scheduled: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[list[int], ...]] = field(default_factory=dict)

    def starts(self, name: str, computed: int, tokens: int, *table: list[int]) -> "Step":
        self.new.append(SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=table))
        self.scheduled[name] = tokens
        self.tables[name] = table
        return self

    def goes_on(self, name: str, computed: int, tokens: int, table: Any, fresh: Any = None) -> "Step":
        self.cached.append((name, computed, fresh))
        self.scheduled[name] = tokens
        self.tables[name] = table
        return self

    def output(self) -> Any:
        return SimpleNamespace(
            scheduled_new_reqs=self.new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, _, _ in self.cached],
                num_computed_tokens=[computed for _, computed, _ in self.cached],
                new_block_ids=[fresh for _, _, fresh in self.cached],
                resumed_req_ids=self.resumed,
            ),
            num_scheduled_tokens=self.scheduled,
            total_num_scheduled_tokens=sum(self.scheduled.values()),
            kv_cache_block_copies=None,
            kv_connector_block_state=SimpleNamespace(get_block_ids=self.tables.get),
        )
