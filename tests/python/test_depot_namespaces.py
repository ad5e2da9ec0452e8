"""Verbs on namespaces that no directory lists: a running depot knows them, and nobody else does."""

import json
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
import yaml
from click.testing import CliRunner

import kvdepot
from kvdepot.cli import main, reset
from kvdepot.cli.known import known_to
from kvdepot.cli.places import one_root
from kvdepot.errors import KVDepotError, StorageError, UnavailableError
from kvdepot.stored.namespaces import StoredNamespace
from kvdepot.stored.served import POOL, export_served, list_blocks
from tools.lab.bucket import Bucket
from tools.lab.ports import free_port

LAYOUT = kvdepot.BlockLayout(shards=2, tensor_sizes_bytes=[5000, 256])
BLOCKS = 12
NAMES = [b"%016d" % index for index in range(BLOCKS)]
FACTS = {"model": "tiny", "rank": 0}
PIPELINES = ("Cache", "Cache|Slab", "Cache|Dax", "Cache|Remote", "Cache|Object")
LONG_S = 120


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(main, [str(one) for one in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


def shown(*arguments: object, status: int = 0) -> Any:
    result = CliRunner().invoke(main, [*map(str, arguments), "--json"])
    assert result.exit_code == status, (result.output, result.exception)
    return json.loads(result.stdout)


class Depots:
    """Starts depots of any pipeline, and what their tiers need."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.file = home / "kvdepot.yaml"
        self.settings: dict[str, Any] = {}
        self._processes: list[subprocess.Popen[str]] = []
        self._bucket: Bucket | None = None

    def configure(self, pipeline: str) -> None:
        """Writes the configuration of a depot at a default socket."""
        self.settings = {"pipeline": pipeline, "pool_gb": 0.0625, **self._tier(pipeline)}
        self.file.write_text(yaml.safe_dump(self.settings))

    def _tier(self, pipeline: str) -> dict[str, Any]:
        medium = self.home / "medium"
        if pipeline.endswith("Slab"):
            return {"slab_path": str(medium), "slab_segment_mb": 1, "slab_capacity_gb": 0.01}
        if pipeline.endswith("Dax"):
            with medium.open("wb") as file:
                file.truncate(8 << 20)
            return {"dax_device_path": str(medium)}
        if pipeline.endswith("Remote"):
            port = free_port()
            self._serve("--socket", self.home / "pool.sock", "--service-port", port, "--prealloc-size", 0.0625)
            return {"remote_servers": [f"127.0.0.1:{port}"], "remote_timeout_ms": 60_000}
        if pipeline.endswith("Object"):
            self._bucket = Bucket(self.home)
            return {**self._bucket.options(), "object_timeout_ms": 60_000}
        return {}

    def start(self) -> str:
        """Starts the depot. Returns its socket."""
        return self._serve("--config", self.file)

    def _serve(self, *arguments: object) -> str:
        command = [sys.executable, "-m", "kvdepot", "serve", *map(str, arguments)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._processes.append(process)
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "serving " in line:
                return str(next((self.home / "kvdepot").glob("depot-*.sock"), ""))
        raise AssertionError("".join(said))

    def stop(self) -> None:
        """Stops the depot that was started last."""
        process = self._processes.pop()
        process.terminate()
        assert process.wait(LONG_S) == 0
        assert process.stderr is not None
        process.stderr.close()

    def open(self, facts: dict[str, object] | None = None) -> kvdepot.Store:
        """Returns a store attached to the depot."""
        more = {"mode": "node", "start_depot": False, "attach_timeout_ms": 60_000, "call_timeout_ms": 60_000}
        return kvdepot.open({**self.settings, **more}, layout=LAYOUT, namespace=FACTS if facts is None else facts)

    def end(self) -> None:
        while self._processes:
            self.stop()
        if self._bucket is not None:
            self._bucket.__exit__(None, None, None)


@pytest.fixture
def depots(monkeypatch: pytest.MonkeyPatch) -> Iterator[Depots]:
    """Depots in a runtime directory of the test's own, which is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="kvd") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        monkeypatch.setenv("XDG_CACHE_HOME", directory)
        depots = Depots(Path(directory))
        yield depots
        depots.end()


def rows(seed: int) -> list[list[Any]]:
    generator = np.random.default_rng(seed)
    sizes = LAYOUT.tensor_sizes_bytes * LAYOUT.shards
    return [[generator.integers(0, 256, size=size, dtype=np.uint8) for size in sizes] for _ in NAMES]


def dump(store: kvdepot.Store, seed: int = 1) -> None:
    store.dump(NAMES, rows(seed)).wait().raise_for_failures()
    assert store.drain(60_000)


def wait_for_fetches(store: kvdepot.Store, count: int) -> None:
    until = time.monotonic() + LONG_S
    while store.stats()["depot"]["fetch_blocks"] < count:
        assert time.monotonic() < until, f"not {count} fetches"
        time.sleep(0.01)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_an_operator_names_what_the_depot_knows(depots: Depots, pipeline: str) -> None:
    depots.configure(pipeline)
    socket = depots.start()
    config, file = ("--config", depots.file), depots.home / "tiny.kvx"
    with depots.open() as store, depots.open({"model": "other"}) as other:
        dump(store)
        dump(other)
        root, has_medium = store.namespace_id, pipeline.endswith(("Slab", "Dax"))
        listed = {row["namespace"]: row for row in shown("namespaces", *config)}
        assert set(listed) == {root, other.namespace_id}
        row = listed[root]
        assert (row["facts"], row["blocks"], row["problem"]) == (FACTS, BLOCKS, None)
        medium = str(depots.home / "medium")
        assert (row["medium"], row["depot"]) == ((medium, None) if has_medium else (None, socket))
        assert "model=tiny" in run("namespaces", *config)
        one = shown("namespaces", root[:8], *config)
        assert (one["facts"], one["depot"], one["pool_blocks"]) == (FACTS, socket, BLOCKS)
        assert one["block_bytes"] == 2 * 5256
        assert "other" in run("namespaces", root, other.namespace_id, *config)

        said = shown("export", root[:8], file, *config)
        assert (said["blocks"], said["gone"], said["unreadable"], said["drained"]) == (BLOCKS, 0, 0, True)
        assert said["tiers_left_out"] == [tier for tier in ("Remote", "Object") if pipeline.endswith(tier)]
        assert "epoch 1" in run("reset", root[:8], *config)
        assert not store.lookup(NAMES).any()
        assert other.lookup(NAMES).all()
        dump(store, seed=2)
        said = shown("rm", root[:8], "--socket", socket, "--yes")
        assert (said["how"], said["blocks"]) == ("reset", BLOCKS)
        assert not store.lookup(NAMES).any()
        assert other.lookup(NAMES).all()

        said = shown("import", file, *config, "--dry-run")
        assert (said["namespace_known"], said["had"], said["nearest"]) == (True, 0, None)
        assert f"{BLOCKS} stored" in run("import", file, *config, "--any-epoch")
        found = [[np.zeros_like(tensor) for tensor in row] for row in rows(1)]
        store.load(NAMES, found).wait().raise_for_failures()
        pairs = zip(found, rows(1), strict=True)
        assert all((a == b).all() for one, other in pairs for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("pipeline", PIPELINES[1:])
def test_prefetch_reads_what_the_depot_or_a_medium_lists(depots: Depots, pipeline: str) -> None:
    depots.configure(pipeline)
    depots.start()
    with depots.open() as store:
        dump(store)
        root = store.namespace_id
    depots.stop()
    socket = depots.start()
    with depots.open() as store:
        if pipeline.endswith("Remote"):
            assert "knows no block" in run("prefetch", root[:8], "--config", depots.file)
            # The depot asks the server, within limits; of a bucket it lists packs by itself.
            until = time.monotonic() + LONG_S
            while not store.lookup(NAMES).all():
                assert time.monotonic() < until
        assert shown("prefetch", root[:8], "--config", depots.file, "--limit", 5)["asked"] == 5
        wait_for_fetches(store, 5)
        assert shown("prefetch", root[:8], "--socket", socket)["asked"] >= BLOCKS - 5
        wait_for_fetches(store, BLOCKS)
        until = time.monotonic() + LONG_S
        while known_to(socket)[root].pool_blocks < BLOCKS:
            assert time.monotonic() < until


def test_without_a_depot_the_errors_say_what_to_do(depots: Depots) -> None:
    depots.configure("Cache|Slab")
    depots.start()
    with depots.open() as store:
        dump(store)
        root = store.namespace_id
    depots.stop()
    config = ("--config", depots.file)
    for verb in (("reset", root), ("prefetch", root)):
        assert "no depot runs with Cache|Slab: start one" in run(*verb, *config, status=1)
    for verb in (("rm", root, "--yes"), ("export", root, depots.home / "x.kvx")):
        said = run(*verb, *config, status=1)
        assert "Cache|Slab has no Posix tier" in said
        assert "start it with kvdepot serve" in said
    assert shown("namespaces", *config)[0]["facts"] == {}
    depots.configure("Cache")
    assert "no depot runs with this configuration" in run("namespaces", *config, status=1)


def test_what_no_engine_has_opened_is_explained(depots: Depots) -> None:
    depots.configure("Cache|Slab")
    depots.start()
    with depots.open() as store:
        dump(store)
        root = store.namespace_id
    depots.stop()
    socket = depots.start()
    config = ("--config", depots.file)
    said = run("reset", root[:8], *config, status=2)
    assert f"the depot on {socket} (pid " in said
    assert f"{depots.home}/medium has blocks of it, but keeps no facts" in said
    assert "let an engine that uses it attach" in said
    said = run("reset", "zz", *config, status=2)
    assert f"no namespace begins with zz in {depots.home}/medium, the depot on {socket}" in said
    with depots.open(), depots.open({"model": "other"}):
        assert "epoch 1" in run("reset", root[:8], *config)
        for verb in (("reset", ""), ("rm", "", "--yes")):
            assert "name is empty" in run(*verb, *config, status=2), "an unset variable of a script"
    Path(f"{socket}.http").unlink()
    said = run("reset", root[:8], *config, status=1)
    assert "cannot be asked for its namespaces" in said
    assert f"no depot answers at {socket}.http" in said
    assert shown("namespaces", *config)[0]["namespace"]
    assert "is left out: no depot answers at" in run("namespaces", *config)


def test_a_depot_supplies_what_a_directory_has_lost(depots: Depots, tmp_path: Path) -> None:
    depots.configure("Cache|Posix")
    depots.settings["directories"] = [str(tmp_path)]
    depots.file.write_text(yaml.safe_dump(depots.settings))
    depots.start()
    with depots.open() as store:
        dump(store)
        root = store.namespace_id
        (tmp_path / root / "namespace.json").unlink()
        said = shown("export", root[:8], depots.home / "x.kvx", "--config", depots.file)
        assert said["blocks"] == BLOCKS
        assert "epoch 1" in run("reset", root[:8], "--config", depots.file)
        assert not store.lookup(NAMES).any()


def test_an_export_of_a_depot_has_one_epoch_and_counts_what_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "x.kvx"
    with kvdepot.attach({"pipeline": "Cache", "pool_gb": 1 / 128, "log_level": "warn"}) as depot:
        store = depot.open(layout=LAYOUT, namespace=FACTS)
        dump(store)
        native, namespace = depot._native, store.native_namespace
        listed = list_blocks(native, namespace)
        assert {place: sorted(hashes) for place, hashes in listed.items()} == {POOL: sorted(NAMES)}
        layout = ((LAYOUT.shards, tuple(LAYOUT.tensor_sizes_bytes)),)
        described = StoredNamespace(namespace.id, (), FACTS, layout, 0)
        hashes = [*NAMES, b"x" * 16]

        def exported(epoch: int | None) -> Any:
            return export_served(
                native.store(namespace), described, hashes, file, epoch_now=lambda: epoch, done=lambda _: None
            )

        for epoch in (1, None):
            with pytest.raises(StorageError, match="was reset while"):
                exported(epoch)
            assert list(tmp_path.iterdir()) == []
        result = exported(0)
        assert (result.blocks, result.gone, result.unreadable) == (BLOCKS, 1, 0)
        assert file.stat().st_mode & 0o777 == 0o600


def test_an_answer_of_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for body in (b"{}", b'{"namespaces": [{}], "next": null}', b"no JSON"):
        monkeypatch.setattr("kvdepot.cli.status_door.ask_page", lambda socket, page, body=body: (200, body))
        with pytest.raises(UnavailableError):
            known_to("any.sock")
    monkeypatch.setattr("kvdepot.cli.status_door.ask_page", lambda socket, page: (404, b'{"error": "no such page"}'))
    with pytest.raises(KVDepotError, match="no such page"):
        known_to("any.sock")


def test_no_prefix_is_unique_while_the_depot_cannot_be_asked(depots: Depots, tmp_path: Path) -> None:
    """It may know another namespace with that prefix, which is the one that was meant."""
    depots.configure("Cache|Posix")
    depots.settings["directories"] = [str(tmp_path)]
    depots.file.write_text(yaml.safe_dump(depots.settings))
    socket = depots.start()
    config = ("--config", depots.file)
    with depots.open() as store, depots.open({"model": "other"}) as other:
        dump(store)
        root = store.namespace_id
        # Only the depot knows the other one.
        shutil.rmtree(tmp_path / other.namespace_id)
        for verb in (("reset", ""), ("rm", "", "--yes")):
            assert "name is empty" in run(*verb, *config, status=2), "an unset variable of a script"
        Path(f"{socket}.http").unlink()
        for verb in (("reset", root[:8]), ("rm", root[:8], "--yes")):
            said = run(*verb, *config, status=1)
            assert "cannot be asked whether it knows other namespaces" in said
            assert "repeat the command with this whole name" in said
        assert store.lookup(NAMES).all()
        assert "was reset: epoch 1" in run("reset", root.upper(), *config)
        assert not store.lookup(NAMES).any()
        assert shown("rm", root, "--yes", *config)["how"] == "reset"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_reset_has_succeeded_though_nobody_tells_its_epoch(
    depots: Depots, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    depots.configure("Cache|Slab")
    socket = depots.start()
    with depots.open() as store:
        dump(store)
        root = store.namespace_id
        resolve = reset.namespace_of

        def resolve_once(*arguments: Any, **more: Any) -> Any:
            found = resolve(*arguments, **more)
            Path(f"{socket}.http").unlink()
            return found

        monkeypatch.setattr(reset, "namespace_of", resolve_once)
        words = ["reset", root, "--config", str(depots.file), *(["--json"] if as_json else [])]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
        assert not store.lookup(NAMES).any()
        if as_json:
            assert json.loads(result.stdout) == {"namespace": root, "epoch": None}
        else:
            assert result.stdout == f"namespace {root} was reset\n"
        assert "its new epoch cannot be shown: " in result.stderr


def test_a_prefix_of_several_names_is_refused() -> None:
    assert one_root(["ab1", "ab2", "b"], "AB2") == "ab2"
    for prefix, said in (("AB", "2 namespaces begin with"), ("c", "no namespace begins with")):
        with pytest.raises(kvdepot.ConfigError, match=said):
            one_root(["ab1", "ab2", "b"], prefix)
