"""SGLang's page hashes as block hashes."""

import hashlib
from collections.abc import Sequence

HASH_BYTES = 16
PERSON = b"kvdepot-sglang"


def page_hashes(keys: Sequence[str]) -> list[bytes]:
    """Returns the 16-byte hash of each page, over all of SGLang's text, including whatever a release appends to it."""
    return [hashlib.blake2b(key.encode(), digest_size=HASH_BYTES, person=PERSON).digest() for key in keys]
