"""Measures kvdepot as the second level of LMCache's server beside LMCache's own, with real vLLM on CPU.

``first-token``: the time to the first token of prompts that are computed, found in vLLM's own prefix cache, in
LMCache's memory (L1), in the second level (L2), and there after vLLM, LMCache's server and depot were restarted.
``long-doc-qa``: LMCache's workload of that name, with documents that exceed the memory.
``l2``: LMCache's benchmark of second levels by themselves, without vLLM.

Every side has the same memory: kvdepot's pool is taken from LMCache's. Media of DAX are plain files on tmpfs.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benches.engine.runs import EngineKind
from benches.lmcache.adapters import LEFT_OUT, SHAPES, Adapters, Objects
from benches.lmcache.first_token import FirstToken
from benches.lmcache.levels import LEVELS, Place
from benches.lmcache.long_doc_qa import OFF, LongDocQa
from benches.lmcache.report import print_first_token, print_queries
from benches.lmcache.stack import CHUNK_TOKENS
from benches.lmcache.summary import Queries, Round, Row, summarize, summarize_queries
from benches.peers.results import Results
from kvdepot import _native
from tools.lab.child import ChildError
from tools.lab.machine import load_average, machine
from tools.lab.models import SIZES, WORK, ModelSize, make_model
from tools.lab.program import run_program
from tools.lab.progress import Progress
from tools.lab.settings import add_set_option

FIRST_TOKEN, LONG_DOC_QA, L2 = "first-token", "long-doc-qa", "l2"
PARTS = (FIRST_TOKEN, LONG_DOC_QA, L2)
MEMORY = Path("/dev/shm")
PACKAGES = ("lmcache", "vllm")
NOT_CONDITIONS = ("json", "settings", "only", "objects")


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="measure this; again for more")
    parser.add_argument("--levels", choices=tuple(LEVELS), nargs="+", default=list(LEVELS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--size", choices=tuple(SIZES), default="small", help="parameters, default small: 94 M")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add_set_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    first = parser.add_argument_group(FIRST_TOKEN)
    first.add_argument("--repeats", type=int, default=3, help="number of prompts, default 3")
    first.add_argument("--tokens", type=int, default=4096, help="tokens of each, a multiple of 256, default 4096")
    first.add_argument("--keep-page-cache", action="store_true", help="read files that the kernel still has in memory")
    documents = parser.add_argument_group(LONG_DOC_QA)
    documents.add_argument("--documents", type=int, default=30, help="number of documents, default 30")
    documents.add_argument("--document-tokens", type=int, default=2000, help="tokens of each, default 2000")
    documents.add_argument("--questions", type=int, default=2, help="questions about each, default 2")
    documents.add_argument("--answer-tokens", type=int, default=40, help="tokens of each answer, default 40")
    documents.add_argument("--inflight", type=int, default=5, help="requests at the same time, default 5")
    objects = parser.add_argument_group(L2)
    objects.add_argument(
        "--objects",
        nargs="+",
        type=Objects.parse,
        metavar="COUNTxKIB",
        default=[Objects.parse(text) for text in SHAPES],
        help=f"number of objects in a call, and their size, default {' '.join(SHAPES)}",
    )
    arguments = parser.parse_args()
    if arguments.tokens < CHUNK_TOKENS or arguments.tokens % CHUNK_TOKENS:
        parser.error(f"--tokens: needs a multiple of {CHUNK_TOKENS}, LMCache's chunk")
    if min(arguments.rounds, arguments.repeats, arguments.documents, arguments.questions, arguments.inflight) < 1:
        parser.error("needs at least one of each")
    return arguments


def measure(arguments: argparse.Namespace, progress: Progress) -> int:
    """Runs all rounds; exit status 1 when an answer with kvdepot was wrong."""
    parts = [part for part in PARTS if arguments.only is None or part in arguments.only]
    loads = {"at first": load_average()}
    size = SIZES[arguments.size]
    with progress.step("make a model of random weights"):
        model = make_model(size)
    disk = WORK / "bench-lmcache"
    disk.mkdir(parents=True, exist_ok=True)
    memory = Path(tempfile.mkdtemp(dir=MEMORY, prefix="kvdepot-bench-lmcache-"))
    try:
        place = Place(disk, memory)
        first = first_token_of(arguments, place, model, size)
        documents = long_doc_qa_of(arguments, place, model, size)
        adapters = Adapters(place, dict(arguments.settings), arguments.objects)
        operations = adapters.results(arguments.levels)
        times: list[Round] = []
        queries: list[Mapping[str, Queries]] = []
        for number in range(1, arguments.rounds + 1):
            # Sides take turns in alternating order.
            backwards = number % 2 == 0
            names = list(reversed(arguments.levels) if backwards else arguments.levels)

            def step(text: str, number: int = number) -> AbstractContextManager[None]:
                return progress.step(f"round {number} of {arguments.rounds}: {text}")

            if FIRST_TOKEN in parts:
                times.append(first.round(names, step, backwards=backwards))
                loads[f"{FIRST_TOKEN}, round {number}"] = load_average()
            if LONG_DOC_QA in parts:
                queries.append(documents.round(names, step, backwards=backwards))
                loads[f"{LONG_DOC_QA}, round {number}"] = load_average()
            if L2 in parts:
                adapters.round(names, step, operations)
                loads[f"{L2}, round {number}"] = load_average()
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    conditions = {
        "machine": machine(),
        "load_average": loads,
        "versions": {"kvdepot": _native.__version__, **{name: version(name) for name in PACKAGES}},
        "model": vars(size),
        **{name: value for name, value in vars(arguments).items() if name not in NOT_CONDITIONS},
        "settings": dict(arguments.settings),
        "objects": [str(one) for one in arguments.objects],
        "left out of l2": {name: LEFT_OUT[name] for name in arguments.levels if name in LEFT_OUT},
        "commands": place.commands,
    }
    titles = {name: LEVELS[name].title for name in arguments.levels}
    rows = summarize(times, titles, arguments.tokens) if times else []
    report(arguments, conditions, rows, queries, documents, operations)
    wrong = [row for row in rows if not row.cell.same_output]
    for row in wrong:
        progress.failure(f"{row.title}, {row.step}: another answer than vLLM alone")
    return int(any(row.title in ours() for row in wrong))


def ours() -> list[str]:
    """Returns the titles of kvdepot's levels."""
    return [kind.title for kind in LEVELS.values() if kind.ours]


def first_token_of(arguments: argparse.Namespace, place: Place, model: Path, size: ModelSize) -> FirstToken:
    """Returns the measurement of times to first token."""
    kind = EngineKind.for_prompts(model, arguments.dtype, (arguments.tokens,))
    return FirstToken(
        place=place,
        arguments=kind.arguments(None),
        tokens=arguments.tokens,
        repeats=arguments.repeats,
        token_bytes=size.kv_bytes_per_token(arguments.dtype),
        settings=dict(arguments.settings),
        keep_page_cache=arguments.keep_page_cache,
    )


def long_doc_qa_of(arguments: argparse.Namespace, place: Place, model: Path, size: ModelSize) -> LongDocQa:
    """Returns the measurement of documents."""
    return LongDocQa(
        place=place,
        model=model,
        dtype=arguments.dtype,
        documents=arguments.documents,
        tokens=arguments.document_tokens,
        questions=arguments.questions,
        answer_tokens=arguments.answer_tokens,
        inflight=arguments.inflight,
        token_bytes=size.kv_bytes_per_token(arguments.dtype),
        settings=dict(arguments.settings),
    )


def report(
    arguments: argparse.Namespace,
    conditions: Mapping[str, Any],
    rows: list[Row],
    queries: list[Mapping[str, Queries]],
    documents: LongDocQa,
    operations: Results,
) -> None:
    """Prints everything as JSON, or as tables with the conditions below them."""
    summary = summarize_queries(queries, OFF) if queries else {}
    if arguments.json:
        runs = [{name: asdict(one) for name, one in round_.items()} for round_ in queries]
        documented = {"rows": {name: asdict(row) for name, row in summary.items()}, "rounds": runs}
        found = {
            "conditions": conditions,
            FIRST_TOKEN: [asdict(row) for row in rows],
            LONG_DOC_QA: documented,
            L2: list(operations.rows()),
        }
        print(json.dumps(found, indent=2))
        return
    if rows:
        print_first_token(rows, arguments.tokens)
    if summary:
        title = f"{documents.documents} documents of {documents.tokens} tokens, {documents.questions} questions each"
        print_queries(summary, title)
    operations.print()
    for name, value in conditions.items():
        if name != "commands":
            print(f"{name}: {value}")
    for name, command in conditions["commands"].items():
        print(f"{name}: {command}")


def main() -> int:
    """Reads the command line and measures."""
    arguments = parse()
    return run_program(lambda progress: measure(arguments, progress), (ChildError, OSError))


if __name__ == "__main__":
    sys.exit(main())
