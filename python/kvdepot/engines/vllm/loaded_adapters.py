"""LoRA adapters in this worker's memory, by the content of their files when vLLM read them.

vLLM reads an adapter when a request first needs it, when it has evicted it, and when it is replaced in place, which
happens under running requests and keeps its number. A name and a path say nothing of what is in memory, so the worker
watches vLLM read the files, and digests them right afterwards. Their times say nothing either: they differ between
nodes, and change with an owner or a link.
"""

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvdepot.engines.adapter_files import content_digest
from kvdepot.engines.vllm.adapters import Signature, adapter_directory, has_weights, signature_of
from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.vllm.meta import AdapterName, AdapterUse

logger = connector_logger()

State = tuple[Path, Signature]
"""An adapter's directory, and the signature of its files: empty without files, then the directory is any."""

NO_FILES: State = (Path(), ())


class LoadedAdapters:
    """What each loaded adapter was read from, and what requests of each name have been computed with so far."""

    def __init__(self) -> None:
        self._runner: weakref.ref[Any] | None = None
        self._watch: Any = None
        self._files: dict[int, bytes] = {}
        self._digests: dict[Path, tuple[Signature, bytes]] = {}
        self._first: dict[AdapterName, bytes] = {}
        self._told: set[AdapterName] = set()

    def watch(self, runner: Any) -> None:
        """Watches the model's runner read adapters. Without that every adapter counts as changed, so it is logged."""
        load = getattr(getattr(runner, "lora_manager", None), "_load_adapter", None)
        if load is None:
            logger.warning("kvdepot: KV of LoRA adapters is not stored: this vLLM does not show what it loads")
            return

        def load_and_note(request: Any, *args: Any, **kwargs: Any) -> Any:
            before = _state_now(request)
            loaded = load(request, *args, **kwargs)
            self._files[request.lora_int_id] = self._read_since(before, request)
            return loaded

        runner.lora_manager._load_adapter = self._watch = load_and_note  # noqa: SLF001 - nothing else is called then
        self._runner = weakref.ref(runner)

    def _read_since(self, before: State | None, request: Any) -> bytes:
        """Returns the digest of an adapter's content that vLLM has read since; empty if it is not known.

        An adapter of a hub may have arrived with this call, completely or after its configuration. Nothing may be
        raised into vLLM. The files are in the page cache, and a file system that hangs has already stopped the worker.
        """
        after = _state_now(request)
        if before is None or after is None or after == NO_FILES:
            return b""
        directory, signature = after
        digest: bytes | None = None
        if before in (NO_FILES, after) or _was_completed(before, after):
            digest = self._digest(directory, signature)
        if digest is None:
            logger.warning("kvdepot: the files of LoRA adapter %r changed while vLLM loaded it", request.lora_name)
        return digest or b""

    def _digest(self, directory: Path, signature: Signature) -> bytes | None:
        """Returns the digest of files with this signature; ``None`` if they no longer have it or cannot be read."""
        known, digest = self._digests.get(directory, ((), b""))
        if known == signature:
            return digest
        try:
            digest = content_digest(directory)
            if signature_of(directory) != signature:
                return None
        except Exception:  # noqa: BLE001 - nothing may be raised into vLLM
            return None
        self._digests[directory] = signature, digest
        return digest

    def changed(self, used: Iterable[AdapterUse]) -> set[AdapterName]:
        """Returns the adapters of a step that were not computed with the files that their requests' keys stand for.

        Each once. Called when the step has read its adapters, before anything can replace one. A name counts as
        changed, too, if an earlier step computed with other files: vLLM's own cache has both under one hash.
        """
        watched = self._is_watched()
        changed = set()
        for use in used:
            name = (use.name, use.path)
            files = self._files.get(use.number, b"") if watched else b""
            first = self._first.setdefault(name, files)
            if not files or files != first or use.files not in (b"", files):
                changed.add(name)
        changed -= self._told
        self._told |= changed
        return changed

    def _is_watched(self) -> bool:
        """Returns whether vLLM still reads adapters where they are watched."""
        runner = self._runner() if self._runner is not None else None
        return runner is not None and getattr(runner.lora_manager, "_load_adapter", None) is self._watch


def _was_completed(before: State, after: State) -> bool:
    """Returns whether an adapter's weights were added to its other files.

    With weights beside weights it is not known which ones vLLM has read.
    """
    return before[0] == after[0] and not has_weights(before[1]) and set(before[1]) <= set(after[1])


def _state_now(request: Any) -> State | None:
    """Returns what an adapter's files are now; ``None`` = that cannot be told."""
    try:
        directory = adapter_directory(request.lora_path)
        return directory, signature_of(directory)
    except FileNotFoundError:
        return NO_FILES
    except Exception as error:  # noqa: BLE001 - whatever a hub's library or a file system raises
        logger.warning("kvdepot: the files of LoRA adapter %r cannot be read: %s", request.lora_name, error)
        return None
