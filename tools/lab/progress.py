"""Progress on standard error: a spinner with time and last log line; plain lines without a terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

REFRESH_PER_S = 8


class Progress:
    """Shows steps in sequence."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)

    @contextmanager
    def step(self, text: str, detail: Callable[[], str] = str) -> Iterator[None]:
        """Shows a running step with ``detail()`` beside it, and finally how long it took."""
        started_s = time.monotonic()
        spinner = Spinner("dots")

        def line() -> Spinner:
            elapsed = f"{time.monotonic() - started_s:4.0f} s"
            found = Text.assemble(f"{text}  ", (elapsed, "cyan"), ("  " + detail(), "dim"))
            found.truncate(max(20, self.console.width - 4), overflow="ellipsis")
            spinner.update(text=found)
            return spinner

        if self.console.is_terminal:
            with Live(console=self.console, get_renderable=line, refresh_per_second=REFRESH_PER_S, transient=True):
                yield
        else:
            self.console.print(f"  {text} …")
            yield
        self.console.print(
            Text.assemble(("✓ ", "green"), f"{text}  ", (f"{time.monotonic() - started_s:.1f} s", "cyan"))
        )

    def note(self, text: str) -> None:
        """Prints a note that needs no time."""
        self.console.print(Text(f"  {text}"))

    def failure(self, text: str) -> None:
        """Prints a failure."""
        self.console.print(Text.assemble(("✗ ", "red"), text))
