"""What the connector needs to know of the configuration: the only place that knows how it is written."""

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

FILE_KEYS = ("config", "UCM_CONFIG_FILE")
CONNECTOR_KEYS = ("load_failure_policy",)


@dataclass(frozen=True)
class ConnectorOptions:
    """Options of one engine's connector. Times are milliseconds.

    Attributes:
        core_json: the configuration for the depot's own process.
        spawn: the command that starts a depot when none answers; None = never start one.
        load_failure_policy: what vLLM shall do with a request whose load failed; ``fail`` is vLLM's own default.
    """

    socket: str
    core_json: str = "{}"
    spawn: tuple[str, ...] | None = None
    use_layerwise: bool = True
    enable_event_sync: bool = True
    hit_ratio: float | None = None
    persist_token_threshold: int = 0
    load_policy: str = "all"
    load_deadline_ms: int | None = None
    attach_timeout_ms: int = 10_000
    call_timeout_ms: int = 8
    timeout_ms: int = 30_000
    copy_threads: int = 0
    load_failure_policy: str = "recompute"
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def wait_ms(self) -> int:
        """How long a lookup may wait for blocks that a tier has."""
        if self.load_policy == "best_effort":
            return 0
        if self.load_policy == "deadline":
            return self.load_deadline_ms or 0
        return self.timeout_ms


def read_options(extra_config: Mapping[str, Any]) -> ConnectorOptions:
    """Reads ``kv_connector_extra_config``: a file's name, keys of the configuration, or nothing at all.

    Raises:
        ConfigError: a key or value is wrong.
    """
    inline = {key: value for key, value in extra_config.items() if key not in FILE_KEYS}
    values: dict[str, Any] = {}
    for key in FILE_KEYS:
        if extra_config.get(key):
            import yaml

            with open(extra_config[key], encoding="utf-8") as file:
                values.update(yaml.safe_load(file) or {})
    values.update(inline)
    known = {entry.name for entry in fields(ConnectorOptions)}
    values.setdefault("socket", os.path.join(tempfile.gettempdir(), f"kvdepot-{os.getuid()}.sock"))
    values.setdefault("spawn", (sys.executable, "-m", "kvdepot", "serve", "--socket", values["socket"]))
    return ConnectorOptions(**{key: value for key, value in values.items() if key in known})


def layerwise(extra_config: Mapping[str, Any]) -> bool:
    """Whether loads and saves go layer by layer; asked before there is a connector."""
    return read_options(extra_config).use_layerwise
