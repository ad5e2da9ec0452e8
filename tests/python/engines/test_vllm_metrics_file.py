"""``metrics_config_path``: the series have the names, buckets and prefix of the file."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot.config import load_config
from kvdepot.config.metrics_file import read_metrics_file
from kvdepot.errors import ConfigError

FILE = """\
log_interval: 5
multiproc_dir: "/vllm-workspace"
metric_prefix: "ucm:"
histogram_max_length: 10000
counter:
  - name: "load_bytes_total"
    documentation: "Total bytes loaded"
gauge:
  - name: "cache_lookup_hit_rate"
    documentation: "Hit rate"
    multiprocess_mode: "livemostrecent"
histogram:
  - name: "load_duration"
    documentation: "Time to load (ms)"
    buckets: [0, 50, 100]
  - name: "load_speed"
    documentation: "Speed (GB/s)"
    buckets: [0.5, 1, 2]
  - name: "layerwise_save_tail_total_ms"
    documentation: "not ours"
    buckets: [1]
"""


class Made:
    """A series as `prometheus_client` creates it, and the values it was given."""

    all: dict[str, "Made"]
    taken: tuple[str, ...] = ()

    def __init__(self, **about: Any) -> None:
        if about["name"] in Made.taken:
            raise ValueError(f"Duplicated timeseries: {about['name']}")
        self.about, self.seen = about, []
        Made.all[about["name"]] = self

    def labels(self, *values: object) -> "Made":
        self.values = values
        return self

    def observe(self, value: float) -> None:
        self.seen.append(value)

    inc = observe


def vllm_config(extra: dict[str, Any] | None, connector: str = "UCMConnector") -> Any:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra))


def made(config: Any) -> Any:
    from kvdepot.engines.vllm.measures import Kind
    from kvdepot.engines.vllm.seed_series import seed_series

    Made.all = {}
    how: dict[str, Any] = {"labelnames": ["engine"], "engines": {0: ["0"]}}
    classes = {Kind.HISTOGRAM: Made, Kind.COUNTER: Made}
    return seed_series(config, logging.getLogger("test"), classes=classes, **how)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.yaml"
    path.write_text(FILE)
    return path


def test_series_have_the_files_names_buckets_and_words(file, caplog):
    series = made(vllm_config({"metrics_config_path": str(file)}))
    assert set(Made.all) == {"ucm:load_bytes_total", "ucm:load_duration", "ucm:load_speed"}
    assert Made.all["ucm:load_duration"].about == {
        "name": "ucm:load_duration",
        "documentation": "Time to load (ms)",
        "labelnames": ["engine"],
        "buckets": (0, 50, 100),
    }
    [warned] = [record.getMessage() for record in caplog.records]
    assert "cache_lookup_hit_rate, layerwise_save_tail_total_ms" in warned
    series.add("load_bytes", 7, 0)
    series.add("load_seconds", [0.25, 0.5], 0)
    series.add("load_bytes_per_second", [3e9], 0)
    series.add("dump_seconds", [1.0], 0)
    assert {name: one.seen for name, one in Made.all.items()} == {
        "ucm:load_bytes_total": [7],
        "ucm:load_duration": [250, 500],
        "ucm:load_speed": [3],
    }


def test_a_name_that_is_taken_costs_one_series_and_not_the_server(file, caplog, monkeypatch):
    file.write_text(FILE.replace("ucm:", "vllm:kvdepot_"))
    monkeypatch.setattr(Made, "taken", ("vllm:kvdepot_load_bytes_total",))
    series = made(vllm_config({"metrics_config_path": str(file)}))
    assert set(Made.all) == {"vllm:kvdepot_load_duration", "vllm:kvdepot_load_speed"}
    assert "1 names have no series, use another metric_prefix: vllm:kvdepot_load_bytes_total (Dup" in caplog.text
    series.add("load_bytes", 7, 0)
    series.add("load_seconds", [0.25], 0)
    assert Made.all["vllm:kvdepot_load_duration"].seen == [250]


def test_of_several_connectors_ours_names_it(file):
    ours = {"kv_connector": "KVDepotConnector", "kv_connector_extra_config": {"metrics_config_path": str(file)}}
    other = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"spec_name": "x"}}
    assert made(vllm_config({"connectors": [other, ours]}, "MultiConnector")) is not None
    assert made(vllm_config({"connectors": [other]}, "MultiConnector")) is None
    assert made(vllm_config(None)) is None


def test_a_mistake_costs_the_series_and_not_the_engine(file, caplog):
    file.write_text("counters: []\n")
    assert made(vllm_config({"metrics_config_path": str(file)})) is None
    assert "did you mean counter?" in caplog.text


def test_the_connector_s_options_find_it_at_the_start(file):
    from kvdepot.engines.vllm.options import read_options

    read_options({"metrics_config_path": str(file)})
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        read_options({"metrics_config_path": f"{file}.not"})


def test_a_depot_does_not_need_the_engines_file(tmp_path):
    assert load_config({"metrics_config_path": str(tmp_path / "none")}).metrics_config_path == str(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("metric_prefix: 'a b'", ":1: metric_prefix: must be letters"),
        ("counter: {name: a}", ":1: counter: must be a list of series"),
        ("counter:\n  - load_bytes_total", ":2: counter[0]: must be a mapping"),
        ("counter:\n  - name: 7", "counter[0].name: must be letters"),
        ("counter:\n  - {name: a, help: b}", ":2: counter[0].help: unknown key"),
        ("counter:\n  - name: a\n  - name: a", ":3: counter[1].name: is named twice"),
        ("counter:\n  - {name: a, buckets: [1]}", "counter[0].buckets: only a histogram has buckets"),
        ("histogram:\n  - {name: a}", "histogram[0].buckets: must be ascending numbers"),
        ("histogram:\n  - {name: a, buckets: [2, 1]}", "histogram[0].buckets: must be ascending numbers, got [2, 1]"),
        ("histogram:\n  - {name: a, buckets: [1, 1]}", "must be ascending numbers"),
        ("histogram:\n  - {name: a, buckets: [one]}", "must be ascending numbers"),
        ("gauge:\n  - {name: a, documentation: 7}", "gauge[0].documentation: must be a text"),
    ],
)
def test_every_mistake_is_named(file, text, problem):
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_metrics_file(str(file))
    assert problem in str(raised.value)
