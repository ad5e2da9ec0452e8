"""Progress bar for work that may take more than a second."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click


@contextmanager
def progress(label: str, total: int, *, hidden: bool) -> Iterator[Callable[[int], object]]:
    """Shows a bar on standard error, if that is a terminal. Yields a function that adds the bytes of a step."""
    with click.progressbar(
        length=max(1, total), label=label, file=sys.stderr, hidden=hidden or not sys.stderr.isatty()
    ) as bar:
        yield bar.update
