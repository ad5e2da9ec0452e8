"""The connector's view of the configuration. No other module here knows how the configuration is written."""

import contextlib
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal

from kvdepot.config import KVDepotConfig, load_config
from kvdepot.config.engine_options import name_of
from kvdepot.config.metrics_file import read_metrics_file
from kvdepot.engines.vllm.step_order import StepOrder
from kvdepot.errors import ConfigError

FILE_KEYS = ("config", "UCM_CONFIG_FILE")
POLICY_KEY = "load_failure_policy"
POLICIES = ("recompute", "fail")
RESET_KEY = "on_reset"
RESETS = ("keep_unchanged", "drop")
VERSION_KEY = "weights_version"
REACHED_BY_ALL = frozenset({"Mooncake", "Object", "Remote"})
"""Tiers that are on no node in particular."""


@dataclass(frozen=True)
class ConnectorOptions:
    """Configuration of one engine's connector.

    Attributes:
        config: configuration from the file or the launch command, with vLLM's and the depot's keys alike.
        drop_at_reset: whether ``reset_cache`` drops what is stored for every engine.
        weights_version: the user's name for the weights at the engine's start, in addition to other facts about them.
        replays: whether vLLM may replay a whole step as one graph.
        shares_prefixes: whether vLLM has a prefix cache of its own, in which requests find what others have loaded.
        step_order: how the engine's model runner deviates from the order of the hooks.
    """

    config: KVDepotConfig
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    drop_at_reset: bool = False
    weights_version: str = ""
    replays: bool = False
    shares_prefixes: bool = True
    step_order: StepOrder = field(default_factory=StepOrder)

    @property
    def use_layerwise(self) -> bool:
        """Whether layers are copied as they are computed; ``auto`` does that on CPUs only."""
        said = self.config.use_layerwise
        return computes_on_cpu() if said == "auto" else said

    @property
    def saves_in_steps(self) -> bool:
        """Whether layers are saved by their hooks.

        With microbatches, a part of the batch is not computed yet then. Where vLLM clears pages before a step's first
        hook, a step that fails after its layers' hooks would leave dumps that read cleared pages.
        """
        return self.use_layerwise and not self.step_order.microbatches and not self.step_order.clears_first

    @property
    def loads_in_steps(self) -> bool:
        """Whether a step waits for its requests' loads: a replayed graph could not."""
        return self.use_layerwise and not self.replays

    @property
    def wants_own_layout(self) -> bool:
        """Whether to request one run of memory per block: only if the user explicitly chose whole blocks."""
        return self.config.use_layerwise is False

    @property
    def enable_event_sync(self) -> bool:
        """Whether copies are ordered after the engine's compute by events."""
        return self.config.enable_event_sync

    @property
    def kv_head_slices(self) -> int:
        """Slices of KV heads that a block is stored in, for engines of any tensor-parallel size; 0 = by rank."""
        return self.config.kv_head_slices

    @property
    def hit_ratio(self) -> float | None:
        """Maximum part of a prompt taken from the depot; ``None`` = no limit."""
        return self.config.hit_ratio

    @property
    def persist_token_threshold(self) -> int:
        """Requests with fewer prompt tokens neither load nor dump."""
        return self.config.persist_token_threshold

    @property
    def timeout_ms(self) -> int:
        """Time limit of each dump and load, in milliseconds."""
        return self.config.timeout_ms

    @property
    def tiers(self) -> tuple[str, ...]:
        """Tiers below the pool, nearest first."""
        return self.config.tiers

    @property
    def may_share_a_tier(self) -> bool:
        """Whether depots of several nodes may find each other's blocks in a tier; directories may be a common mount."""
        in_directories = "Posix" in self.tiers and bool(self.config.directories_shared)  # type: ignore[attr-defined]
        return in_directories or not REACHED_BY_ALL.isdisjoint(self.tiers)

    @property
    def use_gdr(self) -> bool | str:
        """Whether an RDMA adapter copies: true, false or ``auto``."""
        return self.config.use_gdr

    @property
    def waits_for_all(self) -> bool:
        """Whether a request waits for all of its blocks that a tier holds."""
        return self.config.load_policy in ("all", "faster")

    @property
    def waits_while_faster(self) -> bool:
        """Whether a request stops waiting for a tier when computing is faster (P9)."""
        return self.config.load_policy == "faster"

    @property
    def wait_ms(self) -> int:
        """How long a request may wait for blocks that are in a tier, in milliseconds."""
        if self.config.load_policy == "best_effort":
            return 0
        if self.config.load_policy == "deadline":
            return self.config.load_deadline_ms or 0
        return self.timeout_ms


def computes_on_cpu() -> bool:
    """Returns whether vLLM runs on a CPU here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def read_options(extra_config: Mapping[str, Any] | None) -> ConnectorOptions:
    """Reads ``kv_connector_extra_config``: the name of a file, keys of the configuration, or nothing.

    vLLM's questions to the class come several times in each process; what has been read is read again only if the file
    or the environment has changed.

    Raises:
        ConfigError: a key or value is wrong.
    """
    if not isinstance(extra_config, (Mapping, NoneType)):
        raise ConfigError(f"kv_connector_extra_config: must be a mapping of keys to values, got {extra_config!r}")
    extra = dict(extra_config or {})
    try:
        text = json.dumps(extra)
    except TypeError:  # a program's own objects
        return _checked(extra)
    return _read(text, *_sources(extra))


def _sources(extra: Mapping[str, Any]) -> tuple[object, object]:
    """Returns what a configuration is read from besides the launch command: the state of its file, and variables."""
    files = []
    for key in FILE_KEYS:
        with contextlib.suppress(OSError, TypeError, ValueError):
            path = os.path.abspath(extra[key]) if key in extra else ""
            stat = os.stat(path)
            files.append((path, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return tuple(files), tuple(sorted(os.environ.items()))


@functools.lru_cache(maxsize=8)
def _read(text: str, files: object, environ: object) -> ConnectorOptions:  # noqa: ARG001 - part of the cache's key
    return _checked(json.loads(text))


def _checked(extra: dict[str, Any]) -> ConnectorOptions:
    policy = extra.pop(POLICY_KEY, "recompute")
    if policy not in POLICIES:
        raise ConfigError(f"{POLICY_KEY}: must be one of {', '.join(POLICIES)}, got {policy!r}")
    reset = extra.pop(RESET_KEY, "keep_unchanged")
    if reset not in RESETS:
        raise ConfigError(f"{RESET_KEY}: must be one of {', '.join(RESETS)}, got {reset!r}")
    version = name_of(extra.pop(VERSION_KEY, ""), VERSION_KEY)
    files = [extra.pop(key) for key in FILE_KEYS if key in extra]
    if files and (extra or len(files) > 1):
        also = ", ".join(sorted(extra)) or " and ".join(FILE_KEYS)
        raise ConfigError(f"kv_connector_extra_config: names a file and also {also}: write everything in one place")
    config = load_config(files[0] if files else extra or None, owns_pool=False)
    if config.metrics_config_path:
        read_metrics_file(config.metrics_config_path)
    if config.mode == "embedded":
        raise ConfigError("mode: embedded: an engine's processes share a depot: write node, or remove the key")
    return ConnectorOptions(config, policy, reset == "drop", version)
