"""SGLang's own HTTP server on CPU, started by a command line of the documentation."""

import json
import os
import shlex
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.lab.child import Child
from tools.lab.ports import LOOPBACK, free_port
from tools.lab.rounds import ROOT
from tools.sglang_env import EXTENSIONS, STANDIN

START_S = 300.0
ANSWER_S = 240.0
ADMIN_KEY = "of-the-tests"
ON_A_CPU = shlex.split(
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --dtype float32 --max-total-tokens 16384 "
    "--chunked-prefill-size 2048 --mem-fraction-static 0.5 --disable-overlap-schedule --disable-cuda-graph "
    "--skip-tokenizer-init --skip-server-warmup --random-seed 1 --enable-metrics"
)
"""What a CPU needs in addition to a documented line."""


def documented_lines(page: Path) -> list[list[str]]:
    """Returns the arguments of each line of a page that starts ``sglang.launch_server``, from ``-m`` on."""
    blocks = page.read_text().split("```")[1::2]
    # A quoted argument may span lines.
    found = [shlex.split(block.replace("\\\n", " ")) for block in blocks if "sglang.launch_server" in block]
    return [words[words.index("-m") :] for words in found]


class Server(Child):
    """A running server. It answers requests of its operator with the key ``ADMIN_KEY``."""

    def __init__(self, root: Path, arguments: Sequence[str], more: Sequence[str] = ()) -> None:
        """Starts it with ``arguments``, those of a CPU, and ``more``, which replace them."""
        python = sys.executable
        port = free_port()
        self._address = f"http://{LOOPBACK}:{port}"
        paths = [str(STANDIN), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {
            "PYTHONPATH": os.pathsep.join(paths),
            "TORCH_EXTENSIONS_DIR": str(Path(python).parents[1] / EXTENSIONS),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
        }
        own = ["--host", LOOPBACK, "--port", str(port), "--admin-api-key", ADMIN_KEY]
        command = [python, *arguments, *ON_A_CPU, *more, *own]
        super().__init__("SGLang's server", command, root / "sglang.log", environ)
        self.wait_until_ready(self._serves, START_S)

    def ask(self, tokens: Sequence[int], answer_tokens: int = 8) -> dict[str, Any]:
        """Returns SGLang's answer to a prompt: ``output_ids`` and ``meta_info``."""
        sampling = {"temperature": 0, "max_new_tokens": answer_tokens, "ignore_eos": True}
        status, text = self.call("POST", "/generate", {"input_ids": list(tokens), "sampling_params": sampling})
        if status != 200:
            raise ValueError(f"{status}: {text}")
        found: dict[str, Any] = json.loads(text)
        return found

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
        """Returns status and text of the answer to a request of the operator."""
        request = urllib.request.Request(self._address + path, method=method)
        request.add_header("Authorization", f"Bearer {ADMIN_KEY}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self) -> dict[str, float]:
        """Returns SGLang's series, each under its name with all labels."""
        lines = self.call("GET", "/metrics")[1].splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def _serves(self) -> bool:
        try:
            return self.call("GET", "/v1/models")[0] == 200
        except OSError:
            return False
