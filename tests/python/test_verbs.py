"""The verbs that list and remove: what they find, what they leave alone, and what they refuse."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import kvdepot
from kvdepot.cli import main
from kvdepot.cli.top import hour_rate, refresh, rows
from kvdepot.stored.blocks import contents
from kvdepot.stored.gc import find_cold, find_garbage, remove
from kvdepot.stored.namespaces import find_namespaces

LAYOUT = kvdepot.BlockLayout(shards=1, tensor_sizes_bytes=[5000])
BLOCKS = 12
NAMES = [f"block {index}".encode() for index in range(BLOCKS)]
LONG_S = 120


def config(directory: Path, **more: Any) -> dict[str, Any]:
    return {"directories": [str(directory)], "pool_gb": 0.0625, "log_level": "warn", **more}


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(main, [str(one) for one in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


def dump(store: kvdepot.Store) -> None:
    store.dump(NAMES, [[np.full(5000, index, dtype=np.uint8)] for index in range(BLOCKS)]).wait().raise_for_failures()
    assert store.drain(60_000)


def fill(directory: Path, model: str, resets: int = 0) -> str:
    directory.mkdir(exist_ok=True)
    with kvdepot.open(config(directory), layout=LAYOUT, namespace={"model": model}) as store:
        for _ in range(resets):
            store.reset()
        dump(store)
        return store.namespace_id


def hits(directory: Path, model: str, wanted: int = BLOCKS) -> int:
    """Returns how many blocks a new depot finds. Its disk may be too late for the first lookups."""
    until = time.monotonic() + LONG_S / 2
    with kvdepot.open(config(directory), layout=LAYOUT, namespace={"model": model}) as store:
        while (found := int(store.lookup(NAMES).sum())) < wanted and time.monotonic() < until:
            time.sleep(0.01)
    return found


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The test's own runtime directory, where no depot of the user runs."""
    with tempfile.TemporaryDirectory(prefix="kvd") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        monkeypatch.setenv("XDG_CACHE_HOME", directory)
        yield Path(directory)


@pytest.fixture
def serve(runtime: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[Path, str]]]:
    """Starts a depot over ``tmp_path/blocks``, with more keys. Returns its configuration and socket."""
    started = []

    def serve(**more: Any) -> tuple[Path, str]:
        (tmp_path / "blocks").mkdir(exist_ok=True)
        file = runtime / "kvdepot.yaml"
        file.write_text(json.dumps({"directories": [f"{tmp_path}/blocks"], "pool_gb": 0.0625, **more}))
        command = [sys.executable, "-m", "kvdepot", "serve", "--config", str(file)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stderr is not None
        assert any("serving " in line for line in process.stderr)
        return file, str(next((runtime / "kvdepot").glob("depot-*.sock")))

    yield serve
    for process in started:
        process.terminate()
        assert process.wait(LONG_S) == 0
        assert process.stderr is not None
        process.stderr.close()


def attached(directory: Path, socket: str, model: str) -> kvdepot.Store:
    more = {"mode": "node", "socket": socket, "start_depot": False, "attach_timeout_ms": 60_000}
    settings = config(directory, **more, call_timeout_ms=60_000)
    return kvdepot.open(settings, layout=LAYOUT, namespace={"model": model})


def test_ls_lists_in_each_order(tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    root = fill(directory, "tiny")
    files = sorted(directory.rglob("*.kvb"))
    for age, path in enumerate(files):
        os.utime(path, (1_000_000 + age, 1_000_000 + age))
    names = [path.stem for path in files]
    shown = json.loads(run("ls", root[:8], "--directory", directory, "--sort", "age", "--limit", 5, "--json"))
    assert (shown["blocks"], [one["hash"] for one in shown["shown"]]) == (BLOCKS, names[:5])
    shown = json.loads(run("ls", root[:8], "--directory", directory, "--json"))
    assert [one["hash"] for one in shown["shown"]] == names[::-1]
    assert f"3 of {BLOCKS} blocks" in run("ls", root, "--directory", directory, "--sort", "size", "--limit", 3)
    run("ls", "zz", "--directory", directory, status=2)


def test_gc_finds_what_is_in_vain_and_nothing_else(tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    good, past, empty, unknown = (fill(directory, model, resets) for model, resets in
                                  (("good", 0), ("reset", 2), ("empty", 0), ("unknown", 0)))  # fmt: skip
    for path in (directory / empty).rglob("*.kvb"):
        path.unlink()
    (directory / unknown / "namespace.json").unlink()
    old = directory / past / "e1" / "00"
    old.mkdir(parents=True, exist_ok=True)
    (old / ("00" * 16 + ".kvb")).write_bytes(b"x" * 700)
    aside = next((directory / good).rglob("*.kvb"))
    aside = aside.rename(aside.with_suffix(".bad"))
    stale, fresh = aside.parent / ".tmp-host-1-2-3", aside.parent / ".tmp-host-1-2-4"
    for path in (stale, fresh, directory / "lost+found", directory / good / "e0" / "somebody's.txt"):
        path.write_bytes(b"y" * 100)
    os.utime(stale, (time.time() - 7200,) * 2)
    found = {(one.kind, one.path.relative_to(directory).parts[0]): one for one in find_garbage([directory])}
    assert {kind: root for kind, root in found if kind != "old epoch"} == {
        "set aside": good, "temporary": good, "empty namespace": empty, "unknown namespace": unknown,
    }  # fmt: skip
    assert {one.path for one in found.values() if one.kind == "temporary"} == {stale}
    assert {one.path.name for one in find_garbage([directory]) if one.kind == "old epoch"} >= {"e1"}
    assert not any(one.path.name == "e2" for one in find_garbage([directory]))
    said = json.loads(run("gc", directory, "--json"))
    assert (said["removed"], said["freed_bytes"]) == (False, 0)
    assert "would be freed" in run("gc", directory, "--dry-run")
    assert stale.exists()
    said = json.loads(run("gc", directory, "--apply", "--json"))
    assert (said["freed_bytes"], said["failures"]) == (said["bytes"], [])
    assert not any(path.exists() for path in (stale, aside, old, directory / empty))
    (left,) = json.loads(run("gc", directory, "--json"))["found"]
    assert (left["kind"], left["namespace"]) == ("unknown namespace", unknown)
    assert len(list((directory / unknown).rglob("*.kvb"))) == BLOCKS
    assert "--unknown-namespaces" in run("gc", directory, "--apply")
    assert json.loads(run("gc", directory, "--apply", "--unknown-namespaces", "--json"))["freed_bytes"] > 0
    assert not (directory / unknown).exists()
    assert fresh.exists()
    assert (directory / "lost+found").exists()
    assert (directory / good / "e0" / "somebody's.txt").exists()
    assert json.loads(run("gc", directory, "--json"))["found"] == []
    assert [contents(one).blocks for one in find_namespaces([directory]) if one.root == good] == [BLOCKS - 1]
    assert hits(directory, "reset") == BLOCKS
    assert next(one for one in find_namespaces([directory]) if one.root == past).epoch == 2


def test_gc_finds_the_blocks_that_a_smaller_capacity_would_evict(tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    old, new = fill(directory, "old"), fill(directory, "new")
    now_s = time.time()
    for root, age_s in ((old, 36_000), (new, 3_600)):
        for index, path in enumerate(sorted((directory / root).rglob("*.kvb"))):
            os.utime(path, (now_s - age_s + index,) * 2)
    block_bytes = -(-next(directory.rglob("*.kvb")).stat().st_size // 4096) * 4096
    room = BLOCKS + 2
    gib = room * block_bytes / (1 << 30)
    said = json.loads(run("gc", directory, "--capacity-gb", gib, "--json"))["found"]
    oldest = sorted((directory / old).rglob("*.kvb"))[: BLOCKS - 2]
    assert [(one["kind"], one["namespace"]) for one in said] == [("cold", old)] * (BLOCKS - 2)
    assert [Path(one["path"]) for one in said] == oldest
    assert "10.0 h ago" in said[0]["why"]
    shown = run("gc", directory, "--capacity-gb", gib)
    assert old in shown
    assert new not in shown
    assert json.loads(run("gc", directory, "--capacity-gb", 1, "--json"))["found"] == []
    os.utime(oldest[0])
    cold = find_cold([directory], room * block_bytes)
    os.utime(oldest[1])
    assert [remove(one, [directory]) > 0 for one in cold[:2]] == [False, True], "one was used since"
    run("gc", directory, "--capacity-gb", gib, "--apply")
    assert json.loads(run("gc", directory, "--capacity-gb", gib, "--json"))["found"] == []
    assert (hits(directory, "old", 2), hits(directory, "new")) == (2, BLOCKS)


def test_gc_measures_a_capacity_by_blocks_alone_and_by_each_of_them_once(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    root = fill(one, "tiny")
    with kvdepot.open(config(one), layout=LAYOUT, namespace={"model": "never dumped"}):
        pass
    shutil.copytree(one, other)
    shutil.rmtree(other / root / "e0")
    blocks = sorted(one.rglob("*.kvb"))
    within = blocks[0].parent
    (within / "backup").mkdir()
    shutil.copy(blocks[0], within / "backup" / blocks[0].name)
    (within / f"{'ab' * 16}.kvb").mkdir()
    (within / f"{'cd' * 16}.kvb").symlink_to(blocks[0])
    (tmp_path / "alias").symlink_to(one)
    fits = sum(-(-path.stat().st_size // 4096) * 4096 for path in blocks)
    assert find_cold([one, other], fits) == []
    assert {block.path for block in find_cold([one, other], 0)} == set(blocks)
    names = [one, f"{one}/", tmp_path / "alias", other]
    said = json.loads(run("gc", *names, "--capacity-gb", (fits - 1) / (1 << 30), "--json"))
    assert sum(block["kind"] == "cold" for block in said["found"]) == 1
    for capacity in ("0", "nan", "inf"):
        run("gc", one, "--capacity-gb", capacity, status=2)


def test_gc_keeps_the_only_mark_of_an_epoch(tmp_path: Path) -> None:
    """A directory below<N> is a mark: it stays without e<N>, or blocks from before the reset would reappear."""
    directory = tmp_path / "blocks"
    root = fill(directory, "tiny")
    shutil.move(directory / root / "e0", directory / root / "below7")
    assert list(find_garbage([directory])) == []
    (directory / root / "e7").mkdir()
    assert [one.path.name for one in find_garbage([directory])] == ["below7"]


def test_gc_leaves_namespaces_of_other_versions_alone(tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    path = directory / fill(directory, "tiny") / "namespace.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 9}))
    assert list(find_garbage([directory])) == []


def test_rm_of_a_stopped_directory_keeps_the_epoch(tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    fresh, past, other = fill(directory, "fresh"), fill(directory, "reset", 1), fill(directory, "other")
    assert "add --yes" in run("rm", fresh, "--directory", directory, status=2)
    assert hits(directory, "fresh") == BLOCKS
    assert f"{BLOCKS} blocks" in run("rm", fresh, "--directory", directory, "--yes")
    assert not (directory / fresh).exists(), "epoch 0 needs no directory"
    assert hits(directory, "fresh", 0) == 0
    assert hits(directory, "other") == BLOCKS
    said = json.loads(run("rm", past[:10], "--directory", directory, "--yes", "--json"))
    assert (said["blocks"] >= BLOCKS, said["how"]) == (True, "removed")
    found = {one.root: one for one in find_namespaces([directory])}
    assert (found[past].epoch, contents(found[past]).blocks) == (1, 0)
    assert contents(found[other]).blocks == BLOCKS


TIERED = {"pipeline": "Cache|Posix|Slab", "slab_segment_mb": 1, "slab_capacity_gb": 0.01}


def test_rm_of_a_stopped_depot_refuses_what_it_could_not_finish(tmp_path: Path, runtime: Path) -> None:
    """Only a depot reaches a Slab medium: with the files gone, the next one would serve the blocks from there."""
    directory, file = tmp_path / "blocks", runtime / "kvdepot.yaml"
    directory.mkdir()
    settings = config(directory, **TIERED, slab_path=str(tmp_path / "medium"))
    with kvdepot.open(settings, layout=LAYOUT, namespace={"model": "tiny"}) as store:
        dump(store)
        root = store.namespace_id
    file.write_text(json.dumps(settings))
    said = run("rm", root, "--config", file, "--yes", status=2)
    assert f"blocks of namespace {root} would stay in Slab" in said
    assert "Nothing was removed" in said
    assert "kvdepot reset" in said
    assert len(list((directory / root).rglob("*.kvb"))) == BLOCKS


def test_rm_at_a_running_depot_removes_from_all_tiers(
    tmp_path: Path, serve: Callable[..., tuple[Path, str]], runtime: Path
) -> None:
    directory = tmp_path / "blocks"
    more = {**TIERED, "slab_path": str(tmp_path / "medium")}
    file, socket = serve(**more)
    with attached(directory, socket, "tiny") as store:
        dump(store)
        root = store.namespace_id
        assert json.loads(run("namespaces", "--medium", tmp_path / "medium", "--json"))[0]["blocks"] == BLOCKS
        assert json.loads(run("rm", root, "--config", file, "--yes", "--json"))["how"] == "reset"
        assert not store.lookup(NAMES).any()
    run("stop", "--config", file)
    for path in directory.rglob("*.kvb"):
        path.unlink()
    with kvdepot.open(config(directory, **more), layout=LAYOUT, namespace={"model": "tiny"}) as store:
        assert store.drain(60_000)
        assert not store.lookup(NAMES).any()


def test_reset_rm_and_prefetch_go_through_the_running_depot(
    tmp_path: Path, serve: Callable[[], tuple[Path, str]]
) -> None:
    directory = tmp_path / "blocks"
    before = fill(directory, "tiny")
    file, socket = serve()
    with attached(directory, socket, "tiny") as store, attached(directory, socket, "other") as other:
        dump(other)
        said = json.loads(run("prefetch", before[:8], "--config", file, "--limit", 5, "--json"))
        assert said["asked"] == 5
        until = time.monotonic() + LONG_S
        while store.stats()["depot"]["fetch_blocks"] < 5:
            assert time.monotonic() < until
            store.drain(10)
        while not store.lookup(NAMES).all():
            assert time.monotonic() < until
        assert "uses these directories" in run("gc", directory, "--apply", status=1)
        assert "stop it before" in run("gc", directory)
        assert "epoch 1" in run("reset", before[:8], "--config", file)
        assert not store.lookup(NAMES).any()
        assert other.lookup(NAMES).all()
        dump(store)
        assert store.lookup(NAMES).all()
        said = json.loads(run("rm", before[:8], "--socket", socket, "--config", file, "--yes", "--json"))
        assert said["how"] == "reset"
        assert not store.lookup(NAMES).any()
        assert other.lookup(NAMES).all()


def test_what_needs_a_running_depot_says_so(tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    root = fill(directory, "tiny")
    assert "no depot runs" in run("reset", root, "--directory", directory, status=1)
    assert "no depot runs" in run("prefetch", root, "--directory", directory, status=1)
    assert "no depot answers" in run("top", "--once", status=1)
    assert "no depot answers" in run("rm", root, "--socket", tmp_path / "none.sock", status=1)


def test_top_shows_running_depots(tmp_path: Path, serve: Callable[[], tuple[Path, str]]) -> None:
    _, socket = serve()
    with attached(tmp_path / "blocks", socket, "tiny") as store:
        dump(store)
        (shown,) = json.loads(run("top", "--json"))
        assert (shown["socket"], shown["pool_blocks"]) == (socket, BLOCKS)
        text = run("top", "--once", "--interval", 0.1, "--socket", socket)
    assert "Cache|Posix" in text
    assert "dump/s" in text
    assert "hit 1h" in text


@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
def test_top_goes_on_while_the_only_depot_restarts(
    runtime: Path,
    serve: Callable[[], tuple[Path, str]],
    named: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, socket = serve()

    def each_interval() -> Iterator[None]:
        yield
        run("stop", "--socket", socket)
        yield
        serve()
        yield
        raise KeyboardInterrupt

    intervals = each_interval()
    clock = SimpleNamespace(sleep=lambda _: next(intervals), monotonic=time.monotonic)
    monkeypatch.setattr("kvdepot.cli.top.time", clock)
    with pytest.raises(KeyboardInterrupt):
        refresh([socket] if named else [], 2.0, once=False)
    shown = [line for line in capsys.readouterr().out.splitlines() if "Cache|Posix" in line or "no depot" in line]
    assert ["no depot answers" in line for line in shown] == [False, True, False], shown


def test_top_finds_the_depot_of_a_configuration(
    runtime: Path, tmp_path: Path, serve: Callable[[], tuple[Path, str]]
) -> None:
    file, socket = serve()
    assert [one["socket"] for one in json.loads(run("top", "--config", file, "--json"))] == [socket]
    (runtime / "other.yaml").write_text(f"directories: [{tmp_path}/blocks]\npool_gb: 0.125\n")
    assert "no depot answers" in run("top", "--config", runtime / "other.yaml", "--once", status=1)


def test_a_depot_logs_its_own_resets_and_its_end(tmp_path: Path, runtime: Path) -> None:
    file = runtime / "kvdepot.yaml"
    (tmp_path / "blocks").mkdir()
    file.write_text(f"directories: [{tmp_path}/blocks]\npool_gb: 0.0625\n")
    command = [sys.executable, "-m", "kvdepot", "serve", "--config", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as depot:
        assert depot.stderr is not None
        assert any("serving " in line for line in depot.stderr)
        with attached(tmp_path / "blocks", str(next((runtime / "kvdepot").glob("depot-*.sock"))), "tiny") as store:
            root = store.namespace_id
            store.reset()
        run("stop", "--config", file)
        log = depot.stderr.read()
    (line,) = [line for line in log.splitlines() if "was reset" in line]
    assert f"namespace={root}" in line
    assert "epoch=1" in line
    assert "another depot" not in line
    # On a busy machine a stall of the depot may be told after it.
    assert any("no write is pending" in line for line in log.splitlines())


def test_rates_of_top() -> None:
    then = {"pid": 7, "pipeline": "Cache", "pool_bytes": 4096, "pool_free_bytes": 1024, "pool_blocks": 3}
    then |= {"dirty_blocks": 0, "dump_blocks_sealed": 10, "load_blocks": 0, "fetch_bytes": 0, "write_bytes": 2048}
    now = {**then, "dump_blocks_sealed": 30, "load_blocks": 12, "load_blocks_missed": 4, "write_bytes": 4096}
    now |= {"evict_blocks": 2, "lookup_blocks": 16, "lookup_hit_blocks": 4, "uptime_s": 2}
    (row,) = rows({"/s": then}, {"/s": now}, 2.0, {"/s": 0.5})
    rates = ("10", "4", "2", "0 bytes", "1.0 KiB", "1")
    assert row == (7, "Cache", "3.0 KiB of 4.0 KiB", 3, 0, "25.0%", "50.0%", *rates)
    (row,) = rows({"/s": now}, {"/s": now}, 2.0, {"/s": None})
    assert row[5:7] == (None, None), "nothing was looked up"
    for other in ({"pid": 8}, {"uptime_s": 1}):
        (row,) = rows({"/s": now}, {"/s": {**now, **other}}, 2.0, {"/s": 0.5})
        assert row[5:] == (None, "50.0%", *(None,) * 6), "another depot has other counters"
    (row,) = rows({}, {"/s": now}, 2.0, {})
    assert row[5:] == (None,) * 8


def test_the_hit_rate_of_an_hour_in_top() -> None:
    counted = [{"lookup_blocks": 30, "lookup_hit_blocks": 30}, {"lookup_blocks": 10, "lookup_hit_blocks": 0}]
    assert hour_rate(json.dumps({"intervals": counted}).encode()) == 0.75
    for nothing in (None, b"404", b"{}", b'{"intervals": []}', b'{"intervals": [{}]}', b'{"intervals": 3}'):
        assert hour_rate(nothing) is None
