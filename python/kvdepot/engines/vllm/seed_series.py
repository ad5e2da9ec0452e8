"""Series under the names of a ``metrics_config_path`` file, in addition to our own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvdepot.config.metrics_file import MetricsFile, Series, read_metrics_file
from kvdepot.engines.vllm.measures import MEASURES, Kind
from kvdepot.engines.vllm.options import read_options
from kvdepot.engines.vllm_plugin import NAMES
from kvdepot.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig


@dataclass(frozen=True)
class Source:
    """Source of a series: a measure, converted to another unit."""

    measure: str
    factor: float = 1


SOURCES: Mapping[str, Source] = {
    "load_bytes_total": Source("load_bytes"),
    "save_bytes_total": Source("dump_bytes"),
    "cache_load_bytes_total": Source("load_bytes"),
    "cache_dump_bytes_total": Source("dump_bytes"),
    "cache_load_blocks_total": Source("load_blocks"),
    "cache_dump_blocks_total": Source("dump_blocks"),
    "load_blocks_num": Source("load_size_blocks"),
    "save_blocks_num": Source("dump_size_blocks"),
    "load_duration": Source("load_seconds", 1e3),
    "save_duration": Source("dump_seconds", 1e3),
    "load_speed": Source("load_bytes_per_second", 1e-9),
    "save_speed": Source("dump_bytes_per_second", 1e-9),
    "interval_lookup_hit_rates": Source("lookup_hit_ratio"),
    "cache_lookup_duration_ms": Source("lookup_seconds", 1e3),
    "cache_load_duration_ms": Source("load_seconds", 1e3),
    "cache_dump_duration_ms": Source("dump_seconds", 1e3),
    "cache_load_bandwidth_gbps": Source("load_bytes_per_second", 1e-9),
    "cache_dump_bandwidth_gbps": Source("dump_bytes_per_second", 1e-9),
}
"""Names of the seed's file for which the connector has a measure."""


def is_measured(series: Series) -> bool:
    """Returns whether the connector measures a series of this name, as the same kind of series."""
    source = SOURCES.get(series.name)
    return source is not None and MEASURES[source.measure].kind.name == series.kind.upper()


class SeedSeries:
    """The measured series of a file; one child for each engine.

    Attributes:
        not_measured: names of the file that get no series.
        refused: errors for names that one of our or vLLM's series already has.
    """

    def __init__(
        self,
        file: MetricsFile,
        classes: Mapping[Kind, Any],
        labelnames: list[str],
        engines: Mapping[int, list[object]],
    ) -> None:
        self.not_measured = [series.name for series in file.series if not is_measured(series)]
        self.refused: list[str] = []
        self._engines = engines
        self._by_measure: dict[str, list[tuple[float, Any]]] = {}
        for series in file.series:
            if not is_measured(series):
                continue
            source = SOURCES[series.name]
            kind = MEASURES[source.measure].kind
            about: dict[str, Any] = {
                "name": file.prefix + series.name,
                "documentation": series.text or MEASURES[source.measure].text,
                "labelnames": labelnames,
            }
            if kind is Kind.HISTOGRAM:
                about["buckets"] = series.buckets
            try:
                made = classes[kind](**about)
            except ValueError as error:  # a prefix such as "vllm:kvdepot_" results in names of existing series
                self.refused.append(f"{about['name']} ({error})")
                continue
            for labels in engines.values():
                made.labels(*labels)
            self._by_measure.setdefault(source.measure, []).append((source.factor, made))

    def add(self, name: str, value: Any, engine: int) -> None:
        """Adds a step's count of a measure: a number, or a list of observations."""
        for factor, series in self._by_measure.get(name, ()):
            child = series.labels(*self._engines[engine])
            if MEASURES[name].kind is Kind.HISTOGRAM:
                for one in value:
                    child.observe(one * factor)
            else:
                child.inc(value * factor)


def file_of(vllm_config: "VllmConfig") -> MetricsFile | None:
    """Returns the file that an engine's configuration names; ``None`` if it names none.

    Raises:
        ConfigError: the file cannot be read, or is wrong.
    """
    for extra in _own_settings(vllm_config.kv_transfer_config):
        path = read_options(extra).config.metrics_config_path
        if path:
            return read_metrics_file(path)
    return None


def _own_settings(transfer: "KVTransferConfig") -> list[Any]:
    """Returns the settings of this connector, which may be one of several below a ``MultiConnector``."""
    extra = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector in NAMES:
        return [extra]
    inner = extra.get("connectors") or []
    found = [one for one in inner if isinstance(one, Mapping) and one.get("kv_connector") in NAMES]
    return [one.get("kv_connector_extra_config") for one in found]


def seed_series(vllm_config: "VllmConfig", logger: Any, **how: Any) -> SeedSeries | None:
    """Returns the series of an engine's file. A mistake that is only noticed here costs the series, not the engine."""
    try:
        file = file_of(vllm_config)
    except ConfigError as error:
        logger.error("metrics_config_path is not used: %s", error)  # noqa: TRY400 - the message says all
        return None
    if file is None:
        return None
    series = SeedSeries(file, **how)
    if series.not_measured:
        logger.warning(
            "metrics_config_path: %d names have no series, because kvdepot does not measure them: %s",
            len(series.not_measured),
            ", ".join(series.not_measured),
        )
    if series.refused:
        logger.warning(
            "metrics_config_path: %d names have no series, use another metric_prefix: %s",
            len(series.refused),
            ", ".join(series.refused),
        )
    return series
