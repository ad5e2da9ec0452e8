"""Finds mistakes in the configuration while vLLM creates its own: before it loads a model or starts a process.

At that time vLLM asks for the connector's class, but calls no method of it. So the attribute access triggers the check,
which finds its input in the callers' frames: the transfer configuration that names us, and vLLM's own around it.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from kvdepot.engines.vllm.options import read_options
from kvdepot.engines.vllm.releases.refusal import problem
from kvdepot.engines.vllm_plugin import MULTI, NAMES
from kvdepot.errors import ConfigError, KVDepotError

FRAMES_MAX = 64


class WrongConfigurationError(KVDepotError):
    """The engine's configuration is wrong.

    Not a ``ValueError``, which vLLM's own configuration would wrap in further lines: the mistake has to be the last
    line that a failing engine prints.
    """

    kind = "config"


def check_release() -> None:
    """Checks vLLM itself, before anything of it is imported that a release may lack.

    Raises:
        WrongConfigurationError: the connector does not support this release.
    """
    if why := problem():
        raise WrongConfigurationError(why)


def check_callers() -> None:
    """Checks the configuration of the caller that asks for the connector's class, or for ``MultiConnector`` above it.

    Raises:
        WrongConfigurationError: with every mistake, one per line.
    """
    settings: list[Any] = []
    vllm_config = None
    for frame in _callers():
        names = frame.f_locals
        settings = settings or own_settings(names.get("kv_transfer_config"))
        if hasattr(names.get("self"), "cache_config") and hasattr(names.get("self"), "kv_transfer_config"):
            vllm_config = names["self"]
            break
    for extra_config in settings:
        check(extra_config, vllm_config)


def check(extra_config: Any, vllm_config: Any = None) -> None:
    """Checks the connector's own configuration, and vLLM's where it is known. Raises as ``check_callers``."""
    from kvdepot.engines.vllm.facts import unstable_hashes

    try:
        counts_only = read_options(extra_config).config.use_lite
    except ConfigError as error:
        raise WrongConfigurationError(str(error)) from None
    # For counting, hashes that are stable within the process are enough.
    if vllm_config is not None and not counts_only and (problem := unstable_hashes(vllm_config)):
        raise WrongConfigurationError(f"kvdepot would never find a block again: {problem}")


def caller_config() -> Any:
    """Returns the ``VllmConfig`` that a caller is constructing; ``None`` if there is none."""
    for frame in _callers():
        found = frame.f_locals.get("self")
        if hasattr(found, "compilation_config") and hasattr(found, "kv_transfer_config"):
            return found
    return None


def own_settings(transfer: Any) -> list[Any]:
    """Returns the connector's settings in a transfer configuration: its own, or its children's."""
    name, extra_config = getattr(transfer, "kv_connector", None), getattr(transfer, "kv_connector_extra_config", None)
    if name in NAMES:
        return [extra_config]
    children = extra_config.get("connectors") if name == MULTI and isinstance(extra_config, dict) else None
    if not isinstance(children, list):
        return []
    return [
        child.get("kv_connector_extra_config")
        for child in children
        if isinstance(child, dict) and child.get("kv_connector") in NAMES
    ]


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - vLLM passes none of this
    for _ in range(FRAMES_MAX):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
