"""The status page of a real depot, in a real browser: it is right, it is live, it can be read, and it is safe."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import Visit, until
from damage import damage
from playwright.sync_api import Route

from tools.lab.bucket import Bucket
from tools.lab.child import Child
from tools.lab.ports import LOOPBACK, free_port
from tools.monitoring.browser import FOREIGN_NAME
from tools.monitoring.load import POOL_BLOCKS, Engine, Site

# A depot cuts longer ones.
LONG = "meta-llama/Llama-3.3-70B-Instruct"
MARKUP = "<img src=x onerror=hurt=1>"
PHONE = {"width": 360, "height": 740}
WIDTHS = (320, 360, 720, 1024, 1280, 1920)
READABLE = 4.5
"""Least contrast of text, by the Web Content Accessibility Guidelines, level AA."""
BROKEN = 3
Open = Callable[..., Visit]


@pytest.fixture(scope="module")
def site(root: Path) -> Iterator[Site]:
    """A depot that has stored, evicted, found, missed, and failed in all sections of the page."""
    (root / "bucket").mkdir()
    with Bucket(root / "bucket") as bucket, Site(root / "page", bucket, log_level="warn") as site:
        with site.engine({"model": LONG, "dtype": "bfloat16", "tensor_parallel": 2}) as one:
            one.dump(range(POOL_BLOCKS + 20))
            one.load(range(POOL_BLOCKS))
            assert one.find(range(BROKEN, 10_000)) > 0
        with site.engine({"model": MARKUP}) as other:
            other.dump(range(10))
            other.find(range(500, 510))
            fail(site, other)
        until("the depot has let go of what its engines held", lambda: is_still(site.page("status")))
        yield site


def in_percent(part: int, whole: int) -> str:
    """As the page shows it: a browser rounds halves up."""
    return f"{Decimal(100 * part / whole).quantize(Decimal('0.1'), ROUND_HALF_UP)} %" if whole else "–"


def is_still(status: dict[str, Any]) -> bool:
    return not any(status[name] for name in ("claims_open", "pool_dirty_bytes", "pool_leased_bytes"))


def fail(site: Site, engine: Engine) -> None:
    """Damages blocks on the disk that the pool has no more, and has them read."""
    engine.dump(range(1000, 1000 + BROKEN))
    damage(site, engine)
    engine.dump(range(2000, 2000 + 2 * POOL_BLOCKS))
    engine.load(range(1000, 1000 + BROKEN))
    assert site.page("status")["failures"], "damage is found"


def in_bytes(count: int | None) -> str:
    """A size as a person reads it."""
    if count is None:
        return "–"
    for power, unit in reversed(list(enumerate(("KiB", "MiB", "GiB", "TiB"), 1))):
        if count >= 1024**power:
            return f"{count / 1024**power:.1f} {unit}"
    return f"{count} bytes"


def test_all_sections_have_the_depot_s_numbers(site: Site, visit: Open) -> None:
    seen = visit()
    seen.page.goto(site.url)
    seen.until_answered()
    # Nothing happens to the depot now, so its numbers are those that the page was given.
    now = site.page("status")
    assert seen.text("#what") == f"Cache|Posix|Object, pid {now['pid']}"
    used = now["pool_bytes"] - now["pool_free_bytes"]
    assert seen.rows("pool") == [
        ["used", f"{in_bytes(used)} of {in_bytes(now['pool_bytes'])}"],
        ["blocks", str(now["pool_blocks"])],
        ["not written yet", in_bytes(now["pool_dirty_bytes"])],
        ["leased by engines", in_bytes(now["pool_leased_bytes"])],
        ["namespaces", "2"],
        ["open claims", "0"],
        ["pages", now["pool_pages"]],
    ]
    assert used > 0
    assert seen.page.evaluate("[used.value, used.max]") == [used, now["pool_bytes"]]

    disk, bucket = now["tiers"]
    (server,) = bucket["servers"]
    assert seen.rows("tiers") == [
        [
            tier["name"],
            str(tier["blocks"]),
            in_bytes(tier["bytes"]),
            in_bytes(tier["bytes_max"]),
            str(tier["hit_blocks"]),
            servers,
        ]
        for tier, servers in ((disk, ""), (bucket, f"{server['address']} up"))
    ]
    assert in_bytes(disk["bytes_max"]) == "512.0 MiB"

    counted = sorted((-count, reason) for reason, count in now["misses"].items() if count)
    assert counted
    assert sorted((-int(count), reason.replace(" ", "_")) for reason, count in seen.rows("misses")) == counted

    namespaces = [
        [
            one["namespace"][:12],
            one["facts"],
            in_bytes(one["pool_bytes"]),
            str(one["pool_blocks"]),
            in_bytes(one["load_bytes_hour"]),
            str(one["load_blocks"]),
            in_percent(one["lookup_hit_blocks"], one["lookup_blocks"]),
            str(one["misses"]),
        ]
        for one in now["top_namespaces"]
    ]
    shown = seen.rows("namespaces")
    assert [row[:-1] for row in shown] == namespaces
    assert [LONG in facts for _, facts, *_ in namespaces] == [True, False], "the one that was loaded most is first"
    assert all(row[-1].endswith(" ago") for row in shown)

    failures = [
        [operation, kind, str(count), "before this page"]
        for operation, kinds in now["failures"].items()
        for kind, count in kinds.items()
    ]
    assert seen.rows("failures") == failures
    assert any(kind == "corrupt" for _, kind, *_ in failures)

    def told() -> list[list[str]]:
        return [[one["level"], one["message"].split(" ")[0]] for one in reversed(site.page("errors"))]

    # A machine that stalls meanwhile is one more.
    until("the page has all errors", lambda: [[row[1], row[2].split(" ")[0]] for row in seen.rows("errors")] == told())
    assert told()
    config = dict(seen.rows("config"))
    whole = site.page("config")
    assert config["pool_bytes"] == str(whole["pool_bytes"])
    assert config["posix.directories"] == str(site.home.blocks)
    assert set(config) == set(flat(whole))
    assert seen.said == []


def flat(values: dict[str, Any], before: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name}.")
        else:
            yield before + name


def test_rates_are_those_of_the_time_between_two_answers(site: Site, visit: Open) -> None:
    """With a clock that the test moves: an answer is asked for every two seconds."""
    seen = visit()
    seen.page.route("**/history", lambda route: route.fulfill(json={"interval_s": 60, "intervals": []}))
    seen.page.clock.install(time=0)
    seen.page.goto(site.url)
    seen.until_answered()

    def after(move: Callable[[int], None], time_ms: int) -> dict[str, str]:
        state = seen.text("#state")
        move(time_ms)
        until("it answers anew", lambda: seen.text("#state") != state)
        return dict(seen.rows("rates"))

    # From now on it stands still.
    after(seen.page.clock.pause_at, 100_000)
    after_two_seconds = partial(after, seen.page.clock.run_for, 2000)
    still = after_two_seconds()
    assert {still[name] for name in ("stored", "loaded", "missed by loads", "evicted from the pool")} == {"0 blocks/s"}
    assert seen.text("#hits-now") == "no block was looked up"
    with site.engine({"model": "rates"}) as engine:
        engine.dump(range(20))
        assert engine.load(range(10)) == 10
        assert engine.find(range(15, 25)) == 5
    busy = after_two_seconds()
    assert busy == {
        "stored": "10 blocks/s",
        "loaded": "5 blocks/s",
        "missed by loads": "0 blocks/s",
        "read from tiers": busy["read from tiers"],
        # Into both tiers.
        "written to tiers": busy["written to tiers"],
        "evicted from the pool": busy["evicted from the pool"],
    }
    assert busy["written to tiers"] != "0 bytes/s"
    assert busy["evicted from the pool"] != "0 blocks/s", "the pool was full"
    assert seen.text("#hits-now") == "50.0 % at the last lookups"
    assert after_two_seconds()["stored"] == "0 blocks/s"
    assert seen.text("#hits-now") == "50.0 % at the last lookups"


def test_a_page_that_is_opened_later_shows_the_last_hour(site: Site, visit: Open) -> None:
    """What the depot counted before, and with an answer of a whole hour how it is drawn."""
    seen = visit()
    seen.page.goto(site.url)
    seen.until_answered()
    now, told = site.page("status"), site.page("history")["intervals"]
    for name in ("lookup_blocks", "lookup_hit_blocks", "dump_blocks_sealed", "evict_blocks"):
        assert sum(one[name] for one in told) == now[name] > 0, "the depot is younger than an hour"
    rate = 100 * now["lookup_hit_blocks"] / now["lookup_blocks"]
    assert seen.text("#hits-now").endswith(f"{rate:.1f} % in the hour")

    minute = {
        "seconds": 60,
        "lookup_blocks": 100,
        "dump_blocks_sealed": 600,
        "load_blocks": 60,
        "load_blocks_missed": 60,
    }
    hour = [{**minute, "ago_s": 60 * ago, "lookup_hit_blocks": ago} for ago in reversed(range(60))]
    hour[30]["lookup_blocks"] = hour[30]["lookup_hit_blocks"] = 0
    hour[40]["dump_blocks_sealed"] = 6000
    seen = visit()
    seen.page.route("**/history", lambda route: route.fulfill(json={"interval_s": 60, "intervals": hour}))
    seen.page.goto(site.url)
    seen.until_answered()
    looked_up, hit = 59 * 100, sum(range(60)) - 29
    assert seen.text("#hits-now") == f"{100 * hit / looked_up:.1f} % in the hour"
    assert seen.text("#rate-most") == "stored and loaded: 100 blocks/s at most, over a minute"

    def line(graph: str) -> list[tuple[float, float]]:
        points = seen.page.locator(f"#{graph} polyline").get_attribute("points").split()
        return [(float(x), float(y)) for x, y in (point.split(",") for point in points)]

    hits, rates = line("hits"), line("rate")
    assert hits == sorted(hits)
    assert [y for _, y in hits] == sorted(y for _, y in hits), "the hit rate falls from the left to the right"
    assert (len(hits), len(rates)) == (2 * 59, 2 * 60), "each minute is a step"
    assert [hits[0][0], hits[-1][0]] == [rates[0][0], rates[-1][0]] == [0, 600]
    assert [point for point in rates if point[1] == 2] == [(400, 2), (410, 2)]


def test_a_restarted_depot_of_the_same_process_id_is_another_one(site: Site, visit: Open) -> None:
    """As in a container."""
    # So far apart that no time for which the machine stands still matters.
    uptimes_s = iter((10_000, 20_000, 3))
    answers: list[int] = []

    def answer(route: Route) -> None:
        answers.append(next(uptimes_s, 30_000))
        route.fulfill(json={**site.page("status"), "uptime_s": answers[-1]})

    seen = visit()
    seen.page.route("**/status", answer)
    seen.page.goto(site.url)

    def asked(page: str) -> int:
        # Playwright answers the page's requests only while it is asked something.
        seen.text("#state")
        return sum(address == site.url + page for address in seen.asked)

    until("its configuration is asked for again", lambda: asked("config") == 2)
    assert answers[:3] == [10_000, 20_000, 3]
    before = asked("status")
    until("it is asked on", lambda: asked("errors") > before)
    assert asked("config") == 2


def test_the_page_is_live_and_asks_nobody_else(site: Site, visit: Open) -> None:
    seen = visit()
    seen.page.goto(site.url)
    seen.until_answered()
    seen.page.evaluate("window.same = true")
    with site.engine({"model": "live"}) as engine:
        for turn in range(3):
            before = int(dict(seen.rows("pool"))["namespaces"]), seen.rows("namespaces")
            engine.dump(range(turn * 10, turn * 10 + 10))
            engine.load(range(turn * 10, turn * 10 + 10))
            seen.until("the page shows what was loaded", f"namespaces.textContent.includes('{engine.namespace[:12]}')")
            until("its numbers change", lambda before=before: seen.rows("namespaces") != before[1])
    assert seen.page.evaluate("window.same"), "it was not loaded again"
    assert seen.asked
    assert all(address.startswith(site.url) for address in seen.asked), seen.asked
    assert seen.said == []


def test_text_of_engines_is_text(site: Site, visit: Open) -> None:
    seen = visit()
    seen.page.goto(site.url)
    seen.until_answered()
    facts = [row[1] for row in seen.rows("namespaces")]
    assert any(MARKUP in one for one in facts), facts
    assert seen.page.locator("img").count() == 0
    assert seen.page.locator("script").count() == 1
    assert seen.page.evaluate("window.hurt === undefined")
    assert seen.said == []


@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_every_screen(site: Site, visit: Open, width: int) -> None:
    """Nothing is scrolled sideways or sticks out of its section, and no word is cut into letters."""
    seen = visit(viewport={"width": width, "height": 740})
    seen.page.goto(site.url)
    seen.until_answered()
    root = "document.documentElement"
    assert seen.page.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")
    out = """() => [...document.querySelectorAll("section")].flatMap(section => {
        const most = section.getBoundingClientRect().right;
        return [...section.querySelectorAll("*")].filter(one => one.getBoundingClientRect().right > most + 1)
            .map(one => one.textContent.slice(0, 80));
    })"""
    assert seen.page.evaluate(out) == []
    lines = """() => [...document.querySelectorAll("td, th")].map(one => {
        const text = document.createRange();
        text.selectNodeContents(one);
        return [one.textContent, Math.round(text.getBoundingClientRect().height / 20)];
    })"""
    assert [(text, count) for text, count in seen.page.evaluate(lines) if count > 2 and len(text) < 8 * count] == []


# Colours of text above what is behind it, as a screen shows them.
CONTRASTS = """() => {
    const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const mixed = colours => {
        probe.clearRect(0, 0, 1, 1);
        for (const [colour, alpha] of colours) {
            probe.globalAlpha = alpha; probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
        }
        return [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = colour => {
        const linear = part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        const parts = colour.map(part => linear(part / 255));
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    };
    const sheet = document.createElement("div");
    sheet.style.backgroundColor = "Canvas";
    document.body.append(sheet);
    const canvas = getComputedStyle(sheet).backgroundColor;
    sheet.remove();
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
    for (let node = walk.nextNode(); node; node = walk.nextNode()) {
        const owner = node.parentElement;
        if (!node.data.trim() || !owner.checkVisibility() || owner.tagName === "SCRIPT") continue;
        let alpha = 1;
        for (let one = owner; one; one = one.parentElement) alpha *= getComputedStyle(one).opacity;
        const behind = light(mixed([[canvas, 1]]));
        const front = light(mixed([[canvas, 1], [getComputedStyle(owner).color, alpha]]));
        const [low, high] = [behind, front].sort((one, other) => one - other);
        found.push([(high + 0.05) / (low + 0.05), node.data.trim().slice(0, 60)]);
    }
    return [canvas, found];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_in_both_schemes(site: Site, visit: Open, scheme: str) -> None:
    """Its errors, too: the depot is stopped for a while."""
    seen = visit(color_scheme=scheme)
    seen.page.goto(site.url)
    seen.until_answered()
    seen.page.evaluate("document.getElementById('state').className = 'bad'")
    canvas, found = seen.page.evaluate(CONTRASTS)
    assert (canvas == "rgb(255, 255, 255)") == (scheme == "light"), canvas
    assert len(found) > 50
    assert [(text, ratio) for ratio, text in found if ratio < READABLE] == []


def test_a_depot_that_dies_is_noticed_and_so_is_its_return(root: Path, visit: Open) -> None:
    with Site(root / "dies") as site:
        seen = visit()
        seen.page.goto(site.url)
        seen.until_answered()
        first = seen.text("#what")
        assert dict(seen.rows("config"))["eviction"] == "lhd"
        site.process.kill()
        state = "document.getElementById('state')"
        seen.until("the page says so", f"{state}.textContent.startsWith('no answer') && {state}.className === 'bad'")
        assert "what is below is as of" in seen.text("#state")
        assert seen.text("#what") == first, "what it knew stays"
        site.start(eviction="lru")
        seen.until_answered()
        assert seen.text("#what") == f"Cache|Posix, pid {site.process.pid}" != first
        assert dict(seen.rows("config"))["eviction"] == "lru", "the new depot's"
        assert all("ERR_CONNECTION" in one or "ERR_EMPTY" in one for one in seen.said), seen.said


def test_a_depot_that_hangs_is_noticed(root: Path, visit: Open) -> None:
    with Site(root / "hangs") as site:
        seen = visit(patient=False)
        seen.page.goto(site.url)
        seen.until_answered()
        os.kill(site.process.pid, signal.SIGSTOP)
        try:
            seen.until("the page says so", "document.getElementById('state').textContent.startsWith('no answer')")
        finally:
            os.kill(site.process.pid, signal.SIGCONT)
        seen.until_answered()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        pass


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[str]:
    """A page of another origin on this machine."""
    (tmp_path / "index.html").write_text("<!DOCTYPE html><title>elsewhere</title><p>elsewhere")
    server = ThreadingHTTPServer((LOOPBACK, 0), partial(Quiet, directory=tmp_path))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://{LOOPBACK}:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


FRAME = """address => new Promise(loaded => {
    const frame = document.createElement("iframe");
    frame.onload = loaded;
    frame.src = address;
    document.body.append(frame);
})"""
READ = """async ([address, options]) => {
    try { return await (await fetch(address, options)).text(); } catch (error) { return "refused: " + error.message; }
}"""


def test_other_pages_cannot_read_the_depot(site: Site, visit: Open, elsewhere: str) -> None:
    for address in (elsewhere, "data:text/html,<p>data"):
        seen = visit()
        seen.page.goto(address)
        for page in ("status", "config", "errors", "metrics"):
            for options in ({}, {"mode": "no-cors"}, {"method": "POST"}, {"headers": {"X-Any": "1"}}):
                said = seen.page.evaluate(READ, [site.url + page, options])
                assert said == "" or said.startswith("refused: "), (address, page, options, said)
        # Nor show it in a frame, to have somebody click into it.
        seen.page.evaluate(FRAME, site.url)
        (framed,) = seen.page.frames[1:]
        assert "Pool" not in framed.content()


def test_a_name_that_was_made_to_lead_here_reads_nothing(site: Site, visit: Open) -> None:
    """DNS rebinding: to the browser the depot is a page of the foreign host's own origin."""
    seen = visit()
    for page in ("status", "config", "errors", "metrics", ""):
        answer = seen.page.goto(f"http://{FOREIGN_NAME}:{site.port}/{page}")
        assert answer is not None
        assert answer.status == HTTPStatus.FORBIDDEN
        assert "pool_bytes" not in answer.text()
    assert "pool_bytes" not in seen.page.evaluate(READ, ["/status", {}])


@pytest.fixture
def guarded(root: Path) -> Iterator[tuple[str, str]]:
    """The address of a wire door that has a token, and the token."""
    home = root / "guarded"
    home.mkdir()
    token = home / "token"
    token.write_text("a-token-of-at-least-thirty-two-characters\n")
    token.chmod(0o600)
    port = free_port()
    ports = ["--service-port", str(free_port()), "--manage-port", str(port), "--prealloc-size", "0.0625"]
    command = [sys.executable, "-m", "kvdepot", "serve", *ports, "--token-file", str(token)]
    environ = {"XDG_RUNTIME_DIR": str(home)}
    with Child("the wire door", command, home / "log", environ) as child:
        until("it serves", lambda: child.check() is None and "serving " in (home / "log").read_text())
        yield f"http://{LOOPBACK}:{port}/", token.read_text().strip()


def test_a_token_is_asked_for_and_kept_nowhere(guarded: tuple[str, str], visit: Open) -> None:
    address, token = guarded
    seen = visit()
    seen.page.goto(address)
    form = seen.page.locator("#login")
    form.wait_for(state="visible")
    assert seen.text("#state").startswith("no answer: a token is required")
    assert seen.rows("pool") == []
    seen.page.get_by_label("Token").fill("wrong")
    with seen.page.expect_response(lambda one: one.request.headers.get("authorization") == "Bearer wrong") as told:
        seen.page.get_by_role("button", name="Show").click()
    assert told.value.status == HTTPStatus.UNAUTHORIZED
    assert form.is_visible()
    assert seen.rows("pool") == []
    seen.page.get_by_label("Token").fill(token)
    seen.page.keyboard.press("Enter")
    # An answer to the wrong one may come after the first one to the right one.
    seen.until("the form is gone", "document.getElementById('login').hidden")
    seen.until_answered()
    assert len(seen.rows("pool")) == 7
    kept = seen.page.evaluate("[document.cookie, localStorage.length, sessionStorage.length, location.href]")
    assert kept == ["", 0, 0, address]
    assert all(token not in one for one in [*seen.asked, *seen.said])
    seen.page.reload()
    form.wait_for(state="visible")
