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
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from tools.lab.child import end_on_signals
from tools.lab.depot_files import DepotFiles, LeakError
from tools.lab.models import ModelSize, make_model, prompt
from tools.lab.progress import Progress
from tools.lab.warm import Fork, Warm

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
ANSWER_S = 120.0
MODEL = ModelSize(layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512)
# Of about 300 blocks a fifth fits in memory and not half on disk: everything is evicted now and then.
POOL_BLOCKS, TIER_BLOCKS = 64, 128


class WrongError(Exception):
    """An answer is not the reference's, or something is left that should not be."""


@dataclass
class Tally:
    """What happened over all rounds."""

    kills: Counter[str] = field(default_factory=Counter)
    starting: int = 0
    in_flight: int = 0
    answers: int = 0
    cached_tokens: int = 0
    depots: int = 0


class Engine:
    """A forked engine and the socket to it."""

    def __init__(self, warm: Warm, root: Path, plan: dict[str, Any], number: int) -> None:
        address = str(root / f"engine-{number % 2}.sock")
        Path(address).unlink(missing_ok=True)
        self._listener = Listener(address, "AF_UNIX")
        self.log = root / f"engine-{number % 2}.log"
        self.fork: Fork = warm.start("tools.lab.victim", {**plan, "address": address}, self.log, {}, root)
        self._connection: Connection | None = None

    def ready(self) -> bool:
        """Waits for the engine's start; false when it died before."""
        result: list[Connection] = []

        def accept() -> None:
            try:
                result.append(self._listener.accept())
            except OSError:
                return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        end_s = time.monotonic() + ANSWER_S
        while thread.is_alive() and time.monotonic() < end_s:
            thread.join(0.02)
            try:
                self.fork.wait(0)
            except TimeoutError:
                continue
            break
        if not result:
            thread.join(0.1)
        if not result:
            return False
        self._connection = result[0]
        return bool(self._receive() == "ready")

    def ask(self, prompts: list[list[int]]) -> dict[str, Any] | None:
        """Sends a batch and waits for its answers; None when the engine died over it."""
        assert self._connection is not None
        try:
            self._connection.send(prompts)
        except OSError:
            return None
        found: dict[str, Any] | None = self._receive()
        return found

    def _receive(self) -> Any:
        assert self._connection is not None
        try:
            if not self._connection.poll(ANSWER_S):
                raise WrongError(f"the engine has not answered within {ANSWER_S:.0f} s; its log is {self.log}")
            return self._connection.recv()
        except (EOFError, ConnectionError):
            return None

    def stop(self) -> int:
        """Lets the engine end by itself."""
        if self._connection is not None:
            self._connection.close()
        return self.fork.wait(ANSWER_S)

    def close(self) -> None:
        """Nothing of the engine is left after this."""
        self.fork.end()
        if self._connection is not None:
            self._connection.close()
        self._listener.close()


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

    def _engine(self, connector: bool = True) -> Engine:
        self._number += 1
        plan = dict(self._plan)
        if connector:
            # Both ways of loading take turns.
            extra = {**self.files.options, "use_layerwise": self._chosen.random() < 0.5}
            transfer = {**self._transfer, "kv_connector_extra_config": extra}
            plan["engine"] = {**plan["engine"], "kv_transfer_config": transfer}
        return Engine(self._warm, self._root, plan, self._number)

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
            self._end(engine, victim)
        finally:
            engine.close()
        self.tally.kills[victim] += 1
        self.tally.starting += starting
        self.files.check_caps()
        self.files.check_log()
        # An engine that was killed while it started may not have come to start its depot.
        if victim == "engine" and not (starting and self.files.stats() is None):
            self.files.wait_until_quiet()
        return f"{victim}, {delay_s:.2f} s after {'the fork' if starting else 'its start'}"

    def _look_after_start(self, engine: Engine) -> None:
        """The start after a kill: a depot answers, it is clean, and so is its directory."""
        if not self._batch(engine):
            raise WrongError(f"the engine died without being killed; its log is {engine.log}")
        self.files.wait_until_quiet()

    def _kill(self, victims: list[str], engine: Engine) -> None:
        for name in victims:
            if name == "engine":
                engine.fork.kill()
            else:
                self.tally.depots += self.files.kill()

    def _batch(self, engine: Engine) -> bool:
        chosen = self._chosen.sample(range(PROMPTS), BATCH)
        found = engine.ask([self._prompts[n] for n in chosen])
        if found is None:
            self.tally.in_flight += 1
            return False
        for n, tokens in zip(chosen, found["tokens"], strict=True):
            if tokens != self._reference[n]:
                raise WrongError(f"prompt {n}: {tokens} is not the reference's {self._reference[n]}")
        self.tally.answers += len(chosen)
        self.tally.cached_tokens += sum(found["cached"])
        return True

    def _end(self, engine: Engine, victim: str) -> None:
        if victim == "depot":
            status = engine.stop()
            if status != 0:
                raise WrongError(f"the engine has ended with status {status}; its log is {engine.log}")

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
