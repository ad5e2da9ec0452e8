//! The Mooncake tier passes the suite of all tiers, over a store in memory.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::sync::Arc;

use crate::mooncake_store::Store;
use kvdepot_tier::{MooncakeConfig, MooncakeTier, Tier, conformance};

fn check(change: impl Fn(&mut MooncakeConfig)) {
    conformance::check(&|| {
        let mut config = Store::config();
        change(&mut config);
        Arc::new(MooncakeTier::open_with(config, Store::default().starter()).unwrap()) as Arc<dyn Tier>
    });
}

#[test]
fn a_store() {
    check(|_| {});
}

#[test]
fn a_store_with_one_call_at_a_time_and_little_staging_memory() {
    check(|config| (config.calls, config.staging_bytes) = (1, 3 << 20));
}

#[test]
fn a_depot_that_comes_back_finds_all() {
    let store = Store::default();
    // Each check of the suite has its own place, which its tiers share.
    conformance::check_persistent(&|| {
        Arc::new(MooncakeTier::open_with(Store::config(), store.starter()).unwrap())
    });
}
