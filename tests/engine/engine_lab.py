"""Where engines are run: a depot's place on disk, and child processes that run an engine through phases."""

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
START_TIMEOUT_S = 300
WINDOW_TOKENS = 96  # short, so that most blocks of a prompt are outside of it


@dataclass
class EngineRun:
    """What one engine did: the phases' results and the log."""

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

    @property
    def socket(self) -> str:
        return str(self.root / "depot.sock")

    @property
    def control(self) -> Path:
        return Path(self.socket + ".fake") / "control.json"

    def conflicts(self) -> list[float]:
        """How far apart bytes were that were dumped twice under one key (fake core only)."""
        path = Path(self.socket + ".fake") / "conflicts"
        return [float(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []

    def model(self, kind: str) -> str:
        """A tiny model with random weights; made once."""
        path = self.models / kind
        if not (path / "config.json").exists():
            command = [
                self.python,
                str(REPOSITORY / "tools" / "make_model.py"),
                str(path),
                "--architecture",
                kind,
                "--layers",
                "4",
            ]
            subprocess.run(command, check=True, timeout=START_TIMEOUT_S)
            config = path / "config.json"
            config.write_text(re.sub(r'("sliding_window":) \d+', rf"\1 {WINDOW_TOKENS}", config.read_text()))
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
        environment: dict[str, str] | None = None,
    ) -> EngineRun:
        transfer = None
        if connector is not None:
            transfer = {
                "kv_connector": connector,
                "kv_role": "kv_both",
                "kv_connector_module_path": "kvdepot.engines.vllm",
                "kv_connector_extra_config": self.options(options or {}),
            }
        scenario = {
            "engine": {
                "model": self.model(model),
                "tensor_parallel_size": tp,
                **(engine or {}),
            },
            "connector": transfer,
            "control": str(self.control),
            "phases": phases,
        }
        self.control.parent.mkdir(parents=True, exist_ok=True)
        self.control.unlink(missing_ok=True)
        file = self.root / "scenario.json"
        file.write_text(json.dumps(scenario))
        path = [str(HERE / "fake")] if self.native == "fake" else []
        child = subprocess.run(
            [self.python, str(HERE / "runner.py"), str(file)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path),
                "KVDEPOT_FAKE_STRICT": "1",
                **({"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp)))} if tp > 1 else {}),
                **(environment or {}),
            },
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
        log = child.stdout + child.stderr
        (self.root / "engine.log").write_text(log)
        found = [line for line in log.splitlines() if line.startswith("RESULT ")]
        if child.returncode != 0 or not found:
            pytest.fail(f"the engine ended with {child.returncode}; its log:\n{log[-6000:]}")
        return EngineRun(json.loads(found[-1].removeprefix("RESULT ")), log)

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The connector's configuration for this lab's depot."""
        (self.root / "blocks").mkdir(exist_ok=True)
        return {
            "socket": self.socket,
            "pipeline": "Cache|Posix",
            "directories": [str(self.root / "blocks")],
            "pool_gb": 0.25,
            "idle_exit_s": 5,
            # What is late is a miss: right for users, but here the machine is busy and hits are counted.
            "call_timeout_ms": 3000,
            **options,
        }
