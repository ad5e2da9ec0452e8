"""Makes the pictures of docs/monitoring.md: ``python -m tools.monitoring.screenshots``.

The status page of a real depot under load, in Chromium; and what the dashboard's queries return from a real Prometheus
that scrapes this depot, in plots of ours: Grafana is not needed. The engine's series are those of the connector, with
invented counts. With ``--demo`` depot and engine are those of ``make demo``, and nothing is invented.
"""

import argparse
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser

from tools.demo.__main__ import STAYING
from tools.lab.bucket import Bucket
from tools.lab.child import Child, ChildError
from tools.lab.ports import LOOPBACK, free_port
from tools.monitoring.board import as_sent, legend, queries, rate_interval_s
from tools.monitoring.browser import browser
from tools.monitoring.load import POOL_BLOCKS, Engine, Site, Traffic
from tools.monitoring.plot import Line, page
from tools.monitoring.prometheus import SCRAPE_S, Prometheus

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
LOAD_S = 90.0
STEP_S = 2.0
WIDTH, HEIGHT = 1000, 940
CURVES_S = 20.0
Scheme = Literal["light", "dark"]
NOTE = (
    "The queries of deploy/grafana/kvdepot.json, answered by a real Prometheus and drawn without Grafana. "
    "A depot under a small load; the engine's counts are invented."
)
DEMO_NOTE = (
    "make demo, watched by a real Prometheus with the queries of deploy/grafana/kvdepot.json, drawn without Grafana: "
    "real vLLM computes prompts, finds them in the pool, and after a kill -9 of both on the disk."
)
DEMO = ("--prompts", "8", "--tokens", "2048", "--stay", "3600")
DEMO_S = 1200.0
DEMO_END_S = 120.0


def warm(engine: Engine) -> None:
    """Stores more than the pool holds, loads some, and asks for what is not there."""
    engine.dump(range(POOL_BLOCKS))
    engine.load(range(POOL_BLOCKS // 2))
    engine.find(range(POOL_BLOCKS // 2, 2 * POOL_BLOCKS))


def draw_page(url: str, started: Browser, scheme: Scheme, file: Path) -> None:
    """Takes a picture of the status page, once its curves have some length."""
    visit = started.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
    visit.goto(url)
    visit.wait_for_timeout(CURVES_S * 1000)
    visit.screenshot(path=file)
    visit.close()


def draw_board(
    prometheus: Prometheus, started: Browser, begun_s: float, names: Mapping[str, str], file: Path, note: str = NOTE
) -> None:
    """Takes a picture of the dashboard's panels since a time; ``names`` are those of instances."""
    now_s = time.time()
    panels: dict[str, tuple[str, str, list[Line]]] = {}
    for query in queries():
        _, _, lines = panels.setdefault(query.panel, (query.panel, query.unit, []))
        sent = as_sent(query.expression, None, rate_interval_s(5 * STEP_S, SCRAPE_S))
        for one in prometheus.values(sent, begun_s, now_s, STEP_S):
            labels = one["metric"] | {"instance": names.get(one["metric"].get("instance", ""), "")}
            points = [(float(at), float(value)) for at, value in one["values"]]
            points = [(at, value) for at, value in points if math.isfinite(value)]
            lines.append(Line(legend(query, labels), points))
    visit = started.new_page(viewport={"width": 720, "height": 600})
    visit.set_content(page("kvdepot", note, list(panels.values()), (begun_s, now_s)))
    visit.screenshot(path=file, full_page=True)
    visit.close()


def watch_demo(python: Path, out: Path) -> None:
    """Runs ``make demo`` with the interpreter that has vLLM, and makes pictures of what Prometheus and a person see.

    Raises:
        ChildError: the demonstration failed.
    """
    page_port, vllm_port = free_port(), free_port()
    options = [*DEMO, "--port", str(vllm_port), "--set", f"metrics_port={page_port}"]
    with (
        tempfile.TemporaryDirectory(prefix="kvd") as made,
        Prometheus(Path(made) / "prometheus", {"depot": [page_port], "vllm": [vllm_port]}) as prometheus,
        browser() as started,
    ):
        begun_s = time.time()
        log = Path(made) / "demo.log"
        with Child("make demo", [python, "-m", "tools.demo", *options], log, {}) as demo:
            try:
                while STAYING not in log.read_text(errors="replace"):
                    demo.check()
                    if time.time() - begun_s > DEMO_S:
                        raise ChildError(f"{demo.name} takes longer than {DEMO_S:.0f} s\n{demo.tail()}")
                    time.sleep(STEP_S)
                draw_page(f"http://{LOOPBACK}:{page_port}/", started, "light", out / "demo_status_page.png")
                names = {f"{LOOPBACK}:{page_port}": "depot", f"{LOOPBACK}:{vllm_port}": "vllm"}
                draw_board(prometheus, started, begun_s, names, out / "demo_dashboard.png", DEMO_NOTE)
            finally:
                # It ends vLLM and the depot, which are in process groups of their own.
                if demo.running:
                    os.kill(demo.pid, signal.SIGINT)
                    demo.wait_for_end(DEMO_END_S)
        print(log.read_text(errors="replace"))


def main() -> int:
    """Starts everything, and makes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=IMAGES, help="where the pictures are put (default: docs/images)")
    parser.add_argument("--seconds", type=float, default=LOAD_S, help="time under load (default: %(default)s)")
    text = "watch make demo instead, run by this interpreter, which has vLLM (.venv-vllm/bin/python)"
    parser.add_argument("--demo", type=Path, metavar="PYTHON", help=text)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.demo:
        watch_demo(asked.demo, asked.out)
    else:
        watch_load(asked.seconds, asked.out)
    for file in sorted(asked.out.glob("*.png")):
        print(f"{file}: {file.stat().st_size // 1024} KiB")
    return 0


def watch_load(seconds: float, out: Path) -> None:
    """Makes pictures of a depot under the load of a small client."""
    port = free_port()
    series = [sys.executable, "-m", "tools.monitoring.engine", str(port)]
    with (
        tempfile.TemporaryDirectory(prefix="kvd") as made,
        Bucket(Path(made)) as bucket,
        Site(Path(made) / "depot", bucket, serves=True, log_level="warn") as site,
        Child("the engine's series", series, Path(made) / "engine.log", {}),
        Prometheus(Path(made) / "prometheus", {"depot": [site.port], "vllm": [port]}) as prometheus,
        site.engine({"model": "meta-llama/Llama-3.1-8B"}) as busy,
        site.engine({"model": "Qwen/Qwen3-32B"}) as other,
        site.guest({"model": "Qwen/Qwen3-32B"}) as guest,
        browser() as started,
    ):
        begun_s = time.time()
        warm(other)
        with Traffic(busy, guest):
            time.sleep(max(0.0, seconds - 2 * CURVES_S))
            draw_page(site.url, started, "light", out / "status_page.png")
            draw_page(site.url, started, "dark", out / "status_page_dark.png")
            names = {f"{LOOPBACK}:{site.port}": "depot", f"{LOOPBACK}:{port}": "vllm"}
            draw_board(prometheus, started, begun_s, names, out / "dashboard.png")


if __name__ == "__main__":
    sys.exit(main())
