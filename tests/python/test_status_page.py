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
const shown = {}, text = {};
const at = (id) => (text[id] ??= {}), draw = () => {}, bytes = String, HOUR_MS = 3600000;
const fill = (id, lines) => { shown[id] = Object.fromEntries(lines); };
let hour = [], before = null;
%s
const old = { lookup_blocks: 50, lookup_hit_blocks: 9, load_blocks: 100, load_blocks_missed: 10 };
const now = { lookup_blocks: 90, lookup_hit_blocks: 39, load_blocks: 180, load_blocks_missed: 30 };
const interval = { ago_s: 20, seconds: 60, lookup_blocks: 60, lookup_hit_blocks: 20, dump_blocks_sealed: 600 };
recall({ intervals: [interval, { ...interval, ago_s: 3, seconds: 0 }] }, 0);
showRates({ pid: 7, dump_blocks_sealed: 0, ...old }, 0);
showRates({ pid: 7, dump_blocks_sealed: 4, ...now }, 2000);
const then = shown.rates, told = hour.map((one) => [one.at, one.hit / one.looked, one.moved / one.seconds]);
showRates({ pid: 7, dump_blocks_sealed: 4, ...now }, 3590000);
console.log(JSON.stringify({ told, left: hour.length, text, then }));
"""


def test_the_hit_rate_and_the_rates_of_blocks_that_loads_found() -> None:
    """In two seconds lookups found 30 of 40 blocks, and loads 60 of 80. `load_blocks` includes what loads missed."""
    if (node := shutil.which("node")) is None:
        pytest.skip("no node here")
    functions = [
        re.search(rf"^const {name} = .*?^}}\)?;$", PAGE, re.DOTALL | re.MULTILINE)
        for name in ("keep", "counted", "recall", "showHour", "showRates")
    ]
    script = "\n".join(found[0] for found in functions if found)
    ran = subprocess.run([node, "-e", RATES % script], check=True, capture_output=True, text=True, timeout=60)
    found = json.loads(ran.stdout)
    assert found["told"] == [[-20_000, 20 / 60, 10], [2000, 0.75, 32]], "what the depot had counted before is kept"
    assert found["left"] == 2, "an hour is kept"
    assert found["text"]["hits-now"]["textContent"] == "75.0 % at the last lookups, 75.0 % in the hour"
    assert found["text"]["rate-most"]["textContent"] == "stored and loaded: 0 blocks/s, 32 at most"
    assert found["then"]["loaded"] == "30 blocks/s"
    assert found["then"]["missed by loads"] == "10 blocks/s"


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
