"""P1, P8: the content of directories, read without a depot: every damaged file is found, and no other."""

import errno
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import kvdepot
from kvdepot.cli import main
from kvdepot.stored.blocks import block_files, contents
from kvdepot.stored.header import BrokenBlockError, check_block, parse_header
from kvdepot.stored.namespaces import differences, find_namespaces
from kvdepot.stored.verify import ASIDE_MAX, Pace, verify

LAYOUT = kvdepot.BlockLayout(shards=3, tensor_sizes_bytes=[5000, 256])
FACTS = {"model": "tiny", "dtype": "uint8"}
BLOCKS = 24
LONG_S = 900


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with two namespaces of a few blocks each."""
    blocks = tmp_path / "blocks"
    blocks.mkdir()
    generator = np.random.default_rng(1)
    for model in ("tiny", "other"):
        config = {"directories": [str(blocks)], "pool_gb": 0.0625, "log_level": "warn"}
        with kvdepot.open(config, layout=LAYOUT, namespace={**FACTS, "model": model}) as store:
            rows = [
                [generator.integers(0, 256, size=size, dtype=np.uint8) for size in LAYOUT.tensor_sizes_bytes * 3]
                for _ in range(BLOCKS)
            ]
            store.dump([f"{model} {index}".encode() for index in range(BLOCKS)], rows).wait().raise_for_failures()
            assert store.drain(60_000)
    return blocks


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(main, [str(one) for one in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result.stdout


def damaged(directory: Path) -> list[tuple[Path, str]]:
    found = find_namespaces([directory])
    return [
        (finding.path, finding.done)
        for namespace in found
        for finding in verify(namespace, pace=Pace(None), checked=lambda _: None)
    ]


def test_namespaces_are_found_with_their_facts_and_blocks(directory: Path) -> None:
    found = find_namespaces([directory])
    assert sorted(namespace.facts["model"] for namespace in found) == ["other", "tiny"]
    for namespace in found:
        held = contents(namespace)
        assert (held.blocks, held.aside, namespace.problem) == (BLOCKS, 0, "")
        assert held.bytes == sum(file.stat().st_size for file in (directory / namespace.root).rglob("*.kvb"))
        assert namespace.shard_bytes == (5256, 5256, 5256)
    assert differences(*found) == [("model", found[0].facts["model"], found[1].facts["model"])]


def test_namespaces_that_cannot_be_read_are_named_with_the_reason(directory: Path) -> None:
    first, second = (directory / namespace.root / "namespace.json" for namespace in find_namespaces([directory]))
    first.write_text("{")
    document = json.loads(second.read_text())
    second.write_text(json.dumps({**document, "format_version": 9}))
    (directory / "lost+found").mkdir()
    problems = [namespace.problem for namespace in find_namespaces([directory])]
    assert "cannot be read" in problems[0]
    assert "version 9" in problems[1]
    shown = json.loads(run("verify", "--directory", directory, "--json", status=1))
    assert shown["blocks"] == 0
    assert len(shown["unread_namespaces"]) == 2


def test_blocks_of_earlier_epochs_are_not_counted(directory: Path) -> None:
    namespace = find_namespaces([directory])[0]
    (directory / namespace.root / "below3").mkdir()
    (namespace,) = (one for one in find_namespaces([directory]) if one.root == namespace.root)
    assert (namespace.epoch, contents(namespace).blocks) == (3, 0)


@pytest.mark.timeout(LONG_S)
def test_every_flipped_bit_is_found_and_nothing_else(directory: Path) -> None:
    assert damaged(directory) == []
    generator = random.Random(7)
    files = sorted(directory.rglob("*.kvb"))
    for _ in range(1000):
        path = generator.choice(files)
        whole = path.read_bytes()
        bit = generator.randrange(len(whole) * 8)
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert damaged(directory) == [(path, "kept")], f"bit {bit} of {path}"
        path.write_bytes(whole)


@pytest.mark.parametrize("cut", [0, 100, 4095, 4096, 20_000])
def test_a_file_that_was_cut_is_found(directory: Path, cut: int) -> None:
    path = next(iter(sorted(directory.rglob("*.kvb"))))
    os.truncate(path, cut)
    assert damaged(directory) == [(path, "kept")]


def test_a_block_under_another_ones_name_is_found(directory: Path) -> None:
    first, second, *_ = sorted(directory.rglob("*.kvb"))
    second.write_bytes(first.read_bytes())
    assert damaged(directory) == [(second, "kept")]


def test_what_was_set_aside_is_not_found_again_and_stays_for_people(directory: Path) -> None:
    namespace = find_namespaces([directory])[0]
    paths = [file.path for file in block_files(namespace)]
    for path in paths[: ASIDE_MAX + 2]:
        os.truncate(path, 5000)
    text = run("verify", namespace.root[:8], "--directory", directory, "--set-aside", status=1)
    assert f"{BLOCKS} blocks" in text
    assert (text.count("(set aside)"), text.count("(removed)")) == (ASIDE_MAX, 2)
    assert contents(namespace).aside == ASIDE_MAX
    assert f"{BLOCKS - ASIDE_MAX - 2} blocks" in run("verify", namespace.root, "--directory", directory)


def test_a_directory_with_a_block_s_name_is_a_finding_and_the_rest_is_checked(directory: Path) -> None:
    path = next(iter(sorted(directory.rglob("*.kvb"))))
    (path.parent / f"{'0' * 32}.kvb").mkdir()
    os.truncate(path, 100)
    shown = json.loads(run("verify", "--directory", directory, "--json", status=1))
    reasons = [found["reason"] for found in shown["broken"]]
    assert len(reasons) == 2
    assert "it is not a file" in reasons


def test_what_cannot_be_set_aside_is_kept_and_said(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system is often read-only after an error, which is when people check their blocks."""
    for path in sorted(directory.rglob("*.kvb"))[:2]:
        os.truncate(path, 100)

    def rename(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("kvdepot.stored.verify.os.rename", rename)
    text = run("verify", "--directory", directory, "--set-aside", status=1)
    assert text.count("(kept: Read-only file system)") == 2


def test_a_depot_still_reads_what_verify_found_whole(directory: Path) -> None:
    run("verify", "--directory", directory, "--set-aside")
    config = {"directories": [str(directory)], "pool_gb": 0.0625, "log_level": "warn"}
    with kvdepot.open(config, layout=LAYOUT, namespace=FACTS) as store:
        until = time.monotonic() + 60
        # Its disk may be too late for the first lookups.
        while not store.lookup([f"tiny {index}".encode() for index in range(BLOCKS)]).all():
            assert time.monotonic() < until


def test_inspect_shows_a_block_and_says_whether_it_is_whole(directory: Path) -> None:
    path = next(iter(sorted(directory.rglob("*.kvb"))))
    shown = json.loads(run("inspect", path, "--json"))
    assert (shown["hash"], shown["whole"], shown["block_bytes"]) == (path.stem, True, 3 * 5256)
    assert shown["namespace"] in {one.root for one in find_namespaces([directory])}
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    assert "checksum of shard 0" in json.loads(run("inspect", path, "--json", status=1))["problem"]
    assert "block file" in CliRunner().invoke(main, ["inspect", str(directory / "x.txt")]).stderr


def test_headers_of_any_bytes_are_refused_and_never_crash(directory: Path) -> None:
    whole = next(iter(directory.rglob("*.kvb"))).read_bytes()
    generator = random.Random(3)
    for _ in range(2000):
        data = bytearray(whole[: generator.randrange(len(whole) + 1)])
        for _ in range(generator.randrange(1, 8)):
            if data:
                data[generator.randrange(min(len(data), 200))] = generator.randrange(256)
        if bytes(data) == whole:
            continue
        with pytest.raises(BrokenBlockError):
            check_block(bytes(data), "0" * 32, "0" * 32, (5256,) * 3)
    assert parse_header(whole).block_bytes == 3 * 5256


def test_compressed_blocks_are_read_and_damage_is_found(tmp_path: Path) -> None:
    blocks, other = tmp_path / "blocks", tmp_path / "other"
    blocks.mkdir()
    other.mkdir()
    generator = np.random.default_rng(1)
    sizes = LAYOUT.tensor_sizes_bytes * 3
    rows = [[generator.integers(0, 16, size=size, dtype=np.uint8) for size in sizes] for _ in range(4)]
    config = {"directories": [str(blocks)], "pool_gb": 0.0625, "log_level": "warn", "posix_compression": True}
    with kvdepot.open(config, layout=LAYOUT, namespace=FACTS) as store:
        store.dump([f"packed {index}".encode() for index in range(4)], rows).wait().raise_for_failures()
        assert store.drain(60_000)
    (namespace,) = find_namespaces([blocks])

    def contents_of(directory: Path) -> dict[str, bytes | None]:
        key_id, shards = namespace.key_id(), namespace.shard_bytes
        return {p.stem: check_block(p.read_bytes(), p.stem, key_id, shards)[1] for p in directory.rglob("*.kvb")}

    stored = contents_of(blocks)
    assert sorted(block or b"" for block in stored.values()) == sorted(b"".join(map(bytes, row)) for row in rows)
    path = sorted(blocks.rglob("*.kvb"))[0]
    shown = json.loads(run("inspect", path, "--json"))
    assert (shown["whole"], shown["encoding"] in (1, 2), shown["file_bytes"]) == (True, True, 3 * 4096)
    run("export", namespace.root, tmp_path / "file.kvx", "--directory", blocks)
    run("import", tmp_path / "file.kvx", "--directory", other)
    assert contents_of(other) == stored
    assert damaged(blocks) == []
    whole = path.read_bytes()
    for at in (4096, 4100, 4096 + shown["stored_bytes"] - 1, len(whole) - 1):
        data = bytearray(whole)
        data[at] ^= 1
        path.write_bytes(data)
        assert [found for found, _ in damaged(blocks)] == [path], at


def test_reading_is_paced() -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    pace = Pace(1000, lambda: now[0], sleep)
    for _ in range(5):
        pace.read(500)
    assert sum(slept) == pytest.approx(2.5)
    now[0] += 100
    pace.read(500)
    assert slept[-1] == pytest.approx(0.5), "time in which nothing was read is not made up for"
    Pace(None, lambda: now[0], sleep).read(10**12)
    assert len(slept) == 6


def test_the_list_and_the_difference(directory: Path) -> None:
    shown = json.loads(run("namespaces", "--directory", directory, "--json"))
    assert sorted(one["facts"]["model"] for one in shown) == ["other", "tiny"]
    first, second = (one["namespace"] for one in shown)
    assert "model=" in run("namespaces", "--directory", directory)
    assert json.loads(run("namespaces", first, "--directory", directory, "--json"))["block_bytes"] == 3 * 5256
    (fact,) = json.loads(run("namespaces", first, second, "--directory", directory, "--json"))
    assert fact["fact"] == "model"
    assert "model" in run("namespaces", first[:10], second[:10], "--directory", directory)
    run("namespaces", "zz", "--directory", directory, status=2)
    run("namespaces", "--directory", directory / "missing", status=1)
