"""Mistakes in the configuration, found while vLLM makes its own: before it loads a model or starts a process.

vLLM asks for the connector's class then, and calls nothing of it. So the question itself is the moment, and what is
to be checked is found in the callers' frames: the transfer configuration that names us, and vLLM's own around it.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from kvdepot.engines.vllm.options import read_options
from kvdepot.engines.vllm_plugin import NAMES
from kvdepot.errors import ConfigError, KVDepotError

FRAMES_MAX = 64


class WrongConfigurationError(KVDepotError):
    """The engine's configuration is wrong.

    No ``ValueError``, which vLLM's own configuration would wrap into lines of its own: the mistake is the last line of
    what an engine says that does not start.
    """

    kind = "config"


def check_callers() -> None:
    """Checks what the caller that asks for the connector's class is about to use.

    Raises:
        WrongConfigurationError: with every mistake, one a line.
    """
    transfer = vllm_config = None
    for frame in _callers():
        names = frame.f_locals
        if transfer is None and _names_us(names.get("kv_transfer_config")):
            transfer = names["kv_transfer_config"]
        if hasattr(names.get("self"), "cache_config") and hasattr(names.get("self"), "kv_transfer_config"):
            vllm_config = names["self"]
            break
    if transfer is not None:
        check(transfer.kv_connector_extra_config, vllm_config)


def check(extra_config: Any, vllm_config: Any = None) -> None:
    """Checks the connector's own configuration, and what it needs of vLLM's where that is known. Raises as above."""
    from kvdepot.engines.vllm.facts import unstable_hashes

    try:
        counts_only = read_options(extra_config).config.use_lite
    except ConfigError as error:
        raise WrongConfigurationError(str(error)) from None
    # Hashes that last as long as the process are enough to count by.
    if vllm_config is not None and not counts_only and (problem := unstable_hashes(vllm_config)):
        raise WrongConfigurationError(f"kvdepot would never find a block again: {problem}")


def caller_config() -> Any:
    """The ``VllmConfig`` that is being made by a caller; ``None`` when none is."""
    for frame in _callers():
        found = frame.f_locals.get("self")
        if hasattr(found, "compilation_config") and hasattr(found, "kv_transfer_config"):
            return found
    return None


def _names_us(transfer: Any) -> bool:
    return getattr(transfer, "kv_connector", None) in NAMES


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - vLLM passes none of this
    for _ in range(FRAMES_MAX):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
