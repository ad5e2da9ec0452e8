"""Rules between keys: what a configuration must satisfy beyond each key's own type and bounds."""

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvdepot.config.pipeline import pipeline_problem
from kvdepot.config.placement import placement_problems
from kvdepot.config.problem import Problem

if TYPE_CHECKING:
    from kvdepot.config.model import KVDepotConfig

SOCKET_PATH_BYTES_MAX = 107
POOL_BYTES_MIN = 1 << 20
DIRECTORIES_MAX = 64
_POOL_NUMA = re.compile(r"auto|interleave|[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")
POSIX_ONLY = (
    "directories",
    "posix_capacity_gb",
    "posix_free_floor_percent",
    "io_direct",
    "io_engine",
    "io_read_threads",
    "io_write_threads",
    "shard_directories",
    "durable",
    "directories_shared",
    "posix_write",
    "posix_promote",
)


REMOTE_ONLY = (
    "remote_servers",
    "remote_token_file",
    "remote_tls_ca_file",
    "remote_tls_server_name",
    "remote_timeout_ms",
    "remote_connections",
    "remote_protocol",
    "remote_write",
    "remote_promote",
)


def problems(config: "KVDepotConfig") -> Iterator[Problem]:
    """Everything that is wrong with a configuration whose keys are well-typed."""
    wrong = pipeline_problem(config.pipeline)
    if wrong:
        yield Problem("pipeline", wrong)
    yield from _later(config)
    yield from _pool(config)
    yield from _socket(config)
    yield from _posix(config)
    yield from _remote(config)
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
        yield Problem("pool_slots", "the pool's size is said twice, by pool_gb too: remove one")
    if config.pool_gb is not None and config.pool_gb * (1 << 30) < POOL_BYTES_MIN:
        yield Problem("pool_gb", f"a pool has at least {POOL_BYTES_MIN} bytes: the unit is GiB")
    if not _POOL_NUMA.fullmatch(config.pool_numa):
        yield Problem("pool_numa", "must be auto, interleave or a list of NUMA nodes such as 0,2-3")


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


def _posix(config: "KVDepotConfig") -> Iterator[Problem]:
    if "Posix" not in config.tiers:
        for name in POSIX_ONLY:
            if name in config.model_fields_set:
                yield Problem(name, f"has no use in the pipeline {config.pipeline}, which has no Posix tier: remove it")
        return
    if config.directories is None:
        return
    if not 1 <= len(config.directories) <= DIRECTORIES_MAX:
        yield Problem("directories", f"must be 1 to {DIRECTORIES_MAX} directories")
    for path in config.directories:
        if not os.path.isabs(path):
            yield Problem("directories", f"{path!r} must be an absolute path, because the depot is its own process")
    if len(set(config.directories)) != len(config.directories):
        yield Problem("directories", "a directory stands in it twice: name each once")


def _remote(config: "KVDepotConfig") -> Iterator[Problem]:
    if "Remote" not in config.tiers:
        for name in REMOTE_ONLY:
            if name in config.model_fields_set:
                yield Problem(
                    name, f"has no use in the pipeline {config.pipeline}, which has no Remote tier: remove it"
                )
        return
    if config.remote_servers is None:
        yield Problem("pipeline", "its Remote tier needs servers: add remote_servers with host:port of each")
    for name in ("remote_token_file", "remote_tls_ca_file"):
        path = getattr(config, name)
        if path is not None and not os.path.isabs(path):
            yield Problem(name, "must be an absolute path, because the depot is its own process")
    if config.remote_tls_server_name is not None and config.remote_tls_ca_file is None:
        yield Problem("remote_tls_server_name", "has no use without TLS: add remote_tls_ca_file")
    if config.remote_token_file is not None and config.remote_protocol == "infinistore":
        yield Problem("remote_token_file", "InfiniStore's protocol knows no secret: remove it, or write auto there")
