"""The status page runs nothing but its own script: the policy's hashes are those of the page."""

import base64
import hashlib
import http.client
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdepot.cli.status_door import read_page

HTTP = Path(__file__).resolve().parents[2] / "crates" / "kvdepot-server" / "src" / "http"
PAGE = (HTTP / "status.html").read_text("utf-8")


def test_the_policy_knows_script_and_style() -> None:
    source = (HTTP / "page.rs").read_text("utf-8")
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
        expected = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{expected}'" in source, f"write {expected} into page.rs"


def test_nothing_comes_from_elsewhere_and_no_text_becomes_markup() -> None:
    assert not re.findall(r"""(?:src|href|action)\s*=|https?:|@import|url\(""", PAGE)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\son\w+=|style=", PAGE)


def test_every_element_that_the_script_names_is_there() -> None:
    named = set(re.findall(r'(?:at|fill|draw)\("([\w-]+)"', PAGE))
    assert named
    assert named <= set(re.findall(r'id="([\w-]+)"', PAGE))


RATES = """
const shown = {}, text = {}, lines = {}, bytes = String;
const line = (id) => ({ setAttribute: (_, points) => { lines[id] = points; } });
const at = (id) => (text[id] ??= { firstElementChild: line(id) });
const fill = (id, rows) => { shown[id] = Object.fromEntries(rows); };
let before = null, lastHit = "";
%s
const old = { lookup_blocks: 50, lookup_hit_blocks: 9, load_blocks: 100, load_blocks_missed: 10 };
const now = { lookup_blocks: 90, lookup_hit_blocks: 39, load_blocks: 180, load_blocks_missed: 30 };
showHour([]);
const nothing = [text.hits.textContent, text["hits-now"].textContent, text["rate-most"].textContent];
showRates({ dump_blocks_sealed: 0, ...old }, 0);
showRates({ dump_blocks_sealed: 0, ...old }, 0);
showRates({ dump_blocks_sealed: 4, ...now }, 2000);
const zero = { lookup_blocks: 0, lookup_hit_blocks: 0, dump_blocks_sealed: 0, load_blocks: 0, load_blocks_missed: 0 };
showHour([
  { ...zero, ago_s: 60, seconds: 60, lookup_blocks: 60, lookup_hit_blocks: 20, dump_blocks_sealed: 600 },
  { ...zero, ago_s: 0.5, seconds: 59.5, load_blocks: 2400, load_blocks_missed: 20 },
  { ...zero, ago_s: 0, seconds: 0.5, lookup_blocks: 20, lookup_hit_blocks: 20, dump_blocks_sealed: 500 },
]);
const told = { hits: text["hits-now"].textContent, rate: text["rate-most"].textContent };
console.log(JSON.stringify({ nothing, told, lines, rates: shown.rates }));
"""


def test_the_hit_rate_and_the_rates_of_blocks_that_loads_found() -> None:
    """In two seconds lookups found 30 of 40 blocks, and loads 60 of 80. `load_blocks` includes what loads missed."""
    if (node := shutil.which("node")) is None:
        pytest.skip("no node here")
    names = ("draw", "percent", "moved", "showHour", "showRates")
    functions = [
        re.search(rf"^const {name} = .*?;$(?=\n(?:const|//|\n))", PAGE, re.DOTALL | re.MULTILINE) for name in names
    ]
    script = "\n".join(found[0] for found in functions if found)
    ran = subprocess.run([node, "-e", RATES % script], check=True, capture_output=True, text=True, timeout=60)
    found = json.loads(ran.stdout)
    assert found["nothing"][1:] == ["no block was looked up", "stored and loaded: 0 blocks/s at most, over a minute"]
    assert found["told"] == {
        "hits": "75.0 % at the last lookups, 50.0 % in the hour",
        "rate": "stored and loaded: 40 blocks/s at most, over a minute",
    }
    assert found["lines"] == {"hits": "0.0,46.0 300.0,46.0", "rate": "0.0,51.5 300.0,51.5 300.0,2.0 597.5,2.0"}
    assert found["rates"]["loaded"] == "30 blocks/s"
    assert found["rates"]["missed by loads"] == "10 blocks/s"


@pytest.fixture
def door() -> Iterator[tuple[str, int]]:
    """The socket of a running depot, and the port of its HTTP door."""
    with tempfile.TemporaryDirectory(prefix="kvd") as directory:
        socket = f"{directory}/depot.sock"
        core = '{"pipeline": "Cache", "pool_bytes": 16777216}'
        command = [sys.executable, "-m", "kvdepot", "serve", "--core-json", core, "--socket", socket]
        process = subprocess.Popen([*command, "--metrics-port", "0"], stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            said = (re.search(r"metrics are at http://127\.0\.0\.1:(\d+)/", line) for line in process.stderr)
            yield socket, next(int(found[1]) for found in said if found)
        finally:
            process.terminate()
            assert process.wait(120) == 0
            assert process.stderr is not None
            process.stderr.close()


def test_the_json_behind_the_page(door: tuple[str, int]) -> None:
    socket, port = door
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/status", headers={"Host": "evil.example", "Sec-Fetch-Site": "same-origin"})
    refused = connection.getresponse()
    assert refused.status == http.HTTPStatus.FORBIDDEN
    assert b"pool_bytes" not in refused.read()
    connection.request("GET", "/status", headers={"Sec-Fetch-Site": "same-origin"})
    assert json.loads(connection.getresponse().read())["pool_bytes"] == 16 << 20
    connection.close()
    # A depot that a busy machine did not run for a second warns of that, too.
    warnings = json.loads(read_page(socket, "/errors") or b"null")
    assert [one["level"] for one in warnings if "/status was refused" in one["message"]] == ["warn"]
    assert json.loads(read_page(socket, "/config") or b"null")["pool_bytes"] == 16 << 20
    history = json.loads(read_page(socket, "/history") or b"null")
    assert [one["dump_blocks_sealed"] for one in history["intervals"]] == [0] * len(history["intervals"])
    assert (read_page(socket, "/") or b"").decode() == PAGE
