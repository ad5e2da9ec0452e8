"""A real ``vllm serve`` that starts the node's depot: the depot outlives it, and the next server gets its hits."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_lab import Lab

from tools.demo.__main__ import wait_until_healthy
from tools.demo.client import HITS, Client
from tools.demo.server import Server
from tools.lab.depot import DepotHome, depot_stats, wait_until_clean
from tools.lab.models import prompt

EXIT_S = 120
CLEAN_S = 60.0
PROMPT_TOKENS, HIT_TOKENS, ANSWER_TOKENS = 400, 384, 8
SIGNALS = [
    pytest.param(signal.SIGTERM, id="SIGTERM"),
    pytest.param(signal.SIGINT, id="SIGINT", marks=pytest.mark.full),
    pytest.param(signal.SIGKILL, id="SIGKILL", marks=pytest.mark.full),
]


@contextmanager
def depot_home(root: Path) -> Iterator[DepotHome]:
    """The configuration of a depot that the first server starts; whichever depot exists at the end is killed."""
    values: dict[str, Any] = {"pipeline": "Cache|Empty", "directories": None, "pool_gb": 0.125}
    # Hits are exact however busy the machine is.
    values |= {"call_timeout_ms": 30_000, "attach_timeout_ms": 60_000, "load_policy": "all"}
    with DepotHome(root, values) as home:
        try:
            yield home
        finally:
            if (stats := depot_stats(home.socket)) is not None:
                os.kill(stats["pid"], signal.SIGKILL)


def served(home: DepotHome, model: Path, how: signal.Signals, log: Path) -> tuple[int, tuple[int, ...]]:
    """Sends one prompt to a server, which is then ended by a signal. Returns the hit's tokens, and the answer."""
    with Server(model, home.config, "float32", PROMPT_TOKENS + ANSWER_TOKENS, log) as server:
        client = Client(server.port)
        wait_until_healthy(server, client)
        answer = client.complete(prompt(1, PROMPT_TOKENS), ANSWER_TOKENS)
        hits = client.counters(PROMPT_TOKENS)[HITS]
        check_metrics(client, hits)
        wait_until_clean(home.socket, CLEAN_S)
        os.kill(server.pid, how)
        server.wait_for_end(EXIT_S)
    return hits, answer.tokens


def check_metrics(client: Client, hits: int) -> None:
    """Checks a scrape after one prompt with this many hit tokens."""

    def value(name: str) -> int:
        return client.counter(f"vllm:kvdepot_{name}")

    assert value("hit_tokens_total") == hits
    assert value("asked_tokens_total") == HIT_TOKENS * value("claims_total") >= HIT_TOKENS
    assert value("lookup_seconds_count") == value("claims_total")
    assert (value("load_bytes_total") > 0) == (hits > 0)
    assert value("load_seconds_count") == value("loads_total") == (hits > 0)
    assert value("attached") == 1


@pytest.mark.parametrize("how", SIGNALS)
def test_the_depot_outlives_the_server_that_started_it(real_lab: Lab, how: signal.Signals) -> None:
    """A server kills all of its descendants when it is stopped (P6, P11)."""
    model = Path(real_lab.model("llama"))
    with depot_home(real_lab.root / "home") as home:
        first = served(home, model, how, real_lab.root / "first.log")
        stats = depot_stats(home.socket)
        assert stats is not None, "the depot has ended with the server that started it"
        assert first[0] == 0
        second = served(home, model, how, real_lab.root / "second.log")
        assert second == (HIT_TOKENS, first[1])
        after = depot_stats(home.socket)
        assert after is not None
        assert after["pid"] == stats["pid"]
    for name in ("first", "second"):
        log = (real_lab.root / f"{name}.log").read_text(errors="replace")
        for line in (f"pipeline Cache|Empty, depot at {home.socket}", f"attached to the depot (pid {stats['pid']}, "):
            assert log.count(line) == 1, (name, line)
