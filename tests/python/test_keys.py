"""Keys are equal in Rust, in a pure Python reference, and in the vectors that every version must keep."""

import hashlib
import itertools
import json
from pathlib import Path

import pytest
import xxhash

from kvdepot import _native
from kvdepot.errors import ConfigError

VECTORS = Path(__file__).resolve().parents[2] / "crates" / "kvdepot-core" / "tests" / "vectors" / "keys.json"
DOMAIN = b"kvdepot namespace v1\0"


def block_hash(engine_hash):
    return engine_hash if len(engine_hash) == 16 else xxhash.xxh3_128(engine_hash).digest()


def namespace_id(facts, layout, epoch):
    spec = {"facts": facts, "layout": layout}
    canonical = json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return hashlib.sha256(DOMAIN + canonical + b"\0" + epoch.to_bytes(4, "little")).hexdigest()[:32]


@pytest.fixture(scope="module")
def vectors():
    assert VECTORS.is_file(), f"{VECTORS} is missing: it belongs to crates/kvdepot-core"
    return json.loads(VECTORS.read_text("utf-8"))


def layout_runs(shards):
    """Runs of equal shards: ``[count, [sizes…]]``."""
    return [[len(list(group)), sizes] for sizes, group in itertools.groupby(shards)]


def test_block_hash_vectors(vectors):
    assert vectors["block_hashes"]
    for vector in vectors["block_hashes"]:
        engine_hash, expected = bytes.fromhex(vector["engine_hex"]), bytes.fromhex(vector["block_hash_hex"])
        assert block_hash(engine_hash) == expected, vector
        assert _native.block_hash(engine_hash) == expected, vector


def test_namespace_vectors(vectors):
    assert vectors["namespaces"]
    for vector in vectors["namespaces"]:
        facts, layout = json.loads(vector["facts_json"]), layout_runs(vector["shards"])
        for epoch, expected in vector["ids_by_epoch"].items():
            assert namespace_id(facts, layout, int(epoch)) == expected, vector
            assert _native.namespace_id(vector["facts_json"], json.dumps(layout), epoch=int(epoch)) == expected, vector


@pytest.mark.parametrize("length", [1, 8, 15, 16, 17, 32, 64])
def test_block_hashes_of_every_length(length):
    engine_hash = bytes(range(length))
    assert _native.block_hash(engine_hash) == block_hash(engine_hash)
    assert len(_native.block_hash(engine_hash)) == 16


@pytest.mark.parametrize("length", [0, 65])
def test_lengths_that_are_no_hash(length):
    with pytest.raises(ConfigError):
        _native.block_hash(bytes(length))


@pytest.mark.parametrize(
    "facts",
    [
        {"model": "m", "dtype": "bfloat16"},
        {"z": 1, "a": {"y": [True, None, -5], "b": "text"}},
        {"model": "Größe/模型", "escape": 'a"b\\c\n\t\x01\x7f'},
        {"large": 2**63, "negative": -(2**63)},
    ],
)
@pytest.mark.parametrize("epoch", [0, 1, 2**32 - 1])
def test_namespaces_equal_the_reference(facts, epoch):
    layout = [[2, [64, 32]]]
    expected = namespace_id(facts, layout, epoch)
    assert _native.namespace_id(json.dumps(facts), json.dumps(layout), epoch=epoch) == expected


def test_order_and_spelling_of_facts_do_not_matter():
    layout = "[[1,[8]]]"
    assert _native.namespace_id('{"a":1,"b":"\\u00e9"}', layout) == _native.namespace_id('{ "b": "é", "a": 1 }', layout)


def test_epochs_and_layouts_are_other_namespaces():
    facts = '{"model":"m"}'
    ids = {
        _native.namespace_id(facts, layout, epoch=epoch) for layout in ("[[1,[8]]]", "[[2,[8]]]") for epoch in (0, 1)
    }
    assert len(ids) == 4


def test_fractions_are_refused():
    with pytest.raises(ConfigError):
        _native.namespace_id('{"scale":0.5}', "[[1,[8]]]")
