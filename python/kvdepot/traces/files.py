"""Trace files: Mooncake's lines, engines' recordings, and sessions with their own hashes."""

import gzip
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import IO

from kvdepot._native import Trace
from kvdepot.errors import ConfigError

RECORDED = re.compile(r"trace-(\d+)-\d+\.\d+\.jsonl")
"""A file recorded by an engine: start of the recording in Unix milliseconds, process, and number."""

Request = tuple[int, int, int, list[int]]
"""Milliseconds, tokens of the prompt and of the answer, and the numbers of the prompt's blocks."""


def recorded_name(begin_ms: int, process: int) -> str:
    """Returns the base name of a recording's files, to which the recorder appends."""
    return f"{begin_ms}-{process}"


def read_traces(paths: Iterable[str], told: Callable[[int], object] = lambda _: None) -> tuple[Trace, list[str]]:
    """Reads all requests of these files, sorted by time. Returns them and notes about skipped lines.

    A ``.json`` file is one session; any other has one request or session per line. Recordings of several engines, or of
    one that was restarted, keep the time between them. A truncated last line, as a crash leaves it, is skipped.
    ``told`` is called with numbers of lines that were read.

    Raises:
        ConfigError: a file cannot be read, or a line is not a request; with its file and number.
    """
    trace = Trace()
    notes: list[str] = []
    chosen = list(paths)
    begins = {path: int(found[1]) for path in chosen if (found := RECORDED.fullmatch(os.path.basename(path)))}
    first = min(begins.values(), default=0)
    for path in chosen:
        later_ms = begins.get(path, first) - first
        try:
            with _open(path) as file:
                notes += _read(trace, path, file, later_ms, told)
        except (OSError, UnicodeDecodeError, EOFError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
    trace.sort()
    return trace, notes


def _open(path: str) -> IO[str]:
    if path.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8")
    return open(path, encoding="utf-8")


def _read(trace: Trace, path: str, file: IO[str], later_ms: int, told: Callable[[int], object]) -> Iterator[str]:
    if path.removesuffix(".gz").endswith(".json"):
        _push(trace, file.read(), path, None, later_ms)
        return
    for number, line in enumerate(file, 1):
        told(1)
        if not line.strip():
            continue
        try:
            _push(trace, line, path, number, later_ms)
        except ConfigError:
            if line.endswith("\n"):
                raise
            yield f"{path}:{number}: an incomplete last line was skipped"


def _push(trace: Trace, text: str, path: str, number: int | None, later_ms: int) -> None:
    try:
        trace.push_json(text, later_ms=later_ms)
    except ConfigError as error:
        raise ConfigError(f"{path}{'' if number is None else f':{number}'}: {error}") from None


def line_of(request: Request) -> str:
    """Formats a request as a line in Mooncake's format."""
    timestamp, input_length, output_length, blocks = request
    return json.dumps(
        {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": blocks}
    )
