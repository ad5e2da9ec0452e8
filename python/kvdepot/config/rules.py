"""Rules between keys: checks beyond each key's own type and bounds."""

import os
import re
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvdepot.config.pipeline import pipeline_problem
from kvdepot.config.placement import placement_problems
from kvdepot.config.problem import Problem
from kvdepot.config.tier_rules import tier_problems

if TYPE_CHECKING:
    from kvdepot.config.model import KVDepotConfig

SOCKET_PATH_BYTES_MAX = 107
POOL_BYTES_MIN = 1 << 20
_POOL_NUMA = re.compile(r"auto|interleave|[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")


def problems(config: "KVDepotConfig") -> Iterator[Problem]:
    """Yields every problem of a configuration whose keys are well-typed."""
    wrong = pipeline_problem(config.pipeline)
    if wrong:
        yield Problem("pipeline", wrong)
    yield from _later(config)
    yield from _pool(config)
    yield from _socket(config)
    yield from _start(config)
    yield from _metrics(config)
    yield from _copies(config)
    yield from _traces(config)
    yield from tier_problems(config)
    yield from placement_problems(config)
    if config.load_policy == "deadline" and config.load_deadline_ms is None:
        yield Problem("load_policy", "the policy deadline needs load_deadline_ms: add it")
    if config.load_policy != "deadline" and config.load_deadline_ms is not None:
        yield Problem(
            "load_deadline_ms", f"has no use with load_policy {config.load_policy}: remove it, or write deadline there"
        )
    if config.load_deadline_ms is not None and config.load_deadline_ms > config.timeout_ms:
        yield Problem("load_deadline_ms", f"must not be more than timeout_ms, which is {config.timeout_ms}")


def _later(config: "KVDepotConfig") -> Iterator[Problem]:
    for key in type(config).key_table():
        if key.facts.only and getattr(config, key.name) not in key.facts.only:
            meaning = key.meaning.rstrip(".")
            yield Problem(key.name, f"this version does not have that ({meaning}): {key.facts.instead}")


def _pool(config: "KVDepotConfig") -> Iterator[Problem]:
    if config.pool_slots is not None and config.pool != "Staging":
        yield Problem("pool_slots", "only a Staging pool is sized in blocks: write pool_gb instead")
    if config.pool_slots is not None and config.pool_gb is not None:
        yield Problem("pool_slots", "the pool's size is also set by pool_gb: remove one of the two")
    if config.pool_gb is not None and config.pool_gb * (1 << 30) < POOL_BYTES_MIN:
        yield Problem("pool_gb", f"a pool has at least {POOL_BYTES_MIN} bytes: the unit is GiB")
    if not _POOL_NUMA.fullmatch(config.pool_numa):
        yield Problem("pool_numa", "must be auto, interleave or a list of NUMA nodes such as 0,2-3")


def _copies(config: "KVDepotConfig") -> Iterator[Problem]:
    forbidden = config.copy_engines_forbidden or ()
    if config.copy_engine in forbidden:
        yield Problem("copy_engine", "is forbidden by copy_engines_forbidden: write auto, or allow it there")
    if config.use_gdr is True and "gdr" in forbidden:
        yield Problem("use_gdr", "gdr is forbidden by copy_engines_forbidden: write false, or allow it there")


def _start(config: "KVDepotConfig") -> Iterator[Problem]:
    if config.start_depot:
        return
    if not config.share_depot:
        yield Problem("start_depot", "no other process starts an engine's own depot: remove start_depot or share_depot")
    if config.mode == "embedded":
        yield Problem("start_depot", "an embedded depot is a part of this process: remove it, or write mode: node")


def _socket(config: "KVDepotConfig") -> Iterator[Problem]:
    if config.socket is None:
        return
    if not os.path.isabs(config.socket):
        yield Problem("socket", "must be an absolute path, because engines have their own working directories")
    if len(os.fsencode(config.socket)) > SOCKET_PATH_BYTES_MAX:
        yield Problem("socket", f"a socket's path has at most {SOCKET_PATH_BYTES_MAX} bytes: choose a shorter one")
    if not config.share_depot:
        yield Problem("socket", "engines that do not share a depot cannot share a socket: remove socket or share_depot")
    if config.mode == "embedded":
        yield Problem("socket", "an embedded depot has no socket: remove it, or write mode: node")


def is_address(text: str) -> bool:
    """Returns whether a text is an IP address as the core reads it, which resolves no names."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, text)
        except (OSError, ValueError):
            continue
        return True
    return False


def _metrics(config: "KVDepotConfig") -> Iterator[Problem]:
    if not is_address(config.metrics_host):
        yield Problem("metrics_host", "must be an IP address, such as 127.0.0.1 or 0.0.0.0")
    file = config.metrics_token_file
    if file is not None and not os.path.isabs(file):
        yield Problem("metrics_token_file", "must be an absolute path, because a depot has its own working directory")


def _traces(config: "KVDepotConfig") -> Iterator[Problem]:
    directory = config.trace_directory
    if directory is not None and not os.path.isabs(directory):
        yield Problem("trace_directory", "must be an absolute path, because engines have their own working directories")
