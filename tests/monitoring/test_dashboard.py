"""Every query of the dashboard and every rule, in a real Prometheus that scrapes a depot and an engine's series."""

import math
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import until
from damage import damage
from test_alerts import ALERTS

from tools.lab.bucket import Bucket
from tools.lab.child import Child
from tools.lab.ports import LOOPBACK, free_port
from tools.monitoring.board import Query, as_sent, legend, queries, rate_interval_s, variable
from tools.monitoring.load import POOL_BLOCKS, Site, Traffic
from tools.monitoring.prometheus import SCRAPE_S, Prometheus, QueryError

pytestmark = pytest.mark.timeout(600)  # each wait has a limit of its own, and some are within others

STEP_S = 15.0
RATE_S = rate_interval_s(STEP_S, SCRAPE_S)
MODEL = "watched"


@dataclass
class Watched:
    """What Prometheus scrapes, and Prometheus."""

    site: Site
    traffic: Traffic
    prometheus: Prometheus
    depot: str
    vllm: str


@pytest.fixture(scope="module")
def watched(root: Path) -> Iterator[Watched]:
    """A depot above a disk and a bucket, with load that goes on, and an engine's series."""
    home, port = root / "scraped", free_port()
    home.mkdir()
    series = [sys.executable, "-m", "tools.monitoring.engine", str(port)]
    with (
        Bucket(home) as bucket,
        Site(home / "depot", bucket, serves=True) as site,
        Child("the engine's series", series, home / "engine.log", {}),
        Prometheus(home / "prometheus", {"depot": [site.port], "vllm": [port]}) as prometheus,
        site.engine({"model": MODEL}) as engine,
        site.guest({"model": MODEL}) as guest,
    ):
        until("both are scraped", lambda: [one["value"][1] for one in prometheus.value("up")] == ["1", "1"])
        with Traffic(engine, guest) as traffic:
            addresses = [f"{LOOPBACK}:{one}" for one in (site.port, port)]
            yield Watched(site, traffic, prometheus, *addresses)


def points(series: list[dict[str, Any]]) -> list[float]:
    """The numbers of an answer that can be drawn."""
    numbers = [float(value) for one in series for _, value in one["values"]]
    return [number for number in numbers if math.isfinite(number)]


def ask(prometheus: Prometheus, query: Query, instances: list[str] | None) -> list[dict[str, Any]]:
    now_s = time.time()
    sent = as_sent(query.expression, instances, RATE_S)
    return prometheus.values(sent, now_s - 2 * STEP_S, now_s, STEP_S)


@pytest.mark.parametrize("number", range(len(queries())), ids=[f"{one.panel}: {one.legend}" for one in queries()])
def test_every_line_of_every_panel_has_data(watched: Watched, number: int) -> None:
    """For all instances, as the board is opened, and each line has a name."""
    query = queries()[number]
    found = until("there is data", lambda: [one for one in ask(watched.prometheus, query, None) if points([one])])
    names = [legend(query, one["metric"]) for one in found]
    assert len(set(names)) == len(names), f"two lines of a panel have the same name: {names}"
    assert all(name and "{{" not in name for name in names), names


def test_the_names_of_a_panel_s_lines_differ(watched: Watched) -> None:
    for panel in {one.panel for one in queries()}:
        of_panel = [one for one in queries() if one.panel == panel]
        names = [legend(one, series["metric"]) for one in of_panel for series in ask(watched.prometheus, one, None)]
        assert len(set(names)) == len(names), (panel, names)


def test_the_numbers_are_the_depot_s(watched: Watched) -> None:
    prometheus = watched.prometheus

    def one(expression: str) -> float:
        # A series is gone while a scrape takes longer than its limit, which is a second here.
        (found,) = until(f"{expression} is scraped", lambda: prometheus.value(expression))
        return float(found["value"][1])

    now = watched.site.page("status")
    assert one("kvdepot_pool_bytes") == now["pool_bytes"]
    assert one('kvdepot_tier_max_bytes{tier="posix"}') == now["tiers"][0]["bytes_max"]
    assert prometheus.value('kvdepot_tier_max_bytes{tier="object"}') == [], "a bucket has no limit"
    # The traffic goes on, so a counter as of the next scrape is no less than in this status. Each one is awaited: one
    # that has not grown says nothing about whether the scrape came before or after the status.
    until("dumps are scraped", lambda: one("kvdepot_dump_blocks_total") >= now["dump_blocks"])
    loaded = now["top_namespaces"][0]["load_bytes"]
    until("loads are scraped", lambda: one("kvdepot_namespace_load_bytes_total") >= loaded)
    until("hits come from the disk", lambda: one('kvdepot_tier_hit_blocks_total{tier="posix"}') > 0)
    until("dumps have a rate", lambda: one(f"rate(kvdepot_dump_blocks_sealed_total[{RATE_S:.0f}s])") > 0)
    assert one("vllm:kvdepot_attached") == 1


def test_the_variable_lists_depots_and_engines_and_chooses_them(watched: Watched) -> None:
    asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable("instance")["query"]["query"])
    assert asked is not None
    listed = watched.prometheus.ask(f"label/{asked[2]}/values", match=asked[1])
    assert listed == sorted((watched.depot, watched.vllm))
    size = next(one for one in queries() if one.expression.startswith("kvdepot_pool_bytes{"))
    attached = next(one for one in queries() if "kvdepot_attached" in one.expression)

    def number_of(query: Query, instances: list[str]) -> int:
        # So that none is found because none is chosen, and not because none is scraped.
        until("there is data", lambda: ask(watched.prometheus, query, None))
        return len(ask(watched.prometheus, query, instances))

    for chosen, of_depot, of_engine in (
        ([watched.depot], 1, 0),
        ([watched.vllm], 0, 1),
        ([watched.depot, watched.vllm], 1, 1),
        # A dot is a dot.
        ([watched.depot.replace(".", "0")], 0, 0),
    ):
        # Once there are as many as there should be, there are never more.
        until("as many depots", lambda chosen=chosen, count=of_depot: count == number_of(size, chosen))
        until("as many engines", lambda chosen=chosen, count=of_engine: count == number_of(attached, chosen))


def test_a_wrong_query_is_an_error(watched: Watched) -> None:
    """So that the tests above would notice one."""
    with pytest.raises(QueryError, match="parse error"):
        watched.prometheus.value("rate(kvdepot_pool_bytes[5m]")


def test_all_rules_are_loaded_and_healthy(watched: Watched) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in watched.prometheus.ask("rules")["groups"] for rule in group["rules"]]

    until("all are evaluated", lambda: all(one["health"] != "unknown" for one in rules()))
    assert {one["health"] for one in rules()} == {"ok"}
    assert len(rules()) == len(ALERTS)


def test_damage_and_death_raise_alerts(watched: Watched) -> None:
    """The last one of the file: it ends the depot."""
    prometheus, corrupt = watched.prometheus, f"KvdepotCorruptBlocks {watched.depot}"
    assert corrupt not in prometheus.alerts()
    # Its blocks would have the disk evict those that are damaged.
    watched.traffic.stop()
    with watched.site.engine({"model": "damaged"}) as engine:
        engine.dump(range(8))
        damage(watched.site, engine)
        engine.dump(range(1000, 1000 + 2 * POOL_BLOCKS))
        engine.load(range(8))
    until("it is noticed", lambda: prometheus.alerts().get(corrupt) == "firing")
    down = f"KvdepotDown {watched.depot}"
    until("it is up", lambda: down not in prometheus.alerts())
    watched.site.process.kill()
    # It fires five minutes later, which test_alerts.py shows.
    until("its end is noticed", lambda: prometheus.alerts().get(down) == "pending")
    assert all(watched.vllm not in name for name in prometheus.alerts())
