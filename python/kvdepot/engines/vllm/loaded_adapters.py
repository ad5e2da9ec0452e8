"""LoRA adapters in this worker's memory, by what their files were when vLLM read them.

vLLM reads an adapter when a request first needs it, when it has evicted it, and when it is replaced in place, which
happens under running requests and keeps its number. A name and a path say nothing of what is in memory, so the worker
watches vLLM read the files.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from kvdepot.engines.vllm.adapters import files_of
from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.vllm.meta import AdapterName, AdapterUse

logger = connector_logger()


class LoadedAdapters:
    """What each loaded adapter was read from, and what requests of each name have been computed with so far."""

    def __init__(self) -> None:
        self._runner: weakref.ref[Any] | None = None
        self._watch: Any = None
        self._files: dict[int, bytes] = {}
        self._first: dict[AdapterName, bytes] = {}
        self._told: set[AdapterName] = set()

    def watch(self, runner: Any) -> None:
        """Watches the model's runner read adapters. Without that every adapter counts as changed, so it is logged."""
        load = getattr(getattr(runner, "lora_manager", None), "_load_adapter", None)
        if load is None:
            logger.warning("kvdepot: KV of LoRA adapters is not stored: this vLLM does not show what it loads")
            return

        def load_and_note(request: Any, *args: Any, **kwargs: Any) -> Any:
            before = _files_now(request)
            loaded = load(request, *args, **kwargs)
            after = _files_now(request)
            # An adapter of a hub may have come with this call.
            self._files[request.lora_int_id] = after if after and before in (None, after) else b""
            return loaded

        runner.lora_manager._load_adapter = self._watch = load_and_note  # noqa: SLF001 - nothing else is called then
        self._runner = weakref.ref(runner)

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


def _files_now(request: Any) -> bytes | None:
    """Returns what an adapter's files are now: ``None`` = there are none, empty = they cannot be read.

    Just before and after vLLM itself reads them, so a file system that hangs has already stopped the worker.
    """
    try:
        return files_of(request.lora_path)
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - nothing may be raised into vLLM; the adapter's KV is not stored
        logger.warning("kvdepot: the files of LoRA adapter %r cannot be read: %s", request.lora_name, error)
        return b""
