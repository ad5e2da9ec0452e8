"""Writes keys.json: test vectors for block hashes, namespaces and block keys, without any code of kvdepot.

Needs the package `xxhash`. Run it as `python make_keys.py > keys.json`.
"""

import hashlib
import json
import struct

import xxhash

DOMAIN = b"kvdepot namespace v1\0"
HASHES = [bytes(range(16)), b"\xff" * 16, bytes(range(32)), b"\x07", b"\x00", b"\x00" * 15, bytes(range(64)), b"a" * 17]
NAMESPACES = [
    ({}, [[1]]),
    ({"model": "m", "dtype": "bfloat16", "block_tokens": 16, "rank": 0, "world": 2}, [[4096, 4096]] * 3 + [[128]]),
    (
        {
            "z": [1, -2, True, False, None, [], {}],
            "a": {"y": 18446744073709551615, "x": 'tab\t quote" back\\ slash/ low\x1f del\x7f'},
            "modèle": "通义",
            "\U0001f600": "above the basic plane",
            "\ufb01": "below it in code points, above it in UTF-16",
            "Z": "",
        },
        [[100, 28], [4000], [4000]],
    ),
]


def block_hash(engine: bytes) -> bytes:
    return engine if len(engine) == 16 else xxhash.xxh3_128_digest(engine)


def layout_runs(shards: list[list[int]]) -> list[list]:
    runs: list[list] = []
    for shard in shards:
        if runs and runs[-1][1] == shard:
            runs[-1][0] += 1
        else:
            runs.append([1, shard])
    return runs


def canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def namespace(facts: dict, shards: list[list[int]]) -> dict:
    canonical = canonical_json({"facts": facts, "layout": layout_runs(shards)})
    root = hashlib.sha256(DOMAIN + canonical.encode())
    epochs = {}
    for epoch in (0, 1, 0x01020304):
        epoch_id = root.copy()
        epoch_id.update(b"\0" + struct.pack("<I", epoch))
        epochs[str(epoch)] = epoch_id.hexdigest()[:32]
    return {
        "facts_json": json.dumps(facts, indent=1),
        "shards": shards,
        "canonical": canonical,
        "root": root.hexdigest()[:32],
        "ids_by_epoch": epochs,
    }


def main() -> None:
    hashes = [{"engine_hex": h.hex(), "block_hash_hex": block_hash(h).hex()} for h in HASHES]
    namespaces = [namespace(facts, shards) for facts, shards in NAMESPACES]
    keys = []
    for vector in namespaces:
        for namespace_id in vector["ids_by_epoch"].values():
            for block in hashes[::3]:
                digits = block["block_hash_hex"]
                keys.append({"namespace": namespace_id, "block_hash": digits, "key_hex": namespace_id + digits})
    print(json.dumps({"block_hashes": hashes, "namespaces": namespaces, "block_keys": keys}, indent=1))


if __name__ == "__main__":
    main()
