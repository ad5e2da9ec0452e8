"""How long weights take to identify at an engine's start: in files (sampled), and in host memory (every byte)."""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvdepot.engines.weights import weights_digest

TENSOR_NAME = "model.layers.{}.mlp.experts.{}.gate_proj.weight"


def checkpoint(folder: Path, total_bytes: int, tensors: int, files: int) -> None:
    """Creates sparse files like those of a large mixture of experts: only their headers take space."""
    per_file = -(-tensors // files)
    tensor_bytes = total_bytes // tensors
    for number in range(files):
        count = min(per_file, tensors - number * per_file)
        header = json.dumps(
            {
                TENSOR_NAME.format(number, index): {
                    "dtype": "F8_E4M3",
                    "shape": [tensor_bytes],
                    "data_offsets": [index * tensor_bytes, (index + 1) * tensor_bytes],
                }
                for index in range(count)
            }
        ).encode()
        with (folder / f"model-{number:05}-of-{files:05}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + count * tensor_bytes)


def seconds(work: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of each round, and those of processor time, both sorted."""
    found, used = [], []
    for _ in range(rounds):
        begin, used_before = time.perf_counter(), time.process_time()
        work()
        found.append(time.perf_counter() - begin)
        used.append(time.process_time() - used_before)
    return sorted(found), sorted(used)


def in_memory(total_bytes: int, tensors: int) -> Callable[[], object]:
    """Returns the digest of weights in host memory."""
    import torch

    from kvdepot.engines.vllm.live import tensors_digest

    held = {str(index): torch.ones(total_bytes // tensors, dtype=torch.uint8) for index in range(tensors)}
    return lambda: tensors_digest(held, {})


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=int, default=700, help="size of the checkpoint (default: %(default)s)")
    parser.add_argument("--tensors", type=int, default=90_000, help="its tensors (default: %(default)s)")
    parser.add_argument("--files", type=int, default=163, help="its files (default: %(default)s)")
    parser.add_argument("--memory-gb", type=float, default=0.0, help="size of weights in host memory; needs torch")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        checkpoint(Path(name), options.gb * 10**9, options.tensors, options.files)
        wall, used = seconds(lambda: weights_digest(Path(name)), options.rounds)
    print(f"files, {options.gb} GB in {options.tensors} tensors: {told(wall)}, of a processor {told(used)}")
    if options.memory_gb:
        wall, used = seconds(in_memory(int(options.memory_gb * 10**9), 200), options.rounds)
        print(f"memory, {options.memory_gb} GB: {told(wall)}, of a processor {told(used)}")


def told(found: list[float]) -> str:
    """Returns the range of figures as text."""
    return f"{found[0]:.2f} to {found[-1]:.2f} s"


if __name__ == "__main__":
    main()
