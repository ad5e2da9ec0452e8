"""What the connector needs of the configuration: the only place here that knows how it is written."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from kvdepot.config import KVDepotConfig, load_config
from kvdepot.engines.vllm.log import connector_logger
from kvdepot.errors import config_error

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvdepot._native import Depot

FILE_KEYS = ("config", "UCM_CONFIG_FILE")
POLICY_KEY = "load_failure_policy"
POLICIES = ("recompute", "fail")
RESET_KEY = "on_reset"
RESETS = ("keep_unchanged", "drop")
VERSION_KEY = "weights_version"
LAST_WORDS_MAX = 4096

logger = connector_logger()


class ConnectorOptions:
    """Configuration of one engine's connector.

    Attributes:
        drop_at_reset: whether ``reset_cache`` drops what is stored for every engine.
        weights_version: name that the user gives the weights of the engine's start, beside what else is known of them.
    """

    def __init__(
        self,
        config: KVDepotConfig,
        load_failure_policy: Literal["recompute", "fail"] = "recompute",
        drop_at_reset: bool = False,
        weights_version: str = "",
    ) -> None:
        self._config = config
        self.load_failure_policy = load_failure_policy
        self.drop_at_reset = drop_at_reset
        self.weights_version = weights_version
        self.use_layerwise = config.use_layerwise
        self.enable_event_sync = config.enable_event_sync
        self.hit_ratio = config.hit_ratio
        self.persist_token_threshold = config.persist_token_threshold
        self.timeout_ms = config.timeout_ms
        self.use_gdr = config.use_gdr

    def copy_json(self, cuda_device: int | None) -> str:
        """What copies between the engine's memory, on this device or in host memory, and the pool."""
        return self._config.copy_json(cuda_device)

    @property
    def waits_for_all(self) -> bool:
        """Whether a request waits for whatever a tier holds of it."""
        return self._config.load_policy == "all"

    @property
    def wait_ms(self) -> int:
        """How long a request may wait for blocks that are in a tier."""
        if self._config.load_policy == "best_effort":
            return 0
        if self._config.load_policy == "deadline":
            return self._config.load_deadline_ms or 0
        return self.timeout_ms

    def attach(self, kv_cache_config: "KVCacheConfig", engine_id: str, pipeline_stages: int) -> "Depot":
        """Attaches to the node's depot, and starts it when none answers.

        Scheduler and workers are processes of their own and come to one depot, because each makes the same path.

        Raises:
            ConfigError: the configuration needs what only a library user has.
        """
        from kvdepot import _native

        if self._config.mode == "embedded":
            raise config_error("mode: embedded: an engine's processes share a depot: write node, or remove the key")
        # Stages may hold different numbers of layers, and must not look for different depots.
        block_bytes = bytes_per_block(kv_cache_config) if pipeline_stages == 1 else None
        socket = self._config.socket_path(block_bytes, suffix=engine_id)
        depot = _native.Depot.connect(
            socket,
            spawn=self._config.depot_command(socket, block_bytes),
            wait_ms=self._config.attach_timeout_ms,
            call_timeout_ms=self._config.call_timeout_ms,
        )
        if not depot.attached:
            logger.error(
                "kvdepot: no depot answers at %s; going on without one, it is tried again. %s",
                socket,
                last_words(f"{socket}.log"),
            )
        return depot

    def start_core_log(self) -> None:
        """Lets the core's lines go where this process's errors go."""
        from kvdepot import _native

        _native.init_logging(self._config.effective_log_level())


def read_options(extra_config: Mapping[str, Any] | None) -> ConnectorOptions:
    """Reads ``kv_connector_extra_config``: a file's name, keys of the configuration, or nothing at all.

    Raises:
        ConfigError: a key or value is wrong.
    """
    extra = dict(extra_config or {})
    policy = extra.pop(POLICY_KEY, "recompute")
    if policy not in POLICIES:
        raise config_error(f"{POLICY_KEY}: must be one of {', '.join(POLICIES)}, got {policy!r}")
    reset = extra.pop(RESET_KEY, "keep_unchanged")
    if reset not in RESETS:
        raise config_error(f"{RESET_KEY}: must be one of {', '.join(RESETS)}, got {reset!r}")
    version = extra.pop(VERSION_KEY, "")
    if not isinstance(version, str | int):
        raise config_error(f"{VERSION_KEY}: must be a name or a number, got {version!r}")
    files = [extra.pop(key) for key in FILE_KEYS if key in extra]
    if files and (extra or len(files) > 1):
        also = ", ".join(sorted(extra)) or " and ".join(FILE_KEYS)
        raise config_error(f"kv_connector_extra_config: names a file and also {also}: write everything in one place")
    return ConnectorOptions(load_config(files[0] if files else extra or None), policy, reset == "drop", str(version))


def layerwise(extra_config: Mapping[str, Any] | None) -> bool:
    """Whether loads and saves go layer by layer; asked before there is a connector."""
    return read_options(extra_config).use_layerwise


def last_words(log_file: str) -> str:
    """What the depot said last: most often why it could not start."""
    try:
        with open(log_file, encoding="utf-8", errors="replace") as file:
            lines = file.read()[-LAST_WORDS_MAX:].strip().splitlines()
    except OSError:
        return "It has written no log."
    return f"Its log {log_file} ends: {lines[-1]}" if lines else f"Its log {log_file} is empty."


def bytes_per_block(kv_cache_config: "KVCacheConfig") -> int:
    """Bytes of a block over all layers of a rank: every cache tensor describes one backing allocation."""
    sizes = [tensor.size for tensor in kv_cache_config.kv_cache_tensors]
    return max(sizes, default=0) // kv_cache_config.num_blocks
