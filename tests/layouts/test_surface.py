"""The table of the installed release, from which the connector is checked against it, is that of its sources."""

import json
from pathlib import Path

import vllm

from tools.vllm_surface.sources import Release
from tools.vllm_surface.table import table_of
from tools.vllm_surface.used import ROOT, used_by_connector

TABLES = ROOT / "tests" / "python" / "engines" / "vllm_surface"


def test_the_table_is_up_to_date() -> None:
    version = vllm.__version__.partition("+")[0]
    table = TABLES / f"{version.rpartition('.')[0]}.json"
    made = table_of(Release(Path(vllm.__file__).parents[1]), version, used_by_connector())
    assert made == json.loads(table.read_text()), "the connector uses other names of vLLM now: run `make vllm-surface`"
