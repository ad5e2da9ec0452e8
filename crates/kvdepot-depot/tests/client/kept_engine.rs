//! P4 for a pool that outlives its depot (`pool_keep_s`): no tier reads into it with an engine whose reads outlive the
//! depot too.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use kvdepot_depot::message::{Request, Response};
use kvdepot_depot::{Depot, DepotConfig};
use kvdepot_io::kernel::UringQueue;

fn engine(keep_ms: u64, private: bool) -> String {
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let config = serde_json::json!({"pipeline": "Cache|Posix", "pool_bytes": 8 << 20, "populate": false,
        "pool_keep_ms": keep_ms, "pool_keeper": ["true"],
        "posix": {"directories": [dir.path()], "engine": "io_uring"}});
    let config = DepotConfig::from_json(&config.to_string()).unwrap();
    let depot = if private { Depot::start_private(config) } else { Depot::start(config) }.unwrap();
    let Response::Stats(text) = depot.session().handle(Request::Stats) else { panic!("no stat") };
    let stat: serde_json::Value = serde_json::from_str(&text).unwrap();
    stat["tiers"][0]["engine"].as_str().unwrap().to_owned()
}

#[test]
fn a_pool_that_outlives_its_depot_is_not_read_into_by_io_uring() {
    if UringQueue::new(8).is_err() {
        return eprintln!("not tested: no io_uring here");
    }
    assert_ne!(engine(1000, false), "io_uring");
    assert_eq!(engine(0, false), "io_uring");
    assert_eq!(engine(1000, true), "io_uring", "private memory goes with its process");
}
