"""The table of the installed release, with which the faces are checked, is that of its sources."""

import json
from pathlib import Path

import sglang

from tools.sglang_surface.table import ROOT, table_of_sglang
from tools.vllm_surface.sources import Release

TABLES = ROOT / "tests" / "python" / "engines" / "sglang_surface"


def test_the_table_is_up_to_date() -> None:
    version = sglang.__version__.partition("+")[0]
    assert sglang.__file__ is not None
    made = table_of_sglang(Release(Path(sglang.__file__).parents[1], "sglang"), version)
    table = json.loads((TABLES / f"{version}.json").read_text())
    assert made == table, "the faces use other names of SGLang now: run `make sglang-surface`"
