"""LMCache's own server as a process, with its L1 memory and one L2 adapter."""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.lab.child import Child
from tools.lab.ports import LOOPBACK, free_port

START_S = 120.0
CALL_S = 10.0
L1_GB = "0.25"
CHUNK_TOKENS = "128"


def depot_adapter(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value of ``--l2-adapter`` for kvdepot."""
    return {
        "type": "plugin",
        "module_path": "kvdepot.engines.lmcache",
        "class_name": "KVDepotL2Adapter",
        "adapter_params": dict(params),
    }


class LMCacheServer(Child):
    """A running server that has answered once."""

    def __init__(self, root: Path, l2_adapter: Mapping[str, Any]) -> None:
        self.port, self._http, metrics = free_port(), free_port(), free_port()
        program = Path(sys.executable).parent / "lmcache"
        command: list[str | Path] = [
            program,
            "server",
            "--host",
            LOOPBACK,
            "--port",
            str(self.port),
            "--http-port",
            str(self._http),
        ]
        command += ["--prometheus-port", str(metrics), "--l1-size-gb", L1_GB, "--eviction-policy", "LRU"]
        command += ["--chunk-size", CHUNK_TOKENS, "--supported-transfer-mode", "auto"]
        command += ["--shm-name", f"kvdepot-{self.port}", "--l2-adapter", json.dumps(l2_adapter)]
        super().__init__("LMCache's server", command, root / "lmcache.log", {"LMCACHE_TRACK_USAGE": "false"})
        self.wait_until_ready(self._answers, START_S)

    def adapter(self) -> dict[str, Any]:
        """Returns the status of the L2 adapter."""
        found = _find(self._ask("GET", "/status"), "l2_adapters")
        status: dict[str, Any] = found[0]
        return status

    def forget(self) -> None:
        """Empties the server's own memory, L1."""
        self._ask("POST", "/cache/clear")

    def _answers(self) -> bool:
        try:
            return bool(self._ask("GET", "/healthcheck")["status"] == "healthy")
        except (OSError, urllib.error.URLError):
            return False

    def _ask(self, method: str, path: str) -> Any:
        request = urllib.request.Request(f"http://{LOOPBACK}:{self._http}{path}", method=method)
        with urllib.request.urlopen(request, timeout=CALL_S) as answer:
            return json.loads(answer.read())


def _find(values: Any, name: str) -> Any:
    if not isinstance(values, dict):
        return None
    if name in values:
        return values[name]
    return next((found for one in values.values() if (found := _find(one, name)) is not None), None)
