"""LoRA adapters identified by content: vLLM's block hashes include only an adapter's name and path.

An adapter that was trained further and stored at the same path would hit the KV of the earlier one, on every node and
after every restart (P1). So keys of requests with an adapter include a digest of its files.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvdepot.engines.adapter_files import adapter_files, content_digest
from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.vllm.meta import AdapterName
from kvdepot.engines.vllm.threads import Threads
from kvdepot.engines.weights import local_directory
from kvdepot.publish.terms import EVENT_HASH_BYTES

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = connector_logger()

KEY_BYTES = 16

THREADS_MAX = 64
"""Adapters that are looked at at a time: so many may hang with a mount before those on other mounts wait, too."""

WAITING_MAX = 4096
"""Adapters that wait for a thread. The files of others count as unreadable."""

Signature = tuple[tuple[str, int, int, int], ...]
"""Of each file of an adapter: name, size, and the times of the last change of content and of inode."""


@dataclass(frozen=True)
class Adapter:
    """A known adapter.

    Attributes:
        signature: state of its files when they were last read.
        digest: that of its content and of the options; empty = untrusted.
        files: digest of its content alone, which workers compare with what they have loaded.
    """

    signature: Signature = ()
    digest: bytes = b""
    files: bytes = b""


UNKNOWN = Adapter()


FIRST_WAIT_S = 0.001
"""Seconds that a step waits for a look, once: a look at a known adapter rarely takes longer."""


class Inquiry:
    """A look at an adapter's files, by another thread.

    Attributes:
        begun_s: when it began, or the one that it follows: one that hangs makes nobody wait anew.
        waited: whether a step has waited for it, or for the one that it follows.
        found: the adapter; ``None`` until it is known.
        following: an inquiry for requests that came after this one began, which might have missed a later change.
    """

    def __init__(self, begun_s: float, found: Adapter | None = None, *, waited: bool = False) -> None:
        self.begun_s, self.waited = begun_s, waited
        self.found = found
        self.following: Inquiry | None = None
        self._over = threading.Event()

    def end(self, found: Adapter) -> None:
        """Sets what was found."""
        self.found = found
        self._over.set()

    def wait(self, timeout_s: float) -> None:
        """Waits for the answer, for a limited time. The first time is never too short for a look without a read."""
        if self.found is None:
            self._over.wait(timeout_s if self.waited else max(timeout_s, FIRST_WAIT_S))
            self.waited = True


class Adapters:
    """Digests of the adapters that an engine's requests name.

    The files may be on a mount that hangs, and the scheduler's thread serves all requests, so other threads read them:
    one for each adapter that is being looked at.
    """

    def __init__(
        self, options: Mapping[str, str] | None = None, begin: Callable[[Callable[[], None]], None] | None = None
    ) -> None:
        """Starts without an adapter. ``options``: those of the engine that change what an adapter does."""
        self._options = json.dumps(dict(options), sort_keys=True).encode() if options else b""
        self._begin = begin or Threads(THREADS_MAX, WAITING_MAX).begin
        self._lock = threading.Lock()
        self._known: dict[AdapterName, Adapter] = {}
        self._running: dict[AdapterName, Inquiry] = {}
        self.used = False
        """Whether a request has named an adapter."""

    def ask(self, lora: "LoRARequest") -> Inquiry:
        """Begins to look at an adapter's files, without waiting for anything."""
        self.used = True
        name = (lora.lora_name, lora.lora_path)
        now_s = time.monotonic()
        with self._lock:
            if self._known.get(name) == UNKNOWN:
                return Inquiry(now_s, UNKNOWN)
            if (running := self._running.get(name)) is not None:
                running.following = running.following or Inquiry(running.begun_s, waited=running.waited)
                return running.following
            inquiry = self._running[name] = Inquiry(now_s)
        try:
            self._begin(lambda: self._answer(name, inquiry))
        except RuntimeError as error:
            logger.warning("kvdepot: the files of LoRA adapter %r from %s cannot be read: %s", *name, error)
            with self._lock:
                del self._running[name]
            inquiry.end(UNKNOWN)
        return inquiry

    def _answer(self, name: AdapterName, inquiry: Inquiry | None) -> None:
        """Ends an inquiry, and those that follow it."""
        while inquiry is not None:
            found = self._look(name)
            with self._lock:
                following = inquiry.following
                if following is None:
                    del self._running[name]
                else:
                    following.begun_s, following.waited = time.monotonic(), False
                    self._running[name] = following
            inquiry.end(found)
            inquiry = following

    def _look(self, name: AdapterName) -> Adapter:
        """Returns the adapter; its digest is empty if its KV must not be loaded or stored."""
        with self._lock:
            known = self._known.get(name)
        if known == UNKNOWN:
            return UNKNOWN
        try:
            directory = adapter_directory(name[1])
            signature = complete_signature(directory)
            if known is not None and known.signature == signature:
                return known
            digest = files = content_digest(directory)
            if self._options:
                digest = hashlib.sha256(files + self._options).digest()
            written_meanwhile = signature_of(directory) != signature
        except Exception as error:  # noqa: BLE001 - whatever a hub's library or a file system raises
            # Not permanent: a hub's adapter may arrive with the first request, and a file system may come back.
            logger.warning("kvdepot: the files of LoRA adapter %r from %s cannot be read: %s", *name, error)
            return UNKNOWN
        if written_meanwhile or (known is not None and known.digest != digest):
            # vLLM may have either version in memory, and has KV of the earlier one in its own cache under the same
            # hashes.
            self.distrust(name, "its files have changed while the engine runs: give a changed adapter another path")
            return UNKNOWN
        with self._lock:
            if self._known.get(name) != UNKNOWN:
                self._known[name] = Adapter(signature, digest, files)
            return self._known[name]

    def distrust(self, name: AdapterName, why: str) -> None:
        """Excludes an adapter until the engine ends. Logged once."""
        with self._lock:
            known, self._known[name] = self._known.get(name), UNKNOWN
        if known != UNKNOWN:
            logger.warning("kvdepot: KV of LoRA adapter %r from %s is not loaded or stored: %s", *name, why)


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


def complete_signature(directory: Path) -> Signature:
    """Returns the signature of an adapter with a configuration and weights; a download may have left out either.

    Raises:
        FileNotFoundError: it is not there, or not complete.
    """
    signature = signature_of(directory)
    if not has_weights(signature) or not any(name == "adapter_config.json" for name, *_ in signature):
        raise FileNotFoundError(f"no complete adapter in {directory}")
    return signature


def has_weights(signature: Signature) -> bool:
    """Returns whether weights are among an adapter's files."""
    return any(name.startswith("adapter_model.") for name, *_ in signature)


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
