"""Progress of work that may take more than a second, on a terminal's standard error."""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import click

T = TypeVar("T")

BEGIN_S = 1.0
"""How long work takes before a line tells of it."""
STEP_S = 0.5
CLEAR = "\r\033[K"


@contextmanager
def progress(label: str, total: int, *, hidden: bool) -> Iterator[Callable[[int], object]]:
    """Shows a bar on standard error, if that is a terminal. Yields a function that adds the bytes of a step."""
    with click.progressbar(
        length=max(1, total), label=label, file=sys.stderr, hidden=hidden or not sys.stderr.isatty()
    ) as bar:
        yield bar.update


@contextmanager
def counting(label: str, total: int | None = None, *, hidden: bool = False) -> Iterator[Callable[[int], object]]:
    """Shows a line that counts, from the first second on, if standard error is a terminal. The line goes at the end.

    It counts seconds, too, so that it moves while a step takes long. Yields a function that adds to the count.

    Args:
        label: what is counted, such as ``replays``.
        total: where the count ends; ``None`` = that is not known; 0 = only the seconds count.
        hidden: shows nothing.
    """
    count = 0

    def add(number: int) -> None:
        nonlocal count
        count += number

    if hidden or not sys.stderr.isatty():
        yield add
        return
    begun, ended = time.monotonic(), threading.Event()

    def show() -> None:
        wait_s, shown = BEGIN_S, False
        while not ended.wait(wait_s):
            wait_s, shown = STEP_S, True
            so_far = f": {count:,}" if total or count else ""
            of = f" of {total:,}" if total else ""
            click.echo(f"{CLEAR}{label}{so_far}{of}, {time.monotonic() - begun:.0f} s", nl=False, err=True)
        if shown:
            click.echo(CLEAR, nl=False, err=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield add
    finally:
        ended.set()
        thread.join()


def counted(items: Iterable[T], label: str, total: int | None = None, *, hidden: bool = False) -> Iterator[T]:
    """Yields the items, and shows how many there were, as ``counting`` does."""
    with counting(label, total, hidden=hidden) as add:
        for item in items:
            yield item
            add(1)
