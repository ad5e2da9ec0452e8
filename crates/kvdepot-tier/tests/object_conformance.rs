//! The Object tier passes the suite of all tiers, over HTTP and on a store in memory.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod bucket_server;

use std::cell::Cell;
use std::sync::Arc;

use bucket_server::BucketServer;
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

#[test]
fn a_bucket() {
    check(|_| {});
}

#[test]
fn a_bucket_with_few_requests_and_every_block_in_parts() {
    check(|config| (config.requests, config.part_bytes) = (4, 5000));
}

#[test]
fn a_store_in_memory() {
    conformance::check(&|| {
        let store = Arc::new(object_store::memory::InMemory::new());
        Arc::new(ObjectTier::open_on(ObjectConfig::new("s3://bucket").unwrap(), store).unwrap())
            as Arc<dyn Tier>
    });
}

#[test]
fn a_depot_that_comes_back_finds_all() {
    let servers = BucketServer::start();
    // The suite's checks share a place each among their own tiers.
    conformance::check_persistent(&|| Arc::new(ObjectTier::open(servers.config("kv")).unwrap()));
}

/// `KVDEPOT_TEST_OBJECT_URL` (a bucket that exists), `KVDEPOT_TEST_OBJECT_ENDPOINT` and AWS's own variables say which.
#[test]
#[ignore = "needs a store that speaks S3"]
fn a_real_store() {
    let url = std::env::var("KVDEPOT_TEST_OBJECT_URL").expect("KVDEPOT_TEST_OBJECT_URL names a bucket");
    let endpoint = std::env::var("KVDEPOT_TEST_OBJECT_ENDPOINT").ok();
    let count = Cell::new(0);
    let make = |part_bytes| {
        count.set(count.get() + 1);
        let hour = std::time::Duration::from_secs(3600);
        let config = ObjectConfig::new(&format!("{url}/{}-{}", std::process::id(), count.get())).unwrap();
        let config = ObjectConfig {
            endpoint: endpoint.clone(),
            part_bytes,
            present_ttl: hour,
            absent_ttl: hour,
            ..config
        };
        Arc::new(ObjectTier::open(config).unwrap()) as Arc<dyn Tier>
    };
    conformance::check(&|| make(16 << 20));
}
