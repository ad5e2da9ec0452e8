"""P1, P8: the content of Slab and Dax media, read without a depot and beside one: each damaged block is found."""

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import kvdepot
from kvdepot import _native
from kvdepot.cli import main
from kvdepot.stored.media import Medium
from kvdepot.stored.verify import Pace

MIB = 1 << 20
LAYOUT = kvdepot.BlockLayout(shards=3, tensor_sizes_bytes=[5000, 256])
BLOCKS = 24
HASHES = [b"%016d" % index for index in range(BLOCKS)]
TIERS = ("Slab", "Dax")
FLIPS, FLIPS_AT_ONCE = 1000, 10


def settings(tier: str, directory: Path) -> dict[str, Any]:
    """A pipeline with this tier on a medium in a directory."""
    path = directory / tier.lower()
    if tier == "Slab":
        return {"pipeline": "Cache|Slab", "slab_path": str(path), "slab_segment_mb": 1, "slab_capacity_gb": 0.01}
    if not path.exists():
        path.touch()
        with path.open("r+b") as file:
            file.truncate(8 * MIB)
    return {"pipeline": "Cache|Dax", "dax_device_path": str(path)}


def opened(keys: dict[str, Any], model: str = "tiny") -> kvdepot.Store:
    config = {"pool_gb": 0.0625, "log_level": "error", "mode": "embedded", **keys}
    return kvdepot.open(config, layout=LAYOUT, namespace={"model": model})


def fill(keys: dict[str, Any], model: str = "tiny") -> str:
    """Stores the blocks in a namespace, whose name it returns."""
    generator = np.random.default_rng(1)
    sizes = LAYOUT.tensor_sizes_bytes * LAYOUT.shards
    rows = [[generator.integers(0, 256, size=size, dtype=np.uint8) for size in sizes] for _ in range(BLOCKS)]
    with opened(keys, model) as store:
        store.dump(HASHES, rows).wait().raise_for_failures()
        assert store.drain(60_000)
        return str(store.namespace_id)


@pytest.fixture(params=TIERS)
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A closed medium with two namespaces of a few blocks each."""
    keys = settings(request.param, tmp_path)
    for model in ("tiny", "other"):
        fill(keys, model)
    return tmp_path / str(request.param).lower()


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(main, [str(one) for one in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result.stdout


def shown(*arguments: object, status: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", status=status))


def flip(path: Path, at: int, bit: int = 3) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def test_namespaces_and_blocks_are_listed(medium: Path) -> None:
    before = medium.read_bytes()
    rows = shown("namespaces", "--medium", medium)
    assert [(row["blocks"], row["epoch"], row["medium"], row["problem"]) for row in rows] == [
        (BLOCKS, 0, str(medium), None)
    ] * 2
    text = run("namespaces", "--medium", medium)
    assert text.count(str(medium)) == 2
    root = rows[0]["namespace"]
    one = shown("namespaces", root[:8], "--medium", medium)
    assert (one["directories"], one["facts"], one["media"][0]["blocks"]) == ([], {}, BLOCKS)
    assert root in run("namespaces", root[:8], "--medium", medium)
    compared = CliRunner().invoke(main, ["namespaces", root, rows[1]["namespace"], "--medium", str(medium)])
    assert (compared.exit_code, "keeps no facts" in compared.stderr) == (2, True)
    listed = shown("ls", root[:8], "--medium", medium, "--limit", 100)
    assert (listed["namespace"], listed["blocks"], listed["bytes"]) == (root, BLOCKS, rows[0]["bytes"])
    assert sorted(block["hash"] for block in listed["shown"]) == sorted(
        _native.block_hash(name).hex() for name in HASHES
    )
    assert {(block["path"], block["used_unix_s"]) for block in listed["shown"]} == {(str(medium), None)}
    assert sum(block["bytes"] for block in listed["shown"]) == listed["bytes"]
    assert f"{medium} at {listed['shown'][0]['offset_bytes']}" in run("ls", root, "--medium", medium)
    oldest = shown("ls", root, "--medium", medium, "--limit", 100, "--sort", "age")["shown"]
    assert oldest == listed["shown"][::-1]
    assert shown("ls", root, "--medium", medium, "--sort", "size", "--limit", 3)["blocks"] == BLOCKS
    assert medium.read_bytes() == before


def test_each_planted_flip_is_found(medium: Path) -> None:
    whole = shown("verify", "--medium", medium)
    assert (whole["blocks"], whole["broken"], whole["unread_media"]) == (2 * BLOCKS, [], {})
    blocks = {
        (one.root, block.hash): block for one in Medium(medium).namespaces for block in Medium(medium).blocks(one.root)
    }
    assert whole["bytes"] == sum(block.bytes for block in blocks.values())
    generator = random.Random(5)
    planted = generator.sample(sorted(blocks), 7)
    for name in planted:
        flip(medium, blocks[name].offset_bytes + generator.randrange(blocks[name].bytes), generator.randrange(8))
    report = shown("verify", "--medium", medium, status=1)
    assert sorted((one["namespace"], one["hash"]) for one in report["broken"]) == sorted(planted)
    assert {(one["path"], one["offset_bytes"], one["done"]) for one in report["broken"]} == {
        (str(medium), blocks[name].offset_bytes, "kept") for name in planted
    }
    assert report["blocks"] == 2 * BLOCKS
    text = run("verify", "--medium", medium, "--rate-mib", 1000, status=1)
    assert "7 broken" in text
    assert f"{medium} at {blocks[planted[0]].offset_bytes}: " in text
    root = planted[0][0]
    of_root = shown("verify", root[:12], "--medium", medium, status=1)
    assert of_root["blocks"] == BLOCKS
    assert sorted(one["hash"] for one in of_root["broken"]) == sorted(name for of, name in planted if of == root)


def test_every_flipped_bit_is_found_and_nothing_else(medium: Path) -> None:
    """Many at a time, in different blocks, and each written back; the Rust tests flip bits between blocks, too."""
    opened_medium = Medium(medium)
    blocks = [block for one in opened_medium.namespaces for block in opened_medium.blocks(one.root)]
    generator, flips = random.Random(11), 0
    while flips < FLIPS:
        planted = generator.sample(blocks, FLIPS_AT_ONCE)
        places = [(block.offset_bytes + generator.randrange(block.bytes), generator.randrange(8)) for block in planted]
        for at, bit in places:
            flip(medium, at, bit)
        findings = Medium(medium).verify(pace=Pace(None), checked=lambda *_: None)
        found = sorted(finding.offset_bytes or 0 for finding in findings)
        assert found == sorted(block.offset_bytes for block in planted), places
        for at, bit in places:
            flip(medium, at, bit)
        flips += len(planted)
    assert list(Medium(medium).verify(pace=Pace(None), checked=lambda *_: None)) == []


def test_set_aside_says_that_media_are_only_read(medium: Path) -> None:
    before = medium.read_bytes()
    said = CliRunner().invoke(main, ["verify", "--medium", str(medium), "--set-aside"])
    assert (said.exit_code, "media are only read" in said.stderr) == (0, True)
    assert medium.read_bytes() == before


def test_a_broken_block_is_a_miss_for_the_depot_which_drops_it(tmp_path: Path) -> None:
    for tier in TIERS:
        keys = settings(tier, tmp_path)
        root = fill(keys)
        path = tmp_path / tier.lower()
        block = next(Medium(path).blocks(root))
        flip(path, block.offset_bytes + 4200)
        run("verify", "--medium", path, status=1)
        with opened(keys) as store:
            index = [_native.block_hash(name).hex() for name in HASHES].index(block.hash)
            out = [[np.zeros(size, dtype=np.uint8) for size in LAYOUT.tensor_sizes_bytes * LAYOUT.shards]]
            assert store.load([HASHES[index]], out).wait().failures
        assert shown("verify", "--medium", path)["blocks"] == BLOCKS - 1


def test_a_medium_is_read_while_a_depot_uses_it(tmp_path: Path) -> None:
    for tier in TIERS:
        keys = settings(tier, tmp_path)
        root = fill(keys)
        path = tmp_path / tier.lower()
        with opened(keys) as store:
            assert shown("verify", "--medium", path)["blocks"] == BLOCKS
            assert shown("ls", root, "--medium", path)["blocks"] == BLOCKS
            assert store.lookup(HASHES).all(), "the depot still has the medium"


def test_without_options_all_tiers_of_the_configuration_are_read(tmp_path: Path) -> None:
    blocks = tmp_path / "blocks"
    blocks.mkdir()
    keys = {
        **settings("Slab", tmp_path),
        **settings("Dax", tmp_path),
        "pipeline": "Cache|Dax|Slab|Posix",
        "directories": [str(blocks)],
    }
    root = fill(keys)
    file = tmp_path / "kvdepot.yaml"
    file.write_text(json.dumps({**keys, "pool_gb": 0.0625}))
    media = [str(tmp_path / "dax"), str(tmp_path / "slab")]
    rows = shown("namespaces", "--config", file)
    assert sorted((row["blocks"], row["medium"] or "") for row in rows) == [(BLOCKS, one) for one in ("", *media)]
    assert all(row["facts"] == {"model": "tiny"} for row in rows), "a medium's namespace has the facts of its name"
    assert sorted(one["path"] for one in shown("namespaces", root, "--config", file)["media"]) == media
    assert shown("ls", root, "--config", file)["blocks"] == 3 * BLOCKS
    assert str(blocks) in run("ls", root, "--config", file, "--limit", 100)
    assert shown("verify", "--config", file)["blocks"] == 3 * BLOCKS
    flip(tmp_path / "slab", next(Medium(tmp_path / "slab").blocks(root)).offset_bytes)
    (path,) = (path for path in sorted(blocks.rglob("*.kvb"))[:1])
    flip(path, 5000)
    broken = shown("verify", root, "--config", file, status=1)["broken"]
    assert sorted(one["path"] for one in broken) == sorted([str(path), media[1]])
    assert sorted(one["offset_bytes"] is None for one in broken) == [False, True]
    both = shown("verify", "--directory", blocks, "--medium", media[0], "--medium", media[0], status=1)
    assert both["blocks"] == 2 * BLOCKS, "a medium that is named twice is one"
    (tmp_path / "slab").unlink()
    report = shown("verify", "--config", file, status=1)
    assert (report["blocks"], list(report["unread_media"])) == (2 * BLOCKS, [media[1]]), "the others are read"
    assert f"medium {media[1]} was skipped" in run("verify", "--config", file, status=1)
    file.write_text('pipeline: "Cache"\npool_gb: 0.0625\n')
    run("verify", "--config", file, status=2)


@pytest.mark.parametrize("content", [b"", bytes(5000), bytes(MIB), b"something else" * 10_000])
def test_what_is_no_medium_is_an_error_with_its_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    report = shown("verify", "--medium", path, status=1)
    assert "neither a Slab nor a Dax" in report["unread_media"][str(path)]
    assert shown("verify", "3f2a", "--medium", path, status=1)["unread_media"]
    for verb in (["namespaces"], ["ls", "3f2a"]):
        said = CliRunner().invoke(main, [*verb, "--medium", str(path)])
        assert (said.exit_code, str(path) in said.stderr) == (2, True)
    path.unlink()
    assert str(path) in shown("verify", "--medium", path, status=1)["unread_media"]
    run("namespaces", "--medium", path, status=1)


def test_a_medium_that_cannot_be_read_hides_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    root = fill({"directories": [str(tmp_path / "blocks")]})
    file, gone = tmp_path / "kvdepot.yaml", tmp_path / "slab"
    file.write_text(f"pipeline: Cache|Posix|Slab\ndirectories: [{tmp_path}/blocks]\nslab_path: {gone}\n")
    for verb in (["namespaces"], ["ls", root]):
        said = CliRunner().invoke(main, [*verb, "--config", str(file)])
        assert (said.exit_code, root[:12] in said.stdout or verb[0] == "ls") == (0, True), said.output
        assert f"medium {gone} is left out" in said.stderr


def test_what_cannot_be_a_medium_is_not_opened(tmp_path: Path) -> None:
    fifo, odd = tmp_path / "fifo", Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    os.mkfifo(fifo)
    assert "neither a Slab nor a Dax" in shown("verify", "--medium", fifo, status=1)["unread_media"][str(fifo)]
    assert CliRunner().invoke(main, ["ls", "3f2a", "--medium", str(odd)]).exit_code == 1


def test_a_medium_that_was_cut_or_is_damaged_is_an_error(medium: Path) -> None:
    whole = medium.read_bytes()
    medium.write_bytes(whole[: len(whole) // 2])
    assert shown("verify", "--medium", medium, status=1)["unread_media"]
    run("ls", "3f2a", "--medium", medium, status=1 if medium.name == "slab" else 2)
    damaged = bytearray(whole)
    for page in (0, 4096):
        damaged[page + 18] ^= 1
    medium.write_bytes(damaged)
    (problem,) = shown("verify", "--medium", medium, status=1)["unread_media"].values()
    assert "damaged" in problem


def test_a_namespace_whose_epoch_is_damaged_is_unread(tmp_path: Path) -> None:
    root = fill(settings("Dax", tmp_path))
    path = tmp_path / "dax"
    flip(path, 4096 + 30)
    report = shown("verify", "--medium", path, status=1)
    assert (report["blocks"], report["broken"], list(report["unread_namespaces"])) == (0, [], [root])
    assert "epoch" in shown("namespaces", "--medium", path)[0]["problem"]


def test_what_is_no_name_of_a_namespace_is_refused(medium: Path) -> None:
    with pytest.raises(kvdepot.errors.ConfigError):
        _native.MediumReader(str(medium)).blocks("3f2a")
    with pytest.raises(kvdepot.errors.ConfigError):
        _native.MediumReader(str(medium)).check("3f2a")
