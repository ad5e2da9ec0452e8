"""LoRA adapters identified by content: one that was retrained in place is another one."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import BLOCK, FakeDepot, Step, pages, request, scheduler

from kvdepot.engines.vllm import adapters as adapters_module
from kvdepot.engines.vllm.adapters import FIRST_WAIT_S, UNKNOWN, Adapters
from kvdepot.engines.vllm.meta import LoadReport
from kvdepot.engines.vllm.scheduler import ADAPTER_S


def write(path: Path, values: bytes, name: str = "adapter_model.safetensors") -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    (path / name).write_bytes(values)
    return path


def lora(path: Path, name: str = "sql") -> Any:
    return SimpleNamespace(lora_name=name, lora_path=str(path), lora_int_id=1)


def digest(adapters: Adapters, request: Any) -> bytes:
    inquiry = adapters.ask(request)
    inquiry.wait(60)
    assert inquiry.found is not None
    return inquiry.found.digest


def test_the_content_names_an_adapter(tmp_path: Path) -> None:
    one, same, other = (write(tmp_path / name, name[:1].encode() * 5000) for name in ("a1", "a2", "b"))
    adapters = Adapters()
    assert digest(adapters, lora(one)) == digest(adapters, lora(same)) == digest(Adapters(), lora(one)) != b""
    assert digest(adapters, lora(other)) != digest(adapters, lora(one))
    write(one, b"optimizer", "optimizer.pt")
    assert digest(Adapters(), lora(one)) == digest(adapters, lora(same)), "only the adapter's own files count"


def test_an_adapter_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, adapters = write(tmp_path / "a", b"weights"), Adapters()
    found = digest(adapters, lora(path))
    monkeypatch.setattr("kvdepot.engines.vllm.adapters.content_digest", lambda path: pytest.fail("read again"))
    assert digest(adapters, lora(path)) == found


def test_one_that_changes_under_the_engine_is_left_alone_by_it_and_new_to_the_next(tmp_path: Path) -> None:
    """vLLM may have either version in memory, and has KV of the first under the same hashes (P1)."""
    path, adapters = write(tmp_path / "a", b"first"), Adapters()
    before = digest(adapters, lora(path))
    (path / "adapter_model.safetensors").write_bytes(b"later")
    os.utime(path / "adapter_model.safetensors", ns=(1, 1))
    assert digest(adapters, lora(path)) == b""
    (path / "adapter_model.safetensors").write_bytes(b"first")
    assert digest(adapters, lora(path)) == b"", "what is in vLLM's memory is not known any more"
    (path / "adapter_model.safetensors").write_bytes(b"later")
    assert digest(Adapters(), lora(path)) not in (b"", before)


def test_files_that_were_only_touched_are_the_same(tmp_path: Path) -> None:
    path, adapters = write(tmp_path / "a", b"first"), Adapters()
    before = digest(adapters, lora(path))
    os.utime(path / "adapter_model.safetensors", ns=(1, 1))
    assert digest(adapters, lora(path)) == before


def test_an_adapter_that_is_not_found_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert digest(Adapters(), lora(tmp_path / "nowhere")) == digest(Adapters(), lora(tmp_path / "empty")) == b""


@pytest.mark.parametrize("missing", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_that_is_half_downloaded_is_not_there_yet(tmp_path: Path, missing: str) -> None:
    path, adapters = write(tmp_path / "a", b"weights"), Adapters()
    complete = digest(Adapters(), lora(path))
    (path / missing).rename(tmp_path / missing)
    assert digest(adapters, lora(path)) == b""
    (tmp_path / missing).rename(path / missing)
    assert digest(adapters, lora(path)) == complete != b""


class RecordingDepot(FakeDepot):
    """Records the keys of its claims."""

    def claim(self, groups: Any, hashes: Any, **how: Any) -> Any:
        self.asked = list(hashes)
        return super().claim(groups, hashes, **how)


def keys(path: Path | None) -> tuple[list[bytes], list[bytes]]:
    """Returns the keys that a request with this adapter looks up, and those that it stores."""
    depot = RecordingDepot()
    side, req = scheduler(depot), request("r", 2 * BLOCK)
    req.lora_request = lora(path) if path is not None else None
    depot.asked = []
    side.new_request(req)
    tokens, _ = side.match(req, 0)
    side.allocated(req, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), tokens or 0)
    step = side.build_step(Step().starts("r", 0, 2 * BLOCK, [1, 2]).output())
    assert step.saves == {} or path is None, "stored before the workers have compared their memory"
    side.reported(LoadReport(done={step.adapted: 1}))
    saves = step.saves or side.build_step(Step().output()).late_saves
    return depot.asked, saves[0].hashes if saves else []


def test_keys_have_the_adapter_s_content(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"first")
    plain, first = keys(None), keys(path)
    write(path, b"later")
    later, unknown = keys(path), keys(tmp_path / "nowhere")
    assert plain == ([b"r/0"], [b"r/0", b"r/1"])
    assert unknown == ([], [])
    for found in (first, later):
        assert (len(found[0]), len(found[1])) == (1, 2)
        assert found[0][0] == found[1][0]
    assert {*plain[1]}.isdisjoint(first[1])
    assert {*first[1]}.isdisjoint(later[1])


def test_hits_of_an_adapter_are_loaded_by_its_keys(tmp_path: Path) -> None:
    side, req = scheduler(FakeDepot(units=9)), request("r", 2 * BLOCK)
    req.lora_request = lora(write(tmp_path / "a", b"first"))
    side.new_request(req)
    tokens, _ = side.match(req, 0)
    side.allocated(req, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), tokens or 0)
    step = side.build_step(Step().starts("r", BLOCK, BLOCK, [1, 2]).output())
    (load,) = step.loads
    assert load.blocks[0].pages == [1]
    assert load.blocks[0].hashes != req.block_hashes[:1]


def test_the_same_adapter_does_something_else_in_an_engine_with_other_options(tmp_path: Path) -> None:
    one = lora(write(tmp_path / "a", b"weights"))
    options = [{}, {"target_modules": "q_proj"}, {"target_modules": "v_proj"}]
    assert len({digest(Adapters(some), one) for some in options}) == len(options)
    assert digest(Adapters({}), one) == digest(Adapters(), one)


class Mount:
    """A file system that hangs until it is back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_back = threading.Event()
        self.looks = 0
        look = adapters_module.signature_of

        def signature_of(directory: Path) -> Any:
            self.looks += 1
            self.is_back.wait()
            return look(directory)

        monkeypatch.setattr(adapters_module, "signature_of", signature_of)


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mount]:
    made = Mount(monkeypatch)
    yield made
    made.is_back.set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("kvdepot.engines.vllm.scheduler.time.monotonic", lambda: now[0])
    return now


def with_adapter(name: str, path: Path) -> Any:
    made = request(name, 4 * BLOCK)
    made.lora_request = lora(path)
    return made


def test_a_mount_that_hangs_delays_requests_with_its_adapters_for_a_while_and_no_others(
    tmp_path: Path, mount: Mount, clock: list[float]
) -> None:
    path = write(tmp_path / "a", b"weights")
    side = scheduler(FakeDepot(units=9), adapters=Adapters())
    first, second = with_adapter("first", path), with_adapter("second", path)
    side.new_request(first)
    assert side.match(first, 0) == (None, False)
    assert side.match(request("plain", 4 * BLOCK), 0)[0]
    clock[0] += ADAPTER_S + 1
    assert side.match(first, 0) == (0, False)
    assert side.match(second, 0) == (0, False), "one after the other would wait"
    side.allocated(first, pages([1, 2, 3, 4]), 0)
    step = side.build_step(Step().starts("first", 0, 2 * BLOCK, [1, 2, 3, 4]).output())
    assert (step.saves, step.adapted) == ({}, 0)
    assert [use.files for use in step.adapters] == [b""]

    inquiry = side._requests["second"].inquiry
    assert inquiry is not None
    mount.is_back.set()
    inquiry.wait(60)
    later = with_adapter("later", path)
    side.new_request(later)
    pending = side._requests["later"].inquiry
    if pending is not None:
        pending.wait(60)
    assert side.match(later, 0)[0]
    step = side.build_step(Step().goes_on("first", 2 * BLOCK, 1, ([1, 2, 3, 4],)).output())
    side.reported(LoadReport(done={step.adapted: 1}))
    assert side.build_step(Step().output()).late_saves[0].pages == [1, 2], "the answer came before it ended"


def test_the_first_request_with_an_adapter_waits_for_its_digest(tmp_path: Path, mount: Mount) -> None:
    side = scheduler(FakeDepot(units=9), adapters=Adapters())
    req = with_adapter("r", write(tmp_path / "a", b"weights"))
    assert side.match(req, 0) == (None, False)
    inquiry = side._requests["r"].inquiry
    assert inquiry is not None
    mount.is_back.set()
    inquiry.wait(60)
    assert side.match(req, 0)[0]


class Waits:
    """Waits for looks: an answer comes only while the scheduler waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[Any] = []
        self.hangs = False
        self.seconds: list[float] = []

        def wait(_event: threading.Event, timeout_s: float) -> bool:
            self.seconds.append(timeout_s)
            while self.begun and not self.hangs:
                self.begun.pop()()
            return True

        monkeypatch.setattr(adapters_module, "threading", SimpleNamespace(Event=Over, Lock=threading.Lock))
        monkeypatch.setattr(Over, "wait", wait)


class Over(threading.Event):
    """What an inquiry waits for."""


def test_a_request_whose_adapter_is_known_is_matched_at_once_in_a_busy_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = Waits(monkeypatch)
    side = scheduler(FakeDepot(units=9), adapters=Adapters(begin=waits.begun.append))
    side.build_step(Step().starts("other", 0, BLOCK, [9]).output())
    assert side.match(with_adapter("r", write(tmp_path / "a", b"weights")), 0)[0]
    assert waits.seconds == [FIRST_WAIT_S]


def test_steps_wait_once_for_a_look_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    waits = Waits(monkeypatch)
    waits.hangs = True
    side = scheduler(FakeDepot(units=9), adapters=Adapters(begin=waits.begun.append))
    asked = [with_adapter(name, write(tmp_path / "a", b"weights")) for name in ("one", "two", "three")]
    for number in range(3):
        side.build_step(Step().starts(f"other{number}", 0, BLOCK, [9]).output())
        assert [side.match(req, 0) for req in asked] == [(None, False)] * 3
    assert sum(waits.seconds) == FIRST_WAIT_S
    waits.hangs = False
    assert [bool(side.match(req, 0)[0]) for req in asked] == [True] * 3


def test_requests_that_do_not_need_the_files_do_not_wait_for_them(tmp_path: Path, mount: Mount) -> None:
    side = scheduler(FakeDepot(units=9), adapters=Adapters(), loads=False)
    assert side.match(with_adapter("r", write(tmp_path / "a", b"weights")), 0) == (0, False)


def test_a_mount_that_hangs_under_many_adapters_keeps_no_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_back = threading.Event()
    look = adapters_module.adapter_directory

    def hang(path: str) -> Path:
        if Path(path).name.startswith("hangs"):
            is_back.wait()
        return look(path)

    monkeypatch.setattr(adapters_module, "adapter_directory", hang)
    adapters = Adapters()
    healthy, *hanging = (write(tmp_path / name, b"weights") for name in ("a", *(f"hangs{n}" for n in range(32))))
    try:
        asked = [adapters.ask(lora(path)) for path in hanging for _ in range(3)]
        assert digest(adapters, lora(healthy)) == digest(Adapters(), lora(healthy)) != b""
        assert {inquiry.found for inquiry in asked} == {None}
    finally:
        is_back.set()
    for inquiry in asked:
        inquiry.wait(60)
    assert all(inquiry.found and inquiry.found.digest for inquiry in asked)


def test_looks_wait_for_a_thread_and_beyond_a_limit_find_nothing(
    tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "THREADS_MAX", 1)
    monkeypatch.setattr(adapters_module, "WAITING_MAX", 1)
    adapters = Adapters()
    paths = [write(tmp_path / name, b"weights") for name in ("hangs", "waits", "too many")]
    asked = [adapters.ask(lora(path)) for path in paths for _ in range(2)]
    assert [inquiry.found for inquiry in asked] == [None] * 4 + [UNKNOWN] * 2
    mount.is_back.set()
    for inquiry in asked[:4]:
        inquiry.wait(60)
    assert all(inquiry.found and inquiry.found.digest for inquiry in asked[:4])


def test_a_request_that_comes_during_a_look_gets_one_that_began_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work: list[Any] = []
    path, adapters = write(tmp_path / "a", b"first"), Adapters(begin=work.append)
    look, looks, after = adapters._look, [], []

    def look_before_a_change(name: tuple[str, str]) -> Any:
        looks.append(look(name))
        if len(looks) == 1:
            write(path, b"another")
            after.extend(adapters.ask(lora(path)) for _ in range(2))
        return looks[-1]

    monkeypatch.setattr(adapters, "_look", look_before_a_change)
    before = adapters.ask(lora(path))
    work.pop()()
    assert before.found is not None
    assert before.found.digest
    assert [inquiry.found for inquiry in after] == [UNKNOWN] * 2
    assert len(looks) == 2, "requests that come during one look share the next"


def test_an_adapter_is_not_trusted_again_by_a_look_that_had_begun(tmp_path: Path) -> None:
    work: list[Any] = []
    path, adapters = write(tmp_path / "a", b"first"), Adapters(begin=work.append)
    inquiry = adapters.ask(lora(path))
    adapters.distrust(("sql", str(path)), "a worker has said so")
    work.pop()()
    assert inquiry.found == adapters.ask(lora(path)).found == UNKNOWN


def test_without_another_thread_an_adapter_is_unknown(tmp_path: Path) -> None:
    def refuse(_work: Any) -> None:
        raise RuntimeError("can't start new thread")

    adapters = Adapters(begin=refuse)
    assert digest(adapters, lora(write(tmp_path / "a", b"first"))) == b""
