"""The connector's counters in vLLM's own ``/metrics``."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

COUNTERS = {
    "claims": "Lookups for requests, each of which may lease blocks.",
    "hit_tokens": "Tokens that requests were given from the depot.",
    "loads": "Loads of requests, counted by each rank.",
    "load_blocks": "Blocks copied from the depot into the KV cache, summed over the ranks.",
    "load_bytes": "Bytes copied from the depot into the KV cache, summed over the ranks.",
    "dump_blocks": "Blocks copied from the KV cache into the depot, summed over the ranks.",
    "dump_bytes": "Bytes copied from the KV cache into the depot, summed over the ranks.",
    "dump_fences": "Steps that waited for a dump because they would have overwritten what it read.",
}
FAILURES = {
    "load": "Blocks that could not be loaded and are computed, by kind of failure, summed over the ranks.",
    "dump": "Blocks that could not be stored, by kind of failure, summed over the ranks.",
}
PREFIX = "vllm:kvdepot_"


class DepotPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc, unused-ignore]
    """Counters named ``vllm:kvdepot_<name>_total``, one child for each engine.

    Failures are ``vllm:kvdepot_load_failed_blocks_total`` and ``vllm:kvdepot_dump_failed_blocks_total``, by ``kind``.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._engines = per_engine_labelvalues
        self._counters = {
            name: self._counter_cls(name=PREFIX + name, documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._failures = {
            verb: self._counter_cls(
                name=f"{PREFIX}{verb}_failed_blocks", documentation=text, labelnames=[*labelnames, "kind"]
            )
            for verb, text in FAILURES.items()
        }
        for counter in self._counters.values():
            for labels in per_engine_labelvalues.values():
                counter.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what a step counted."""
        labels = self._engines[engine_idx]
        for name, amount in transfer_stats_data.items():
            verb, failed, kind = name.partition("_failed_")
            if failed:
                self._failures[verb].labels(*labels, kind).inc(amount)
            elif name in self._counters:
                self._counters[name].labels(*labels).inc(amount)
