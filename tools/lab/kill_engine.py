"""Kills a real vLLM, one rank of it, its depot, or both, at random moments under load, and looks at what is left.

After every kill: the next start is clean, every answer is the reference's, a depot that lives has given back what the
dead engine held, no temporary file stays, and neither pool nor directory is over its cap (P1, P4, P5, P6). Latent
attention rounds otherwise in batches of other shapes: its answers are as likely as the reference's, which is looked at
when all is done.
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
from tools.lab.judge import Judge
from tools.lab.models import make_model, prompt
from tools.lab.progress import Progress
from tools.lab.subject import BLOCK_TOKENS, KINDS, Subject
from tools.lab.warm import Warm

PROMPTS = 20
PROMPT_TOKENS = (330, 600)
ANSWER_TOKENS = 24
BATCH = 6
VICTIMS = ("engine", "depot", "both")
VICTIMS_OF_MANY_RANKS = (*VICTIMS, "rank")
STARTING_SHARE = 0.15
# Per rank: they share the machine.
START_WINDOW_S = 3.0
LOAD_WINDOW_S = 2.5
BATCHES_AFTER = 2
# An engine has about 300 blocks, of which a fifth fits in memory and less than half on disk: all are sometimes evicted.
POOL_BLOCKS, TIER_BLOCKS = 64, 128


@dataclass
class Tally:
    """Counts over all rounds."""

    kills: Counter[str] = field(default_factory=Counter)
    while_starting: int = 0
    batches_cut: int = 0
    answers: int = 0
    tokens_found: int = 0
    depots_killed: int = 0
    ranks_killed: int = 0
    regret_max: float = 0.0
    regret_mean: float = 0.0


class Rounds:
    """Kills, one per round."""

    def __init__(self, warm: Warm, root: Path, model: Path, subject: Subject, seed: int) -> None:
        self._warm, self._root, self._chosen = warm, root, random.Random(seed)
        self._subject = subject
        blocks = subject.namespaces
        self.files = DepotFiles(root, subject.block_bytes, POOL_BLOCKS * blocks, TIER_BLOCKS * blocks)
        self._prompts = [prompt(seed * 1000 + n, self._chosen.randint(*PROMPT_TOKENS)) for n in range(PROMPTS)]
        self._plan: dict[str, Any] = {
            "answer_tokens": ANSWER_TOKENS,
            "engine": {"model": str(model), **subject.engine},
        }
        self._transfer = {
            "kv_connector": "KVDepotConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "kvdepot.engines.vllm",
        }
        self._number = 0
        self._judge = Judge([], None)
        self.tally = Tally()

    def _engine(self, connector: bool = True) -> ForkedEngine:
        self._number += 1
        plan = dict(self._plan)
        if connector:
            # Alternate between both ways of loading.
            extra = {**self.files.options, "use_layerwise": self._chosen.random() < 0.5}
            transfer = {**self._transfer, "kv_connector_extra_config": extra}
            plan["engine"] = {**plan["engine"], "kv_transfer_config": transfer}
        return ForkedEngine(self._warm, self._root, plan, f"engine-{self._number % 2}")

    def _ask_reference(self, order: dict[str, Any]) -> dict[str, Any]:
        """Returns the answers of an engine without a connector."""
        engine = self._engine(connector=False)
        try:
            found = engine.ask(order) if engine.ready() else None
            if found is None:
                raise WrongError(f"the engine of the reference has ended; its log is {engine.log}")
            return found
        finally:
            engine.close()

    def make_reference(self) -> None:
        """Computes the answers that all others are compared with."""
        reference = self._ask_reference({"prompts": self._prompts})["tokens"]
        spoilt = None
        if not self._subject.exact:
            wrong = [_with_one_wrong_block(tokens, self._prompts[n - 1]) for n, tokens in enumerate(self._prompts)]
            spoilt = self._ask_reference({"prompts": wrong})["tokens"]
        self._judge = Judge(reference, spoilt)

    def prove(self) -> None:
        """Judges the answers that could not be judged when they arrived."""

        def score(prompts: list[int], answers: list[list[int]]) -> list[float]:
            order = {"prompts": [self._prompts[n] for n in prompts], "answers": answers}
            found: list[float] = self._ask_reference(order)["regrets"]
            return found

        self._judge.prove(score)
        self.tally.regret_max = round(self._judge.regret_max, 4)
        self.tally.regret_mean = round(self._judge.regret_mean, 4)

    def round(self) -> str:
        """Starts an engine, kills something, and checks what is left. Returns what was killed, and when."""
        victim = self._chosen.choice(VICTIMS if self._subject.ranks == 1 else VICTIMS_OF_MANY_RANKS)
        starting = self._chosen.random() < STARTING_SHARE
        delay_s = self._chosen.uniform(0, START_WINDOW_S if starting else LOAD_WINDOW_S) * self._subject.ranks
        order = ["engine", "depot"] if self._chosen.random() < 0.5 else ["depot", "engine"]
        victims = order if victim == "both" else [victim]
        which_rank = self._chosen.randrange(self._subject.ranks)
        engine = self._engine()
        try:
            killer = threading.Timer(delay_s, self._kill, (victims, engine, which_rank))
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
            if alive:
                engine.stop()
        finally:
            engine.close()
        self.tally.kills[victim] += 1
        self.tally.while_starting += starting
        self.files.check_caps()
        self.files.check_log()
        # An engine that was killed during its start may not have started its depot yet.
        if victim in ("engine", "rank") and not (starting and self.files.stats() is None):
            self.files.wait_until_quiet()
        return f"{victim}, {delay_s:.2f} s after {'the fork' if starting else 'its start'}"

    def last(self) -> None:
        """Starts once more after the last kill, without another one: stored blocks are found again."""
        engine = self._engine()
        try:
            if not engine.ready():
                raise WrongError(f"the engine did not start after the last kill; its log is {engine.log}")
            self._look_after_start(engine)
            few = list(range(BATCH // 2))
            for _ in range(2):
                before = self.tally.tokens_found
                if not self._batch(engine, few):
                    raise WrongError(f"the engine died without being killed; its log is {engine.log}")
                self.files.wait_until_quiet()
            if self.tally.tokens_found == before:
                raise WrongError(f"nothing that was stored after the last kill is found; the log is {engine.log}")
            engine.stop()
        finally:
            engine.close()
        self.files.check_caps()
        self.files.check_log()

    def _look_after_start(self, engine: ForkedEngine) -> None:
        """Checks the start after a kill: a depot answers, and it and its directory are clean."""
        if not self._batch(engine):
            raise WrongError(f"the engine died without being killed; its log is {engine.log}")
        self.files.wait_until_quiet()

    def _kill(self, victims: list[str], engine: ForkedEngine, which_rank: int) -> None:
        for name in victims:
            if name == "engine":
                engine.fork.kill()
            elif name == "rank":
                self.tally.ranks_killed += engine.fork.kill_worker(which_rank)
            else:
                self.tally.depots_killed += self.files.kill()

    def _batch(self, engine: ForkedEngine, prompts: list[int] | None = None) -> bool:
        """Sends the given prompts, or random ones. Returns False if the engine did not answer."""
        chosen = prompts or self._chosen.sample(range(PROMPTS), BATCH)
        found = engine.ask({"prompts": [self._prompts[n] for n in chosen]})
        if found is None:
            self.tally.batches_cut += 1
            return False
        for n, tokens in zip(chosen, found["tokens"], strict=True):
            self._judge.take(self._number, n, tokens)
        self.tally.answers += len(chosen)
        self.tally.tokens_found += sum(found["cached"])
        return True

    def close(self) -> None:
        """Ends the last depot."""
        self.files.kill()


def _with_one_wrong_block(tokens: list[int], others: list[int]) -> list[int]:
    """Replaces the third block by that of another prompt."""
    begin, end = 2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS
    return [*tokens[:begin], *others[begin:end], *tokens[end:]]


def main() -> int:
    """Runs the rounds; the last line of standard output is the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="default 20")
    parser.add_argument("--seed", type=int, help="default: another one each time")
    parser.add_argument("--model", choices=KINDS, default="llama", help="default llama")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1, help="default 1")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
    end_on_signals()
    progress = Progress()
    subject = Subject(arguments.model, arguments.ranks)
    progress.note(f"{subject.kind}, {subject.ranks} ranks, seed {seed}")
    model = make_model(subject.model)
    root = Path(tempfile.mkdtemp(prefix="kvdepot-kills-"))
    began_s = time.monotonic()
    with ExitStack() as stack:
        warm = stack.enter_context(Warm(root / "warm.log"))
        rounds = Rounds(warm, root, model, subject, seed)
        stack.callback(rounds.close)
        try:
            with progress.step("compute the reference"):
                rounds.make_reference()
            for number in range(1, arguments.kills + 1):
                with progress.step(f"round {number}"):
                    done = rounds.round()
                progress.note(done)
            with progress.step("start once more"):
                rounds.last()
            with progress.step("judge what is not the reference's"):
                rounds.prove()
        except (WrongError, LeakError) as error:
            progress.failure(f"seed {seed}, after {sum(rounds.tally.kills.values())} kills: {error}")
            return 1
    shutil.rmtree(root)
    seen = {
        "model": subject.kind,
        "ranks": subject.ranks,
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
