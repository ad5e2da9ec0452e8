//! The counters of the wire door.

use kvdepot_core::ErrorKind;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

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
        registry.register("connections", "Open connections", connections.clone());
        registry.register("connections_accepted", "Accepted connections", accepted.clone());
        registry.register(
            "connections_refused",
            "Connections refused, or closed after an error, by reason",
            Family::clone(&refused),
        );
        registry.register("requests", "Requests by operation", Family::clone(&requests));
        registry.register("failures", "Failed requests, by kind", Family::clone(&failures));
        registry.register_with_unit("received", "Payload received", Unit::Bytes, received_bytes.clone());
        registry.register_with_unit("sent", "Payload sent", Unit::Bytes, sent_bytes.clone());
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

    /// Returns the series of these counters.
    pub(super) const fn registry(&self) -> &Registry {
        &self.registry
    }
}
