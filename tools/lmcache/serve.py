"""A real ``vllm serve`` that looks for prefixes in LMCache's server."""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.lab.child import Child
from tools.lab.metrics import counter
from tools.lab.ports import LOOPBACK, free_port
from tools.lmcache.connector import VARIABLES, transfer

START_S = 300.0
CALL_S = 60.0
HITS = "vllm:external_prefix_cache_hits_total"


class VllmServer(Child):
    """A server that answers, with its engine process. vLLM's own prefix cache is off, so every hit is LMCache's."""

    def __init__(
        self, root: Path, model: Path, port: int | None, options: Mapping[str, Any], environ: Mapping[str, str]
    ) -> None:
        """Starts the server.

        Args:
            root: directory of the log.
            model: directory of the model.
            port: of LMCache's server; None for a vLLM without a connector.
            options: of ``vllm serve``, without their dashes.
            environ: variables.
        """
        self.port = free_port()
        whole = {"host": LOOPBACK, "port": self.port, **options}
        if port is not None:
            whole["kv-transfer-config"] = json.dumps(transfer(port))
        command: list[str | Path] = [sys.executable, "-m", "tools.lmcache.serve_child", "serve", model]
        for name, value in whole.items():
            command += [f"--{name}", str(value)]
        command += ["--enforce-eager", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
        super().__init__("vLLM", command, root / "vllm.log", {**environ, **VARIABLES})
        self.wait_until_ready(self._answers, START_S)

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{LOOPBACK}:{self.port}"

    def hit_tokens(self) -> int:
        """Returns how many tokens its connector has found."""
        return counter(self._read("/metrics"), HITS)

    def _answers(self) -> bool:
        try:
            self._read("/health")
        except (OSError, urllib.error.URLError):
            return False
        return True

    def _read(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=CALL_S) as answer:
            found: bytes = answer.read()
            return found.decode()
