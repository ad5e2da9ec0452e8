"""Real vLLM with any connector, asked round by round from another process."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.lab.rounds import Rounds


class Engine(Rounds):
    """A running vLLM of that interpreter; ``transfer`` is its transfer configuration."""

    def __init__(self, root: Path, python: str, model: str, transfer: Mapping[str, Any]) -> None:
        root.mkdir(parents=True, exist_ok=True)
        command = [python, "-m", "tools.lab.vllm_rounds_child", model, json.dumps(dict(transfer))]
        super().__init__("vLLM", command, root / "vllm.log", {"PYTHONHASHSEED": "0"})

    def ask(self, seed: int, count: int, tokens: int) -> dict[str, Any]:
        """Answers to ``count`` prompts of so many tokens, and how many tokens of each were found.

        Raises:
            ChildError: vLLM ended, or does not answer.
        """
        return self.round({"seed": seed, "count": count, "tokens": tokens})

    def flush(self) -> None:
        """Empties vLLM's own prefix cache; what a connector keeps stays. Raises as above."""
        while not self.round({"flush": True})["flushed"]:
            # A request's blocks are in use until the engine's next step.
            self.round({"seed": 0, "count": 1, "tokens": 4})
