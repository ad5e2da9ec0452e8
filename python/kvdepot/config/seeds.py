"""The seeds' spelling: translates files with ``ucm_connectors`` into our own keys."""

from collections.abc import Iterable, Mapping

from kvdepot.config.document import Document, KeyPath, path_text
from kvdepot.config.keys import Key, suggestion
from kvdepot.config.said import Said

STORES: Mapping[str, tuple[str, ...]] = {
    "UcmPipelineStore": (
        "store_pipeline",
        "storage_backends",
        "io_direct",
        "cache_buffer_capacity_gb",
        "posix_capacity_gb",
        "posix_io_engine",
        "use_gdr",
        "share_buffer_enable",
        "waiting_queue_depth",
        "running_queue_depth",
        "timeout_ms",
    ),
    "UcmNfsStore": (
        "storage_backends",
        "io_direct",
        "stream_number",
        "timeout_ms",
        "buffer_number",
        "shard_data_dir",
        "use_gdr",
    ),
}
REQUIRED = {"UcmPipelineStore": ("store_pipeline", "storage_backends"), "UcmNfsStore": ("storage_backends",)}
MODULES = {
    "UcmPipelineStore": "ucm.store.pipeline.connector",
    "UcmNfsStore": "ucm.store.pcstore.pcstore_connector_v1",
}
TOP_LEVEL = (
    "enable_event_sync",
    "use_layerwise",
    "hit_ratio",
    "enable_record_traces",
    "use_lite",
    "persist_token_threshold",
    "metrics_config_path",
)
STORE_DEFAULTS: Mapping[str, object] = {"io_direct": False}
"""Values of a store's missing keys whose default differs from ours."""
TOP_DEFAULTS: Mapping[str, object] = {"use_layerwise": True}
"""The same for the file's top-level keys."""
CONNECTOR_KEYS = ("ucm_connector_name", "ucm_connector_module_path", "ucm_connector_config")


class SeedReader:
    """Reads one document into ``said`` and ``problems``."""

    def __init__(self, document: Document, keys: Iterable[Key]) -> None:
        self.document = document
        self.keys = tuple(keys)
        self.names = {seed: key.name for key in self.keys for seed in key.facts.seeds}
        self.said: list[Said] = []
        self.problems: list[str] = []

    def read(self) -> None:
        """Reads the complete document."""
        root = self.document.root
        for name, value in root.items():
            if name in TOP_LEVEL:
                self._say(self.names[name], value, (name,))
            elif name != "ucm_connectors":
                self._unknown((name,), (*TOP_LEVEL, "ucm_connectors"))
        for name, value in TOP_DEFAULTS.items():
            if name not in root:
                self._say(self.names[name], value, ("ucm_connectors",))
        connectors = root["ucm_connectors"]
        if not isinstance(connectors, list) or len(connectors) != 1:
            count = f"{len(connectors)} entries" if isinstance(connectors, list) else type(connectors).__name__
            self._problem(("ucm_connectors",), f"must be a list with exactly one connector, got {count}")
        else:
            self._connector(connectors[0], ("ucm_connectors", 0))

    def _connector(self, connector: object, path: KeyPath) -> None:
        if not isinstance(connector, Mapping):
            self._problem(
                path, f"must be a mapping with ucm_connector_name and ucm_connector_config, got {connector!r}"
            )
            return
        for name in connector:
            if name not in CONNECTOR_KEYS:
                self._unknown((*path, name), CONNECTOR_KEYS)
        store = connector.get("ucm_connector_name")
        if not isinstance(store, str) or store not in STORES:
            said = suggestion(store, STORES, f"write {' or '.join(STORES)}")
            self._problem((*path, "ucm_connector_name"), f"no known store: {said}, got {store!r}")
            return
        module = connector.get("ucm_connector_module_path", MODULES[store])
        if module != MODULES[store]:
            text = f"kvdepot brings its own {store} and loads no other module: remove the key, got {module!r}"
            self._problem((*path, "ucm_connector_module_path"), text)
        config = connector.get("ucm_connector_config")
        if not isinstance(config, Mapping):
            text = f"must be a mapping with at least {' and '.join(REQUIRED[store])}, got {config!r}"
            self._problem((*path, "ucm_connector_config"), text)
            return
        self._store(store, config, (*path, "ucm_connector_config"))

    def _store(self, store: str, config: Mapping[str, object], path: KeyPath) -> None:
        missing = [name for name in REQUIRED[store] if config.get(name) in (None, "", [])]
        has_files = "Posix" in str(config.get("store_pipeline", "Posix"))
        if not has_files:
            missing = [name for name in missing if name != "storage_backends"]
        for name in missing:
            self._problem((*path, name), f"{store} needs it: add it")
        for name, value in config.items():
            if name not in STORES[store]:
                self._unknown((*path, name), STORES[store])
            elif name not in missing:
                self._say(self.names[name], value, (*path, name))
        defaults = {**STORE_DEFAULTS}
        if config.get("posix_io_engine") == "aio":
            # In the seed, aio bypasses the page cache whatever io_direct's default is; without that it would be of no
            # use.
            defaults["io_direct"] = True
        for name, value in defaults.items():
            if has_files and name not in config:
                self._say(self.names[name], value, path)
        self._say_halves(store, config, path)
        if store == "UcmNfsStore":
            self._say("pipeline", "Staging|Posix", (*path[:-1], "ucm_connector_name"))

    def _say_halves(self, store: str, config: Mapping[str, object], path: KeyPath) -> None:
        for key in self.keys:
            name = key.facts.half_of_seed
            whole = config.get(name) if name in STORES[store] else None
            if isinstance(whole, int) and not isinstance(whole, bool) and whole > 0:
                self._say(key.name, -(-whole // 2), (*path, name))

    def _unknown(self, path: KeyPath, known: Iterable[str]) -> None:
        name = path[-1]
        for store, names in STORES.items():
            if name in names and "ucm_connector_config" not in path:
                self._problem(path, f"is in the wrong place: move it into ucm_connector_config of {store}")
                return
            if name in names:
                self._problem(path, f"is a key of {store} only: remove it, or name that store")
                return
        if name in TOP_LEVEL:
            self._problem(path, "is in the wrong place: move it to the top level of the file")
            return
        if any(name == key.name for key in self.keys):
            text = "is of kvdepot's own spelling, which does not mix with ucm_connectors: write the file in one of them"
            self._problem(path, text)
            return
        said = suggestion(name, known, f"known here: {', '.join(known)}")
        self._problem(path, f"unknown key: {said}")

    def _say(self, field: str, value: object, path: KeyPath) -> None:
        self.said.append(Said(field, value, path))

    def _problem(self, path: KeyPath, text: str) -> None:
        here = path
        while here and here not in self.document.lines:
            here = here[:-1]
        line = self.document.lines.get(here)
        self.problems.append(f"{self.document.name}{f':{line}' if line else ''}: {path_text(path)}: {text}")
