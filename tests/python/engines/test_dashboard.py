"""Dashboard and alert rules query series that depots and engines export, and no others; all are documented."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvdepot.cli.status_door import read_page
from kvdepot.engines.vllm.measures import MEASURES, Kind

ROOT = Path(__file__).resolve().parents[3]
BOARD = ROOT / "deploy" / "grafana" / "kvdepot.json"
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
PAGE = ROOT / "docs" / "monitoring.md"
SERVER = ROOT / "crates" / "kvdepot-server" / "src"
STATS = ROOT / "crates" / "kvdepot-depot" / "src" / "stats.rs"
NAME = re.compile(r"(?:vllm:)?kvdepot_[a-z0-9_]+")
LONG_S = 120


def of_engines() -> set[str]:
    ends = {Kind.COUNTER: ("_total",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
    return {f"vllm:kvdepot_{one.name}{end}" for one in MEASURES.values() for end in ends[one.kind]}


@pytest.fixture(scope="module")
def of_depots() -> set[str]:
    """Returns the series of a real depot with a disk, and those that other depots have."""
    with tempfile.TemporaryDirectory(prefix="kvd") as directory:
        (Path(directory) / "blocks").mkdir()
        core: dict[str, Any] = {"pipeline": "Cache|Posix", "pool_bytes": 16 << 20}
        core["posix"] = {"directories": [f"{directory}/blocks"], "capacity_bytes": 1 << 30}
        socket = f"{directory}/depot.sock"
        command = [sys.executable, "-m", "kvdepot", "serve", "--core-json", json.dumps(core), "--socket", socket]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            assert any("serving " in line for line in process.stderr)
            page = read_page(socket, "/metrics")
            assert page is not None
            text = page.decode()
        finally:
            process.terminate()
            assert process.wait(LONG_S) == 0
            assert process.stderr is not None
            process.stderr.close()
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    return names | of_some_depots() | of_wire_doors()


def series(kind: str, name: str) -> str:
    return f"kvdepot_{name}{'_total' if kind == 'Counter' else ''}"


def of_some_depots() -> set[str]:
    """Returns the series that `series.rs` and `stats.rs` name, those that only some depots have, too."""
    (gauges,) = re.findall(r"GAUGES_HELP: .*?= &\[\n(.*?)^\];", STATS.read_text(), re.DOTALL | re.MULTILINE)
    names = {series("Gauge", name) for name in re.findall(r'^    \("(\w+)", "', gauges, re.MULTILINE)}
    for function in (SERVER / "http" / "series.rs").read_text().split("fn "):
        names |= {series(*one) for one in re.findall(r'Kind::(Counter|Gauge),\s*"(\w+)"', function)}
        # Tables whose rows share a kind.
        for kind in re.findall(r"write\(encoder, Kind::(Counter|Gauge), name", function):
            rows = re.findall(r'\(\s*"((?:tier|object|pool_region)_\w+)",\s*"', function)
            names |= {series(kind, name) for name in rows}
    assert {"kvdepot_failures_total", "kvdepot_remote_server_up", "kvdepot_tier_shared_depots"} <= names
    assert {"kvdepot_tier_compressed_blocks_total", "kvdepot_object_timeouts_total"} <= names
    return names


def of_wire_doors() -> set[str]:
    source = (SERVER / "wire" / "counters.rs").read_text()
    plain = re.findall(r'registry\.register\(\s*"(\w+)"', source)
    in_bytes = re.findall(r'registry\.register_with_unit\(\s*"(\w+)",[^;]*Unit::Bytes', source)
    kinds = {name: "Gauge" if f"{name}: Gauge" in source else "Counter" for name in plain}
    kinds |= {f"{name}_bytes": "Counter" for name in in_bytes}
    timed = re.findall(r'registry\.register_with_unit\(\s*"(\w+)",[^;]*Unit::Seconds', source)
    parts = {f"kvdepot_wire_{name}_seconds_{part}" for name in timed for part in ("bucket", "sum", "count")}
    return {series(kind, f"wire_{name}") for name, kind in kinds.items()} | parts


def expressions() -> list[tuple[str, str]]:
    board = json.loads(BOARD.read_text("utf-8"))
    found = [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel["targets"]]
    rules = yaml.safe_load(RULES.read_text("utf-8"))
    return found + [(rule["alert"], rule["expr"]) for group in rules["groups"] for rule in group["rules"]]


def test_every_series_that_is_asked_for_is_exported(of_depots: set[str]) -> None:
    exported = of_depots | of_engines()
    assert "kvdepot_pool_bytes" in exported
    asked = {name for _, text in expressions() for name in NAME.findall(text)}
    assert len(asked) > 30
    assert asked - exported == set(), "neither a depot nor an engine exports them"


def test_every_series_of_a_depot_is_documented_with_its_type_and_a_use(of_depots: set[str]) -> None:
    rows = re.findall(
        r"^\| `(kvdepot_\w+)(?:\{[\w,]+\})?` \| (\w+) \| (.+) \| (.+) \|$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    documented = {name: kind for name, kind, *_ in rows}
    assert len(rows) == len(documented)
    histograms = {name.removesuffix("_bucket") for name in of_depots if name.endswith("_bucket")}
    assert {name for name, kind in documented.items() if kind == "histogram"} == histograms
    parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    of_depots = of_depots - parts | histograms
    assert of_depots - set(documented) == set(), "add them to docs/monitoring.md"
    assert set(documented) - of_depots == set(), "no depot exports them"
    for name, kind in documented.items():
        if name in histograms:
            continue
        assert kind == ("info" if name.endswith("_info") else "counter" if name.endswith("_total") else "gauge"), name


def test_every_alert_is_documented() -> None:
    named = re.findall(r"^\| `(Kvdepot\w+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    rules = yaml.safe_load(RULES.read_text("utf-8"))
    assert sorted(named) == sorted(rule["alert"] for group in rules["groups"] for rule in group["rules"])


def test_expressions_are_whole_and_panels_do_not_overlap() -> None:
    for title, text in expressions():
        for left, right in ("()", "[]", "{}"):
            assert text.count(left) == text.count(right), title
        assert text.count('"') % 2 == 0, title
    board = json.loads(BOARD.read_text("utf-8"))
    cells = [
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert {"kvdepot_pool_bytes", "vllm:kvdepot_attached"} <= set(NAME.findall(json.dumps(board["templating"])))


def test_counters_are_asked_for_as_rates_and_gauges_are_not() -> None:
    for title, text in expressions():
        for name in NAME.findall(text):
            counted = name.endswith(("_total", "_bucket"))
            assert bool(re.search(rf"(rate|increase)\({re.escape(name)}\b", text)) == counted, (title, name)


def value(expression: str, rates: dict[str, float]) -> float:
    """Computes an expression of rates and numbers, without its comparison."""
    text = re.sub(r"rate\((\w+)\{?[^)]*\)", lambda found: str(rates[found[1]]), expression.split(">")[0])
    assert re.fullmatch(r"[\d.\s()+*/-]+", text), text
    return float(eval(text))


def test_blocks_that_loads_asked_for_include_those_that_they_missed() -> None:
    """A depot counts both in `load_blocks`: 6 of 100 is 6 %, and 94 were loaded."""
    rates = {"kvdepot_load_blocks_total": 100.0, "kvdepot_load_blocks_missed_total": 6.0}
    whole = dict(expressions())
    assert value(whole["KvdepotLoadsMiss"], rates) == pytest.approx(0.06)
    targets = [one for panel in json.loads(BOARD.read_text("utf-8"))["panels"] for one in panel["targets"]]
    loaded = [one["expr"] for one in targets if "kvdepot_load_blocks_total" in one["expr"]]
    assert [value(one, rates) for one in loaded] == [94.0]


def test_every_alert_says_what_to_do() -> None:
    for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("info", "warning", "critical")
            assert rule["annotations"]["summary"]
            assert len(rule["annotations"]["description"]) > 30, rule["alert"]
