//! The counters of the wire door.

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::ErrorKind;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

type Label = [(&'static str, &'static str); 1];

/// Upper bounds of the buckets of requests' times, in seconds.
const BOUNDS_S: [f64; 12] = [0.000_1, 0.000_25, 0.001, 0.002_5, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0];

/// A request that is being served. Its time ends when this is dropped.
#[derive(Debug)]
pub(super) struct Timed {
    begun: Instant,
    times: Histogram,
}

impl Drop for Timed {
    fn drop(&mut self) {
        self.times.observe(self.begun.elapsed().as_secs_f64());
    }
}

/// Counters of a wire door since it was opened.
#[derive(Debug)]
pub(super) struct Counters {
    registry: Arc<Registry>,
    pub(super) connections: Gauge,
    pub(super) accepted: Counter,
    refused: Family<Label, Counter>,
    requests: Family<Label, Counter>,
    times: Family<Label, Histogram, fn() -> Histogram>,
    failures: Family<Label, Counter>,
    pub(super) received_bytes: Counter,
    pub(super) sent_bytes: Counter,
}

impl Counters {
    pub(super) fn new() -> Self {
        let mut registry = Registry::with_prefix("kvdepot_wire");
        let (connections, accepted, refused) = (Gauge::default(), Counter::default(), Family::default());
        let (requests, failures) = (Family::default(), Family::default());
        let times = Family::new_with_constructor((|| Histogram::new(BOUNDS_S)) as fn() -> Histogram);
        let (received_bytes, sent_bytes) = (Counter::default(), Counter::default());
        registry.register("connections", "Open connections", connections.clone());
        registry.register("connections_accepted", "Accepted connections", accepted.clone());
        registry.register(
            "connections_refused",
            "Connections refused, or closed after an error, by reason",
            Family::clone(&refused),
        );
        registry.register("requests", "Requests by operation", Family::clone(&requests));
        registry.register_with_unit(
            "request",
            "Time from when a request had arrived until its answer was sent, its payload's transfer included",
            Unit::Seconds,
            Family::clone(&times),
        );
        registry.register("failures", "Failed requests, by kind", Family::clone(&failures));
        registry.register_with_unit("received", "Payload received", Unit::Bytes, received_bytes.clone());
        registry.register_with_unit("sent", "Payload sent", Unit::Bytes, sent_bytes.clone());
        Self {
            registry: Arc::new(registry),
            connections,
            accepted,
            refused,
            requests,
            times,
            failures,
            received_bytes,
            sent_bytes,
        }
    }

    /// Counts a request that has arrived. Its time is measured until the result is dropped.
    pub(super) fn request(&self, op: &'static str) -> Timed {
        let label = [("op", op)];
        self.requests.get_or_create(&label).inc();
        Timed { begun: Instant::now(), times: self.times.get_or_create(&label).clone() }
    }

    pub(super) fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&[("reason", reason)]).inc();
    }

    pub(super) fn failed(&self, kind: ErrorKind) {
        self.failures.get_or_create(&[("kind", kind.as_str())]).inc();
    }

    /// Returns the series of these counters.
    pub(super) const fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn a_request_counts_when_it_arrives_and_its_time_when_it_ends() {
        let counters = Counters::new();
        let text = || {
            let mut text = String::new();
            encode(&mut text, counters.registry()).expect("text");
            text
        };
        let (first, second) = (counters.request("get"), counters.request("get"));
        let served = |count| format!("kvdepot_wire_request_seconds_count{{op=\"get\"}} {count}\n");
        assert!(
            text().contains("kvdepot_wire_requests_total{op=\"get\"} 2\n") && text().contains(&served(0))
        );
        drop(first);
        assert!(text().contains(&served(1)), "{}", text());
        drop(second);
        assert!(text().contains(&served(2)), "{}", text());
    }
}
