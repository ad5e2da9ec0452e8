"""Models with random weights, generated once, and prompts of their words."""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.lab.child import Child
from tools.make_model import LATENT_VALUES, SPECIAL, VOCABULARY

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".work"
MAKE_S = 300.0
BYTES_PER_VALUE = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class ModelSize:
    """A model. The default has 94 M parameters: some seconds for 4096 tokens on two cores."""

    layers: int = 8
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    intermediate: int = 2816
    architecture: str = "llama"
    sliding_window: int = 512
    initializer_range: float = 0.06

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Returns the bytes of keys and values that all layers keep per token."""
        if self.architecture == "mla":
            return self.layers * LATENT_VALUES * BYTES_PER_VALUE[dtype]
        return self.layers * 2 * self.kv_heads * self.head_dim * BYTES_PER_VALUE[dtype]


SIZES = {
    "small": ModelSize(),
    "1b": ModelSize(layers=16, hidden=2048, heads=32, intermediate=8192, kv_heads=8),
    "8b": ModelSize(layers=32, hidden=4096, heads=32, intermediate=14336, kv_heads=8, head_dim=128),
}
"""Models by name: ours for processors, and two of the shapes of Llama 3, with our vocabulary."""


def model_directory(size: ModelSize) -> Path:
    """Returns the directory of such a model, which may not exist yet."""
    shape = f"{size.layers}x{size.hidden}-{size.heads}x{size.kv_heads}x{size.head_dim}-{size.intermediate}"
    others = {"w": size.sliding_window, "r": size.initializer_range}
    defaults = {"w": ModelSize.sliding_window, "r": ModelSize.initializer_range}
    rest = "".join(f"-{key}{value}" for key, value in others.items() if value != defaults[key])
    return WORK / "models" / f"{size.architecture}-{shape}{rest}"


def model_command(size: ModelSize) -> list[str]:
    """Returns the command that generates the model."""
    command = [sys.executable, "-m", "tools.make_model", str(model_directory(size))]
    for name, value in vars(size).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return command


def make_model(size: ModelSize) -> Path:
    """Generates the model unless a complete one exists."""
    directory = model_directory(size)
    stamp = directory / "made.json"
    if not stamp.is_file():
        with Child("make_model", model_command(size), WORK / "logs" / "make-model.log", {}) as child:
            child.wait(MAKE_S)
        stamp.write_text(json.dumps(vars(size)))
    return directory


def prompt(seed: int, tokens: int) -> list[int]:
    """Returns token ids that depend only on the arguments; two seeds share no significant prefix."""
    chosen = random.Random(seed)
    return [chosen.randrange(len(SPECIAL), VOCABULARY) for _ in range(tokens)]
