"""SGLang's own server, started by the lines of docs/sglang.md: what its operator does over HTTP (P1, P8)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import model, settings
from test_engine import TOKENS, until

from tools.lab.depot import Depot, DepotHome
from tools.lab.rounds import ROOT
from tools.sglang.engine_child import prompts
from tools.sglang.server import Server, documented_lines

PAGE = 64
WHOLE = TOKENS // PAGE * PAGE
PROMPTS = prompts(1, 2, TOKENS)
HICACHE = ["--hicache-storage-prefetch-policy", "wait_complete", "--hicache-ratio", "2.0"]
"""A busy machine's hits are whole; without a ratio SGLang wants more than 10 GiB of free memory."""
COUNTS = 'sglang:kvdepot_counts_total{name="'


def started(root: Path, home: DepotHome, face: str, more: Sequence[str] = ()) -> tuple[Server, list[str]]:
    """Starts the documented line of a face with a tiny model. Returns its arguments as well.

    ``FaultyLinker`` has the line of the linker.
    """
    file = root / "kvdepot.yaml"
    file.write_text(yaml.safe_dump(settings(home, load_policy="all")))
    documented = "KVDepotLinker" if face == "FaultyLinker" else face
    (line,) = [one for one in documented_lines(ROOT / "docs" / "sglang.md") if any(documented in word for word in one)]
    changed = {"/etc/kvdepot.yaml": str(file)}
    if face == "FaultyLinker":
        changed |= {"KVDepotLinker": face, "kvdepot.engines.sglang": "tools.sglang.faulty_linker"}
    for before, after in changed.items():
        line = [word.replace(before, after) for word in line]
    line = [model() if word == "MODEL" else word for word in line]
    return Server(root, line, [*(HICACHE if face == "KVDepotHiCache" else []), *more]), line


class Driver:
    """Asks a server for the same prompts."""

    def __init__(self, server: Server, found_in: str) -> None:
        self._server = server
        self._found_in = found_in

    def ask(self) -> tuple[list[list[int]], list[int]]:
        """Returns the answers, and how many tokens of each prompt came from the depot."""
        found = [self._server.ask(prompt) for prompt in PROMPTS]
        details = [one["meta_info"].get("cached_tokens_details") or {} for one in found]
        return [one["output_ids"] for one in found], [one.get(self._found_in, 0) for one in details]

    def flush(self) -> None:
        """Empties SGLang's own caches; it refuses while a request has not ended."""
        until(lambda: self._server.call("POST", "/flush_cache")[0] == 200, "SGLang's caches are flushed")

    def counts(self) -> dict[str, float]:
        """Returns kvdepot's counts among SGLang's metrics."""
        found = self._server.metrics().items()
        return {name.removeprefix(COUNTS).rstrip('"}'): value for name, value in found if name.startswith(COUNTS)}


def stored(depot: Depot, pages: int) -> None:
    until(lambda: (depot.stats() or {}).get("dump_blocks_sealed", 0) >= pages, f"{pages} pages are stored")


@pytest.mark.timeout(900)
def test_an_operator_clears_and_attaches_again_over_http(tmp_path: Path, home: DepotHome) -> None:
    pages = 2 * WHOLE // PAGE
    with home.start() as depot:
        server, line = started(tmp_path, home, "KVDepotHiCache")
        with server:
            driver = Driver(server, "storage")
            cold = driver.ask()
            assert cold[1] == [0, 0]
            stored(depot, pages)
            driver.flush()
            assert driver.ask() == (cold[0], [WHOLE, WHOLE])
            counts = driver.counts()
            assert (counts["hit"], counts["loaded"], counts["dumped"]) == (pages, pages, pages)
            for name in ("prefetch_pgs", "prefetch_bandwidth", "backup_pgs", "backup_bandwidth"):
                assert any(series.startswith(f"sglang:{name}") for series in server.metrics()), name

            driver.flush()
            assert server.call("POST", "/hicache/storage-backend/clear")[0] == 200
            assert driver.ask() == (cold[0], [0, 0])
            stored(depot, 2 * pages)

            new = {"model_path": model(seed=1), "weight_version": "second", "flush_cache": True}
            status, text = server.call("POST", "/update_weights_from_disk", new)
            assert status == 200, text
            other = driver.ask()
            assert other[1] == [0, 0]
            assert other[0] != cold[0]
            until(lambda: driver.counts().get("other_weights", 0) > 0, "kvdepot is off")
            driver.flush()
            assert driver.ask() == (other[0], [0, 0]), "nothing was stored of it, and nothing of before is found"
            attach_again(server, line, driver)
            driver.flush()
            assert driver.ask() == (other[0], [0, 0])
            stored(depot, 3 * pages)
            driver.flush()
            assert driver.ask() == (other[0], [WHOLE, WHOLE])
            assert driver.counts()["hit"] == 2 * pages


def attach_again(server: Server, line: list[str], driver: Driver) -> None:
    """Detaches the backend and attaches it with a name for the new weights; SGLang refuses until it is idle."""
    until(lambda: server.call("DELETE", "/hicache/storage-backend")[0] == 200, "the backend is detached")
    driver.flush()
    extra = json.loads(line[line.index("--hicache-storage-backend-extra-config") + 1])

    def attached(**more: str) -> tuple[int, str]:
        named = json.dumps({**extra, **more})
        asked = {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config_json": named}
        return server.call("PUT", "/hicache/storage-backend", asked)

    status, text = attached()
    assert status != 200, "the new weights have no name"
    assert "set weights_version" in text
    until(lambda: attached(weights_version="of this test")[0] == 200, "the backend is attached")
    shown: dict[str, Any] = json.loads(server.call("GET", "/hicache/storage-backend")[1])
    assert shown["hicache_storage_backend"] == "dynamic"


@pytest.mark.timeout(600)
def test_a_server_with_the_linker_shows_its_counts(tmp_path: Path, home: DepotHome) -> None:
    pages = 2 * WHOLE // PAGE
    with home.start() as depot:
        server, _ = started(tmp_path, home, "KVDepotLinker")
        with server:
            driver = Driver(server, "host")
            cold = driver.ask()
            assert cold[1] == [0, 0]
            stored(depot, pages)
            driver.flush()
            assert driver.ask() == (cold[0], [WHOLE, WHOLE])
            counts = driver.counts()
            # SGLang offers what it has loaded, and the depot takes only what it does not have.
            assert (depot.stats() or {})["dump_blocks_sealed"] == pages
    assert counts["hit"] == pages
    assert counts["dumped"] >= pages
