"""LoRA adapters identified by content: vLLM's block hashes include only an adapter's name and path.

An adapter that was trained further and stored at the same path would hit the KV of the earlier one, on every node and
after every restart (P1). So keys of requests with an adapter include a digest of its files.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvdepot.engines.adapter_files import adapter_files, content_digest
from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.weights import local_directory
from kvdepot.publish.terms import EVENT_HASH_BYTES

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = connector_logger()

KEY_BYTES = 16

Signature = tuple[tuple[str, int, int, int], ...]
"""Of each file of an adapter: name, size, and the times of the last change of content and of inode."""


@dataclass(frozen=True)
class Adapter:
    """A known adapter.

    Attributes:
        signature: state of its files when they were last read.
        digest: that of its content and of the options; empty = untrusted.
        files: name of the state of its files when they were first read: workers that loaded them compare it.
    """

    signature: Signature = ()
    digest: bytes = b""
    files: bytes = b""


UNKNOWN = Adapter()


class Adapters:
    """Digests of the adapters that an engine's requests name."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        """Starts without an adapter. ``options``: those of the engine that change what an adapter does."""
        self._options = json.dumps(dict(options), sort_keys=True).encode() if options else b""
        self._known: dict[tuple[str, str], Adapter] = {}
        self.used = False
        """Whether a request has named an adapter."""

    def find(self, lora: "LoRARequest") -> Adapter:
        """Returns the adapter; its digest is empty if its KV must not be loaded or stored."""
        self.used = True
        name = (lora.lora_name, lora.lora_path)
        known = self._known.get(name)
        if known is not None and not known.digest:
            return known
        try:
            directory = adapter_directory(lora.lora_path)
            signature = signature_of(directory)
            if known is not None and known.signature == signature:
                return known
            digest = content_digest(directory)
            if self._options:
                digest = hashlib.sha256(digest + self._options).digest()
            written_meanwhile = signature_of(directory) != signature
        except OSError as error:
            # Not permanent: a hub's adapter may arrive with the first request, and a file system may come back.
            logger.warning("kvdepot: the files of LoRA adapter %r from %s cannot be read: %s", *name, error)
            return UNKNOWN
        if written_meanwhile or (known is not None and known.digest != digest):
            # vLLM may have either version in memory, and has KV of the earlier one in its own cache under the same
            # hashes.
            self.distrust(name, "its files have changed while the engine runs: give a changed adapter another path")
            return UNKNOWN
        files = known.files if known is not None else name_of(directory, signature)
        self._known[name] = Adapter(signature, digest, files)
        return self._known[name]

    def distrust(self, name: tuple[str, str], why: str) -> None:
        """Excludes an adapter until the engine ends. Logged once."""
        if self._known.get(name) == UNKNOWN:
            return
        logger.warning("kvdepot: KV of LoRA adapter %r from %s is not loaded or stored: %s", *name, why)
        self._known[name] = UNKNOWN


def adapter_directory(path: str) -> Path:
    """Returns where vLLM finds an adapter that is on this machine.

    Raises:
        FileNotFoundError: the adapter is not on this machine.
    """
    expanded = os.path.expanduser(path)
    directory = Path(expanded) if os.path.isdir(expanded) else local_directory(path, None, "adapter_config.json")
    if directory is None or not directory.is_dir():
        raise FileNotFoundError(f"no such directory: {path}")
    return directory


def signature_of(directory: Path) -> Signature:
    """Returns a signature that changes with any file of the adapter, without reading the files."""
    stats = ((path.name, path.stat()) for path in adapter_files(directory))
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats)


def name_of(directory: Path, signature: Signature) -> bytes:
    """Returns a short name for the state of the files in a directory."""
    return hashlib.sha256(repr((str(directory), signature)).encode()).digest()[:KEY_BYTES]


def files_of(path: str) -> bytes:
    """Returns the name of the state of an adapter's files, without reading them.

    Raises:
        OSError: they cannot be found.
    """
    directory = adapter_directory(path)
    return name_of(directory, signature_of(directory))


def block_keys(hashes: Sequence[bytes]) -> list[bytes]:
    """Returns the depot's keys of blocks: the last 16 bytes of vLLM's digests.

    So the last 8 bytes, which name a block in vLLM's KV events, are known of every block in the depot, no matter which
    engine stored it.
    """
    return [block_hash[-KEY_BYTES:] for block_hash in hashes]


def with_adapter(hashes: Sequence[bytes], adapter: bytes) -> list[bytes]:
    """Returns the depot's keys of blocks computed with an adapter: 8 bytes of a digest of both, then as above."""
    head, tail = KEY_BYTES - EVENT_HASH_BYTES, EVENT_HASH_BYTES
    return [hashlib.sha256(adapter + block_hash).digest()[:head] + block_hash[-tail:] for block_hash in hashes]


def is_key_list_of(hashes: Sequence[bytes], keys: Sequence[bytes]) -> bool:
    """Returns whether ``keys`` are those of the first of these hashes.

    Compares the last key only: each hash depends on all tokens before it. So keys of a request whose hashes were
    computed again, for other tokens, are recognised even if there are as many.
    """
    if not keys:
        return True
    if len(keys) > len(hashes):
        return False
    return hashes[len(keys) - 1][-EVENT_HASH_BYTES:] == keys[-1][-EVENT_HASH_BYTES:]
