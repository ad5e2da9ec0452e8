"""A real ``vllm serve`` with kvdepot's connector."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from tools.lab.child import Child
from tools.lab.ports import LOOPBACK, free_port

MODEL_NAME = "demo"
BLOCK_TOKENS = 32
BATCHED_TOKENS = 2048
KV_CACHE_BYTES = 1 << 30


class Server(Child):
    """The server and its engine processes. vLLM's own prefix cache is off, so every hit is the depot's."""

    def __init__(
        self,
        model: Path,
        config: Path,
        dtype: str,
        max_tokens: int,
        log: Path,
        more: Mapping[str, int | str] | None = None,
    ) -> None:
        """Starts the server.

        Args:
            model: directory of the model.
            config: kvdepot's configuration file.
            dtype: vLLM's ``--dtype``.
            max_tokens: longest prompt with its answer, in tokens.
            log: file for the output of all processes.
            more: further options of ``vllm serve`` without their dashes, such as ``{"data-parallel-size": 2}``.
        """
        self.port = int((more or {}).get("port", 0)) or free_port()
        transfer = {
            "kv_connector": "KVDepotConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"config": str(config)},
        }
        options = {
            "served-model-name": MODEL_NAME,
            "host": LOOPBACK,
            "port": self.port,
            "dtype": dtype,
            "block-size": BLOCK_TOKENS,
            "max-model-len": max_tokens,
            "max-num-batched-tokens": BATCHED_TOKENS,
            "max-num-seqs": 4,
            "kv-cache-memory-bytes": KV_CACHE_BYTES,
            "kv-transfer-config": json.dumps(transfer),
            **(more or {}),
        }
        command: list[str | Path] = [Path(sys.executable).parent / "vllm", "serve", model]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        command += ["--enforce-eager", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
        # All cores compute: the client only waits in the meantime.
        environ = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        super().__init__("vLLM", command, log, environ)
