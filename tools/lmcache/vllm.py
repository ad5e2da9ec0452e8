"""Real vLLM that looks for prefixes in LMCache's server, driven round by round from another process."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tools.lab.child import ChildError, tail
from tools.lab.rounds import Rounds
from tools.lab.warm import ENVIRON
from tools.lmcache.connector import VARIABLES


class Engine(Rounds):
    """A running vLLM; ``port`` is that of LMCache's server, 0 = without."""

    def __init__(
        self,
        root: Path,
        model: str,
        port: int,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        environ: Mapping[str, str] = ENVIRON,
    ) -> None:
        """Starts it.

        Args:
            root: directory of the log.
            model: directory of the model.
            port: of LMCache's server.
            arguments: of ``vllm.LLM``, in addition to those of the tests.
            environ: variables, by default of an engine with one thread.
        """
        log = root / f"vllm-{port}.log"
        log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tools.lmcache.vllm_child", model, str(port), json.dumps(dict(arguments))]
        super().__init__("vLLM", command, log, {**environ, **VARIABLES})

    def ask(self, seed: int, count: int, tokens: int) -> dict[str, Any]:
        """Returns answers to ``count`` prompts of ``tokens`` tokens, and how many tokens of each were found.

        Raises:
            ChildError: vLLM ended, or does not answer.
        """
        return self.round({"seed": seed, "count": count, "tokens": tokens})

    def flush(self) -> None:
        """Empties vLLM's own prefix cache; what LMCache keeps stays.

        Raises:
            ChildError: blocks stay in use, or vLLM ended.
        """
        if not self.round({"flush": True})["flushed"]:
            raise ChildError(f"{self.name} does not give its blocks free\n{tail(self.log)}")
