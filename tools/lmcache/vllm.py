"""Real vLLM that looks for prefixes in LMCache's server, driven round by round from another process."""

import sys
from pathlib import Path
from typing import Any

from tools.lab.rounds import Rounds


class Engine(Rounds):
    """A running vLLM; ``port`` is that of LMCache's server, 0 = without."""

    def __init__(self, root: Path, model: str, port: int) -> None:
        log = root / f"vllm-{port}.log"
        log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tools.lmcache.vllm_child", model, str(port)]
        super().__init__("vLLM", command, log, {"PYTHONHASHSEED": "0"})

    def ask(self, seed: int, count: int, tokens: int) -> dict[str, Any]:
        """Returns answers to ``count`` prompts of ``tokens`` tokens, and how many tokens of each were found.

        Raises:
            ChildError: vLLM ended, or does not answer.
        """
        return self.round({"seed": seed, "count": count, "tokens": tokens})
