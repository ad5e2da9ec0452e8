"""Real SGLang on CPU with kvdepot as its external linker, without a host pool of its own (P1, P3, P4)."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import model, settings
from test_engine import NOTHING, PROMPT, WHOLE, said_since, stored, until

from tools.lab.depot import DepotHome
from tools.sglang.engine import Engine, depot_linker

PAGES = sum(WHOLE) // 32


@pytest.mark.timeout(600)
def test_answers_are_the_same_whatever_is_killed(tmp_path: Path, home: DepotHome) -> None:
    linker = depot_linker(settings(home))
    seen: dict[str, Any] = {}
    with home.start() as depot, Engine(tmp_path / "first", model(), linker) as sglang:
        seen["cold"] = sglang.ask(**PROMPT)
        stored(depot, PAGES)
        seen["on the device"] = sglang.ask(**PROMPT)
        sglang.flush()
        seen["flushed"] = sglang.ask(**PROMPT)
        depot.wait_until_clean(60)
        # Both are killed here.
    with Engine(tmp_path / "second", model(), linker) as sglang:
        with home.start() as depot:
            seen["restarted"] = sglang.ask(**PROMPT)
            sglang.flush()
            depot.kill()
            seen["depot dead"] = sglang.ask(**PROMPT)
            sglang.flush()
        with home.start() as depot:
            until(lambda: "attached to the depot" in said_since(sglang, "the depot was lost"), "the depot is found")
            seen["depot back"] = sglang.ask(**PROMPT)
            until(lambda: (depot.stats() or {}).get("pool_leased_bytes") == 0, "nothing is held any more")
    print(json.dumps(seen))
    assert [one["tokens"] for one in seen.values()] == [seen["cold"]["tokens"]] * len(seen)
    assert {name: one["from_depot"] for name, one in seen.items()} == {
        "cold": NOTHING,
        "on the device": NOTHING,
        "flushed": WHOLE,
        "restarted": WHOLE,
        "depot dead": NOTHING,
        "depot back": WHOLE,
    }
