"""The file of ``metrics_config_path``: the series that an engine exports and their names, in the seeds' spelling."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvdepot.config.document import Document, KeyPath, read_document
from kvdepot.config.keys import suggestion
from kvdepot.errors import ConfigError

Kind = Literal["counter", "gauge", "histogram"]
KINDS: tuple[Kind, ...] = ("counter", "gauge", "histogram")
WITHOUT_USE = ("log_interval", "multiproc_dir", "histogram_max_length")
"""Keys of the seed's own collector, which are ignored: vLLM collects here, with its own interval and directory."""
TOP_LEVEL = ("metric_prefix", *WITHOUT_USE, *KINDS)
SERIES_KEYS = ("name", "documentation", "buckets", "multiprocess_mode")
PREFIX_DEFAULT = "ucm:"


@dataclass(frozen=True)
class Series:
    """One series that the file requests.

    Attributes:
        name: name without the prefix.
        text: description for operators.
        buckets: upper bounds of a histogram's buckets.
    """

    name: str
    kind: Kind
    text: str
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True)
class MetricsFile:
    """The file's content."""

    prefix: str
    series: tuple[Series, ...]


def read_metrics_file(path: str) -> MetricsFile:
    """Reads a file and checks all of it.

    Raises:
        ConfigError: every mistake found, one per line, each with file, line and what to do.
    """
    document = read_document(Path(path))
    reader = _Reader(document)
    found = MetricsFile(reader.prefix(), tuple(reader.all_series()))
    reader.check_names()
    if reader.problems:
        raise ConfigError("\n".join(reader.problems))
    return found


class _Reader:
    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[str] = []
        self._seen: set[str] = set()

    def check_names(self) -> None:
        for name in self.document.root:
            if name not in TOP_LEVEL:
                self._unknown((name,), TOP_LEVEL)

    def prefix(self) -> str:
        said = self.document.root.get("metric_prefix", PREFIX_DEFAULT)
        if isinstance(said, str) and _is_name(said or "a"):
            return said
        self._problem(("metric_prefix",), f"must be letters, digits, _ and :, got {said!r}")
        return PREFIX_DEFAULT

    def all_series(self) -> Iterator[Series]:
        for kind in KINDS:
            entries = self.document.root.get(kind)
            if entries is None:
                continue
            if not isinstance(entries, list):
                self._problem((kind,), f"must be a list of series, got {entries!r}")
                continue
            for index, entry in enumerate(entries):
                series = self._one(kind, entry, (kind, index))
                if series is not None:
                    yield series

    def _one(self, kind: Kind, entry: object, path: KeyPath) -> Series | None:
        if not isinstance(entry, Mapping):
            self._problem(path, f"must be a mapping with name and documentation, got {entry!r}")
            return None
        for key in entry:
            if key not in SERIES_KEYS:
                self._unknown((*path, key), SERIES_KEYS)
        name, text = entry.get("name"), entry.get("documentation", "")
        if not isinstance(name, str) or not _is_name(name):
            self._problem((*path, "name"), f"must be letters, digits, _ and :, got {name!r}")
            return None
        if name in self._seen:
            self._problem((*path, "name"), f"is named twice: remove one, got {name!r}")
            return None
        self._seen.add(name)
        if not isinstance(text, str):
            self._problem((*path, "documentation"), f"must be a text, got {text!r}")
        return Series(name, kind, str(text), self._buckets(kind, entry, path))

    def _buckets(self, kind: Kind, entry: Mapping[str, object], path: KeyPath) -> tuple[float, ...]:
        said = entry.get("buckets")
        if kind != "histogram":
            if said is not None:
                self._problem((*path, "buckets"), f"only a histogram has buckets: remove them, got {said!r}")
            return ()
        numbers = [one for one in said if _is_number(one)] if isinstance(said, list) else []
        if not isinstance(said, list) or not said or len(numbers) < len(said) or numbers != sorted(set(numbers)):
            self._problem((*path, "buckets"), f"must be ascending numbers, got {said!r}")
            return ()
        return tuple(float(one) for one in numbers)

    def _unknown(self, path: KeyPath, known: tuple[str, ...]) -> None:
        said = suggestion(path[-1], known, f"known here: {', '.join(known)}")
        self._problem(path, f"unknown key: {said}")

    def _problem(self, path: KeyPath, text: str) -> None:
        self.problems.append(f"{self.document.at(path)}: {text}")


def _is_name(text: str) -> bool:
    return text.isascii() and text.replace("_", "a").replace(":", "a").isalnum() and not text[0].isdigit()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
