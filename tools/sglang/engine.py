"""Real SGLang over kvdepot, with HiCache or a linker, driven round by round from another process."""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.lab.child import POLL_S, ChildError, tail
from tools.lab.rounds import Rounds
from tools.sglang_env import EXTENSIONS, STANDIN

FLUSH_S = 120.0


def depot_backend(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns SGLang's arguments for kvdepot as HiCache's storage backend."""
    named = {
        "backend_name": "kvdepot",
        "module_path": "kvdepot.engines.sglang",
        "class_name": "KVDepotHiCache",
        "interface_v1": 1,
        **extra_config,
    }
    return {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": json.dumps(named)}


def depot_linker(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns SGLang's arguments for kvdepot as its external linker, without HiCache."""
    named = {
        "linker": "KVDepotLinker",
        "linker_module_path": "kvdepot.engines.sglang",
        "linker_extra_config": dict(extra_config),
    }
    return {
        "enable_hierarchical_cache": False,
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": named,
    }


class Engine(Rounds):
    """A running SGLang, with the given arguments in addition to those of the tests."""

    def __init__(
        self, root: Path, model: str, arguments: Mapping[str, Any], *, python: str = sys.executable, **environ: str
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        paths = [str(STANDIN), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [python, "-m", "tools.sglang.engine_child", model, json.dumps(dict(arguments))]
        here = {
            "PYTHONPATH": os.pathsep.join(paths),
            "TORCH_EXTENSIONS_DIR": str(Path(python).parents[1] / EXTENSIONS),
            **environ,
        }
        super().__init__("SGLang", command, root / "sglang.log", here)

    def ask(self, seed: int, count: int, tokens: int, **more: int) -> dict[str, Any]:
        """Returns answers to ``count`` prompts of ``tokens`` tokens, and how many tokens of each were found and where.

        Args:
            seed: chooses the prompts.
            count: number of prompts.
            tokens: tokens of each.
            more: ``answer_tokens``: tokens of each answer.

        Raises:
            ChildError: SGLang ended, or does not answer.
        """
        return self.round({"seed": seed, "count": count, "tokens": tokens, **more})

    def flush(self) -> None:
        """Empties SGLang's own caches, in the device's memory and in the host's.

        SGLang answers before it has finished a request, and refuses until then.

        Raises:
            ChildError: it refuses for too long, or ended.
        """
        end_s = time.monotonic() + FLUSH_S
        while not self.round({"flush": True})["flushed"]:
            if time.monotonic() > end_s:
                raise ChildError(f"SGLang has not flushed its caches\n{tail(self.log)}")
            time.sleep(POLL_S)
