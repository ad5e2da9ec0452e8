"""The weights in this worker's memory: a digest of every byte, to be compared with a later one.

The digest is exact, so it also detects an update that changes few values: in bfloat16, a step of reinforcement learning
leaves most values unchanged. On a device it costs about as much as a few decode steps; the values stay there.
"""

import hashlib
import secrets
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kvdepot.engines.vllm.log import connector_logger

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

logger = connector_logger()

HOST_BYTES_MAX = 8 << 30
"""Weights in host memory above this size are not digested: reading them would take longer than a step may wait."""

HOST_THREADS = 8
PART_BYTES = 64 << 20
"""Threads that hash weights in host memory, and the size of what each hashes at a time."""

DEVICE_CHUNK_WORDS = 4 << 20
FRAMES_MAX = 64
SAMPLED_TENSORS = 64
SAMPLED_VALUES = 1024
PACKING = "_kvdepot_packing"

# Odd 64-bit constants, as signed numbers: torch has no unsigned arithmetic.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


class LiveWeights:
    """The weights of one worker's models. Read between steps, when nothing computes or writes them."""

    def __init__(self, runner: Any, why_unknown: str = "", settled: bool = True, unnamed_draft: bool = False) -> None:
        self._runner = weakref.ref(runner) if runner is not None else None
        self._why_unknown = why_unknown
        self._settled = settled
        self._unnamed_draft = unnamed_draft

    @staticmethod
    def of(vllm_config: "VllmConfig", unnamed_draft: bool = False) -> "LiveWeights":
        """Returns the weights of the worker that is currently calling its connector, at any depth of the call stack.

        Args:
            vllm_config: vLLM's configuration.
            unnamed_draft: whether this worker has a draft whose weights have no name but their bytes in memory.
        """
        parallel = vllm_config.parallel_config
        if getattr(parallel, "enable_eplb", False):
            return LiveWeights(None, "experts move between ranks while the engine runs")
        if parallel.data_parallel_size > 1 and getattr(vllm_config.model_config, "is_moe", True):
            return LiveWeights(None, "other engines hold a part of the experts")
        # vLLM passes its tensors to a connector, but not its model. Nothing else has to be known of the caller.
        runner = caller_with("get_model")
        prefetch = getattr(getattr(vllm_config, "offload_config", None), "prefetch", None)
        return LiveWeights(
            runner,
            "" if runner is not None else "this version of vLLM does not show its model",
            settled=not getattr(prefetch, "offload_group_size", 0),
            unnamed_draft=unnamed_draft,
        )

    def digest(self) -> str:
        """Returns the digest of all parameters and buffers; empty if unavailable, which is logged with the reason."""
        runner = self._runner() if self._runner is not None else None
        if runner is None:
            logger.info("kvdepot: weights in memory are not compared: %s", self._why_unknown or "the model is gone")
            return ""
        if self._unnamed_draft and "draft" not in _models(runner):
            logger.info("kvdepot: weights in memory are not compared: the draft does not show its model")
            return ""
        try:
            return tensors_digest(dict(named_tensors(runner)), packed_weights(runner))
        except Exception as error:  # noqa: BLE001 - no memory, a kind of tensor not seen before: then it is unknown
            logger.warning("kvdepot: weights in memory cannot be compared: %s: %s", type(error).__name__, error)
            return ""

    def sample(self) -> str:
        """Returns a digest of some values of some parameters, within about a millisecond; empty if unavailable.

        It detects unannounced changes: an update changes most tensors, each in many places.
        """
        runner = self._runner() if self._runner is not None else None
        if runner is None or not self._settled:
            return ""
        try:
            return _sample(list(runner.get_model().parameters()))
        except Exception as error:  # noqa: BLE001 - as above
            logger.debug("kvdepot: weights in memory cannot be sampled: %s: %s", type(error).__name__, error)
            return ""


def caller_with(method: str) -> Any:
    """Returns the nearest object up the call stack with this method, among those whose methods are running."""
    frame = sys._getframe(1)  # noqa: SLF001 - there is no other way up
    for _ in range(FRAMES_MAX):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        found = frame.f_locals.get("self")
        if found is not None and callable(getattr(type(found), method, None)):
            return found
    return None


def named_tensors(runner: Any) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yields parameters and buffers of the model, and of its draft model if there is one."""
    for kind, model in _models(runner).items():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            yield from _plain(f"{kind}.{name}", tensor)


def packed_weights(runner: Any) -> dict[str, str]:
    """Returns weights that vLLM has packed for a CPU's kernels, each with an identifier of the packing.

    Their tensors are empty and their bytes inaccessible. Packing again creates another function, so reloaded weights
    count as different, even if they are the same.
    """
    found = {}
    for kind, model in _models(runner).items():
        for name, module in model.named_modules():
            packed, weight = getattr(module, "cpu_linear", None), getattr(module, "weight", None)
            if packed is not None and weight is not None and weight.numel() == 0:
                if not hasattr(packed, PACKING):
                    setattr(packed, PACKING, secrets.token_hex(16))
                found[f"{kind}.{name}"] = getattr(packed, PACKING)
    return found


def _models(runner: Any) -> dict[str, Any]:
    """Returns the model, and its draft model if there is one."""
    models = {"model": runner.get_model()}
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    if (draft := getattr(drafter, "model", None)) is not None and callable(getattr(draft, "named_parameters", None)):
        models["draft"] = draft
    return models


def _plain(name: str, tensor: Any) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yields a tensor, or the tensors that a wrapper consists of."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    parts = getattr(tensor, "partitions", None)
    if isinstance(parts, dict):  # vLLM's weight that several layers share
        for key, part in parts.items():
            yield from _plain(f"{name}.{key}", part)
    elif is_traceable_wrapper_subclass(tensor):
        for key in tensor.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{key}", getattr(tensor, key))
    else:
        yield name, tensor


def tensors_digest(tensors: dict[str, "torch.Tensor"], packed: dict[str, str]) -> str:
    """Returns the digest of tensors and packings by name.

    Raises:
        ValueError: there are none, or too many in host memory.
    """
    host = sum(tensor.nbytes for tensor in tensors.values() if tensor.device.type == "cpu")
    if host > HOST_BYTES_MAX:
        raise ValueError(f"{host} bytes of them are in host memory, more than {HOST_BYTES_MAX}")
    if not tensors:
        raise ValueError("the model has none")
    # Hashing lets other threads run, so a rank's processors share the work. Sums run on their device meanwhile.
    with ThreadPoolExecutor(HOST_THREADS) as threads:
        found = {
            name: _host_digest(tensor, threads) if tensor.device.type == "cpu" else device_sum(_as_bytes(tensor))
            for name, tensor in tensors.items()
        }
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0{tensor.stride()}\0".encode())
        value = found[name]
        digest.update(value() if callable(value) else int(value).to_bytes(8, "little", signed=True))
    for name, packing in sorted(packed.items()):
        digest.update(f"{name}\0{packing}\0".encode())
    return digest.hexdigest()[:32]


def _sample(parameters: list[Any]) -> str:
    import torch

    by_device: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters[:: max(1, len(parameters) // SAMPLED_TENSORS)]:
        data = parameter.detach()
        data = data.permute(_by_stride(data))
        if data.is_contiguous() and data.numel():
            # Adjacent values: distant ones would each cost a memory access.
            begin = max(0, data.numel() - SAMPLED_VALUES) // 2
            values = data.view(-1)[begin : begin + SAMPLED_VALUES]
            by_device.setdefault(data.device, []).append(values.view(torch.uint8))
    digest = hashlib.sha256()
    for device in sorted(by_device, key=str):
        digest.update(str(int(device_sum(torch.cat(by_device[device])))).encode())
    return digest.hexdigest()[:32] if by_device else ""


def _by_stride(tensor: "torch.Tensor") -> list[int]:
    """Returns the dimensions in the order of memory, the outermost first."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _host_digest(tensor: "torch.Tensor", threads: ThreadPoolExecutor) -> Callable[[], bytes]:
    """Starts to hash a tensor in host memory. Returns what waits for its SHA-256, or for that of its parts' hashes."""
    data = _as_bytes(tensor)
    parts = [data[begin : begin + PART_BYTES] for begin in range(0, len(data), PART_BYTES)] or [data]
    hashes = [threads.submit(_sha256, part) for part in parts]

    def digest() -> bytes:
        found = [one.result() for one in hashes]
        return found[0] if len(found) == 1 else hashlib.sha256(b"".join(found)).digest()

    return digest


def _sha256(data: "torch.Tensor") -> bytes:
    return hashlib.sha256(memoryview(data.numpy())).digest()


def _as_bytes(tensor: "torch.Tensor") -> "torch.Tensor":
    """Returns the bytes in the order of memory: a transposed weight is not copied."""
    import torch

    plain = tensor.detach()
    return plain.permute(_by_stride(plain)).contiguous().view(-1).view(torch.uint8)


def device_sum(data: "torch.Tensor", chunk_words: int = DEVICE_CHUNK_WORDS) -> "torch.Tensor":
    """Returns 64 bits that depend on each bit of ``data`` and its place: a sum of words mixed with their index."""
    import torch

    total = torch.zeros((), dtype=torch.int64, device=data.device)
    whole = len(data) // 8 * 8
    if whole < len(data):
        tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
        tail[: len(data) - whole] = data[whole:]
        total += _mixed(tail.view(torch.int64), len(data))
    words = (data if data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0 else data.clone())[:whole]
    words = words.view(torch.int64)
    for begin in range(0, len(words), chunk_words):
        total += _mixed(words[begin : begin + chunk_words], begin)
    return total


def _mixed(words: "torch.Tensor", begin: int) -> "torch.Tensor":
    import torch

    place = torch.arange(begin + 1, begin + 1 + len(words), dtype=torch.int64, device=words.device)
    mixed = place.mul_(_STEP).add_(words)
    mixed.bitwise_xor_(mixed >> 32).mul_(_MIX_1)
    mixed.bitwise_xor_(mixed >> 29).mul_(_MIX_2)
    mixed.bitwise_xor_(mixed >> 32)
    return mixed.sum()
