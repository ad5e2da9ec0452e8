"""Progress of work that may take more than a second."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click


@contextmanager
def progress(label: str, total: int, *, hidden: bool) -> Iterator[Callable[[int], object]]:
    """A bar on standard error, where that is a terminal; gives what is told of each step's bytes."""
    with click.progressbar(
        length=max(1, total), label=label, file=sys.stderr, hidden=hidden or not sys.stderr.isatty()
    ) as bar:
        yield bar.update
