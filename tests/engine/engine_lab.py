"""A depot's place on disk, and child processes that run an engine through phases."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tools.lab.warm import Warm

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PREVIOUS_PYTHON = REPOSITORY / ".venv-vllm-previous" / "bin" / "python"
START_TIMEOUT_S = 600
WINDOW_TOKENS = 96  # short, so that most blocks of a prompt are outside of it
# Half the usual spread: otherwise bfloat16 rounding errors would be as large as the effect of one wrong block.
# "KIND-…" is a model of that architecture with other sizes.
EXTRA_ARGUMENTS = {
    "llama-other": ["--seed", "1"],
    "llama-one_kv_head": ["--kv-heads", "1"],
    "gemma3": ["--sliding-window", str(WINDOW_TOKENS)],
    "mla": ["--initializer-range", "0.03"],
    "llava": ["--initializer-range", "0.12"],
}


@dataclass
class EngineRun:
    """Results of one engine: those of its phases, and the log."""

    results: dict[str, Any]
    log: str

    def __getitem__(self, phase: str) -> Any:
        return self.results[phase]


@dataclass
class Lab:
    """A depot's place on disk and the means to run engines on it."""

    root: Path
    native: str
    python: str
    models: Path
    warm: Warm
    short_roots: list[Path] = field(default_factory=list)

    @property
    def socket(self) -> str:
        return str(self.root / "depot.sock")

    @property
    def control(self) -> Path:
        return Path(self.socket + ".fake") / "control.json"

    def short_root(self) -> Path:
        """A directory whose name is short enough for sockets."""
        path = Path(tempfile.mkdtemp(prefix="kvd-"))
        self.short_roots.append(path)
        return path

    def close(self) -> None:
        """Ends depots that would wait for engines longer than a test lasts."""
        from tools.lab.child import kill_process
        from tools.lab.depot import depot_stats

        sockets = [one for path in self.short_roots for one in path.rglob("*.sock")]
        for socket in filter(Path.exists, [Path(self.socket), *sockets]):
            if (stats := depot_stats(socket)) is not None:
                kill_process(int(stats["pid"]))
        for path in self.short_roots:
            shutil.rmtree(path, ignore_errors=True)

    def conflicts(self) -> list[float]:
        """Returns the largest difference of each block that was dumped twice with other bytes (fake core only)."""
        path = Path(self.socket + ".fake") / "conflicts"
        return [float(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []

    def model(self, kind: str) -> str:
        """Returns a tiny model with random weights, which is generated once."""
        if kind == "mla" and "amx_tile" not in Path("/proc/cpuinfo").read_text():
            pytest.skip("vLLM caches prefixes of latent attention only on CPUs with AMX")
        extra = EXTRA_ARGUMENTS.get(kind, [])
        path = self.models / "".join([kind, *extra])
        if not (path / "config.json").exists():
            make = [self.python, str(REPOSITORY / "tools" / "make_model.py"), str(path)]
            make += ["--architecture", kind.partition("-")[0]]
            subprocess.run([*make, "--layers", "4", *extra], check=True, timeout=START_TIMEOUT_S)
        return str(path)

    def run(
        self,
        model: str,
        phases: list[dict[str, Any]],
        *,
        tp: int = 1,
        options: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        connector: str | None = "KVDepotConnector",
        beside: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        environment: dict[str, str] | None = None,
        control: dict[str, Any] | None = None,
    ) -> EngineRun:
        transfer = None
        if connector is not None:
            transfer = {
                "kv_connector": connector,
                "kv_role": "kv_both",
                "kv_connector_module_path": "kvdepot.engines.vllm",
                "kv_connector_extra_config": self.options(options or {}),
            }
        if transfer is not None and beside is not None:
            transfer = beside(transfer)
        scenario = {
            "engine": {
                "model": self.model(model),
                "tensor_parallel_size": tp,
                **(engine or {}),
            },
            "connector": transfer,
            "control": str(self.control),
            "socket": None if connector is None else self.options(options or {}).get("socket"),
            "phases": phases,
        }
        self.control.parent.mkdir(parents=True, exist_ok=True)
        self.control.write_text(json.dumps(control or {}))
        file = self.root / "scenario.json"
        file.write_text(json.dumps(scenario))
        values = {
            "PYTHONPATH": os.pathsep.join([str(HERE / ("fake" if self.native == "fake" else "saboteur")), str(HERE)]),
            "KVDEPOT_FAKE_STRICT": "1",
            "KVDEPOT_SABOTAGE": str(self.control),
            **(environment or {}),
        }
        log_file = self.root / "engine.log"
        fork = self.warm.start("runner", str(file), log_file, values, self.root)
        try:
            status: int | str = fork.wait(START_TIMEOUT_S)
        except TimeoutError:
            status = f"no end after {START_TIMEOUT_S} s"
        finally:
            fork.end()
        log = log_file.read_text(errors="replace")
        found = [line for line in log.splitlines() if line.startswith("RESULT ")]
        if status != 0 or not found:
            pytest.fail(f"the engine ended with {status}; its log:\n{log[-6000:]}")
        return EngineRun(json.loads(found[-1].removeprefix("RESULT ")), log)

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns the connector's configuration for this lab's depot; an option of None leaves its key out."""
        (self.root / "blocks").mkdir(exist_ok=True)
        chosen = {
            "socket": self.socket,
            "pipeline": "Cache|Posix",
            "directories": [str(self.root / "blocks")],
            "pool_gb": 0.25,
            # A depot lives until the lab is closed: it must not end while the next engine starts.
            "idle_exit_s": 120,
            "attach_timeout_ms": 60_000,
            # A timeout is a miss, which is correct for users, but here the machine is busy and hits are counted.
            "call_timeout_ms": 30_000,
            # So is a block that arrives more slowly than it is computed.
            "load_policy": "all",
            **options,
        }
        return {key: value for key, value in chosen.items() if value is not None}
