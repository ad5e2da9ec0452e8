//! The Object tier passes the suite of all tiers, in every protocol over HTTP, and on a store in memory.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use crate::bucket_server::{BucketServer, in_every_dialect, with_every_standin};
use kvdepot_core::BlockLayout;
use kvdepot_tier::conformance::Bench;
use kvdepot_tier::{ObjectConfig, ObjectTier, Tier, conformance};

fn check(change: impl Fn(&mut ObjectConfig)) {
    let (server, count) = (BucketServer::start(), Cell::new(0));
    conformance::check(&|| {
        count.set(count.get() + 1);
        let mut config = server.config(&format!("kv/{}", count.get()));
        change(&mut config);
        Arc::new(ObjectTier::open(config).unwrap()) as Arc<dyn Tier>
    });
}

in_every_dialect! {
    a_bucket
    a_bucket_with_packs
    a_depot_that_comes_back_finds_all
    a_depot_that_comes_back_finds_all_packs
}

/// A real server takes no parts as small as these.
mod in_parts {
    use super::*;

    with_every_standin! {
        a_bucket_with_few_requests_and_every_block_in_parts
    }

    fn a_bucket_with_few_requests_and_every_block_in_parts() {
        check(|config| (config.requests, config.part_bytes) = (4, 5000));
    }
}

fn a_bucket() {
    check(|_| {});
}

/// Packs every block, also one that is alone.
fn packed(config: &mut ObjectConfig) {
    (config.pack_bytes, config.pack_blocks_min) = (64 << 20, 1);
    config.pack_linger = Duration::from_millis(1);
}

fn a_bucket_with_packs() {
    check(packed);
}

#[test]
fn a_store_in_memory() {
    conformance::check(&|| {
        let store = Arc::new(object_store::memory::InMemory::new());
        Arc::new(ObjectTier::open_on(ObjectConfig::new("s3://bucket").unwrap(), store).unwrap())
            as Arc<dyn Tier>
    });
}

fn a_depot_that_comes_back_finds_all() {
    let servers = BucketServer::start();
    // Each check of the suite has its own place, which its tiers share.
    conformance::check_persistent(&|| Arc::new(ObjectTier::open(servers.config("kv")).unwrap()));
}

fn a_depot_that_comes_back_finds_all_packs() {
    let servers = BucketServer::start();
    conformance::check_persistent(&|| {
        let mut config = servers.config("kv");
        packed(&mut config);
        Arc::new(ObjectTier::open(config).unwrap())
    });
}

/// `KVDEPOT_TEST_OBJECT_URL` (an existing bucket), `…_ENDPOINT`, `…_CREDENTIALS` and `…_CA` (files) and the provider's own
/// variables select the store.
#[test]
#[ignore = "needs a store, or an emulator"]
fn a_real_store() {
    let url = std::env::var("KVDEPOT_TEST_OBJECT_URL").expect("KVDEPOT_TEST_OBJECT_URL names a bucket");
    let count = Cell::new(0);
    let make = || {
        count.set(count.get() + 1);
        let hour = Duration::from_secs(3600);
        let config = ObjectConfig::new(&format!("{url}/{}-{}", std::process::id(), count.get())).unwrap();
        let config = ObjectConfig {
            endpoint: std::env::var("KVDEPOT_TEST_OBJECT_ENDPOINT").ok(),
            credentials_file: std::env::var_os("KVDEPOT_TEST_OBJECT_CREDENTIALS").map(Into::into),
            tls_ca_file: std::env::var_os("KVDEPOT_TEST_OBJECT_CA").map(Into::into),
            part_bytes: 5 << 20,
            present_ttl: hour,
            absent_ttl: hour,
            ..config
        };
        Arc::new(ObjectTier::open(config).unwrap()) as Arc<dyn Tier>
    };
    let layout = BlockLayout::new(vec![vec![12 << 20]]).unwrap();
    let large = Bench::with(make(), conformance::spec("large", layout));
    large.write_all(2);
    assert!(large.read_is_right(0) && large.read_is_right(1), "in three parts");
    conformance::check(&make);
}
