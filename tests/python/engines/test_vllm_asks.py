"""A request's own settings: how much is loaded and stored, and what is logged about unreadable ones."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from engine_parts import BLOCK, FakeDepot, Step, pages, request, scheduler

from kvdepot.engines.vllm.asks import KEYS_TOLD_MAX, Ask, Asks
from kvdepot.engines.vllm.stats import DepotStats
from kvdepot.errors import ConfigError

NEITHER = Ask(load_tokens_max=0, store_tokens_max=0)


def read(params: Any, *tiers: str) -> tuple[Ask, dict[str, int]]:
    stats = DepotStats()
    return Asks(tiers, stats).read(params), stats.data


@pytest.mark.parametrize(
    ("params", "ask"),
    [
        (None, Ask()),
        ({}, Ask()),
        ({"max_load_tokens": 100, "max_offload_tokens": 50}, Ask(100, 50)),
        ({"max_load_tokens": 0}, Ask(load_tokens_max=0)),
        ({"max_load_tokens": None, "kv_load_tiers": None, "kvdepot.no_store": None}, Ask()),
        ({"kvdepot.no_load": True, "max_load_tokens": 100}, Ask(load_tokens_max=0)),
        ({"kvdepot.no_store": True}, Ask(store_tokens_max=0)),
        ({"kvdepot.no_store": False, "kvdepot.no_load": False}, Ask()),
        ({"kvdepot.priority": "low"}, Ask(priority="low")),
        ({"kvdepot.priority": "high", "kvdepot.no_load": True}, Ask(load_tokens_max=0, priority="high")),
        ({"kvdepot.priority": "normal"}, Ask()),
        ({"kvdepot.priority": None}, Ask()),
    ],
)
def test_what_can_be_asked(params: Any, ask: Ask) -> None:
    assert read(params, "Posix") == (ask, {})


@pytest.mark.parametrize(
    ("params", "ask"),
    [
        ("no_store", NEITHER),
        ([], NEITHER),
        ({"max_load_tokens": -1}, Ask(load_tokens_max=0)),
        ({"max_load_tokens": "7"}, Ask(load_tokens_max=0)),
        ({"max_load_tokens": 1.5}, Ask(load_tokens_max=0)),
        ({"max_offload_tokens": True}, Ask(store_tokens_max=0)),
        ({"max_offload_tokens": {"tokens": 5}}, Ask(store_tokens_max=0)),
        ({"kvdepot.no_load": 1}, Ask(load_tokens_max=0)),
        ({"kvdepot.no_store": "false"}, Ask(store_tokens_max=0)),
        ({"kv_load_tiers": {"medium": "CPU"}}, Ask(tiers=())),
        ({"kv_load_tiers": ["CPU"]}, Ask(tiers=())),
        ({"kv_load_tiers": [{"medium": "TAPE"}]}, Ask(tiers=())),
        ({"kv_load_tiers": [{"medium": 7}]}, Ask(tiers=())),
        ({"kv_load_tiers": [{"speed": "fast"}]}, Ask(tiers=())),
        ({"kvdepot.priority": 3}, Ask(priority="low")),
        ({"kvdepot.priority": "urgent"}, Ask(priority="low")),
        ({"kvdepot.priority": ["high"]}, Ask(priority="low")),
    ],
)
def test_what_cannot_be_read_is_taken_strictly_and_told_once(
    params: Any, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    stats = DepotStats()
    asks = Asks(["Posix"], stats)
    assert [asks.read(params), asks.read(params)] == [ask, ask]
    assert stats.data == {"params_malformed": 2}
    assert len(caplog.records) == 1
    assert caplog.records[0].levelname == "WARNING"


ALL = ("Slab", "Posix", "Remote", "Object", "Dax", "Mooncake", "Fake")


@pytest.mark.parametrize(
    ("tiers", "filters", "allowed"),
    [
        (("Posix",), [], ()),
        (("Posix",), [{}], None),
        (("Posix",), [{"medium": "storage"}], None),
        (("Posix",), [{"medium": "CPU"}], ()),
        (("Posix",), [{"medium": "CPU"}, {"medium": "STORAGE", "locality": "LOCAL"}], None),
        (("Remote",), [{"locality": "LOCAL"}], ()),
        (("Remote",), [{"medium": "CPU", "locality": "REMOTE"}], None),
        (("Slab", "Object"), [{"locality": "LOCAL"}], ("Slab",)),
        (("Slab", "Object"), [{"locality": "remote"}], ("Object",)),
        (("Slab", "Object"), [{"locality": "REMOTE"}, {"locality": "LOCAL"}], None),
        (("Dax", "Posix"), [{"medium": "CPU", "locality": "LOCAL"}], ("Dax",)),
        (("Dax", "Mooncake"), [{"medium": "STORAGE"}], ("Mooncake",)),
        (ALL, [{"locality": "LOCAL"}], ("Slab", "Posix", "Dax", "Fake")),
        (ALL, [{"locality": "REMOTE"}], ("Posix", "Remote", "Object", "Mooncake", "Fake")),
        (ALL, [{"medium": "CPU"}], ("Remote", "Dax", "Mooncake", "Fake")),
        ((), [], None),
    ],
)
def test_filters_choose_tiers(tiers: tuple[str, ...], filters: Any, allowed: tuple[str, ...] | None) -> None:
    """What a tier does not say matches every filter."""
    assert read({"kv_load_tiers": filters}, *tiers) == (Ask(tiers=allowed), {})


LOCAL = [{"locality": "LOCAL"}]


def test_a_claim_is_loaded_from_the_tiers_of_its_request() -> None:
    depot = FakeDepot(units=9, settled=False)
    side = scheduler(depot, wait_ms=10**6, tiers=("Slab", "Remote"))
    assert side.match(request("free", 4 * BLOCK), 0) == (None, False)
    assert side.match(request("near", 4 * BLOCK, kv_load_tiers=LOCAL), 0) == (None, False)
    assert side.match(request("strict", 4 * BLOCK, kv_load_tiers=[]), 0) == (3 * BLOCK, False)
    assert [claim.tiers for claim in depot.claims] == [None, ("Slab",), ()]


def test_a_load_from_chosen_tiers_begins_when_all_its_blocks_are_there() -> None:
    """A load looks in every tier for a block that does not arrive."""
    found = []
    for params in ({}, {"kv_load_tiers": LOCAL}):
        depot = FakeDepot(units=9, settled=False)
        side = scheduler(depot, wait_ms=10**6, tiers=("Slab", "Remote"))
        req = request("r", 4 * BLOCK, **params)
        side.match(req, 0)
        depot.claims[0].on_their_way = (3, 3, 0, 3, 0)
        side.build_step(Step().output())
        found.append(side.match(req, 0)[0])
    assert found == [3 * BLOCK, None]


class OtherPipeline(FakeDepot):
    """A depot that was started with other tiers than its engine's configuration has."""

    def claim(self, groups: Any, hashes: Any, *, tiers: Any = None, **how: Any) -> Any:
        if tiers:
            raise ConfigError("the depot's pipeline has no such tier (tier=Slab, pipeline=Cache)")
        return super().claim(groups, hashes, tiers=tiers, **how)


def test_tiers_that_the_depot_does_not_have_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    depot = OtherPipeline(units=9)
    side = scheduler(depot, tiers=("Slab", "Remote"))
    for name in ("a", "b"):
        assert side.match(request(name, 4 * BLOCK, kv_load_tiers=LOCAL), 0) == (3 * BLOCK, False)
    assert [claim.tiers for claim in depot.claims] == [(), ()]
    assert (
        caplog.text.count("kv_load_tiers of a request cannot be followed: the depot's pipeline has no such tier") == 1
    )


def test_unknown_keys_are_named_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Other connectors have keys of their own, and clients make mistakes."""
    stats = DepotStats()
    asks = Asks(["Posix"], stats)
    params = {"do_remote_prefill": True, "kvdepot.nostore": True, "kvdepot.deadline": 3}
    assert [asks.read(params) for _ in range(3)] == [Ask()] * 3
    assert stats.data == {"params_unknown": 9}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert "'do_remote_prefill'" in said[0]
    assert "did you mean kvdepot.no_store?" in said[1]


def test_clients_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    stats = DepotStats()
    asks = Asks(["Posix"], stats)
    asks.read({f"key {number}" + "x" * 10_000: 1 for number in range(10 * KEYS_TOLD_MAX)})
    assert len(caplog.records) == KEYS_TOLD_MAX
    assert max(len(record.getMessage()) for record in caplog.records) < 300
    assert stats.data == {"params_unknown": 10 * KEYS_TOLD_MAX}


def test_the_blocks_of_each_request_are_stored_with_its_priority() -> None:
    side = scheduler(FakeDepot(units=0))
    for name, first, priority in (("a", 1, "low"), ("b", 3, None), ("c", 5, "high")):
        params = {} if priority is None else {"kvdepot.priority": priority}
        req = request(name, 2 * BLOCK, **params)
        side.match(req, 0)
        side.allocated(req, pages([first, first + 1]), 0)
    step = Step()
    for name, first in (("a", 1), ("b", 3), ("c", 5)):
        step.starts(name, 0, 2 * BLOCK, [first, first + 1])
    saves = side.build_step(step.output()).saves[0]
    found = {priority: blocks.pages for priority, blocks in saves.by_priority()}
    assert found == {"low": [1, 2], "normal": [3, 4], "high": [5, 6]}


def hit(limit: int, **values: Any) -> tuple[int | None, FakeDepot]:
    depot = FakeDepot(units=9)
    side = scheduler(depot, **values)
    return side.match(request("r", 8 * BLOCK, max_load_tokens=limit), 2 * BLOCK)[0], depot


def test_a_request_loads_no_more_than_it_asks_for() -> None:
    """Beyond vLLM's own hit, in full blocks; the claim has that length, since windows then need other blocks."""
    tokens, depot = hit(3 * BLOCK + 5)
    assert tokens == 3 * BLOCK
    assert (depot.claims[0].skip, depot.claims[0].limit) == (2, 5)
    assert hit(100 * BLOCK)[0] == 5 * BLOCK
    assert hit(3 * BLOCK, hit_ratio=0.5)[0] == 2 * BLOCK


@pytest.mark.parametrize("params", [{"max_load_tokens": BLOCK - 1}, {"kvdepot.no_load": True}, {"max_load_tokens": -3}])
def test_a_request_that_may_not_load_is_not_looked_up(params: dict[str, Any]) -> None:
    depot = FakeDepot(units=9)
    side, req = scheduler(depot), request("r", 4 * BLOCK, **params)
    assert side.match(req, 0) == (0, False)
    assert depot.claims == []
    side.allocated(req, pages([1, 2, 3, 4]), 0)
    assert side.stats.data["misses"] == {"asked": 1}
    step = side.build_step(Step().starts("r", 0, 4 * BLOCK, [1, 2, 3, 4]).output())
    assert step.saves[0].pages == [1, 2, 3, 4], "what may not be loaded may be stored"


def saved(tokens: int, **params: Any) -> list[int]:
    """Returns saved pages of a request whose prompt has two blocks, and its answer two more."""
    side, req = scheduler(FakeDepot()), request("r", 2 * BLOCK, known=4 * BLOCK, **params)
    side.match(req, 0)
    side.allocated(req, pages([1, 2, 3, 4]), 0)
    found = []
    step = Step().starts("r", 0, 2 * BLOCK, [1, 2, 3, 4])
    for computed in range(2 * BLOCK, tokens + 1):
        found += [page for blocks in side.build_step(step.output()).saves.values() for page in blocks.pages]
        step = Step().goes_on("r", computed, 1, ([1, 2, 3, 4],))
    return found


@pytest.mark.parametrize(
    ("params", "stored"),
    [
        ({}, [1, 2, 3, 4]),
        ({"max_offload_tokens": 3 * BLOCK + 15}, [1, 2, 3]),
        ({"max_offload_tokens": BLOCK}, [1]),
        ({"max_offload_tokens": BLOCK - 1}, []),
        ({"kvdepot.no_store": True}, []),
        ({"max_offload_tokens": "all"}, []),
    ],
)
def test_a_request_stores_no_more_than_it_asks_for(params: dict[str, Any], stored: list[int]) -> None:
    """Counted from its beginning, prompt and answer."""
    assert saved(4 * BLOCK, **params) == stored


def test_what_another_connector_loaded_for_it_is_not_stored_either() -> None:
    side, req = scheduler(FakeDepot()), request("r", 4 * BLOCK, **{"kvdepot.no_store": True})
    side.match(req, 0)
    side.allocated(req, pages([1, 2, 3, 4]), 0)
    side.build_step(Step().starts("r", 2 * BLOCK, 2 * BLOCK, [1, 2, 3, 4]).output())
    assert not side.has_late_saves()


def test_requests_of_engines_without_the_field_are_read() -> None:
    side, req = scheduler(FakeDepot(units=9)), request("r", 4 * BLOCK)
    del req.kv_transfer_params
    assert side.match(req, 0) == (3 * BLOCK, False)


def test_the_documented_request_is_understood() -> None:
    """It needs a server; the other tests here and `tests/engine/test_asks.py` show what the keys do."""
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text("utf-8")
    (command,) = re.findall(r"^```\n(curl .*?)^```$", page, re.MULTILINE | re.DOTALL)
    words = shlex.split(command)
    body = json.loads(words[words.index("-d") + 1])
    assert read(body["kv_transfer_params"], "Posix") == (Ask(load_tokens_max=4096, store_tokens_max=0), {})
