"""The connector's measures in vLLM's own ``/metrics``."""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.vllm.measures import MEASURES, Kind, Measure
from kvdepot.engines.vllm.seed_series import seed_series
from kvdepot.engines.vllm.stats import known

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "vllm:kvdepot_"


class DepotPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc, unused-ignore]
    """Series named ``vllm:kvdepot_<measure>``, counters with ``_total`` appended; one child for each engine."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._engines = per_engine_labelvalues
        self._series = {name: self._new(measure, labelnames) for name, measure in MEASURES.items()}
        for name, measure in MEASURES.items():
            for engine in per_engine_labelvalues:
                for label in measure.values or ([] if measure.label else [""]):
                    self._of(name, engine, label)
        self._of_file = seed_series(
            vllm_config,
            connector_logger(),
            classes={Kind.HISTOGRAM: self._histogram_cls, Kind.COUNTER: self._counter_cls},
            labelnames=labelnames,
            engines=per_engine_labelvalues,
        )

    def _new(self, measure: Measure, labelnames: list[str]) -> Any:
        labels = [*labelnames, measure.label] if measure.label else labelnames
        about: dict[str, Any] = {"name": PREFIX + measure.name, "documentation": measure.text, "labelnames": labels}
        if measure.kind is Kind.HISTOGRAM:
            return self._histogram_cls(**about, buckets=measure.buckets)
        if measure.kind is Kind.GAUGE:
            return self._gauge_cls(**about, multiprocess_mode="mostrecent")
        return self._counter_cls(**about)

    def _of(self, name: str, engine: int, label: str = "") -> Any:
        return self._series[name].labels(*self._engines[engine], *([label] if MEASURES[name].label else []))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the counts of a step."""
        for name, value in known(transfer_stats_data).items():
            measure = MEASURES[name]
            if self._of_file is not None:
                self._of_file.add(name, value, engine_idx)
            if measure.kind is Kind.HISTOGRAM:
                for seconds in value:
                    self._of(name, engine_idx).observe(seconds)
            elif measure.kind is Kind.GAUGE:
                self._of(name, engine_idx).set(value)
            elif measure.label:
                for label, amount in value.items():
                    self._of(name, engine_idx, label).inc(amount)
            else:
                self._of(name, engine_idx).inc(value)
