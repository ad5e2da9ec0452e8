"""A cheap digest of a model's weights that is the same on every node and differs for every other checkpoint.

It covers names, sizes and a few bytes from the middle of every tensor: a fine-tune, a merge or a new revision under the
same name changes some tensor everywhere, so also in its middle. Times of files are left out: they differ between nodes.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HEADER_BYTES_MAX = 64 << 20
SAMPLES_MAX = 8192
SAMPLE_BYTES = 64
PLAIN_SAMPLES = 64
THREADS = 16
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
SPLIT = re.compile(r"-\d{5}-of-\d{5}(?=\.)")
"""Suffix that the parts of a split file have in their names."""


def weights_digest(place: Path) -> str:
    """Returns the digest of the weight files in a directory, or of one file and its companions; empty without any.

    Companions are a file's split parts (``…-00001-of-00003.gguf``), and a projector for media (``mmproj…``) next to it.
    For a file that is alone in its directory the digest equals the directory's.
    """
    return _digest([(path.name, path) for path in _weight_files(place)])


def tree_digest(place: Path) -> str:
    """Returns the digest of a weight file, or of all files below a directory; empty if there are none."""
    if place.is_file():
        return weights_digest(place)
    files = sorted(path for path in place.rglob("*") if path.is_file())
    return _digest([(path.relative_to(place).as_posix(), path) for path in files])


def _weight_files(place: Path) -> list[Path]:
    if not place.is_file():
        return sorted(path for path in place.iterdir() if path.name.endswith(WEIGHT_SUFFIXES) and path.is_file())
    whole = SPLIT.sub("", place.name)
    beside = (path for path in place.parent.iterdir() if path.name.endswith(WEIGHT_SUFFIXES) and path.is_file())
    return sorted(
        path
        for path in {place, *beside}
        if path.name == place.name
        or (whole != place.name and SPLIT.sub("", path.name) == whole)
        or path.name.startswith("mmproj")
    )


def _digest(files: Sequence[tuple[str, Path]]) -> str:
    if not files:
        return ""
    digest = hashlib.sha256()
    # Every read is short and at another place: a disk or a file server handles many concurrently.
    with ThreadPoolExecutor(THREADS) as readers:
        for samples in readers.map(_samples, files):
            digest.update(samples)
    return digest.hexdigest()[:32]


def _samples(named: tuple[str, Path]) -> bytes:
    """Returns a file's name, its size, and bytes from the middle of every tensor."""
    name, path = named
    size = path.stat().st_size
    with path.open("rb") as file:
        offsets = _tensor_middles(file.fileno(), size) if path.suffix == ".safetensors" else None
        if offsets is None:
            offsets = [size * i // PLAIN_SAMPLES for i in range(PLAIN_SAMPLES)]
        return f"{name}\0{size}\0".encode() + b"".join(
            os.pread(file.fileno(), SAMPLE_BYTES, offset) for offset in offsets
        )


def _tensor_middles(fd: int, size: int) -> list[int] | None:
    """Returns the offsets of the middle of every tensor of a safetensors file; None if it is not one."""
    head_bytes = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 2 <= head_bytes <= min(HEADER_BYTES_MAX, size - 8):
        return None
    try:
        header = json.loads(os.pread(fd, head_bytes, 8))
        spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        step = max(1, len(spans) // SAMPLES_MAX)
        middles = [8 + head_bytes + (int(begin) + int(end)) // 2 for begin, end in spans[::step]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return middles if all(0 <= middle <= size for middle in middles) else None


def local_directory(
    model: str, revision: str | None, file: str = "config.json", cache: str | None = None
) -> Path | None:
    """Returns where a model lies on this machine: a directory, or its snapshot in the hub's cache. Uses no network."""
    if os.path.isdir(model):
        return Path(model)
    if os.path.isfile(model):
        return Path(model).parent
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, file, cache_dir=cache, revision=revision)
    except Exception:  # noqa: BLE001 - a name that is no hub's, no package: the configuration's digest has to do
        return None
    return Path(found).parent if isinstance(found, str) else None


def local_weights(model: str, revision: str | None, file: str = "config.json", cache: str | None = None) -> Path | None:
    """Returns where a model's weights lie on this machine: a weight file if one is named, else a directory."""
    if os.path.isfile(model) and model.endswith(WEIGHT_SUFFIXES):
        return Path(model)
    return local_directory(model, revision, file, cache)


def model_digest(model: str, revision: str | None = None, cache: str | None = None) -> str:
    """Returns the digest of a model's weight files on this machine; empty if there are none. Uses no network.

    Args:
        model: a directory, a weight file, or a name of the hub.
        revision: revision of a name of the hub; ``None`` = its main one.
        cache: the hub's cache; ``None`` = the default one.

    Raises:
        OSError: a file cannot be read.
    """
    # A cache of an engine's own has the weights, but not always the configuration.
    for file in ("config.json", "model.safetensors.index.json", "model.safetensors"):
        place = local_weights(model, revision, file, cache)
        if place is not None and (digest := weights_digest(place)):
            return digest
    return ""


def config_file_digest(model: str, revision: str | None = None) -> str:
    """Returns the digest of a model's ``config.json``, without its author and version; empty if there is none."""
    directory = local_directory(model, revision)
    try:
        values = json.loads((directory / "config.json").read_text()) if directory is not None else {}
    except (OSError, ValueError):
        values = {}
    if not isinstance(values, dict):
        return ""
    kept = {name: value for name, value in values.items() if name not in ("transformers_version", "_name_or_path")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:32] if kept else ""
