"""Commands that cannot be run are checked as far as possible; snippets in Python and YAML are run and read."""

import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from collect import ROOT, documented_commands, snippets
from table import DRY, NOT_RUN, VLLM_OFFLOADING, VLLM_SERVE

import kvdepot
from kvdepot.config import load_config
from kvdepot.engines import vllm_plugin
from tools.demo.__main__ import report
from tools.demo.client import Answer
from tools.demo.report import COLD, RESTARTED, WARM, Phase, conclude

RUN_S = 60
# Many commands, each with that limit.
pytestmark = pytest.mark.timeout(600)
TOKEN = "/etc/kvdepot/token"


def engine_commands():
    return sorted(one for one in documented_commands() if one.startswith(VLLM_SERVE))


def test_python_snippets_run(tmp_path):
    # InfiniStore's client has an environment of its own: tests/wire/test_documented_client.py runs it.
    found = [one for one in snippets("python") if "import ctypes, infinistore" not in one.text]
    assert found
    for one in found:
        environ = {
            **os.environ,
            "HOME": str(tmp_path),
            "XDG_DATA_HOME": str(tmp_path),
            "XDG_RUNTIME_DIR": str(tmp_path),
        }
        subprocess.run([sys.executable, "-c", one.text], check=True, cwd=tmp_path, env=environ, timeout=RUN_S)


def test_configuration_examples_are_right(tmp_path):
    """Reads a block that continues an earlier one of its page together with it."""
    before: dict[str, dict] = {}
    found = snippets("yaml")
    assert found
    for number, one in enumerate(found):
        keys = yaml.safe_load(one.text)
        if not keys.keys() & {"pipeline", "ucm_connectors"}:
            keys = before[one.page] | keys
        before[one.page] = keys
        # Sizes are those of a large node.
        keys = {**keys, **{key: 0.1 for key in ("pool_gb", "posix_capacity_gb") if key in keys}}
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(keys).replace("/etc/kvdepot", str(tmp_path)).replace("/mnt", str(tmp_path)))
        checked = subprocess.run(
            [sys.executable, "-m", "kvdepot", "config", "check", file], capture_output=True, text=True, timeout=RUN_S
        )
        assert checked.returncode == 0, (one.page, checked.stderr)


def test_there_are_engine_commands():
    assert engine_commands()


@pytest.mark.parametrize("command", engine_commands())
def test_the_engine_is_started_with_what_the_connector_reads(command):
    """`make demo` starts the same command with its own model; this is the documented line itself."""
    words = shlex.split(command)
    outer = json.loads(words[words.index("--kv-transfer-config") + 1])
    below = outer.get("kv_connector_extra_config", {}).get("connectors", [outer])
    (transfer,) = (one for one in below if one["kv_connector"] in vllm_plugin.NAMES)
    assert set(transfer) <= {"kv_connector", "kv_role", "kv_connector_extra_config"}
    text = (ROOT / "tools" / "demo" / "server.py").read_text()
    assert all(f'"{key}": "{transfer[key]}"' in text for key in set(transfer) - {"kv_connector_extra_config"})
    # The key that names the file; `make demo` starts an engine with the same one. Lite mode has its keys in the line.
    extra = transfer.get("kv_connector_extra_config", {})
    if extra.get("use_lite"):
        assert load_config({**extra, "pool_gb": 0.1}, owns_pool=False).use_lite
    else:
        assert set(extra) <= {"config"}
    assert '"kv_connector_extra_config": {"config": str(config)}' in text


def test_vllm_s_own_offloading_is_started_with_what_the_tier_reads():
    """`tests/engine/test_offloading.py` starts an engine with the same line; here its words are what we have."""
    (command,) = (one for one in documented_commands() if one.startswith(VLLM_OFFLOADING))
    words = shlex.split(command)
    (tier,) = json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]["secondary_tiers"]
    assert tier["type"] in importlib.import_module(tier["module_path"]).__all__
    assert set(tier) == {"type", "module_path", "config"}


@pytest.mark.parametrize("target", DRY)
def test_targets_that_are_not_run_are_right_for_make(target):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True, env=environ, timeout=RUN_S)


def test_no_recipe_ends_a_pipe_before_its_writer():
    """`grep -q` and `head` close the pipe, and the writer then fails now and then: make's shell has pipefail."""
    early = re.compile(r"\|\s*(head\b|grep\s+(-\w*[qm]|--quiet|--silent|--max-count))")
    recipes = (ROOT / "Makefile").read_text().splitlines()
    assert [line for line in recipes if early.search(line)] == []


def test_files_that_commands_for_others_name_exist():
    named = [word for one in NOT_RUN for word in shlex.split(one) if word.startswith("deploy/")]
    assert named
    assert all((ROOT / word).exists() for word in named)


def test_the_demo_prints_what_came_out(capsys):
    """CI runs it with --json only: each run starts vLLM twice."""
    tokens = (5, 6)
    phases = [
        Phase(COLD, (Answer(2.0, tokens),), hit_tokens=0, prompt_tokens=96, load_average=1.5),
        Phase(WARM, (Answer(0.5, tokens),), hit_tokens=64, prompt_tokens=96, load_average=1.5),
        Phase(RESTARTED, (Answer(1.0, (5, 7)),), hit_tokens=32, prompt_tokens=96, load_average=1.5),
    ]
    asked = argparse.Namespace(prompts=1, tokens=96, dtype="float32", settings=[], json=False)
    report(phases, asked, Path("/blocks"))
    lines = capsys.readouterr().out.splitlines()
    (cold,) = (line for line in lines if COLD in line)
    (warm,) = (line for line in lines if WARM in line)
    (restarted,) = (line for line in lines if RESTARTED in line)
    assert "2,000 ms" in cold
    assert all(part in warm for part in ("500 ms", "2 of 3", "4.0×", "identical"))
    assert all(part in restarted for part in ("1,000 ms", "1 of 3", "2.0×", "DIFFERS"))
    assert any("1 prompts of 96 tokens, float32" in line for line in lines)
    said = []
    progress = SimpleNamespace(note=said.append, failure=said.append)
    assert conclude(phases, progress) == 1
    assert said == [
        f"! {RESTARTED}: 1 of 3 blocks were hit, though all were stored",
        f"{RESTARTED}: other output than cold",
    ]
    assert conclude(phases[:2], progress) == 0


def test_pages_for_users_say_network_listener_and_local_socket():
    """`door` is a word of the code and of design.md."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"]
    found = [page.name for page in pages if re.search(r"(?<!-)\bdoors?\b", page.read_text("utf-8"), re.IGNORECASE)]
    assert set(found) <= {"design.md", "benchmarks.md"}


def test_lite_mode_has_a_launch_line():
    assert sum("use_lite" in one for one in engine_commands()) >= 1


VERSIONS = {
    "protocol of the local socket": ("crates/kvdepot-depot/src/message.rs", "PROTOCOL_VERSION: u32"),
    "hand-over of the pool (`--take-over`)": ("crates/kvdepot-depot/src/handover.rs", "HAND_OVER_VERSION: u32"),
    "record of a kept pool (`pool_keep_s`)": ("crates/kvdepot-depot/src/ledger/layout.rs", "VERSION: u64"),
    "protocol of the network listener": ("crates/kvdepot-wire/src/own/handshake.rs", "VERSION: u32"),
    "`namespace.json` (Posix)": ("crates/kvdepot-tier/src/format.rs", "FORMAT_VERSION: u32"),
    "blocks (Posix, Object)": ("crates/kvdepot-tier/src/format.rs", "FORMAT_VERSION: u32"),
    "packs of small blocks (Object)": ("crates/kvdepot-tier/src/object/packs/codec.rs", "VERSION: u32"),
    "media of the Slab tier": ("crates/kvdepot-tier/src/slab/superblock.rs", "VERSION: u32"),
    "media of the Dax tier": ("crates/kvdepot-tier/src/dax/layout.rs", "VERSION: u32"),
    "`.kvdepot-index`": ("crates/kvdepot-tier/src/posix/checkpoint.rs", "VERSION: u32"),
    "`.kvdepot-total`": ("crates/kvdepot-tier/src/posix/total.rs", "VERSION: u32"),
    "`.kvdepot-ledger` (`posix_capacity_shared`)": ("crates/kvdepot-tier/src/posix/ledger/codec.rs", "VERSION: u32"),
    "blocks on InfiniStore's servers": ("crates/kvdepot-tier/src/remote/value.rs", "VERSION: u32"),
    "exports": ("python/kvdepot/stored/export.py", "VERSION"),
}


def test_versions_of_formats_and_protocols_are_those_of_the_source():
    section = (ROOT / "docs" / "operate.md").read_text("utf-8").split("## Upgrade\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| ([^|]+) \| (\d+) \|", section, re.MULTILINE))
    for what, (file, constant) in VERSIONS.items():
        found = re.findall(rf"\b{re.escape(constant)} = (\d+)", (ROOT / file).read_text("utf-8"))
        assert found == [rows.pop(what)], what
    assert rows == {}


def test_the_python_reference_has_all_of_the_api():
    """The page has all exceptions by their module."""
    page = (ROOT / "tools" / "site" / "__main__.py").read_text("utf-8")
    there = {*re.findall(r"auto(?:class|function):: kvdepot\.(\w+)", page), *kvdepot.errors.__all__, "__version__"}
    assert set(kvdepot.__all__) - there == set()
    assert "kvdepot.is_failure" in page
