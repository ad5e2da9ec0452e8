"""A depot's `/metrics`, parsed by Prometheus' own parser."""

import http.client
import socket

import numpy as np
import pytest
from node import NodeDepot

import kvdepot

RUN_S = 120
"""Limit against a hang of the test itself, not a measure of speed."""


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=RUN_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(RUN_S)
        self.sock.connect(self.path)


def asked(path: str, page: str) -> tuple[str, str]:
    connection = UnixConnection(path)
    connection.request("GET", page)
    with connection.getresponse() as answer:
        said = (answer.status, answer.headers["Content-Type"], answer.read().decode())
    connection.close()
    assert said[0] == 200
    return said[1:]


@pytest.fixture
def metrics_of_a_depot(tmp_path):
    depot = NodeDepot(tmp_path)
    directory = tmp_path / "blocks"
    directory.mkdir()
    depot.config |= {"pipeline": "Cache|Posix", "directories": [str(directory)], "idle_exit_s": 1}
    with depot.open(kvdepot.BlockLayout(1, [4096]), {"model": "tiny"}) as store:
        store.dump([b"a"], [[np.zeros(4096, np.uint8)]]).wait().raise_for_failures()
        assert store.drain(60_000)
        yield asked(f"{depot.config['socket']}.http", "/metrics")


def test_prometheus_reads_it_and_every_series_is_described(metrics_of_a_depot):
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    kind, text = metrics_of_a_depot
    assert kind.startswith("application/openmetrics-text")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert all(family.documentation for family in families.values())
    assert all(family.type != "unknown" for family in families.values())
    dumped = families["kvdepot_dump_blocks_sealed"]
    assert dumped.type == "counter"
    assert [(sample.name, sample.value) for sample in dumped.samples] == [("kvdepot_dump_blocks_sealed_total", 1)]
    written = families["kvdepot_write_bytes"]
    assert (written.type, written.unit) == ("counter", "bytes")
    assert written.samples[0].value >= 4096
    pool = families["kvdepot_pool_bytes"]
    assert (pool.type, pool.unit, pool.samples[0].value) == ("gauge", "bytes", 1 << 26)
    tiers = {sample.labels["tier"]: sample.value for sample in families["kvdepot_tier_blocks"].samples}
    assert list(tiers.values()) == [1]
    build = families["kvdepot_build"]
    assert build.samples[0].labels["pipeline"] == "Cache|Posix"


def test_copies_and_hits_of_each_namespace_are_told(metrics_of_a_depot):
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    _, text = metrics_of_a_depot
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    copies = families["kvdepot_copy_seconds"]
    assert copies.type == "histogram"
    counts = {one.labels["operation"]: one.value for one in copies.samples if one.name.endswith("_count")}
    assert counts == {"load": 0, "dump": 1}
    sizes = {
        one.labels["operation"]: one.value
        for one in families["kvdepot_copy_bytes"].samples
        if one.name.endswith("_sum")
    }
    assert sizes == {"load": 0, "dump": 4096}
    written = [one.value for one in families["kvdepot_tier_write_block_bytes"].samples if one.name.endswith("_sum")]
    assert written == [4096]
    (asked,) = families["kvdepot_namespace_lookup_blocks"].samples
    assert (asked.value, asked.labels["facts"]) == (0, "model=tiny")
