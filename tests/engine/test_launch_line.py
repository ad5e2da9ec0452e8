"""The launch line and benchmark of UCM's documents, as `examples/README.md` has them, on a CPU with a tiny model."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from engine_lab import REPOSITORY, Lab

from kvdepot.compat import SHIMS
from tools.demo.__main__ import wait_until_healthy
from tools.demo.client import Client
from tools.demo.server import Server
from tools.lab.child import Child
from tools.lab.depot import wait_until_clean
from tools.lab.ports import LOOPBACK, free_port

EXAMPLES = REPOSITORY / "examples"
VLLM = Path(sys.executable).parent / "vllm"
PROMPT_TOKENS, BLOCKS = 16_000, 125
KV_CACHE_BYTES = 256 << 20
BENCH_S, CLEAN_S = 300.0, 120.0
HIT = re.compile(r"request_id: \S+, total_blocks_num: (\d+), hit hbm: (\d+), hit external: (\d+)")
COLD = (str(BLOCKS), "0", "0")
ENVIRON = {
    "UC_LOGGER_LEVEL": "debug",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # vLLM requires a NUMA node for each rank, unless thread binding is disabled.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Hits are exact unless the machine stalls for half a minute.
    "KVDEPOT_CALL_TIMEOUT_MS": "30000",
    "KVDEPOT_ATTACH_TIMEOUT_MS": "60000",
    "KVDEPOT_LOAD_POLICY": "all",
}


def documented(program: str) -> list[list[str]]:
    """Returns the words of the page's commands that begin like this."""
    page = (EXAMPLES / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (block,) = (one for one in blocks if one.startswith(program))
    lines = block.splitlines() if program == "grep" else [block.replace("\\\n", " ")]
    return [shlex.split(line) for line in lines]


def changed(words: list[str], **values: object) -> list[str]:
    """Returns a command with other values of options that it has."""
    made = list(words)
    for name, value in values.items():
        made[made.index("--" + name.replace("_", "-")) + 1] = str(value)
    return made


class Documented(Server):
    """The launch line with another model, port and file, and what a CPU needs besides."""

    def __init__(self, model: str, file: Path, log: Path, environ: dict[str, str]) -> None:
        self.port = free_port()
        (words,) = documented("vllm serve")
        transfer = words[words.index("--kv-transfer-config") + 1]
        (named,) = re.findall(r'"UCM_CONFIG_FILE": "(.*?)"', transfer)
        words[2] = model
        words = changed(words, port=self.port, kv_transfer_config=transfer.replace(named, str(file)))
        words += ["--host", LOOPBACK, "--dtype", "float32", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
        Child.__init__(self, "vLLM", [VLLM, *words[1:]], log, environ)


def bench(model: str, port: int, log: Path, environ: dict[str, str]) -> None:
    """Runs the benchmark with one prompt, which is as long as documented."""
    (words,) = documented("vllm bench serve")
    assert words[words.index("--random-input-len") + 1] == str(PROMPT_TOKENS)
    words = changed(words, model=model, host=LOOPBACK, port=port, num_prompts=1)
    with Child("the benchmark", [VLLM, *words[1:]], log, environ) as child:
        child.wait(BENCH_S)
    assert "Mean TTFT (ms):" in log.read_text()


@pytest.mark.parametrize(
    ("name", "more", "pool", "hit", "transfers"),
    [
        # A step that waits for its load computes the prompt's last token, and with it the last block.
        ("ucm_config_example.yaml", "", {"KVDEPOT_POOL_GB": "1"}, BLOCKS - 1, "Cache task"),
        pytest.param(
            "ucm_config_nfs_example.yaml",
            "use_layerwise: false\n",
            {"KVDEPOT_POOL_SLOTS": "512"},
            BLOCKS,
            "PC::",
            marks=pytest.mark.full,
        ),
    ],
    ids=["pipeline store", "nfs store"],
)
def test_the_second_benchmark_finds_the_prompts_of_the_first(
    real_lab: Lab, name: str, more: str, pool: dict[str, str], hit: int, transfers: str
) -> None:
    """Module path, class, file, options and messages are the documented ones."""
    root, short = real_lab.root, real_lab.short_root()
    for path, text in SHIMS["ucm"].files.items():  # as `kvdepot compat install ucm`, but not into vLLM's environment
        (root / "site" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "site" / path).write_text(text)
    (root / "blocks").mkdir()
    file = root / name
    file.write_text((EXAMPLES / name).read_text().replace("/mnt/test", str(root / "blocks")) + more)
    modules = os.pathsep.join(filter(None, [str(root / "site"), os.environ.get("PYTHONPATH")]))
    environ = {**ENVIRON, **pool, "PYTHONPATH": modules, "XDG_RUNTIME_DIR": str(short)}
    log, model = root / "vllm.log", real_lab.model("llama")
    hits = []
    with Documented(model, file, log, environ) as server:
        wait_until_healthy(server, Client(server.port))
        (socket,) = short.rglob("*.sock")
        for turn in range(2):
            bench(model, server.port, root / f"bench-{turn}.log", environ)
            wait_until_clean(socket, CLEAN_S)
            hits.append(HIT.findall(log.read_text()))
    assert hits == [[COLD], [COLD, (str(BLOCKS), "0", str(hit))]]
    said = log.read_text()
    assert "Application startup complete" in said
    patterns = [words[2] for words in documented("grep") if "request_id" in words[2] or transfers in words[2]]
    assert len(patterns) == 2
    assert all(re.search(pattern, said) for pattern in patterns)
    written = r"\[UC\]\[D\] Posix task\(\d+,Cache2Backend,\d+,\d+\) finished, cost"
    assert re.search(written, Path(f"{socket}.log").read_text())
    assert list((root / "blocks").rglob("*.kvb"))
