"""The files of ``examples`` are valid, and so are the commands of its page."""

import json
import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from kvdepot.cli import main
from kvdepot.cli.compat import command as compat_command
from kvdepot.cli.infinistore import arguments_of_serve
from kvdepot.cli.serve import command as serve
from kvdepot.compat import SHIMS
from kvdepot.config import load_config
from kvdepot.config.metrics_file import read_metrics_file
from kvdepot.engines.vllm_plugin import NAMES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAGE = (EXAMPLES / "README.md").read_text("utf-8")
COMMANDS = [
    command
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for command in (
        [block.replace("\\\n", " ")] if block.startswith("vllm") else block.splitlines()  # one command over many lines
    )
]


def of(program: str) -> list[list[str]]:
    """Returns the page's commands of a program, as words."""
    found = [words for words in map(shlex.split, COMMANDS) if words[0] == program]
    assert found, program
    return found


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("ucm_config*.yaml")), ids=lambda file: file.name)
def test_configurations_are_good(file, machine):
    assert load_config(file, machine=machine).directories == ("/mnt/test",)


@pytest.mark.parametrize(
    ("example", "seed"),
    [("ucm_config_example.yaml", "000_pipeline.yaml"), ("ucm_config_nfs_example.yaml", "003_nfs.yaml")],
)
def test_configurations_are_the_seeds(example, seed, seeds):
    assert (EXAMPLES / example).read_text() == (seeds / seed).read_text()


def test_a_configuration_may_name_the_metrics_file(machine):
    document = yaml.safe_load((EXAMPLES / "ucm_config_example.yaml").read_text())
    document["metrics_config_path"] = str(EXAMPLES / "metrics" / "metrics_configs.yaml")
    path = load_config(document, machine=machine).metrics_config_path
    assert read_metrics_file(path).prefix == "ucm:"


def test_the_launch_line_names_what_is_installed():
    for words in (words for words in of("vllm") if words[1] == "serve"):
        transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert transfer["kv_connector"] in NAMES
        module = transfer["kv_connector_module_path"].replace(".", "/") + ".py"
        assert module in SHIMS["ucm"].files
        file = Path(transfer["kv_connector_extra_config"]["UCM_CONFIG_FILE"])
        assert (EXAMPLES / file.name).is_file()


def test_the_benchmark_asks_the_server_of_the_launch_line():
    serve, bench = of("vllm")
    assert serve[1:3] == ["serve", bench[bench.index("--model") + 1]]
    assert serve[serve.index("--port") + 1] == bench[bench.index("--port") + 1]


def test_infinistores_options_are_serves():
    for words in of("infinistore"):
        given = arguments_of_serve(words[1:])
        context = serve.make_context("serve", given[1:])
        assert context.params["service_port"] == (12345 if "12345" in words else 22345)


def test_kvdepots_own_commands_are_known():
    for words in of("kvdepot"):
        command = main.get_command(click.Context(main), words[1])
        assert command is compat_command
        assert words[2] in command.commands
        assert words[3] in SHIMS


@pytest.mark.parametrize(
    "line",
    [
        "INFO 11-23 14:00:00 [log.py:14] request_id: x-1, total_blocks_num: 125, hit hbm: 0, hit external: 125",
        "2026-01-31T00:00:00.1Z [UC][D] Cache task(7,LOAD,48,300) finished, cost 1.250ms. [41,42]",
        "2026-01-31T00:00:00.1Z [UC][D] Task(7,PC::S2D,48,300) finished, costs=0.001250s, bw=0.000240GB/s [41,42]",
    ],
)
def test_each_line_is_found_by_one_of_the_greps(line):
    assert sum(re.search(words[2], line) is not None for words in of("grep")) == 1
