"""Files of LoRA adapters, identified by content: engines' hashes include only an adapter's name and path."""

import hashlib
from pathlib import Path

READ_BYTES = 1 << 20


def adapter_files(directory: Path, suffixes: tuple[str, ...] = ()) -> list[Path]:
    """Returns an adapter's files, sorted by name: those that begin with ``adapter`` or end with one of ``suffixes``.

    Raises:
        FileNotFoundError: there are none.
    """
    names = (path for path in sorted(directory.iterdir()) if path.is_file())
    files = [path for path in names if path.name.startswith("adapter") or path.name.endswith(suffixes)]
    if not files:
        raise FileNotFoundError(f"no adapter in {directory}")
    return files


def content_digest(directory: Path, suffixes: tuple[str, ...] = ()) -> bytes:
    """Returns the digest of an adapter's complete files (as ``adapter_files``): they are small, and any value counts.

    Raises:
        OSError: there are none, or one cannot be read.
    """
    digest = hashlib.sha256()
    for path in adapter_files(directory, suffixes):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while part := file.read(READ_BYTES):
                digest.update(part)
    return digest.digest()
