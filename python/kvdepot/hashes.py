"""The names of blocks in the depot."""

from kvdepot import _native


def block_hash(engine_hash: bytes) -> bytes:
    """Returns the 16 bytes that stand for an engine's hash, in ``kvdepot why``, events and the names of files.

    Raises:
        ConfigError: the hash is not 1 to 64 bytes long.
    """
    return _native.block_hash(engine_hash)
