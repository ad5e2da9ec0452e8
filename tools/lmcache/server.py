"""LMCache's own server as a process, with its L1 memory and at most one L2 adapter."""

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tools.lab.child import POLL_S, Child, ChildError
from tools.lab.metrics import counter
from tools.lab.ports import LOOPBACK, free_port

START_S = 120.0
CALL_S = 60.0
L1_GB = 0.25
CHUNK_TOKENS = 128
SHARED = Path("/dev/shm")
IDLE_POLLS = 3
HITS = {"L1": "lmcache_mp_lookup_hit_l1_tokens_total", "L2": "lmcache_mp_lookup_hit_l2_tokens_total"}


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

    def __init__(
        self,
        root: Path,
        l2_adapter: Mapping[str, Any] | None,
        *,
        l1_gb: float = L1_GB,
        chunk_tokens: int = CHUNK_TOKENS,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Starts the server.

        Args:
            root: directory of the log.
            l2_adapter: value of ``--l2-adapter``; None for a server with L1 only.
            l1_gb: memory of L1.
            chunk_tokens: tokens of an object.
            more: further options without their dashes.
        """
        self.port, self._http, metrics = free_port(), free_port(), free_port()
        memory = f"kvdepot-{self.port}"
        self._memory = SHARED / f"lmcache_l1_pool_{memory}"
        options: dict[str, Any] = {
            "host": LOOPBACK,
            "port": self.port,
            "http-port": self._http,
            "prometheus-port": metrics,
            "l1-size-gb": l1_gb,
            "eviction-policy": "LRU",
            "chunk-size": chunk_tokens,
            "supported-transfer-mode": "auto",
            "shm-name": memory,
            **more,
        }
        if l2_adapter is not None:
            options["l2-adapter"] = json.dumps(dict(l2_adapter))
        self.command = [str(Path(sys.executable).parent / "lmcache"), "server"]
        for name, value in options.items():
            self.command += [f"--{name}", str(value)]
        super().__init__("LMCache's server", self.command, root / "lmcache.log", {"LMCACHE_TRACK_USAGE": "false"})
        self.wait_until_ready(self._answers, START_S)

    def kill(self) -> None:
        """The same as the base's. A killed server leaves its memory in /dev/shm, which is removed."""
        super().kill()
        self._memory.unlink(missing_ok=True)

    def adapter(self) -> dict[str, Any]:
        """Returns the status of the L2 adapter."""
        found = _find(self._status(), "l2_adapters")
        status: dict[str, Any] = found[0]
        return status

    def forget(self) -> None:
        """Empties the server's own memory, L1."""
        self._ask("POST", "/cache/clear")

    def forget_all(self, timeout_s: float) -> None:
        """Empties L1 until nothing is left: an object in use is kept at first.

        Raises:
            ChildError: the time passed first.
        """
        end_s = time.monotonic() + timeout_s
        self.forget()
        while _find(self._status(), "l1_manager")["total_object_count"]:
            if time.monotonic() > end_s:
                raise ChildError(f"{self.name} keeps objects for {timeout_s:.0f} s\n{self.tail()}")
            time.sleep(POLL_S)
            self.forget()

    def hits(self) -> dict[str, int]:
        """Returns how many tokens lookups have found, by the level that had them."""
        text = self._read("/metrics")
        return {level: counter(text, name) for level, name in HITS.items()}

    def wait_until_idle(self, timeout_s: float, objects: int = 0) -> None:
        """Waits until L1 has so many objects, and nothing is being stored or loaded.

        Raises:
            ChildError: the server ended, or the time passed first.
        """
        end_s = time.monotonic() + timeout_s
        idle = 0
        while idle < IDLE_POLLS:
            status = self._status()
            memory = _find(status, "l1_manager")
            busy = {
                "objects being written": memory["write_locked_count"],
                "objects to store": _find(status, "store_controller")["pending_keys_count"],
                "stores": _find(status, "store_controller")["in_flight_task_count"],
                "loads": _find(status, "active_prefetch_jobs"),
                "missing objects": max(0, objects - memory["total_object_count"]),
            }
            idle = 0 if any(busy.values()) else idle + 1
            if time.monotonic() > end_s:
                raise ChildError(f"{self.name} is not idle after {timeout_s:.0f} s: {busy}\n{self.tail()}")
            self.check()
            time.sleep(POLL_S)

    def _answers(self) -> bool:
        try:
            return bool(self._ask("GET", "/healthcheck")["status"] == "healthy")
        except (OSError, urllib.error.URLError):
            return False

    def _status(self) -> Any:
        return self._ask("GET", "/status")

    def _ask(self, method: str, path: str) -> Any:
        return json.loads(self._read(path, method))

    def _read(self, path: str, method: str = "GET") -> str:
        request = urllib.request.Request(f"http://{LOOPBACK}:{self._http}{path}", method=method)
        with urllib.request.urlopen(request, timeout=CALL_S) as answer:
            found: bytes = answer.read()
            return found.decode()


def _find(values: Any, name: str) -> Any:
    if not isinstance(values, dict):
        return None
    if name in values:
        return values[name]
    return next((found for one in values.values() if (found := _find(one, name)) is not None), None)
