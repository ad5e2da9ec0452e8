//! What the wire door counts, and how it reads as Prometheus text.

use std::fmt::Write;

use kvdepot_core::{Error, ErrorKind, Result};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

type Label = [(&'static str, &'static str); 1];

/// Counters of a wire door since it was opened.
#[derive(Debug)]
pub(super) struct Counters {
    registry: Registry,
    pub(super) connections: Gauge,
    pub(super) accepted: Counter,
    refused: Family<Label, Counter>,
    requests: Family<Label, Counter>,
    failures: Family<Label, Counter>,
    pub(super) received_bytes: Counter,
    pub(super) sent_bytes: Counter,
}

impl Counters {
    pub(super) fn new() -> Self {
        let mut registry = Registry::with_prefix("kvdepot_wire");
        let (connections, accepted, refused) = (Gauge::default(), Counter::default(), Family::default());
        let (requests, failures) = (Family::default(), Family::default());
        let (received_bytes, sent_bytes) = (Counter::default(), Counter::default());
        registry.register("connections", "Connections that are open", connections.clone());
        registry.register("connections_accepted", "Connections that were accepted", accepted.clone());
        registry.register(
            "connections_refused",
            "Connections that were closed, by reason",
            Family::clone(&refused),
        );
        registry.register("requests", "Requests by operation", Family::clone(&requests));
        registry.register("failures", "Requests that failed, by kind", Family::clone(&failures));
        registry.register("received_bytes", "Bytes of payload received", received_bytes.clone());
        registry.register("sent_bytes", "Bytes of payload sent", sent_bytes.clone());
        Self { registry, connections, accepted, refused, requests, failures, received_bytes, sent_bytes }
    }

    pub(super) fn request(&self, op: &'static str) {
        self.requests.get_or_create(&[("op", op)]).inc();
    }

    pub(super) fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&[("reason", reason)]).inc();
    }

    pub(super) fn failed(&self, kind: ErrorKind) {
        self.failures.get_or_create(&[("kind", kind.as_str())]).inc();
    }

    /// Prometheus text: these counters, and the numbers of the depot's own.
    pub(super) fn text(&self, stats: &serde_json::Value) -> Result<String> {
        let bad = |e| Error::new(ErrorKind::Io, "metrics cannot be written").with_source(e);
        let mut text = String::new();
        encode(&mut text, &self.registry).map_err(bad)?;
        let mut depot = String::new();
        for (name, value) in stats.as_object().into_iter().flatten().filter(|(name, _)| *name != "pid") {
            if let Some(value) = value.as_u64() {
                writeln!(depot, "# TYPE kvdepot_{name} gauge\nkvdepot_{name} {value}").map_err(bad)?;
            }
        }
        write_servers(&mut depot, stats).map_err(bad)?;
        write_regions(&mut depot, stats).map_err(bad)?;
        // What ends the text must stand at its end.
        let end = text.rfind("# EOF").unwrap_or(text.len());
        text.insert_str(end, &depot);
        Ok(text)
    }
}

/// How the servers of a depot's tiers are.
fn write_servers(out: &mut String, stats: &serde_json::Value) -> std::fmt::Result {
    let tiers = stats["tiers"].as_array().into_iter().flatten();
    let servers: Vec<_> = tiers.flat_map(|tier| tier["servers"].as_array().into_iter().flatten()).collect();
    for name in ["up", "connections", "failures"] {
        if !servers.is_empty() {
            writeln!(out, "# TYPE kvdepot_remote_server_{name} gauge")?;
        }
        for server in &servers {
            let value = server[name].as_bool().map(u64::from).or_else(|| server[name].as_u64()).unwrap_or(0);
            // Text in quotes is written alike there and here.
            writeln!(out, "kvdepot_remote_server_{name}{{server={}}} {value}", server["address"])?;
        }
    }
    Ok(())
}

/// What the regions of a depot's pool hold.
fn write_regions(out: &mut String, stats: &serde_json::Value) -> std::fmt::Result {
    let regions = stats["pool_regions"].as_array().map_or(&[][..], Vec::as_slice);
    for name in ["bytes", "free_bytes"] {
        if !regions.is_empty() {
            writeln!(out, "# TYPE kvdepot_pool_region_{name} gauge")?;
        }
        for (number, region) in regions.iter().enumerate() {
            let node = region["node"].as_u64().map_or_else(String::new, |node| node.to_string());
            let value = region[name].as_u64().unwrap_or(0);
            writeln!(out, "kvdepot_pool_region_{name}{{region=\"{number}\",node=\"{node}\"}} {value}")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_of_tiers_are_told() {
        let server = |address: &str, up: bool| serde_json::json!({"address": address, "up": up, "connections": 4, "failures": 7});
        let tiers = serde_json::json!([{"name": "posix"}, {"servers": [server("a:1", true), server("[::1]:2", false)]}]);
        let text = Counters::new().text(&serde_json::json!({"tiers": tiers})).expect("text");
        for line in [
            "kvdepot_remote_server_up{server=\"a:1\"} 1",
            "kvdepot_remote_server_up{server=\"[::1]:2\"} 0",
            "kvdepot_remote_server_failures{server=\"a:1\"} 7",
            "# TYPE kvdepot_remote_server_connections gauge",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is not in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn regions_of_the_pool_are_told() {
        let regions = serde_json::json!([{"node": 1, "bytes": 9, "free_bytes": 5}, {"node": null, "bytes": 7, "free_bytes": 0}]);
        let text = Counters::new().text(&serde_json::json!({"pool_regions": regions})).expect("text");
        for line in [
            "kvdepot_pool_region_bytes{region=\"0\",node=\"1\"} 9",
            "kvdepot_pool_region_free_bytes{region=\"0\",node=\"1\"} 5",
            "kvdepot_pool_region_bytes{region=\"1\",node=\"\"} 7",
            "# TYPE kvdepot_pool_region_free_bytes gauge",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is not in\n{text}");
        }
    }
}
