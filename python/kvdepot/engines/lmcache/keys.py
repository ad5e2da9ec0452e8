"""LMCache's keys as block hashes: every field of a key, in 16 bytes.

Ranks, object groups and salts are in the hash and not in the namespace: an LMCache server serves the ranks of all its
engines, and a namespace for each of them would need a store for each.
"""

import hashlib
import json
from typing import Any

from kvdepot.engines.lmcache.facts import UnknownLayoutError

HASH_BYTES = 16


def object_hash(key: Any) -> bytes:
    """Returns the hash of an ``ObjectKey`` of LMCache's server.

    Raises:
        UnknownLayoutError: the key has no hash of the tokens.
    """
    if not key.chunk_hash:
        raise UnknownLayoutError(f"a key of {key.model_name} has no hash of its tokens")
    fields = f"{key.kv_rank} {key.object_group_id}".encode()
    return _digest(b"kvdepot-l2", fields, key.cache_salt.encode(), bytes(key.chunk_hash))


def object_label(model: str, name: bytes) -> bytes:
    """Returns the hash of an object of a model together with the model, which is in the namespace, not in the hash."""
    return name + model.encode()


def chunk_hash(key: Any) -> bytes:
    """Returns the hash of a ``CacheEngineKey`` of LMCache inside the engine.

    Raises:
        UnknownLayoutError: the key has tags that are not plain values.
    """
    fields = [key.model_name, key.world_size, key.worker_id, key.chunk_hash, str(key.dtype), key.tags]
    try:
        text = json.dumps(fields, ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UnknownLayoutError(f"a key of {key.model_name} has tags that are not plain values: {error}") from error
    return _digest(b"kvdepot-chunk", text.encode())


def _digest(person: bytes, *fields: bytes) -> bytes:
    hasher = hashlib.blake2b(digest_size=HASH_BYTES, person=person)
    for field in fields:
        hasher.update(len(field).to_bytes(4, "little"))
        hasher.update(field)
    return hasher.digest()
