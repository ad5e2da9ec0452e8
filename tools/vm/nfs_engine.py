"""Real vLLM with a seed's file on an NFS mount: the tokens of an engine without a depot, and hits from the mount.

Runs in the virtual machine of ``tools/vm/nfs_engine.sh``, which mounts the export at the directory that the file
names. Engine and depot end, nothing stays in the page cache, and new ones find on the mount what the first ones stored.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from tools.lab.depot import depot_stats, wait_until_clean
from tools.lab.forked_engine import ForkedEngine
from tools.lab.models import make_model, prompt
from tools.lab.subject import BLOCK_TOKENS, Subject
from tools.lab.warm import Warm

SUBJECT = Subject("llama", 1)
PROMPT_TOKENS = (330, 200)
PROMPTS = [prompt(seed, tokens) for seed, tokens in enumerate(PROMPT_TOKENS)]
HITS = [tokens // BLOCK_TOKENS * BLOCK_TOKENS for tokens in PROMPT_TOKENS]
BLOCKS = sum(HITS) // BLOCK_TOKENS
ANSWER_TOKENS = 8
LONG_S = 600.0
"""An emulated processor takes a minute to start an engine; only a hang takes so long."""
POLL_S = 0.2


def say(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)


def until(what: str, done: Callable[[], bool]) -> None:
    """Waits for what other processes do."""
    end_s = time.monotonic() + LONG_S
    while not done():
        if time.monotonic() > end_s:
            sys.exit(f"FAILED: {what}: not after {LONG_S:.0f} s")
        time.sleep(POLL_S)


def depot_of(runtime: Path) -> dict[str, Any]:
    """Returns the statistics of the depot that an engine has started: the file names no socket."""
    for socket in (runtime / "kvdepot").glob("*.sock"):
        if (stats := depot_stats(socket)) is not None:
            return {**stats, "socket": socket}
    return {}


class Lab:
    """Engines, forked one after another, and their depot's directory."""

    def __init__(self, warm: Warm, seed: Path, runtime: Path) -> None:
        self._warm, self._runtime = warm, runtime
        self._transfer = {
            "kv_connector": "UCMConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "kvdepot.engines.vllm",
            "kv_connector_extra_config": {"UCM_CONFIG_FILE": str(seed.absolute())},
        }

    def engine(self, name: str, *, connector: bool = True) -> ForkedEngine:
        """Starts an engine, as the seed's launch command does."""
        began_s = time.monotonic()
        arguments = {**SUBJECT.engine, "model": str(make_model(SUBJECT.model))}
        if connector:
            arguments |= {"enable_prefix_caching": False, "kv_transfer_config": self._transfer}
        plan = {"answer_tokens": ANSWER_TOKENS, "engine": arguments}
        made = ForkedEngine(self._warm, self._runtime, plan, name, answer_s=LONG_S)
        if not made.ready():
            sys.exit(f"FAILED: {name}: {made.log.read_text(errors='replace')[-4000:]}")
        say(f"{name}: started in {time.monotonic() - began_s:.0f} s")
        return made


def ask(engine: ForkedEngine) -> tuple[list[list[int]], list[int]]:
    """Returns the answers to all prompts, and how many tokens of each were found."""
    tokens, cached = [], []
    for one in PROMPTS:
        found = engine.ask({"prompts": [one]})
        if found is None:
            sys.exit(f"FAILED: the engine has ended: {engine.log.read_text(errors='replace')[-4000:]}")
        tokens += found["tokens"]
        cached += found["cached"]
    return tokens, cached


def check(what: str, got: object, wanted: object) -> None:
    """Fails unless both are equal."""
    if got != wanted:
        sys.exit(f"FAILED: {what}: {got} instead of {wanted}")


def run(lab: Lab, runtime: Path, directory: Path) -> None:
    """An engine without a depot, one that stores, and one that finds what was stored."""
    plain = lab.engine("an engine without a depot", connector=False)
    reference, _ = ask(plain)
    plain.stop()
    first = lab.engine("an engine on the mount")
    until("a depot answers", lambda: bool(depot_of(runtime)))

    def stored() -> bool:
        tokens, _ = ask(first)
        check("tokens while blocks are stored", tokens, reference)
        wait_until_clean(depot_of(runtime)["socket"], LONG_S)
        return len(list(directory.rglob("*.kvb"))) == BLOCKS

    until("all blocks are files on the mount", stored)
    first.stop()
    depot = depot_of(runtime)
    os.kill(int(depot["pid"]), signal.SIGKILL)
    until("the depot ends", lambda: not depot_of(runtime))
    Path("/proc/sys/vm/drop_caches").write_text("3\n", "ascii")
    second = lab.engine("another engine on the mount")
    until("another depot answers", lambda: bool(depot_of(runtime)))

    def found() -> bool:
        tokens, cached = ask(second)
        check("tokens from the mount", tokens, reference)
        return cached == HITS

    # A block that comes late, from an emulated processor, is a miss.
    until("all blocks are hits", found)
    read = depot_of(runtime)["fetch_blocks"]
    if read < BLOCKS:
        sys.exit(f"FAILED: {read} blocks were read from the mount, not {BLOCKS}")
    say(f"identical tokens; {BLOCKS} blocks on the mount, and all of them hits of another engine on another depot")
    second.stop()
    os.kill(int(depot_of(runtime)["pid"]), signal.SIGKILL)


def main() -> None:
    """Runs all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make-model", action="store_true", help="only make the model")
    parser.add_argument("seed", type=Path, nargs="?")
    options = parser.parse_args()
    if options.make_model:
        make_model(SUBJECT.model)
        return
    file = yaml.safe_load(options.seed.read_text())
    directory = Path(file["ucm_connectors"][0]["ucm_connector_config"]["storage_backends"])
    runtime = Path(tempfile.mkdtemp(prefix="kvd-"))
    os.environ["XDG_RUNTIME_DIR"] = str(runtime)
    with ExitStack() as stack:
        began_s = time.monotonic()
        warm = stack.enter_context(Warm(runtime / "warm.log"))
        run(Lab(warm, options.seed, runtime), runtime, directory)
    say(f"vLLM on the mount: {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
