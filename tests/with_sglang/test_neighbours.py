"""vLLM and SGLang on one node, over one depot, both under load: when one is killed the other never notices (P4)."""

import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import interpreter, model, settings
from test_engine import NOTHING, PROMPT, WHOLE, until

from tools.lab.child import ChildError
from tools.lab.depot import DepotHome
from tools.lab.vllm_rounds import Engine as Vllm
from tools.sglang.engine import Engine as Sglang
from tools.sglang.engine import depot_backend, depot_linker

ROUNDS_BEFORE, ROUNDS_AFTER = 3, 6


class Load:
    """Asks one engine for the same prompts until it is stopped, each time with the engine's own cache empty."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._stopped = threading.Event()
        self.found: list[dict[str, Any]] = []
        self.error: ChildError | OSError | ValueError | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._engine.flush()
                self.found.append(self._engine.ask(**PROMPT))
        except (ChildError, OSError, ValueError) as error:  # a killed engine's pipes are closed
            self.error = error

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def from_depot(answer: dict[str, Any]) -> list[int]:
    """Tokens of each prompt that the engine's own cache did not have."""
    found: list[int] = answer.get("from_depot", answer["cached"])
    return found


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("killed", ["vLLM", "SGLang"])
@pytest.mark.parametrize("face", ["hicache", "linker"])
def test_when_one_engine_is_killed_the_other_never_notices(
    tmp_path: Path, home: DepotHome, face: str, killed: str
) -> None:
    python = interpreter("KVDEPOT_VLLM_PYTHON", ".venv-vllm", "vllm-env")
    connector = {
        "kv_connector": "KVDepotConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvdepot.engines.vllm",
        "kv_connector_extra_config": settings(home, load_policy="all"),
    }
    keys = settings(home, load_policy="all")
    door = depot_linker(keys) if face == "linker" else depot_backend(keys)
    with (
        home.start() as depot,
        Vllm(tmp_path / "vllm", python, model(), connector) as vllm,
        Sglang(tmp_path / "sglang", model(), door) as sglang,
    ):
        engines: dict[str, Any] = {"vLLM": vllm, "SGLang": sglang}
        cold = {name: engine.ask(**PROMPT) for name, engine in engines.items()}
        assert all(from_depot(answer) == NOTHING for answer in cold.values())
        # Same tokens, and neither finds what the other has stored.
        until(lambda: (depot.stats() or {}).get("dump_blocks_sealed", 0) >= 2 * sum(WHOLE) // 32, "all is stored")
        depot.wait_until_clean(60)
        loads = {name: Load(engine) for name, engine in engines.items()}
        try:
            until(lambda: all(len(load.found) >= ROUNDS_BEFORE for load in loads.values()), "both are under load")
            engines[killed].kill()
            (survivor,) = loads.keys() - {killed}
            other, seen = loads[survivor], len(loads[survivor].found)
            until(lambda: len(other.found) >= seen + ROUNDS_AFTER or other.error is not None, "the other goes on")
        finally:
            for load in loads.values():
                load.stop()
        assert loads[killed].error is not None
        assert other.error is None
        assert [answer["tokens"] for answer in other.found] == [cold[survivor]["tokens"]] * len(other.found)
        assert [from_depot(answer) for answer in other.found] == [WHOLE] * len(other.found)
        until(lambda: (depot.stats() or {}).get("pool_leased_bytes") == 0, "nothing is held for the killed one")
