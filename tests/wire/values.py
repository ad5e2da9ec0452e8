"""Bytes that identify their owner: two keys, versions or lengths never have equal values."""

import random
import struct


def value(key: str, nbytes: int, version: int = 0) -> bytes:
    """Returns bytes for a key; the same for the same arguments."""
    return random.Random(f"{key}/{nbytes}/{version}").randbytes(nbytes)


def stamped(number: int, nbytes: int) -> bytes:
    """Returns a repeated number: cheap to make and to check; a mixture of two numbers shows."""
    return (struct.pack("<Q", number) * (nbytes // 8 + 1))[:nbytes]
