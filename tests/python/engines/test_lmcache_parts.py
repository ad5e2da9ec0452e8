"""Parts of kvdepot in LMCache that need neither LMCache nor torch: keys, layouts, tasks, stores and options."""

import asyncio
import json
import os
import select
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvdepot.config import load_config
from kvdepot.engines import counters
from kvdepot.engines.lmcache import facts, options
from kvdepot.engines.lmcache import tasks as lmcache_tasks
from kvdepot.engines.lmcache import weights as lmcache_weights
from kvdepot.engines.lmcache.bounded import Bounded
from kvdepot.engines.lmcache.counters import Counters
from kvdepot.engines.lmcache.facts import Layout, UnknownLayoutError
from kvdepot.engines.lmcache.keys import HASH_BYTES, chunk_hash, object_hash
from kvdepot.engines.lmcache.objects import address_of, layout_of
from kvdepot.engines.lmcache.recent import Recent
from kvdepot.engines.lmcache.stores import LAYOUTS_MAX, Stores
from kvdepot.engines.lmcache.tasks import WAITING_MAX, Tasks
from kvdepot.engines.lmcache.weights import Weights
from kvdepot.engines.resets import AGAIN_S, Resets
from kvdepot.engines.weights import weights_digest
from kvdepot.errors import ConfigError, UnavailableError

BEGIN_S = 60.0


@dataclass(frozen=True)
class Type:
    """The part of torch's dtype that is used."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


BF16, F32 = Type("bfloat16", 2), Type("float32", 4)


def object_key(**other: Any) -> Any:
    fields = {"chunk_hash": b"h" * 32, "model_name": "m", "kv_rank": 0, "object_group_id": 0, "cache_salt": ""}
    return SimpleNamespace(**{**fields, **other})


def chunk_key(**other: Any) -> Any:
    fields = {"model_name": "m", "world_size": 1, "worker_id": 0, "chunk_hash": 7, "dtype": BF16, "tags": None}
    return SimpleNamespace(**{**fields, **other})


def layout(size: int = 16, model: str = "m") -> Layout:
    return Layout.of(model, [(size // 2,)], [BF16])


def test_every_field_of_a_key_changes_its_hash() -> None:
    objects = [
        object_key(),
        object_key(chunk_hash=b"i" * 32),
        object_key(kv_rank=1),
        object_key(object_group_id=1),
        object_key(cache_salt="s"),
        # A byte moves from one field to the next.
        object_key(cache_salt="h", chunk_hash=b"h" * 31),
    ]
    chunks = [
        chunk_key(),
        chunk_key(model_name="n"),
        chunk_key(world_size=2),
        chunk_key(worker_id=1),
        chunk_key(chunk_hash=-7),
        chunk_key(dtype=F32),
        chunk_key(tags=()),
        chunk_key(tags=(("user", "a"),)),
        chunk_key(tags=(("user", "b"),)),
    ]
    hashes = [*map(object_hash, objects), *map(chunk_hash, chunks)]
    assert len(set(hashes)) == len(hashes)
    assert {len(one) for one in hashes} == {HASH_BYTES}


def test_hashes_stay_as_they_are() -> None:
    """Another hash finds nothing that earlier versions have stored: then increment `OBJECT_FORMAT`."""
    assert facts.OBJECT_FORMAT == 1
    assert object_hash(object_key()).hex() == "4734eac10377f834b60c2ff6ba36b21b"
    assert chunk_hash(chunk_key()).hex() == "876f0062ccd50134313d0777a4688f9d"


def test_keys_that_say_too_little_are_refused() -> None:
    with pytest.raises(UnknownLayoutError, match="no hash"):
        object_hash(object_key(chunk_hash=b""))
    with pytest.raises(UnknownLayoutError, match="tags"):
        chunk_hash(chunk_key(tags=(("user", object()),)))


@pytest.mark.parametrize(
    ("model", "shapes", "dtypes"),
    [
        ("", [(4,)], [BF16]),
        ("m", [], []),
        ("m", [(4,)], []),
        ("m", [(4, 0)], [BF16]),
        ("m", [(4,), (0,)], [BF16, BF16]),
        ("m", [(1 << 30,)], [BF16]),
    ],
)
def test_layouts_that_say_too_little_are_refused(model: str, shapes: Any, dtypes: Any) -> None:
    with pytest.raises(UnknownLayoutError):
        Layout.of(model, shapes, dtypes)


def test_facts_tell_everything_that_changes_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "lmcache_version", lambda: "0.5.6")
    whole = Layout.of("m", [(2, 4), (3,)], [BF16, F32], "KV_2LTD")
    assert facts.namespace_facts(whole, "server", "v1", {"chunk_tokens": 256}) == {
        "engine": "lmcache",
        "face": "server",
        "format": 1,
        "lmcache": "0.5.6",
        "model": "m",
        "weights_version": "v1",
        "shapes": [[2, 4], [3]],
        "dtypes": ["bfloat16", "float32"],
        "form": "KV_2LTD",
        "chunk_tokens": 256,
    }
    assert whole.size_bytes == 28


def test_plain_bytes_need_a_declared_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has KV of fp8_e4m3 and of fp8_e5m2 in uint8: without a declaration both would be one namespace."""
    monkeypatch.setattr(facts, "lmcache_version", lambda: "0.5.6")
    plain = Layout.of("m", [(4,), (4,)], [BF16, Type("uint8", 1)])
    with pytest.raises(ConfigError, match="weights_version: missing"):
        facts.namespace_facts(plain, "server", "")
    made = [facts.namespace_facts(plain, "server", version) for version in ("v1-fp8_e4m3", "v1-fp8_e5m2")]
    assert made[0] != made[1]
    told = Layout.of("m", [(4,)], [Type("float8_e5m2", 1)])
    assert facts.namespace_facts(told, "server", "")["dtypes"] == ["float8_e5m2"]


def test_an_lmcache_without_a_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: str) -> str:
        raise facts.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(facts.importlib.metadata, "version", unknown)
    with pytest.raises(ConfigError, match="version is unknown"):
        facts.lmcache_version()


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings about weights that nothing identifies."""
    said: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *values: said.append(text % values))
    monkeypatch.setattr(lmcache_weights, "lmcache_logger", lambda: logger)
    return said


def checkpoint(directory: Path, values: bytes, **config: Any) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").write_bytes(values)
    (directory / "config.json").write_text(json.dumps({"_name_or_path": str(directory), **config}))
    return str(directory)


def test_weights_of_a_directory_are_identified_by_their_content(tmp_path: Path, warned: list[str]) -> None:
    model = checkpoint(tmp_path / "m", b"\1" * 512, rope=1)
    first = Weights("", 60)
    before = first.facts(model)
    assert before["weights_digest"] == weights_digest(tmp_path / "m")
    checkpoint(tmp_path / "m", b"\2" * 512, rope=1)
    assert first.facts(model) == before, "the engine still has them in its memory"
    retrained = Weights("", 60).facts(model)
    assert retrained["weights_digest"] != before["weights_digest"]
    assert retrained["config_digest"] == before["config_digest"]
    checkpoint(tmp_path / "m", b"\2" * 512, rope=2)
    assert Weights("", 60).facts(model)["config_digest"] != before["config_digest"]
    checkpoint(tmp_path / "copy", b"\2" * 512, rope=1)
    assert Weights("", 60).facts(str(tmp_path / "copy")) == retrained
    assert warned == []


@pytest.mark.parametrize("decorated", ["##query", "##lmcache-dcp-layout-v1-d2-interleave16"])
def test_what_lmcache_appends_to_a_name_is_not_the_models(tmp_path: Path, decorated: str, warned: list[str]) -> None:
    model = checkpoint(tmp_path / "m", b"\1" * 512)
    assert Weights("", 60).facts(model + decorated) == Weights("", 60).facts(model)
    assert warned == []


def test_weights_of_a_hubs_model_are_those_of_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    snapshot = tmp_path / "snapshots" / "0123"
    checkpoint(snapshot, b"\1" * 512)
    asked: list[Any] = []

    def try_to_load_from_cache(model: str, file: str, **where: Any) -> str | None:
        asked.append((model, where))
        return str(snapshot / file) if (snapshot / file).exists() else None

    hub = ModuleType("huggingface_hub")
    hub.__dict__["try_to_load_from_cache"] = try_to_load_from_cache
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert Weights("", 60).facts("org/m")["weights_digest"] == weights_digest(snapshot)
    assert asked[0] == ("org/m", {"cache_dir": None, "revision": None})
    assert warned == []


def test_weights_that_nothing_identifies_are_warned_of_once(tmp_path: Path, warned: list[str]) -> None:
    model = str(tmp_path / "nowhere")
    found = Weights("", 60)
    assert [found.facts(model), found.facts(model)] == [{}, {}]
    assert len(warned) == 1
    assert model in warned[0]
    assert "set weights_version" in warned[0]
    # A configuration alone does not identify them.
    empty = checkpoint(tmp_path / "empty", b"", rope=1)
    (tmp_path / "empty" / "model.safetensors").unlink()
    assert list(found.facts(empty)) == ["config_digest"]
    assert len(warned) == 2
    assert Weights("v1", 60).facts(model) == {}
    assert len(warned) == 2


def test_weights_that_cannot_be_read_are_not_those_of_a_model_without_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    """Otherwise an error of a disk would bring KV of earlier weights."""
    model = checkpoint(tmp_path / "m", b"\1" * 512)

    def broken(_: str) -> str:
        raise TimeoutError(110, "Connection timed out")

    found, named = Weights("", 60), Weights("v1", 60)
    with monkeypatch.context() as patch:
        patch.setattr(lmcache_weights, "model_digest", broken)
        with pytest.raises(ConfigError, match="set weights_version"):
            found.facts(model)
        assert named.facts(model) == {}
    assert found.facts(model)["weights_digest"] == weights_digest(tmp_path / "m"), "it is read again"
    assert warned == []


def test_files_that_hang_delay_one_caller_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(lmcache_weights, "model_digest", lambda _: passed(gate))
    found = Weights("", 0.05)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="still being read"):
            found.facts("m")
    gate.set()
    end_s = time.monotonic() + BEGIN_S
    while not found._readings["m"].found.done():
        assert time.monotonic() < end_s
        time.sleep(0.001)
    assert found.facts("m") == {"weights_digest": "well"}


def memory(size: int = 16, **other: Any) -> Any:
    meta = SimpleNamespace(shape=(8,), dtype=BF16, shapes=None, dtypes=None)
    fields = {
        "metadata": meta,
        "raw_tensor": SimpleNamespace(device=SimpleNamespace(type="cpu")),
        "get_size": lambda: size,
        "get_physical_size": lambda: 4096,
        "data_ptr": 64,
    }
    return SimpleNamespace(**{**fields, **other})


def test_an_objects_memory_is_its_layouts_or_refused() -> None:
    assert layout_of(memory(), "m") == layout()
    assert address_of(memory(), layout()) == 64
    for wrong in (
        memory(size=8),
        memory(get_physical_size=lambda: 8),
        memory(raw_tensor=None),
        memory(raw_tensor=SimpleNamespace(device=SimpleNamespace(type="cuda"))),
    ):
        with pytest.raises(UnknownLayoutError):
            address_of(wrong, layout())


def test_only_the_last_hashes_are_kept() -> None:
    recent = Recent(at_most=2)
    assert recent.put(b"a", 1)
    assert recent.put(b"b", 2)
    assert not recent.put(b"a", 3)
    assert recent.put(b"c", 4)
    assert (recent.take(b"a"), recent.take(b"a"), recent.take(b"b")) == (3, None, None)
    assert b"c" in recent
    assert len(recent) == 1


def test_a_mark_that_was_set_again_is_another_one() -> None:
    recent = Recent()
    recent.mark(b"a")
    before = recent.marks([b"a", b"b"])
    recent.mark(b"a")
    assert recent.take(b"a", only=before[b"a"]) is None
    assert recent.take(b"a", only=recent.marks([b"a"])[b"a"]) is not None
    assert recent.marks([b"a"]) == {}


def test_a_clear_during_a_reset_is_not_confirmed_by_it() -> None:
    resets = Resets()
    assert (resets.settled, resets.attempt(0.0)) == (True, None)
    resets.clear()
    first = resets.attempt(0.0)
    resets.clear()
    second = resets.attempt(0.0)
    assert None not in (first, second)
    resets.confirm(first or 0)
    assert not resets.settled
    assert resets.attempt(AGAIN_S / 2) is None, "it was sent a short while ago"
    assert resets.attempt(AGAIN_S) == second
    resets.confirm(second or 0)
    resets.confirm(first or 0)
    assert resets.settled


def test_a_store_that_outlives_a_clear_asks_for_a_reset_of_its_own() -> None:
    resets = Resets()
    old = resets.generation
    assert resets.begin(old)
    resets.clear()
    assert not resets.begin(old), "what was handed over before the clear does not begin"
    resets.confirm(resets.attempt(0.0) or 0)
    assert not resets.settled, "the old store may still put something"
    new = resets.generation
    assert resets.begin(new)
    assert not resets.end(old)
    assert not resets.settled
    resets.confirm(resets.attempt(0.0) or 0)
    assert resets.settled
    assert resets.end(new), "a reset of the store before it makes no store late: resets would never end"
    assert resets.settled


def test_a_flush_resets_nothing_unless_a_store_outlives_it() -> None:
    resets = Resets()
    old = resets.generation
    resets.flush()
    assert (resets.settled, resets.begin(old)) == (True, False)
    assert resets.begin(resets.generation)
    assert resets.begin(resets.generation)
    late = resets.generation
    resets.flush()
    assert resets.end(late), "it has ended before the memory is reused"
    assert (resets.settled, resets.attempt(0.0)) == (True, None)
    resets.reuse()
    assert (resets.settled, resets.attempt(0.0)) == (False, None)
    assert not resets.end(late)
    resets.confirm(resets.attempt(0.0) or 0)
    assert resets.settled


def closed(what: Any) -> str:
    """Ends when ``what`` is closed."""
    end_s = time.monotonic() + 60
    while not what._closed:
        if time.monotonic() > end_s:
            return "stuck"
        time.sleep(0.001)
    return "well"


def passed(gate: threading.Event) -> str:
    return "well" if gate.wait(60) else "stuck"


def test_every_task_ends_once_also_what_fails_or_comes_too_late() -> None:
    counts = Counters()
    tasks: Tasks[str] = Tasks("load", 1, counts)
    gate = threading.Event()

    def fail() -> str:
        raise OSError("broken")

    held = tasks.submit(lambda: passed(gate), lambda: "miss")
    failing = tasks.submit(fail, lambda: "miss")
    assert tasks.take(held) is None
    gate.set()
    found: dict[int, str] = {}
    while len(found) < 2:
        assert select.select([tasks.fileno()], [], [], 60)[0]
        os.eventfd_read(tasks.fileno())
        found |= tasks.take_all()
    assert found == {held: "well", failing: "miss"}
    tasks.close()
    late = tasks.submit(lambda: "well", lambda: "miss")
    assert (tasks.take(late), tasks.take(late)) == ("miss", None)
    tasks.close()
    assert counts.snapshot() == {"load_error": 1, "load_not_begun": 1}


def test_too_many_tasks_are_not_begun() -> None:
    tasks: Tasks[str] = Tasks("load", 1, Counters())
    gate = threading.Event()
    numbers = [tasks.submit(lambda: passed(gate), lambda: "miss") for _ in range(WAITING_MAX + 1)]
    assert tasks.take_all() == {numbers[-1]: "miss"}
    gate.set()
    found: dict[int, str] = {}
    while len(found) < WAITING_MAX:
        assert select.select([tasks.fileno()], [], [], 60)[0]
        os.eventfd_read(tasks.fileno())
        found |= tasks.take_all()
    tasks.close()
    assert found == dict.fromkeys(numbers[:-1], "well")


def test_tasks_that_wait_at_the_end_fail() -> None:
    """Each may take as long as `timeout_ms`: a thousand of them would delay the end for hours."""
    counts = Counters()
    tasks: Tasks[str] = Tasks("load", 1, counts)
    begun = threading.Event()
    held = tasks.submit(lambda: begun.set() or closed(tasks), lambda: "miss")
    waiting = [tasks.submit(lambda: "well", lambda: "miss") for _ in range(3)]
    assert begun.wait(BEGIN_S)
    tasks.close()
    assert tasks.take_all() == {held: "well", **dict.fromkeys(waiting, "miss")}
    assert counts.snapshot() == {"load_not_begun": 3}


def test_work_that_does_not_fit_or_fails_is_missed() -> None:
    counts = Counters()
    work = Bounded("load", 1, counts, at_most=2)
    gate = threading.Event()

    def fail() -> str:
        raise OSError("broken")

    async def ask() -> None:
        held = asyncio.create_task(work.run(lambda: passed(gate), "missed"))
        waits = asyncio.create_task(work.run(lambda: "well", "missed"))
        await asyncio.sleep(0)
        assert await work.run(lambda: "well", "missed") == "missed", "two are there"
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        waits = asyncio.create_task(work.run(fail, "missed"))
        await asyncio.sleep(0)
        gate.set()
        assert (await held, await waits) == ("well", "missed")

    asyncio.run(ask())
    work.close()
    assert asyncio.run(work.run(lambda: "well", "missed")) == "missed"
    assert counts.snapshot() == {"load_error": 1, "load_not_begun": 2}


def test_work_that_waits_at_the_end_is_missed() -> None:
    work = Bounded("load", 1, Counters())
    ran: list[str] = []

    async def ask() -> Any:
        begun = threading.Event()
        held = asyncio.create_task(work.run(lambda: begun.set() or closed(work), "missed"))
        waits = [asyncio.create_task(work.run(lambda: ran.append("ran"), "missed")) for _ in range(3)]
        await asyncio.sleep(0)
        assert begun.wait(BEGIN_S)
        work.close()
        return await asyncio.gather(held, *waits)

    assert asyncio.run(ask()) == ["well", "missed", "missed", "missed"]
    assert ran == []


def test_results_that_nobody_takes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_tasks, "RESULTS_MAX", 2)
    counts = Counters()
    tasks: Tasks[str] = Tasks("lookup", 1, counts)
    tasks.close()
    numbers = [tasks.submit(lambda: "well", lambda: "miss") for _ in range(5)]
    assert [tasks.take(number) for number in numbers] == [None] * 3 + ["miss"] * 2
    assert counts.snapshot() == {"lookup_not_begun": 5, "lookup_not_taken": 3}


class Store:
    """A store whose tasks end when they are waited for."""

    def __init__(self, log: list[str], *, attached: bool = True, breaks: str = "") -> None:
        self.log, self.attached, self.breaks = log, attached, breaks
        self.failures: dict[str, int] = {"not_found": 1}
        self.has: set[bytes] | None = None
        self.fails_quietly = False
        self.failed_lookups: dict[str, int] = {}

    def lookup(self, hashes: list[bytes]) -> Any:
        self._break("lookup")
        if self.fails_quietly:
            self.failed_lookups["busy"] = self.failed_lookups.get("busy", 0) + 1
            return np.zeros(len(hashes), dtype=bool)
        return np.array([self.has is None or one in self.has for one in hashes])

    def stats(self) -> Any:
        self._break("stats")
        return {"failures": {"lookup": dict(self.failed_lookups)} if self.failed_lookups else {}}

    def load(self, hashes: list[bytes], addresses: Any) -> Any:
        self._break("load")
        assert addresses.shape == (len(hashes), 1)
        self.log.append("begun")
        return self

    def wait_done(self) -> bool:
        self.log.append("waited")
        self._break("wait")
        return True

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        self._break("wait")
        return SimpleNamespace(failed=np.arange(sum(self.failures.values())), failures=self.failures)

    def reset(self) -> None:
        self._break("reset")

    def prefetch(self, hashes: list[bytes]) -> None:
        self._break("prefetch")

    def close(self) -> None:
        self.log.append("closed")

    def _break(self, verb: str) -> None:
        if verb == self.breaks:
            raise OSError(verb)


def stores(made: dict[str, Store], attachments: list[str] | None = None) -> tuple[Stores, Counters]:
    counts = Counters()
    log = [] if attachments is None else attachments

    class Attachment:
        def open(self, *, layout: list[int], namespace: Any) -> Store:
            return made[namespace["model"]]

        def close(self) -> None:
            log.append("closed")

    def attach(config: Any, *, block_bytes: int) -> Attachment:
        log.append("attached")
        return Attachment()

    config = load_config({"pool_gb": 0.1, "mode": "node"}, owns_pool=False)
    return Stores(config, lambda one: {"model": one.model}, counts, attach), counts


def test_nobody_leaves_while_another_stores_task_copies() -> None:
    """The race of the document's review: a failing worker must not free memory that others write."""
    log: list[str] = []
    made = {"a": Store(log), "b": Store(log, breaks="load"), "c": Store(log, breaks="wait"), "d": Store(log)}
    found, counts = stores(made)
    places = [(layout(model=name), bytes([number]) * 16, 64) for number, name in enumerate("aabcd")]
    assert found.move("load", places).done == [False, True, False, False, False]
    assert log == ["begun"] * 3 + ["waited"] * 3
    assert counts.snapshot() == {"load_error": 3, "load_not_found": 2, "loaded": 1}


@pytest.mark.parametrize(
    ("failures", "missed"),
    [
        ({}, [False, False]),
        ({"not_found": 1}, [True, False]),
        ({"corrupt": 1, "not_found": 1}, [True, True]),
        ({"timeout": 1}, [False, False]),
        ({"no_space": 2}, [False, False]),
        ({"busy": 1, "not_found": 1}, [False, False]),
    ],
)
def test_a_load_that_failed_is_no_sign_that_a_block_is_gone(failures: dict[str, int], missed: list[bool]) -> None:
    store = Store([])
    store.failures = failures
    found, _ = stores({"m": store})
    moved = found.move("load", [(layout(), b"k", 64), (layout(), b"l", 128)])
    assert moved.missed == missed
    assert moved.done == [index >= sum(failures.values()) for index in range(2)]


def test_only_what_an_answer_leaves_out_is_gone() -> None:
    store = Store([])
    found, _ = stores({"m": store})
    rows = [(layout(), b"k"), (layout(), b"l")]
    assert found.gone(rows) == [False, False]
    store.has = {b"l"}
    assert found.gone(rows) == [True, False]
    store.has = set()
    store.failed_lookups = {"timeout": 3}
    assert found.gone(rows) == [True, True], "earlier lookups have failed, but not this one"
    store.fails_quietly = True
    assert found.gone(rows) == [False, False], "nothing is found, because the depot did not answer"
    store.fails_quietly = False
    store.attached = False
    assert found.gone(rows) == [False, False]
    for verb in ("lookup", "stats"):
        assert stores({"m": Store([], breaks=verb)})[0].gone(rows) == [False, False]
    assert stores({})[0].gone(rows) == [False, False], "no store is open"


def test_stores_never_raise() -> None:
    for verb in ("lookup", "prefetch", "reset"):
        found, _ = stores({"m": Store([], breaks=verb)})
        assert found.lookup([(layout(), b"k")]) == [verb != "lookup"]
        found.prefetch([(layout(), b"k")])
        assert found.reset(layout()) == (verb != "reset")
    found, counts = stores({})
    assert found.lookup([(layout(), b"k")]) == [False]
    assert found.move("load", [(layout(), b"k", 64)]).done == [False]
    assert not found.attached()
    # It is not retried immediately.
    assert counts.snapshot() == {"not_open": 2, "open_error": 1}


def test_a_depot_that_is_away_is_told_and_counted() -> None:
    found, counts = stores({"m": Store([], attached=False)})
    found.lookup([(layout(), b"k"), (layout(), b"l")])
    assert not found.attached()
    assert counts.snapshot() == {"no_depot": 2}


def test_layouts_share_an_attachment() -> None:
    attachments: list[str] = []
    found, _ = stores({"a": Store([]), "b": Store([])}, attachments)
    assert found.lookup([(layout(size, name), b"k") for name in "ab" for size in (2, 4)]) == [True] * 4
    assert attachments == ["attached"]
    found.close()
    found.close()
    assert attachments == ["attached", "closed"]


def test_layouts_are_limited() -> None:
    found, counts = stores({"m": Store([])})
    rows = [(layout(2 * size), b"k") for size in range(1, LAYOUTS_MAX + 3)]
    assert sum(found.lookup(rows)) == LAYOUTS_MAX
    assert counts.snapshot() == {"too_many_layouts": 2}


def test_closed_stores_are_misses() -> None:
    log: list[str] = []
    found, _ = stores({"m": Store(log)})
    assert found.lookup([(layout(), b"k")]) == [True]
    found.close()
    found.close()
    assert found.lookup([(layout(), b"k")]) == [False]
    assert log == ["closed"]


def test_parameters_are_keys_or_a_file(tmp_path: Path) -> None:
    keys = {"pipeline": "Cache|Posix", "directories": [str(tmp_path)], "pool_gb": 0.1}
    read = options.read_params({**keys, "weights_version": 3})
    assert (read.config.mode, read.config.pipeline, read.weights_version) == ("node", "Cache|Posix", "3")
    file = tmp_path / "depot.yaml"
    file.write_text(f"pipeline: Cache|Posix\ndirectories: ['{tmp_path}']\npool_gb: 0.1\n")
    assert options.read_params({"config": str(file)}).config == read.config
    for wrong in (
        {"no_such_key": 1},
        {"config": str(file), "pool_gb": 0.1},
        {"mode": "embedded"},
        {"weights_version": None},
    ):
        with pytest.raises(ConfigError):
            options.read_params(wrong)


DAX = {"dax.device_path": "/dev/dax0.0", "dax.max_dax_size": 64, "dax.async_put": False}
PLACE = {"kvdepot.pipeline": "Cache|Empty", "kvdepot.pool_gb": 0.1}


def test_lmcaches_own_keys_are_read_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    logger = SimpleNamespace(
        info=lambda text, *values: said.append(text % values), warning=lambda text, *values: said.append(text % values)
    )
    monkeypatch.setattr(options, "lmcache_logger", lambda: logger)
    assert options.read_extra_config({**DAX, **PLACE, "other.key": 1}).config.pipeline == "Cache|Empty"
    unused = "dax.device_path, dax.max_dax_size, dax.async_put"
    assert said == [f"kvdepot: ignored, because kvdepot.pipeline determines the tiers: {unused}"]
    with pytest.raises(ConfigError, match=r"dax\.no_such_key"):
        options.read_extra_config({"dax.no_such_key": 1, **PLACE})
    with pytest.raises(ConfigError, match="no_such_key"):
        options.read_extra_config({"kvdepot.no_such_key": 1})


def test_lmcaches_device_is_the_dax_tiers_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(tier.name == "Dax" for tier in options.TIERS):
        with pytest.raises(ConfigError, match="no Dax tier"):
            options.read_extra_config(DAX)
    theirs = ("device_path", "max_dax_size", "async_put")
    settings = [SimpleNamespace(key=SimpleNamespace(name=f"ours_{name}", seeds=(f"dax.{name}",))) for name in theirs]
    settings.append(SimpleNamespace(key=None))
    monkeypatch.setattr(options, "TIERS", (SimpleNamespace(name="Dax", settings=settings),))
    said: list[Any] = []
    monkeypatch.setattr(options, "read_params", said.append)
    options.read_extra_config({**DAX, "kvdepot.pool_gb": 0.1})
    values = {"ours_device_path": "/dev/dax0.0", "ours_max_dax_size": 64, "ours_async_put": False}
    assert said.pop() == {"pipeline": "Cache|Dax", **values, "pool_gb": 0.1}
    options.read_extra_config({**DAX, "kvdepot.pipeline": "Cache|Dax|Posix"})
    assert said.pop() == {"pipeline": "Cache|Dax|Posix", **values}
    with pytest.raises(ConfigError, match=r"dax\.restore_workers"):
        options.read_extra_config({**DAX, "dax.restore_workers": 2})


def test_the_log_repeats_itself_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    now = [100.0]
    monkeypatch.setattr(counters.time, "monotonic", lambda: now[0])
    logger: Any = SimpleNamespace(warning=lambda *values: said.append(values))
    counts = counters.Counters(lambda: logger)
    for _ in range(3):
        counts.trouble("no_depot", "no depot", 2)
    counts.trouble("no_depot", "nothing", 0)
    assert [one[-1] for one in said] == [2]
    now[0] += counters.SAY_AGAIN_S
    counts.trouble("no_depot", "no depot")
    assert [one[-1] for one in said] == [2, 7]
