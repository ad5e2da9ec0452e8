//! `/metrics`: a depot's statistics in OpenMetrics' text form.

use hyper::StatusCode;
use kvdepot_core::{Error, ErrorKind, Result};
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::registry::Registry;
use serde_json::Value;

use super::answer::{Answer, answer_with, failed};
use super::series::Series;

const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A depot's statistics, after the door's own series.
pub(super) fn metrics(door: Option<&Registry>, stats: Value) -> Answer {
    match metrics_text(door, stats) {
        Ok(text) => answer_with(StatusCode::OK, METRICS_TYPE, text),
        Err(error) => failed(&error),
    }
}

/// As [`metrics`], without the series that name namespaces.
pub(super) fn public_metrics(door: Option<&Registry>, mut stats: Value) -> Answer {
    if let Some(stats) = stats.as_object_mut() {
        stats.remove("top_namespaces");
    }
    metrics(door, stats)
}

/// OpenMetrics text.
fn metrics_text(door: Option<&Registry>, stats: Value) -> Result<String> {
    let mut depot = Registry::with_prefix("kvdepot");
    depot.register_collector(Box::new(Series(stats)));
    let mut text = String::new();
    door.into_iter()
        .chain([&depot])
        .try_for_each(|registry| encode_registry(&mut text, registry))
        .and_then(|()| encode_eof(&mut text))
        .map_err(|e| Error::new(ErrorKind::Io, "metrics cannot be written").with_source(e))?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has(text: &str, lines: &[&str]) {
        for line in lines {
            assert!(text.lines().any(|other| other == *line), "{line} is not in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn counters_and_gauges_have_their_type_unit_and_help() {
        let stats = serde_json::json!({
            "pid": 7, "pipeline": "Cache|\"Posix\"", "fetch_bytes": 9, "claims": 3, "pool_bytes": 5, "evict_blocks": 2,
            "lock_hold_max_us": 1500, "failures": {"fetch": {"io": 4}},
        });
        let text = metrics_text(None, stats).expect("text");
        let lines = [
            "# TYPE kvdepot_fetch_bytes counter",
            "# UNIT kvdepot_fetch_bytes bytes",
            "# HELP kvdepot_fetch_bytes Bytes read from tiers into the pool.",
            "kvdepot_fetch_bytes_total 9",
            "kvdepot_claims_total 3",
            "kvdepot_evict_blocks_total 2",
            "# TYPE kvdepot_pool_bytes gauge",
            "kvdepot_pool_bytes 5",
            "kvdepot_lock_hold_max_seconds 0.0015",
            "kvdepot_failures_total{operation=\"fetch\",kind=\"io\"} 4",
            // Before the first one, so that an increase is seen.
            "kvdepot_failures_total{operation=\"fetch\",kind=\"corrupt\"} 0",
        ];
        has(&text, &lines);
        assert!(text.contains("pipeline=\"Cache|\\\"Posix\\\"\""), "{text}");
        assert!(!text.contains("pid"), "{text}");
    }

    #[test]
    fn misses_are_told_by_reason_and_by_the_namespaces_that_are_read_most() {
        let top = serde_json::json!([{"namespace": "3f", "facts": "model=\"a\"", "pool_bytes": 5, "load_bytes": 7, "misses": 2,
            "lookup_blocks": 9, "lookup_hit_blocks": 6}]);
        let misses = serde_json::json!({"evicted": 4, "never_stored": 0});
        let text =
            metrics_text(None, serde_json::json!({"misses": misses, "top_namespaces": top})).expect("text");
        let lines = [
            "# TYPE kvdepot_miss_requests counter",
            "kvdepot_miss_requests_total{reason=\"evicted\"} 4",
            "kvdepot_miss_requests_total{reason=\"never_stored\"} 0",
            "kvdepot_namespace_pool_bytes{namespace=\"3f\",facts=\"model=\\\"a\\\"\"} 5",
            "kvdepot_namespace_load_bytes_total{namespace=\"3f\",facts=\"model=\\\"a\\\"\"} 7",
            "kvdepot_namespace_lookup_blocks_total{namespace=\"3f\",facts=\"model=\\\"a\\\"\"} 9",
            "kvdepot_namespace_lookup_hit_blocks_total{namespace=\"3f\",facts=\"model=\\\"a\\\"\"} 6",
            "kvdepot_namespace_misses_total{namespace=\"3f\",facts=\"model=\\\"a\\\"\"} 2",
        ];
        has(&text, &lines);
    }

    #[test]
    fn tiers_and_their_servers_are_told() {
        let server = |address: &str, up: bool| serde_json::json!({"address": address, "up": up, "connections": 4, "failures": 7});
        let tiers = serde_json::json!([
            {"name": "Posix", "blocks": 3, "bytes": 12, "bytes_max": null, "shared_bytes": 90, "shared_depots": 2,
             "compressed_blocks": 2, "compression_cpu_us": 1_500_000},
            {"name": "object", "put_requests": 5, "list_requests": 2, "sent_bytes": 70, "corrupt_blocks": 1},
            {"name": "Remote", "servers": [server("a:1", true), server("[::1]:2", false)]},
        ]);
        let text = metrics_text(None, serde_json::json!({"tiers": tiers})).expect("text");
        let lines = [
            "kvdepot_tier_blocks{tier=\"Posix\"} 3",
            "kvdepot_tier_bytes{tier=\"Posix\"} 12",
            "kvdepot_tier_shared_bytes{tier=\"Posix\"} 90",
            "kvdepot_tier_shared_depots{tier=\"Posix\"} 2",
            "kvdepot_tier_compressed_blocks_total{tier=\"Posix\"} 2",
            "kvdepot_tier_compression_cpu_seconds_total{tier=\"Posix\"} 1.5",
            "kvdepot_remote_server_up{server=\"a:1\"} 1",
            "kvdepot_remote_server_up{server=\"[::1]:2\"} 0",
            "kvdepot_remote_server_failures_total{server=\"a:1\"} 7",
            "# TYPE kvdepot_remote_server_connections gauge",
            "kvdepot_object_requests_total{request=\"put\"} 5",
            "kvdepot_object_requests_total{request=\"list\"} 2",
            "kvdepot_object_sent_bytes_total 70",
            "kvdepot_object_corrupt_blocks_total 1",
        ];
        has(&text, &lines);
        assert!(!text.contains("tier_max_bytes"), "no bound, no number: {text}");
        assert!(!text.contains("tier_shared_granted_bytes"), "nothing told, no number: {text}");
    }

    #[test]
    fn times_and_bytes_of_what_moves_are_told_by_tier() {
        let moved = serde_json::json!({"blocks": 6, "bytes": 60, "sum_us": 2_500_000, "buckets": [[500, 3], [1_000_000, 2], [null, 1]],
            "sizes": [[4096, 6], [null, 0]]});
        let idle = serde_json::json!({"blocks": 0, "bytes": 0, "sum_us": 0, "buckets": [[500, 0], [1_000_000, 0], [null, 0]]});
        let tiers = serde_json::json!([{"name": "Posix", "reads": moved, "writes": idle}, {"name": "Object", "reads": idle}]);
        let text = metrics_text(None, serde_json::json!({"tiers": tiers})).expect("text");
        let lines = [
            "# TYPE kvdepot_tier_read_seconds histogram",
            "# UNIT kvdepot_tier_read_seconds seconds",
            "# HELP kvdepot_tier_read_seconds Time from the call of a tier until a block was in the pool.",
            "kvdepot_tier_read_seconds_sum{tier=\"Posix\"} 2.5",
            "kvdepot_tier_read_seconds_count{tier=\"Posix\"} 6",
            "kvdepot_tier_read_seconds_bucket{le=\"0.0005\",tier=\"Posix\"} 3",
            "kvdepot_tier_read_seconds_bucket{le=\"1.0\",tier=\"Posix\"} 5",
            "kvdepot_tier_read_seconds_bucket{le=\"+Inf\",tier=\"Posix\"} 6",
            "kvdepot_tier_read_seconds_bucket{le=\"+Inf\",tier=\"Object\"} 0",
            "kvdepot_tier_write_seconds_count{tier=\"Posix\"} 0",
            "kvdepot_tier_read_bytes_total{tier=\"Posix\"} 60",
            "# UNIT kvdepot_tier_read_block_bytes bytes",
            "kvdepot_tier_read_block_bytes_sum{tier=\"Posix\"} 60.0",
            "kvdepot_tier_read_block_bytes_bucket{le=\"4096.0\",tier=\"Posix\"} 6",
            "kvdepot_tier_write_bytes_total{tier=\"Posix\"} 0",
        ];
        has(&text, &lines);
        assert!(!text.contains("kvdepot_tier_write_seconds_count{tier=\"Object\"}"), "{text}");
    }

    #[test]
    fn times_of_claims_and_of_copies_are_told() {
        let times = serde_json::json!({"count": 2, "sum_us": 1_500_000, "buckets": [[500, 1], [null, 1]]});
        let load = serde_json::json!({"batches": 1, "bytes": 4096, "sum_us": 500_000, "buckets": [[500, 0], [null, 1]],
            "sizes": [[4096, 1], [null, 0]]});
        let stats = serde_json::json!({"claim_times": {"admitted": times, "settled": times}, "copies": {"load": load}});
        let text = metrics_text(None, stats).expect("text");
        let lines = [
            "# TYPE kvdepot_claim_wait_seconds histogram",
            "kvdepot_claim_wait_seconds_count 2",
            "kvdepot_claim_seconds_sum 1.5",
            "kvdepot_claim_seconds_bucket{le=\"0.0005\"} 1",
            "# TYPE kvdepot_copy_seconds histogram",
            "kvdepot_copy_seconds_sum{operation=\"load\"} 0.5",
            "# UNIT kvdepot_copy_bytes bytes",
            "kvdepot_copy_bytes_sum{operation=\"load\"} 4096.0",
            "kvdepot_copy_bytes_bucket{le=\"4096.0\",operation=\"load\"} 1",
        ];
        has(&text, &lines);
    }

    #[test]
    fn ages_of_evicted_blocks_and_of_leases_are_exported() {
        let ages = serde_json::json!({"blocks": 4, "sum_s": 700, "buckets": [[60, 1], [300, 2], [null, 1]]});
        let stats = serde_json::json!({"evict_ages": ages, "leases": 3, "lease_age_max_s": 12,
            "tiers": [{"name": "Posix", "evict_blocks": 9}]});
        let text = metrics_text(None, stats).expect("text");
        let lines = [
            "# TYPE kvdepot_evict_age_seconds histogram",
            "# UNIT kvdepot_evict_age_seconds seconds",
            "kvdepot_evict_age_seconds_sum 700.0",
            "kvdepot_evict_age_seconds_count 4",
            "kvdepot_evict_age_seconds_bucket{le=\"60.0\"} 1",
            "kvdepot_evict_age_seconds_bucket{le=\"300.0\"} 3",
            "kvdepot_evict_age_seconds_bucket{le=\"+Inf\"} 4",
            "kvdepot_leases 3",
            "# TYPE kvdepot_lease_age_max_seconds gauge",
            "kvdepot_lease_age_max_seconds 12",
            "kvdepot_tier_evict_blocks_total{tier=\"Posix\"} 9",
        ];
        has(&text, &lines);
        let without = metrics_text(None, serde_json::json!({})).expect("text");
        assert!(!without.contains("evict_age"), "{without}");
    }

    #[test]
    fn regions_of_the_pool_are_told() {
        let regions = serde_json::json!([{"node": 1, "bytes": 9, "free_bytes": 5}, {"node": null, "bytes": 7, "free_bytes": 0}]);
        let text = metrics_text(None, serde_json::json!({"pool_regions": regions})).expect("text");
        let lines = [
            "kvdepot_pool_region_bytes{region=\"0\",node=\"1\"} 9",
            "kvdepot_pool_region_free_bytes{region=\"0\",node=\"1\"} 5",
            "kvdepot_pool_region_bytes{region=\"1\",node=\"\"} 7",
            "# TYPE kvdepot_pool_region_free_bytes gauge",
        ];
        has(&text, &lines);
    }
}
