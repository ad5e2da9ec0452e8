"""Makes the pictures of docs/monitoring.md: ``python -m tools.monitoring.screenshots``.

The status page of a real depot under load, in Chromium; and what the dashboard's queries return from a real Prometheus
that scrapes this depot, in plots of ours: Grafana is not needed. The engine's series are those of the connector, with
invented counts.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser

from tools.lab.bucket import Bucket
from tools.lab.child import Child
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


def warm(engine: Engine) -> None:
    """Stores more than the pool holds, loads some, and asks for what is not there."""
    engine.dump(range(POOL_BLOCKS))
    engine.load(range(POOL_BLOCKS // 2))
    engine.find(range(POOL_BLOCKS // 2, 2 * POOL_BLOCKS))


def draw_page(site: Site, started: Browser, scheme: Scheme, file: Path) -> None:
    """Takes a picture of the status page, once its curves have some length."""
    visit = started.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
    visit.goto(site.url)
    visit.wait_for_timeout(CURVES_S * 1000)
    visit.screenshot(path=file)
    visit.close()


def draw_board(prometheus: Prometheus, started: Browser, begun_s: float, names: Mapping[str, str], file: Path) -> None:
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
    visit.set_content(page("kvdepot", NOTE, list(panels.values()), (begun_s, now_s)))
    visit.screenshot(path=file, full_page=True)
    visit.close()


def main() -> int:
    """Starts everything, and makes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=IMAGES, help="where the pictures are put (default: docs/images)")
    parser.add_argument("--seconds", type=float, default=LOAD_S, help="time under load (default: %(default)s)")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    port = free_port()
    series = [sys.executable, "-m", "tools.monitoring.engine", str(port)]
    with (
        tempfile.TemporaryDirectory(prefix="kvd") as made,
        Bucket(Path(made)) as bucket,
        Site(Path(made) / "depot", bucket, log_level="warn") as site,
        Child("the engine's series", series, Path(made) / "engine.log", {}),
        Prometheus(Path(made) / "prometheus", {"depot": [site.port], "vllm": [port]}) as prometheus,
        site.engine({"model": "meta-llama/Llama-3.1-8B"}) as busy,
        site.engine({"model": "Qwen/Qwen3-32B"}) as other,
        browser() as started,
    ):
        begun_s = time.time()
        warm(other)
        with Traffic(busy):
            time.sleep(max(0.0, asked.seconds - 2 * CURVES_S))
            draw_page(site, started, "light", asked.out / "status_page.png")
            draw_page(site, started, "dark", asked.out / "status_page_dark.png")
            names = {f"{LOOPBACK}:{site.port}": "depot", f"{LOOPBACK}:{port}": "vllm"}
            draw_board(prometheus, started, begun_s, names, asked.out / "dashboard.png")
    for file in sorted(asked.out.glob("*.png")):
        print(f"{file}: {file.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
