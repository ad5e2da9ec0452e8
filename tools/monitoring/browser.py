"""The system's Chromium, driven by Playwright, which downloads no browser of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

from tools.monitoring.programs import chromium

# A name that a foreign page had resolve to this machine.
FOREIGN_NAME = "evil.example"
# Chromium's own services would ask hosts of its vendor. Its own check of what foreign pages ask of this machine is off,
# which not every browser has: the depot's is to be seen.
ARGUMENTS = (
    f"--host-resolver-rules=MAP {FOREIGN_NAME} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--disable-gpu",
    "--disable-features=LocalNetworkAccessChecks",
    "--disable-component-update",
    "--disable-background-networking",
)


@contextmanager
def browser() -> Iterator[Browser]:
    """Yields a running browser without a window."""
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium(), headless=True, args=list(ARGUMENTS))
        try:
            yield started
        finally:
            started.close()
