"""Kills a real vLLM, its depot, or both, at random moments under load, and looks at what is left each time.

After every kill: the next start is clean, every answer is the reference's, a depot that lives has given back what the
dead engine held, no temporary file stays, and neither pool nor directory is over its cap (P1, P4, P5, P6).
Run it with .venv-vllm/bin/python. The seed makes prompts, victims and moments; moments of computing are not its own.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.lab.child import end_on_signals
from tools.lab.depot_files import DepotFiles, LeakError
from tools.lab.forked_engine import ForkedEngine, WrongError
from tools.lab.models import ModelSize, make_model, prompt
from tools.lab.progress import Progress
from tools.lab.warm import Warm

PROMPTS = 20
PROMPT_TOKENS = (330, 600)
ANSWER_TOKENS = 24
BATCH = 6
BLOCK_TOKENS = 32
VICTIMS = ("engine", "depot", "both")
STARTING_SHARE = 0.15
START_WINDOW_S = 3.0
LOAD_WINDOW_S = 2.5
BATCHES_AFTER = 2
MODEL = ModelSize(layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512)
# Of about 300 blocks a fifth fits in memory and not half on disk: everything is evicted now and then.
POOL_BLOCKS, TIER_BLOCKS = 64, 128


@dataclass
class Tally:
    """What happened over all rounds."""

    kills: Counter[str] = field(default_factory=Counter)
    while_starting: int = 0
    batches_cut: int = 0
    answers: int = 0
    tokens_found: int = 0
    depots_killed: int = 0


class Rounds:
    """Kills, one a round."""

    def __init__(self, warm: Warm, root: Path, model: Path, seed: int) -> None:
        self._warm, self._root, self._chosen = warm, root, random.Random(seed)
        block_bytes = BLOCK_TOKENS * MODEL.kv_bytes_per_token("float32")
        self.files = DepotFiles(root, block_bytes, POOL_BLOCKS, TIER_BLOCKS)
        self._prompts = [prompt(seed * 1000 + n, self._chosen.randint(*PROMPT_TOKENS)) for n in range(PROMPTS)]
        self._plan: dict[str, Any] = {
            "answer_tokens": ANSWER_TOKENS,
            "engine": {
                "model": str(model),
                "dtype": "float32",
                "enforce_eager": True,
                "block_size": BLOCK_TOKENS,
                "kv_cache_memory_bytes": 64 << 20,
                "max_model_len": 1024,
                "max_num_batched_tokens": 256,
                "max_num_seqs": 4,
            },
        }
        self._transfer = {
            "kv_connector": "KVDepotConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "kvdepot.engines.vllm",
        }
        self._number = 0
        self._reference: list[list[int]] = []
        self.tally = Tally()

    def _engine(self, connector: bool = True) -> ForkedEngine:
        self._number += 1
        plan = dict(self._plan)
        if connector:
            # Both ways of loading take turns.
            extra = {**self.files.options, "use_layerwise": self._chosen.random() < 0.5}
            transfer = {**self._transfer, "kv_connector_extra_config": extra}
            plan["engine"] = {**plan["engine"], "kv_transfer_config": transfer}
        return ForkedEngine(self._warm, self._root, plan, f"engine-{self._number % 2}")

    def make_reference(self) -> None:
        """Answers of an engine without a connector."""
        engine = self._engine(connector=False)
        try:
            found = engine.ask(self._prompts) if engine.ready() else None
            if found is None:
                raise WrongError(f"the engine of the reference has ended; its log is {engine.log}")
            self._reference = found["tokens"]
        finally:
            engine.close()

    def round(self) -> str:
        """Starts an engine, kills somebody, looks at what is left; says who was killed, and when."""
        victim = self._chosen.choice(VICTIMS)
        starting = self._chosen.random() < STARTING_SHARE
        delay_s = self._chosen.uniform(0, START_WINDOW_S if starting else LOAD_WINDOW_S)
        order = ["engine", "depot"] if self._chosen.random() < 0.5 else ["depot", "engine"]
        victims = order if victim == "both" else [victim]
        engine = self._engine()
        try:
            killer = threading.Timer(delay_s, self._kill, (victims, engine))
            if starting:
                killer.start()
            alive = engine.ready()
            if alive and not starting:
                self._look_after_start(engine)
                killer.start()
            if not alive and victim == "depot":
                raise WrongError(f"the engine did not start without its depot; its log is {engine.log}")
            after = 0
            while alive and after < BATCHES_AFTER:
                after += not killer.is_alive()
                alive = self._batch(engine)
            killer.join()
            if victim == "depot":
                engine.stop()
        finally:
            engine.close()
        self.tally.kills[victim] += 1
        self.tally.while_starting += starting
        self.files.check_caps()
        self.files.check_log()
        # An engine that was killed while it started may not have come to start its depot.
        if victim == "engine" and not (starting and self.files.stats() is None):
            self.files.wait_until_quiet()
        return f"{victim}, {delay_s:.2f} s after {'the fork' if starting else 'its start'}"

    def _look_after_start(self, engine: ForkedEngine) -> None:
        """The start after a kill: a depot answers, it is clean, and so is its directory."""
        if not self._batch(engine):
            raise WrongError(f"the engine died without being killed; its log is {engine.log}")
        self.files.wait_until_quiet()

    def _kill(self, victims: list[str], engine: ForkedEngine) -> None:
        for name in victims:
            if name == "engine":
                engine.fork.kill()
            else:
                self.tally.depots_killed += self.files.kill()

    def _batch(self, engine: ForkedEngine) -> bool:
        chosen = self._chosen.sample(range(PROMPTS), BATCH)
        found = engine.ask([self._prompts[n] for n in chosen])
        if found is None:
            self.tally.batches_cut += 1
            return False
        for n, tokens in zip(chosen, found["tokens"], strict=True):
            if tokens != self._reference[n]:
                raise WrongError(f"prompt {n}: {tokens} is not the reference's {self._reference[n]}")
        self.tally.answers += len(chosen)
        self.tally.tokens_found += sum(found["cached"])
        return True

    def close(self) -> None:
        """Ends the last depot."""
        self.files.kill()


def main() -> int:
    """Does the rounds; the last line of standard output is what was seen, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="default 20")
    parser.add_argument("--seed", type=int, help="default: another one each time")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
    end_on_signals()
    progress = Progress()
    progress.note(f"seed {seed}")
    model = make_model(MODEL)
    root = Path(tempfile.mkdtemp(prefix="kvdepot-kills-"))
    began_s = time.monotonic()
    with ExitStack() as stack:
        warm = stack.enter_context(Warm(root / "warm.log"))
        rounds = Rounds(warm, root, model, seed)
        stack.callback(rounds.close)
        try:
            with progress.step("compute the reference"):
                rounds.make_reference()
            for number in range(1, arguments.kills + 1):
                with progress.step(f"round {number}"):
                    done = rounds.round()
                progress.note(done)
        except (WrongError, LeakError) as error:
            progress.failure(f"seed {seed}, after {sum(rounds.tally.kills.values())} kills: {error}")
            return 1
    shutil.rmtree(root)
    seen = {
        "seed": seed,
        "kills": dict(rounds.tally.kills),
        **{name: value for name, value in vars(rounds.tally).items() if name != "kills"},
        "bytes_seen_max": rounds.files.bytes_seen_max,
        "bytes_max": rounds.files.bytes_max,
        "temporaries_seen": rounds.files.temporaries_seen,
        "seconds": round(time.monotonic() - began_s, 1),
    }
    print(json.dumps(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
