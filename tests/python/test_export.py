"""P1: an export holds exactly the blocks of a namespace, and an import stores exactly those bytes, or nothing."""

import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import kvdepot
from kvdepot import _native
from kvdepot.cli import main
from kvdepot.errors import CorruptError
from kvdepot.stored.blocks import block_files
from kvdepot.stored.export import ExportedBlock, ExportHeader, ExportReader, ExportWriter
from kvdepot.stored.namespaces import find_namespaces
from kvdepot.stored.restore import Restored, open_namespace, restore

LAYOUT = kvdepot.BlockLayout(shards=3, tensor_sizes_bytes=[5000, 256])
FACTS = {"model": "tiny", "dtype": "uint8"}
BLOCKS = 40
NAMES = [f"block {index}".encode() for index in range(BLOCKS)]
LONG_S = 120


def rows(seed: int | None) -> list[list[Any]]:
    generator = np.random.default_rng(seed)
    sizes = LAYOUT.tensor_sizes_bytes * LAYOUT.shards
    if seed is None:
        return [[np.zeros(size, dtype=np.uint8) for size in sizes] for _ in NAMES]
    return [[generator.integers(0, 256, size=size, dtype=np.uint8) for size in sizes] for _ in NAMES]


def config(directory: Path, **more: Any) -> dict[str, Any]:
    return {"directories": [str(directory)], "pool_gb": 0.0625, "log_level": "warn", **more}


def fill(directory: Path, **facts: Any) -> list[list[Any]]:
    directory.mkdir(exist_ok=True)
    stored = rows(1)
    with kvdepot.open(config(directory), layout=LAYOUT, namespace={**FACTS, **facts}) as store:
        store.dump(NAMES, stored).wait().raise_for_failures()
        assert store.drain(60_000)
    return stored


def load(directory: Path, wanted: int = BLOCKS, **facts: Any) -> tuple[int, list[list[Any]]]:
    """Returns how many blocks a new depot finds, and their bytes. Its disk may be too late for the first lookups."""
    found, until = rows(None), time.monotonic() + LONG_S / 2
    with kvdepot.open(config(directory), layout=LAYOUT, namespace={**FACTS, **facts}) as store:
        while (hits := int(store.lookup(NAMES).sum())) < wanted and time.monotonic() < until:
            time.sleep(0.01)
        if hits == BLOCKS:
            store.load(NAMES, found).wait().raise_for_failures()
    return hits, found


def same(one: list[list[Any]], other: list[list[Any]]) -> bool:
    return all((a == b).all() for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True))


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(main, [str(one) for one in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


def write_other(path: Path) -> None:
    """An export of a block of an unknown namespace."""
    with open(path, "wb") as opened:
        writer = ExportWriter(opened, ExportHeader("ab" * 16, {"model": "new"}, ((1, (64,)),), 0, 0, "nobody"))
        writer.add(ExportedBlock(b"x" * 16, 0, b"y" * 64))
        writer.finish()


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The test's own runtime directory, where no depot of the user runs."""
    with tempfile.TemporaryDirectory(prefix="kvd") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        monkeypatch.setenv("XDG_CACHE_HOME", directory)
        yield Path(directory)


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, Path, list[list[Any]]]:
    """Directory, export and bytes."""
    directory, file = tmp_path / "blocks", tmp_path / "tiny.kvx"
    stored = fill(directory)
    (namespace,) = find_namespaces([directory])
    said = json.loads(run("export", namespace.root[:8], file, "--directory", directory, "--json"))
    assert (said["blocks"], said["broken"], said["gone"]) == (BLOCKS, 0, 0)
    return directory, file, stored


def test_export_delete_import_hit(exported: tuple[Path, Path, list[list[Any]]], tmp_path: Path) -> None:
    directory, file, stored = exported
    run("rm", find_namespaces([directory])[0].root, "--directory", directory, "--yes")
    assert not list(directory.rglob("*.kvb"))
    assert load(directory, 0)[0] == 0
    said = json.loads(run("import", file, "--directory", directory, "--json"))
    assert (said["stored"], said["had"], said["missing"], said["failures"]) == (BLOCKS, 0, 0, {})
    hits, found = load(directory)
    assert hits == BLOCKS
    assert same(found, stored)
    # Into a directory that knows nothing of it, and then once more.
    (tmp_path / "other").mkdir()
    assert f"{BLOCKS} stored" in run("import", file, "--directory", tmp_path / "other")
    assert f"{BLOCKS} already stored" in run("import", file, "--directory", tmp_path / "other")
    hits, found = load(tmp_path / "other")
    assert hits == BLOCKS
    assert same(found, stored)
    assert load(tmp_path / "other", 0, model="another")[0] == 0, "other facts find nothing"


def test_export_and_import_through_a_running_depot(tmp_path: Path, runtime: Path) -> None:
    (tmp_path / "blocks").mkdir()
    socket = runtime / "depot.sock"
    file = tmp_path / "kvdepot.yaml"
    file.write_text(f"directories: [{tmp_path}/blocks]\npool_gb: 0.0625\nsocket: {socket}\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "kvdepot", "serve", "--config", str(file)], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        assert any("serving " in line for line in process.stderr)
        attached = {"mode": "node", "socket": str(socket), "start_depot": False, "attach_timeout_ms": 60_000}
        settings = config(tmp_path / "blocks", **attached, call_timeout_ms=60_000)
        with kvdepot.open(settings, layout=LAYOUT, namespace=FACTS) as store:
            stored = rows(2)
            store.dump(NAMES, stored).wait().raise_for_failures()
            root = store.namespace_id
            assert store.lookup(NAMES).all()
            # No drain here: the export requests it, so that nothing in the pool is missing.
            while not (tmp_path / "blocks" / root / "namespace.json").exists():
                store.drain(1000)
            said = json.loads(run("export", root[:8], tmp_path / "x.kvx", "--config", file, "--json"))
            assert (said["blocks"], said["drained"]) == (BLOCKS, True)
            write_other(tmp_path / "other.kvx")
            shown = json.loads(run("import", tmp_path / "other.kvx", "--config", file, "--dry-run", "--json"))
            assert (shown["had"], shown["would_store"], shown["namespace_known"]) == (0, 1, False)
            assert [one.root for one in find_namespaces([tmp_path / "blocks"])] == [root], "nothing was made"
            store.reset()
            assert not store.lookup(NAMES).any()
            shown = json.loads(run("import", tmp_path / "x.kvx", "--config", file, "--dry-run", "--json"))
            assert (shown["had"], shown["would_store"]) == (0, BLOCKS)
            assert "was reset since" in shown["refused"]
            assert "was reset since" in run("import", tmp_path / "x.kvx", "--config", file, status=2)
            assert not store.lookup(NAMES).any()
            run("import", tmp_path / "x.kvx", "--socket", socket, "--any-epoch", "--config", file)
            found = rows(None)
            store.load(NAMES, found).wait().raise_for_failures()
            assert same(found, stored)
    finally:
        process.terminate()
        assert process.wait(LONG_S) == 0
        assert process.stderr is not None
        process.stderr.close()


def test_a_damaged_or_cut_file_changes_nothing(exported: tuple[Path, Path, list[list[Any]]], tmp_path: Path) -> None:
    _, file, _ = exported
    whole = file.read_bytes()
    target = tmp_path / "target"
    target.mkdir()
    generator = random.Random(5)
    damages = [whole[:cut] for cut in (0, 4, 40, 500, len(whole) // 2, len(whole) - 1)]
    damages += [whole + b"x"]
    for _ in range(60):
        bit = generator.randrange(len(whole) * 8)
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        damages.append(bytes(flipped))
    for damaged in damages:
        with pytest.raises(CorruptError):
            ExportReader(io.BytesIO(damaged), "x").check(lambda _: None)
    for damaged in (damages[5], damages[-1]):
        file.write_bytes(damaged)
        assert "Nothing of it can be trusted" in run("import", file, "--directory", target, status=1)
        assert "Nothing of it can be trusted" in run("import", file, "--directory", target, "--dry-run", status=1)
    assert list(target.iterdir()) == []


def test_blocks_in_another_order_or_twice_are_found_by_the_last_checksum(
    exported: tuple[Path, Path, list[list[Any]]],
) -> None:
    """Each block is intact in itself: only the checksum over the file reveals that one is missing."""
    whole = exported[1].read_bytes()
    record = 48 + 8 + 3 * 5256
    start = len(whole) - (24 + 32) - BLOCKS * record
    without = whole[:start] + whole[start + record :]
    with pytest.raises(CorruptError, match="over the whole file"):
        ExportReader(io.BytesIO(without), "x").check(lambda _: None)


def test_a_header_that_lies_about_its_namespace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    file = tmp_path / "lie.kvx"
    header = ExportHeader("ab" * 16, FACTS, ((1, (64,)),), 0, 0, "nobody")
    with open(file, "wb") as opened:
        writer = ExportWriter(opened, header)
        writer.add(ExportedBlock(b"x" * 16, 0, b"y" * 64))
        writer.finish()
    assert "and its facts make" in run("import", file, "--directory", tmp_path / "blocks", status=1)
    assert not list((tmp_path / "blocks").rglob("*.kvb"))


def test_layouts_of_unequal_shards_come_through(tmp_path: Path) -> None:
    file, directory = tmp_path / "uneven.kvx", tmp_path / "blocks"
    directory.mkdir()
    layout = ((2, (100, 28)), (1, (64,)))
    spelled = json.dumps([[count, list(sizes)] for count, sizes in layout])
    core = kvdepot.config.load_config(config(directory)).to_core_json()
    depot = _native.Depot.embedded(core)
    root = depot.open_namespace(json.dumps(FACTS), spelled).id
    depot.close()
    blocks = [ExportedBlock(index.to_bytes(16, "big"), 5, os.urandom(320)) for index in range(300)]
    with open(file, "wb") as opened:
        writer = ExportWriter(opened, ExportHeader(root, FACTS, layout, 0, 0, "nobody"))
        for block in blocks:
            writer.add(block)
        writer.finish()
    run("import", file, "--directory", directory)
    (namespace,) = find_namespaces([directory])
    assert {one.hash for one in block_files(namespace)} == {block.hash.hex() for block in blocks}
    run("export", root, tmp_path / "again.kvx", "--directory", directory)
    with open(tmp_path / "again.kvx", "rb") as opened:
        again = {block.hash: block.payload for block in ExportReader(opened, "again").blocks()}
    assert again == {block.hash: block.payload for block in blocks}


def test_broken_blocks_are_left_out_and_counted(exported: tuple[Path, Path, list[list[Any]]], tmp_path: Path) -> None:
    directory, file, _ = exported
    first, second, *_ = sorted(directory.rglob("*.kvb"))
    data = bytearray(first.read_bytes())
    data[5000] ^= 1
    first.write_bytes(data)
    os.truncate(second, 100)
    assert "already exists" in run("export", "", file, "--directory", directory, status=2)
    shown = run("export", "", file, "--directory", directory, "--force", status=1)
    assert f"{BLOCKS - 2} blocks" in shown
    assert "2 broken blocks" in shown
    assert not list(tmp_path.glob("*.part-*"))


def test_dry_run_says_what_matches_and_stores_nothing(
    exported: tuple[Path, Path, list[list[Any]]], tmp_path: Path
) -> None:
    directory, file, _ = exported
    shown = json.loads(run("import", file, "--directory", directory, "--dry-run", "--json"))
    assert (shown["had"], shown["would_store"], shown["namespace_known"], shown["refused"]) == (BLOCKS, 0, True, None)
    other = tmp_path / "other"
    fill(other, model="larger")
    before = sorted(other.rglob("*"))
    text = run("import", file, "--directory", other, "--dry-run")
    assert "model: tiny in the file, larger there" in text
    assert f"would store {BLOCKS}" in text
    assert sorted(other.rglob("*")) == before


def test_a_reset_after_the_export_refuses_its_blocks(exported: tuple[Path, Path, list[list[Any]]]) -> None:
    directory, file, _ = exported
    with kvdepot.open(config(directory), layout=LAYOUT, namespace=FACTS) as store:
        store.reset()
        root = find_namespaces([directory])[0].root
        assert "has no blocks" in run("export", root, directory.parent / "none.kvx", "--directory", directory)
    assert "was reset since" in run("import", file, "--directory", directory, status=2)
    assert load(directory, 0)[0] == 0
    run("import", file, "--directory", directory, "--any-epoch")
    assert load(directory)[0] == BLOCKS


def test_an_export_is_its_owners_alone(exported: tuple[Path, Path, list[list[Any]]]) -> None:
    assert exported[1].stat().st_mode & 0o777 == 0o600


def test_an_export_that_lacks_blocks_is_no_success(exported: tuple[Path, Path, list[list[Any]]]) -> None:
    directory, file, _ = exported
    first = min(directory.rglob("*.kvb"))
    first.rename(first.with_suffix(".moved"))
    first.symlink_to(first.with_suffix(".moved"))  # which must not be followed
    shown = run("export", "", file, "--directory", directory, "--force", status=1)
    assert "1 blocks were skipped because their files cannot be read" in shown
    assert str(first) in shown


def test_a_layout_beyond_all_bounds_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    file = tmp_path / "x.kvx"
    for layout in (((1 << 24, (1,)),), ((1, (0, 64)),), ((2, (32,)), (-1, (0,))), ((1, ()),), ((1, (float("inf"),)),)):
        with open(file, "wb") as opened:
            ExportWriter(opened, ExportHeader("ab" * 16, FACTS, layout, 0, 0, "nobody")).finish()  # type: ignore[arg-type]
        with open(file, "rb") as opened, pytest.raises(CorruptError, match="its header cannot be read"):
            ExportReader(opened, "x")


def test_a_reset_while_the_first_import_runs_is_noticed(
    exported: tuple[Path, Path, list[list[Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory did not know the namespace: its epoch was 0 nevertheless."""
    (tmp_path / "other").mkdir()

    def and_reset(depot: _native.Depot, reader: ExportReader, **more: Any) -> Restored:
        result = restore(depot, reader, **more)
        depot.reset([open_namespace(depot, reader)])
        return result

    monkeypatch.setattr("kvdepot.cli.import_.restore", and_reset)
    assert "was reset meanwhile" in run("import", exported[1], "--directory", tmp_path / "other", status=1)


def test_an_epoch_that_another_tier_knows_refuses_blocks(
    exported: tuple[Path, Path, list[list[Any]]], tmp_path: Path
) -> None:
    file = tmp_path / "kvdepot.yaml"
    (tmp_path / "fresh").mkdir()
    settings = {
        "pipeline": "Cache|Posix|Slab",
        "slab_path": str(tmp_path / "slab"),
        "slab_capacity_gb": 0.0625,
        "slab_segment_mb": 16,
    }
    settings |= config(tmp_path / "fresh")
    file.write_text(json.dumps(settings))
    with kvdepot.open(settings, layout=LAYOUT, namespace=FACTS) as store:
        store.reset()
        store.drain(60_000)
    shutil.rmtree(tmp_path / "fresh")
    (tmp_path / "fresh").mkdir()
    assert "was reset since" in run("import", exported[1], "--config", file, status=2)
    with kvdepot.open(settings, layout=LAYOUT, namespace=FACTS) as store:
        assert not store.lookup(NAMES).any()


def test_an_export_names_the_tiers_that_it_does_not_read(tmp_path: Path) -> None:
    file, directory = tmp_path / "kvdepot.yaml", tmp_path / "blocks"
    directory.mkdir()
    more = {"slab_path": str(tmp_path / "slab"), "slab_capacity_gb": 0.0625, "slab_segment_mb": 16}
    settings = config(directory, pipeline="Cache|Posix|Slab", **more)
    with kvdepot.open(settings, layout=LAYOUT, namespace=FACTS) as store:
        store.dump(NAMES, rows(1)).wait().raise_for_failures()
        assert store.drain(60_000)
        root = store.namespace_id
    file.write_text(json.dumps(settings))
    words = ("export", root, tmp_path / "x.kvx", "--force")
    assert json.loads(run(*words, "--config", file, "--json"))["tiers_left_out"] == ["Slab"]
    assert "not read: Slab. The file lacks blocks that only these tiers hold" in run(*words, "--config", file)
    assert json.loads(run(*words, "--directory", directory, "--json"))["tiers_left_out"] == []
    assert "not read" not in run(*words, "--directory", directory)
