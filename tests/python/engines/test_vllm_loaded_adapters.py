"""LoRA adapters in the workers' memory: KV computed with other files than its keys stand for is not stored (P1)."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import BLOCK, FakeDepot, Step, geometry, options, pages, request, scheduler

from kvdepot.engines.adapter_files import content_digest
from kvdepot.engines.vllm import compute
from kvdepot.engines.vllm.adapters import Adapters
from kvdepot.engines.vllm.loaded_adapters import LoadedAdapters
from kvdepot.engines.vllm.meta import AdapterUse, LoadReport, StepMetadata
from kvdepot.engines.vllm.worker import WorkerSide


def adapter(path: Path, values: bytes) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(values)
    os.utime(path / "adapter_model.safetensors", ns=(1, len(values)))
    return path


def lora(path: Path, *, number: int = 1, in_place: bool = False) -> Any:
    return SimpleNamespace(lora_name="sql", lora_path=str(path), lora_int_id=number, load_inplace=in_place)


class Manager:
    """The part of vLLM's manager that decides when files are read."""

    def __init__(self) -> None:
        self.loaded: dict[int, str] = {}
        self.fails = False

    def add_adapter(self, request: Any) -> None:
        if request.lora_int_id not in self.loaded or request.load_inplace:
            self.loaded[request.lora_int_id] = self._load_adapter(request)

    def _load_adapter(self, request: Any) -> str:
        if self.fails:
            raise ValueError("not an adapter")
        return str(request.lora_path)


class Runner:
    """A model's runner."""

    def __init__(self) -> None:
        self.lora_manager = Manager()


def watched() -> tuple[Runner, LoadedAdapters]:
    runner, loaded = Runner(), LoadedAdapters()
    loaded.watch(runner)
    return runner, loaded


def use(path: Path, *, number: int = 1, files: bytes | None = None) -> AdapterUse:
    return AdapterUse("sql", str(path), number, content_digest(path) if files is None else files)


def test_an_adapter_that_is_replaced_in_place_has_changed_for_the_requests_that_run(tmp_path: Path) -> None:
    first, second = adapter(tmp_path / "v1", b"first"), adapter(tmp_path / "v2", b"second")
    runner, loaded = watched()
    runner.lora_manager.add_adapter(lora(first))
    assert loaded.changed([use(first)]) == set()
    runner.lora_manager.add_adapter(lora(second, in_place=True))
    assert loaded.changed([use(first), use(second)]) == {("sql", str(first))}
    assert loaded.changed([use(second)]) == set()
    runner.lora_manager.add_adapter(lora(second, in_place=True))
    assert loaded.changed([use(second)]) == set(), "read again, the same files"


@pytest.mark.parametrize("files", [None, b""], ids=["digested", "not digested yet"])
def test_an_adapter_that_comes_back_has_still_changed(tmp_path: Path, files: bytes | None) -> None:
    """vLLM's own cache has KV of both versions under one hash."""
    path = adapter(tmp_path / "v1", b"first")
    runner, loaded = watched()
    runner.lora_manager.add_adapter(lora(path))
    assert loaded.changed([use(path, files=files)]) == set()
    adapter(path, b"another")
    runner.lora_manager.add_adapter(lora(path, number=2))
    assert loaded.changed([use(path, number=2)]) == {("sql", str(path))}


def test_files_that_were_replaced_after_they_were_loaded_are_not_those_in_memory(tmp_path: Path) -> None:
    path = adapter(tmp_path / "v1", b"first")
    runner, loaded = watched()
    runner.lora_manager.add_adapter(lora(path))
    adapter(path, b"another")
    assert loaded.changed([use(path)]) == {("sql", str(path))}
    assert loaded.changed([use(path)]) == set(), "each once"


def touch(path: Path) -> None:
    """Changes the times of a file and of its inode, as a change of the owner or a new link does."""
    os.utime(path / "adapter_model.safetensors", ns=(2, 2))


@pytest.mark.parametrize("change", [touch, lambda path: adapter(path, b"first")], ids=["touched", "written"])
def test_files_with_the_same_content_are_the_same_when_they_are_read_again(tmp_path: Path, change: Any) -> None:
    path = adapter(tmp_path / "v1", b"first")
    touch(path)
    runner, loaded = watched()
    planned = use(path)
    runner.lora_manager.add_adapter(lora(path))
    assert loaded.changed([planned]) == set()
    change(path)
    runner.lora_manager.loaded.clear()
    runner.lora_manager.add_adapter(lora(path))
    assert loaded.changed([planned]) == set()


def test_an_adapter_on_another_node_s_disk_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in ("one", "two"):
        (tmp_path / node).mkdir()
        adapter(tmp_path / node / "sql", b"first")
    touch(tmp_path / "two" / "sql")
    planned = AdapterUse("sql", "sql", 1, content_digest(tmp_path / "one" / "sql"))
    runner, loaded = watched()
    monkeypatch.chdir(tmp_path / "two")
    runner.lora_manager.add_adapter(lora(Path("sql")))
    assert loaded.changed([planned]) == set()


def test_a_file_s_content_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = adapter(tmp_path / "v1", b"first")
    runner, loaded = watched()
    runner.lora_manager.add_adapter(lora(path))
    monkeypatch.setattr("kvdepot.engines.vllm.loaded_adapters.content_digest", lambda path: pytest.fail("read again"))
    runner.lora_manager.add_adapter(lora(path, in_place=True))
    assert loaded.changed([use(path)]) == set()


def test_files_that_change_while_they_are_digested_are_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is that of content which vLLM has not read."""
    path = adapter(tmp_path / "v1", b"first")
    runner, loaded = watched()

    def digest_after_a_write(directory: Path) -> bytes:
        return content_digest(adapter(directory, b"another"))

    monkeypatch.setattr("kvdepot.engines.vllm.loaded_adapters.content_digest", digest_after_a_write)
    runner.lora_manager.add_adapter(lora(path))
    assert loaded.changed([use(path)]) == {("sql", str(path))}


def test_files_that_cannot_be_digested_are_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_directory: Path) -> bytes:
        raise OSError("stale file handle")

    path = adapter(tmp_path / "v1", b"first")
    runner, loaded = watched()
    monkeypatch.setattr("kvdepot.engines.vllm.loaded_adapters.content_digest", refuse)
    runner.lora_manager.add_adapter(lora(path))
    assert loaded.changed([use(path)]) == {("sql", str(path))}


def test_files_that_change_while_they_are_read_are_not_known(tmp_path: Path) -> None:
    path = adapter(tmp_path / "v1", b"first")
    runner, loaded = Runner(), LoadedAdapters()
    read = runner.lora_manager._load_adapter

    def read_during_a_write(request: Any) -> str:
        adapter(path, b"another")
        return read(request)

    runner.lora_manager._load_adapter = read_during_a_write  # type: ignore[method-assign]
    loaded.watch(runner)
    runner.lora_manager.add_adapter(lora(path))
    assert loaded.changed([use(path)]) == {("sql", str(path))}


def downloaded(path: Path, names: list[str]) -> set[tuple[str, str]]:
    """Returns whether an adapter has changed of which vLLM downloads the files with these names when it loads it."""
    complete = adapter(path.parent / "hub", b"first")
    runner, loaded = Runner(), LoadedAdapters()
    read = runner.lora_manager._load_adapter

    def download(request: Any) -> str:
        path.mkdir(exist_ok=True)
        for name in names:
            (complete / name).replace(path / name)
        return read(request)

    runner.lora_manager._load_adapter = download  # type: ignore[method-assign]
    loaded.watch(runner)
    runner.lora_manager.add_adapter(lora(path))
    return loaded.changed([use(path, files=b"")]) | loaded.changed([use(path)])


def test_an_adapter_that_vllm_downloads_is_known(tmp_path: Path) -> None:
    assert downloaded(tmp_path / "v1", ["adapter_config.json", "adapter_model.safetensors"]) == set()


def test_an_adapter_of_which_vllm_downloads_the_rest_is_known(tmp_path: Path) -> None:
    path = adapter(tmp_path / "v1", b"first")
    (path / "adapter_model.safetensors").unlink()
    assert downloaded(path, ["adapter_model.safetensors"]) == set()


def test_weights_that_come_beside_others_may_not_be_those_in_memory(tmp_path: Path) -> None:
    path = adapter(tmp_path / "v1", b"first")
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    assert downloaded(path, ["adapter_model.safetensors"]) == {("sql", str(path))}


def test_an_adapter_of_which_vllm_downloads_a_file_anew_is_not_known(tmp_path: Path) -> None:
    path = adapter(tmp_path / "v1", b"first")
    (path / "adapter_model.safetensors").unlink()
    os.utime(path / "adapter_config.json", ns=(1, 1))
    assert downloaded(path, ["adapter_config.json", "adapter_model.safetensors"]) == {("sql", str(path))}


def test_a_replacement_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = adapter(tmp_path / "v1", b"first")
    runner, loaded = watched()
    runner.lora_manager.add_adapter(lora(path))
    runner.lora_manager.fails = True
    with pytest.raises(ValueError, match="not an adapter"):
        runner.lora_manager.add_adapter(lora(tmp_path / "nothing", in_place=True))
    assert loaded.changed([use(path)]) == set()


def test_adapters_that_cannot_be_watched_count_as_changed(tmp_path: Path) -> None:
    path = adapter(tmp_path / "v1", b"first")
    loaded = LoadedAdapters()
    loaded.watch(SimpleNamespace())
    assert loaded.changed([use(path)]) == {("sql", str(path))}
    runner, loaded = watched()
    runner.lora_manager.add_adapter(lora(path))
    runner.lora_manager = Manager()
    assert loaded.changed([use(path)]) == {("sql", str(path))}, "vLLM has another manager by now"


def test_a_worker_tells_of_a_replacement_with_the_step_that_computes_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "_cuda", lambda: None)
    first, second = adapter(tmp_path / "v1", b"first"), adapter(tmp_path / "v2", b"second")
    side = WorkerSide(SimpleNamespace(), options(), geometry())  # type: ignore[arg-type]
    runner = Runner()
    side._adapters.watch(runner)

    def run(number: int) -> LoadReport:
        step = StepMetadata(adapters=[use(first)], adapted=number)
        side.prepare(step)
        side.start_loads(step)
        side.finish_saves(step)
        report = side.report()
        assert report is not None
        assert report.done == {number: 1}
        return report

    runner.lora_manager.add_adapter(lora(first))
    assert run(1).changed_adapters == set()
    runner.lora_manager.add_adapter(lora(second, in_place=True))
    report = run(2)
    assert report.changed_adapters == {("sql", str(first))}
    assert report.aggregate(LoadReport()).changed_adapters == report.changed_adapters


# The scheduler.


def with_adapter(name: str, path: Path) -> Any:
    made = request(name, 4 * BLOCK)
    made.lora_request = lora(path)
    return made


def begun(side: Any, req: Any, *table: int) -> Any:
    """Starts a request that computes the first two blocks of its prompt."""
    side.new_request(req)
    side.match(req, 0)
    side.allocated(req, pages(list(table)), 0)
    return side.build_step(Step().starts(req.request_id, 0, 2 * BLOCK, list(table)).output())


@pytest.mark.parametrize("ranks", [1, 2])
def test_saves_of_a_request_with_an_adapter_wait_until_every_rank_has_compared_it(tmp_path: Path, ranks: int) -> None:
    side = scheduler(FakeDepot(), ranks)
    step = begun(side, with_adapter("r", adapter(tmp_path / "v1", b"first")), 1, 2, 3, 4)
    assert step.saves == {}
    assert step.adapters == [use(tmp_path / "v1")]
    for _ in range(ranks):
        assert side.build_step(Step().output()).late_saves == {}
        side.reported(LoadReport(done={step.adapted: 1}))
    assert side.build_step(Step().output()).late_saves[0].pages == [1, 2]
    assert not side.has_late_saves()


def test_workers_compare_the_content_alone_whatever_options_keys_contain(tmp_path: Path) -> None:
    side = scheduler(FakeDepot(), adapters=Adapters({"target_modules": "q_proj"}, begin=lambda work: work()))
    step = begun(side, with_adapter("r", adapter(tmp_path / "v1", b"first")), 1, 2, 3, 4)
    assert step.adapters == [use(tmp_path / "v1")]


def test_a_request_whose_adapter_was_replaced_stores_nothing_more(tmp_path: Path) -> None:
    """The next step is planned before the replacement is known. Requests with the new version are stored."""
    side = scheduler(FakeDepot(units=9))
    first, second = adapter(tmp_path / "v1", b"first"), adapter(tmp_path / "v2", b"second")
    old, new, plain = with_adapter("old", first), with_adapter("new", second), request("plain", 4 * BLOCK)
    replaced = begun(side, old, 1, 2, 3, 4)
    begun(side, new, 5, 6, 7, 8)
    both = Step().goes_on("old", 2 * BLOCK, BLOCK, ([1, 2, 3, 4],)).goes_on("new", 2 * BLOCK, BLOCK, ([5, 6, 7, 8],))
    planned = side.build_step(both.output())
    assert {found.path for found in planned.adapters} == {str(first), str(second)}
    side.reported(LoadReport(done={replaced.adapted: 1}, changed_adapters={("sql", str(first))}))
    side.reported(LoadReport(done={planned.adapted - 1: 1}))
    side.reported(LoadReport(done={planned.adapted: 1}))
    later = side.build_step(Step().goes_on("old", 3 * BLOCK, BLOCK, ([1, 2, 3, 4],)).output())
    side.reported(LoadReport(done={later.adapted: 1}))
    last = side.build_step(Step().output())
    assert later.late_saves[0].pages == [5, 6, 7]
    assert last.late_saves == {}
    assert side.match(with_adapter("again", first), 0) == (0, False), "vLLM's own cache has KV of both"
    assert side.match(plain, 0)[0]
    assert side.stats.data["dropped_blocks"] == {"adapter": 3}


def test_a_step_with_several_adapters_is_walked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = scheduler(FakeDepot())
    paths = [adapter(tmp_path / name, name.encode()) for name in ("v1", "v2")]
    asked = [request("plain", 2 * BLOCK), *(with_adapter(path.name, path) for path in paths)]
    plan = Step()
    for number, req in enumerate(asked):
        side.new_request(req)
        side.match(req, 0)
        plan.starts(req.request_id, 0, 2 * BLOCK, [2 * number + 1, 2 * number + 2])
        side.allocated(req, pages([2 * number + 1, 2 * number + 2]), 0)
    complete, walks = side._saves.complete, []
    monkeypatch.setattr(side._saves, "complete", lambda *args: walks.append(args) or complete(*args))
    step = side.build_step(plan.output())
    assert len(walks) == 1
    assert step.saves[0].pages == [1, 2]
    side.reported(LoadReport(done={step.adapted: 1}, changed_adapters={("sql", str(paths[0]))}))
    assert side.build_step(Step().output()).late_saves[0].pages == [5, 6]


def test_a_step_that_completes_nothing_with_an_adapter_waits_for_no_rank(tmp_path: Path) -> None:
    side = scheduler(FakeDepot())
    begun(side, with_adapter("r", adapter(tmp_path / "v1", b"first")), 1, 2, 3, 4)
    step = side.build_step(Step().goes_on("r", 2 * BLOCK, 1, ()).output())
    assert (step.saves, step.adapted) == ({}, 0)


def test_saves_without_an_adapter_do_not_wait(tmp_path: Path) -> None:
    side = scheduler(FakeDepot())
    begun(side, with_adapter("r", adapter(tmp_path / "v1", b"first")), 1, 2, 3, 4)
    step = begun(side, request("plain", 4 * BLOCK), 5, 6, 7, 8)
    assert step.saves[0].pages == [5, 6]
    assert (step.adapters, step.adapted) == ([], 0)
