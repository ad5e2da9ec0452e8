//! Depots that store their blocks at pool servers.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses its part, and fails where it cannot go on")]

use std::sync::Arc;

use kvdepot_core::{BlockLayout, NamespaceSpec};
use kvdepot_depot::DepotConfig;
use kvdepot_depot::client::{Attachment, Claim, ClaimGroupSpec};
use serde_json::{Value, json};

use crate::common::{Engine, LONG, config, hash};

pub(crate) const BLOCK: u64 = 64 << 10;

pub(crate) fn layout() -> BlockLayout {
    BlockLayout::uniform(4, &[BLOCK / 4]).unwrap()
}

/// Makes the configuration of a depot with the server at this address. `more` is added to it, and `remote` to that of
/// the tier.
pub(crate) fn over(
    address: impl ToString,
    pipeline: &str,
    pool_bytes: u64,
    remote: &Value,
    more: &Value,
) -> DepotConfig {
    let mut whole = json!({
        "pipeline": pipeline,
        "remote": {"servers": [address.to_string()], "timeout_ms": 20_000},
    });
    for (key, value) in remote.as_object().unwrap() {
        whole["remote"][key] = value.clone();
    }
    for (key, value) in more.as_object().unwrap() {
        whole[key] = value.clone();
    }
    config(pool_bytes, whole)
}

/// Claims blocks `0..count`. Returns whether the claim settled, the hit, and how much of it came from a tier.
pub(crate) fn claim(attachment: &Arc<Attachment>, spec: &Arc<NamespaceSpec>, count: u64) -> (bool, u32, u32) {
    let group = ClaimGroupSpec { namespaces: vec![Arc::clone(spec)], window_blocks: 0, hashes_per_block: 1 };
    let hashes: Vec<_> = (0..count).map(hash).collect();
    let mut claim = Claim::open(attachment, &[group], &hashes, 0, u32::try_from(count).unwrap(), "").unwrap();
    let (settled, units, from_tier) = claim.wait(LONG);
    claim.release();
    (settled, units, from_tier)
}

/// Dumps 32 blocks through one depot and loads them through the other: all exist, with the same bytes.
pub(crate) fn hand_over(producer: &Arc<Attachment>, consumer: &Arc<Attachment>, spec: &Arc<NamespaceSpec>) {
    let mut from = Engine::new(producer, spec, 32);
    let mut into = Engine::new(consumer, spec, 32);
    from.fill(5);
    let names: Vec<u64> = (0..32).collect();
    assert!(from.dump(&names, &from.all_pages()).is_empty());
    assert!(producer.drain(LONG).unwrap(), "written behind");
    assert_eq!(claim(consumer, spec, 40), (true, 32, 32), "{}", consumer.stats());
    into.clear();
    assert!(into.load(&names, &into.all_pages()).is_empty());
    assert!((0..32).all(|page| into.holds(page, page, 5)));
}

/// Returns the depot's statistics. A call that was too late on a busy machine is repeated.
pub(crate) fn stats(attachment: &Arc<Attachment>) -> Value {
    let mut stats = Value::Null;
    let deadline = std::time::Instant::now() + LONG;
    while stats.is_null() {
        assert!(std::time::Instant::now() < deadline, "the depot does not say how it is");
        stats = attachment.stats()["depot"].take();
    }
    stats
}

/// Returns the state of the first server of the first tier.
pub(crate) fn server(attachment: &Arc<Attachment>) -> Value {
    stats(attachment)["tiers"][0]["servers"][0].take()
}

/// Waits until `what` holds.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + LONG;
    while !holds() {
        assert!(std::time::Instant::now() < deadline, "never: {what}");
        std::thread::yield_now();
    }
}
