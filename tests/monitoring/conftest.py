"""A real browser for all tests, and pages of it that must not complain nor ask other hosts."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from tools.monitoring.browser import browser as run_browser
from tools.monitoring.load import PATIENCE_S

POLL_S = 0.05
# The page gives a depot five seconds for an answer. A busy machine may take longer, and tests compare answers.
PATIENT = (
    f"{{ const after = AbortSignal.timeout; AbortSignal.timeout = () => after.call(AbortSignal, {PATIENCE_S}e3); }}"
)


def until(what: str, is_so: Callable[[], Any]) -> Any:
    """Waits until something is so, and returns it."""
    end_s = time.monotonic() + PATIENCE_S
    while not (found := is_so()):
        assert time.monotonic() < end_s, what
        time.sleep(POLL_S)
    return found


class Visit:
    """A page of the browser, and what went on in it.

    Attributes:
        page: the page.
        said: messages of its console, and errors of its scripts.
        asked: addresses that it asked for.
    """

    def __init__(self, context: BrowserContext) -> None:
        context.set_default_timeout(PATIENCE_S * 1000)
        self.page: Page = context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def text(self, selector: str) -> str:
        """The text of an element."""
        return self.page.locator(selector).inner_text()

    def rows(self, name: str) -> list[list[str]]:
        """The cells of a table's body."""
        script = "body => [...body.rows].map(row => [...row.cells].map(cell => cell.textContent))"
        found: list[list[str]] = self.page.locator(f"tbody#{name}").evaluate(script)
        return found

    def until(self, what: str, script: str) -> None:
        """Waits until an expression is true in the page."""
        # Asked from outside: the page's policy forbids Playwright's own way to wait.
        until(what, lambda: self.page.evaluate(script))

    def until_answered(self) -> None:
        """Waits until the page shows what a depot has answered."""
        self.until("the depot answers", "document.getElementById('state').textContent.startsWith('as of')")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with run_browser() as started:
        yield started


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    """Opens pages, with the page's own limit of time or a longer one; options are those of Playwright's contexts."""
    opened: list[BrowserContext] = []

    def open_page(*, patient: bool = True, **options: Any) -> Visit:
        opened.append(browser.new_context(**options))
        if patient:
            opened[-1].add_init_script(PATIENT)
        return Visit(opened[-1])

    yield open_page
    for context in opened:
        context.close()


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("monitoring")
