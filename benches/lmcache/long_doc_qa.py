"""LMCache's own workload ``long-doc-qa``: documents that exceed the memory are read once, then asked about.

It is run by ``lmcache bench engine`` against a ``vllm serve``, with the parameters of LMCache's figures for its DAX
backend (pull request 2904), scaled down: 30 documents of 10,000 tokens, two questions about each, one document after
the other (``tile``), answers of 200 tokens, five requests in flight. As there, memory holds a third of the documents.
"""

import csv
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.lmcache.levels import LEVELS, Level, Place, Sizes
from benches.lmcache.stack import CHUNK_TOKENS, END_S, IDLE_S
from benches.lmcache.summary import Queries
from benches.peers.work import GIB, MIB
from tools.lab.child import Child, ChildError
from tools.lab.machine import load_average
from tools.lab.warm import ON_ALL_CORES
from tools.lmcache.serve import VllmServer
from tools.lmcache.server import LMCacheServer
from tools.make_model import save_tokenizer

ALONE, OFF = "vLLM alone", "LMCache, no second level"
RUN_S = 3600.0
QUESTION_TOKENS = 128
"""More than a question and the answer's template have."""
L1_PART, POOL_PART = 3, 6
"""LMCache's memory above kvdepot holds a third of the documents, and kvdepot's own memory a sixth."""
LEAST_BYTES = 64 * MIB
"""Less memory holds too few objects at a time. Documents that fit into it show nothing."""
MEDIUM_EPOCHS = 3
STAGING = {"l2-store-policy": "skip_l1"}
"""L1 only stages what goes to the second level, like ``local_cpu: false`` in LMCache's figures.

Otherwise L1 is full, LMCache makes room once a second, and loads from the second level fail until then.
"""
RESULTS = "bench_results.csv"

Step = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class LongDocQa:
    """The measurement.

    Attributes:
        place: where levels write.
        model: directory of the model.
        dtype: vLLM's ``--dtype``.
        documents: their number.
        tokens: length of each.
        questions: asked about each document.
        answer_tokens: length of an answer.
        inflight: requests at the same time.
        token_bytes: KV of a token.
        settings: keys of kvdepot's configuration.
    """

    place: Place
    model: Path
    dtype: str
    documents: int
    tokens: int
    questions: int
    answer_tokens: int
    inflight: int
    token_bytes: int
    settings: Mapping[str, Any]

    @property
    def sizes(self) -> Sizes:
        """Memory for half of the documents, and a medium for all of them."""
        every = self.documents * self.tokens * self.token_bytes
        medium = MEDIUM_EPOCHS * every + 64 * MIB
        l1, pool = (max(every // part, LEAST_BYTES) for part in (L1_PART, POOL_PART))
        return Sizes(l1, pool, medium, CHUNK_TOKENS * self.token_bytes)

    def round(self, names: Sequence[str], step: Step, *, backwards: bool) -> dict[str, Queries]:
        """Runs the workload with vLLM alone, with LMCache's memory only, and with each of these levels.

        ``backwards``, the first two come last.
        """
        found = {}
        for name in (*names, OFF, ALONE) if backwards else (ALONE, OFF, *names):
            if name in (ALONE, OFF):
                with step(name):
                    found[name] = self._run(None, self.place.disk / "documents", without=name == ALONE)
                continue
            kind = LEVELS[name]
            with step(kind.title), kind(self.place, self.sizes, self.settings) as level:
                found[kind.title] = self._run(level, level.root / "documents", without=False)
        return found

    def command(self, url: str, results: Path) -> list[str]:
        """Returns LMCache's command. It derives the number of documents from a size of KV, of which one GB is named."""
        options = {
            "engine-url": url,
            "model": str(self.model),
            "workload": "long-doc-qa",
            "kv-cache-volume": 1,
            "tokens-per-gb-kvcache": self.documents * self.tokens,
            "ldqa-document-length": self.tokens,
            "ldqa-query-per-document": self.questions,
            "ldqa-shuffle-policy": "tile",
            "ldqa-num-inflight-requests": self.inflight,
            "ldqa-max-output-length": self.answer_tokens,
            "output-dir": results,
        }
        words = [str(Path(sys.executable).parent / "lmcache"), "bench", "engine"]
        for name, value in options.items():
            words += [f"--{name}", str(value)]
        return [*words, "--ignore-eos", "--json", "--quiet", "--no-interactive"]

    def _run(self, level: Level | None, root: Path, *, without: bool) -> Queries:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        with ExitStack() as stack:
            server = None
            if level is not None:
                stack.enter_context(level.start())
            if not without:
                l1_gb = level.l1_gb if level else self.sizes.whole_bytes / GIB
                adapter = level.adapter() if level else None
                more = STAGING if level else {}
                server = LMCacheServer(root, adapter, l1_gb=l1_gb, chunk_tokens=CHUNK_TOKENS, more=more)
                stack.enter_context(server)
                self.place.note("long-doc-qa", level.title if level else OFF, server.command)
            port = server.port if server else None
            vllm = stack.enter_context(VllmServer(root, self.model, port, self._options(), ON_ALL_CORES))
            command = self.command(vllm.url, root)
            self.place.note("long-doc-qa", "the workload", command)
            environ = {"LMCACHE_TRACK_USAGE": "false", "HF_HUB_OFFLINE": "1"}
            with Child("lmcache bench", command, root / "bench.log", environ) as bench:
                bench.wait(RUN_S)
            if server:
                server.wait_until_idle(IDLE_S)
            found = server.hits() if server else {}
            queries = read_results(root / RESULTS, vllm.hit_tokens() if server else 0, found)
            vllm.end(END_S)
        return queries

    def _options(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "tokenizer": tokenizer_of(self.place.disk, self.documents),
            "block-size": 32,
            "max-model-len": self.tokens + self.answer_tokens + QUESTION_TOKENS,
            "max-num-batched-tokens": 2048,
            "max-num-seqs": max(4, self.inflight),
            "kv-cache-memory-bytes": GIB,
        }


def tokenizer_of(root: Path, documents: int) -> Path:
    """Writes a tokenizer that knows the words of the workload, and returns its directory.

    The model's own tokenizer knows none of them, so all documents would be the same.
    """
    directory = root / f"tokenizer-{documents}"
    save_tokenizer(directory, ["Document", "Question", "hi", *(f"{number}:" for number in range(documents))])
    return directory


def read_results(path: Path, vllm_tokens: int, found: Mapping[str, int]) -> Queries:
    """Returns what LMCache's benchmark has measured of each query, without its first reading of the documents.

    Raises:
        ChildError: no query was answered.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    answered = [row for row in rows if row["successful"] == "True"]
    if not answered:
        raise ChildError(f"no query was answered: see {path}")
    return Queries(
        seconds=max(float(row["finish_time"]) for row in answered) - min(float(row["submit_time"]) for row in answered),
        ttft_ms=tuple(1e3 * float(row["ttft"]) for row in answered),
        failed=len(rows) - len(answered),
        asked_tokens=sum(int(row["num_input_tokens"]) for row in answered),
        vllm_tokens=vllm_tokens,
        found=dict(found),
        load_average=load_average(),
    )
