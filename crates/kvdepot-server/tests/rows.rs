//! `Cache|Slab|Remote|Object`: a disk of the node's own, a pool server, a bucket. The nearest that has a block serves it. P1, P2.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../kvdepot-tier/tests/object/bucket_server/mod.rs"]
mod bucket_server;
mod common;
#[path = "common/pool.rs"]
mod pool;
#[path = "common/wire.rs"]
mod wire;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bucket_server::{Act, BucketServer};
use common::{Engine, LONG, Served, config, embedded, spec};
use kvdepot_depot::DepotConfig;
use kvdepot_depot::client::Attachment;
use pool::{claim, layout, over, until};
use serde_json::{Value, json};
use wire::Wired;

const POOL: u64 = 8 << 20;
const BLOCKS: u64 = 16;

struct Row {
    bucket: BucketServer,
    server: Wired,
    /// Blocks that the bucket was asked for.
    gets: Arc<AtomicU64>,
}

impl Row {
    fn new() -> Self {
        let (bucket, gets) = (BucketServer::start(), Arc::new(AtomicU64::new(0)));
        let counted = Arc::clone(&gets);
        bucket.plan(move |request| {
            let is_block = request.method == "GET" && request.is_block();
            counted.fetch_add(u64::from(is_block), Ordering::Relaxed);
            Act::Serve
        });
        Self { bucket, server: Wired::open(config(64 << 20, json!({})), json!({})), gets }
    }

    fn config(&self, pipeline: &str, slab: &Path) -> DepotConfig {
        self.config_with(pipeline, slab, &json!({}))
    }

    fn config_with(&self, pipeline: &str, slab: &Path, placement: &Value) -> DepotConfig {
        let object = self.bucket.config("kv");
        let more = json!({
            "placement": placement,
            "slab": {"path": slab, "capacity_bytes": 32 << 20, "segment_mb": 4},
            "object": {
                "url": format!("s3://{}/{}", object.bucket, object.prefix),
                "endpoint": object.endpoint,
                "credentials_file": object.credentials_file,
                // Objects are counted by block.
                "pack_mb": 0,
                "timeout_ms": 30_000,
            },
        });
        over(self.server.at, pipeline, POOL, &json!({}), &more)
    }

    /// A depot stores all blocks in all its tiers, and ends.
    fn store(&self, pipeline: &str, slab: &Path) {
        self.store_filled(pipeline, slab, 3);
    }

    fn store_filled(&self, pipeline: &str, slab: &Path, seed: u8) {
        let depot = embedded(self.config(pipeline, slab));
        let mut engine = Engine::new(&depot, &spec("row", layout()), BLOCKS as usize);
        engine.fill(seed);
        let names: Vec<u64> = (0..BLOCKS).collect();
        assert!(engine.dump(&names, &engine.all_pages()).is_empty());
        assert!(depot.drain(LONG).unwrap());
    }

    /// A depot that starts now finds all blocks, with the right bytes.
    fn serves(&self, pipeline: &str, slab: &Path) {
        self.serves_filled(pipeline, slab, 3);
    }

    fn serves_filled(&self, pipeline: &str, slab: &Path, seed: u8) {
        let depot = embedded(self.config(pipeline, slab));
        let spec = spec("row", layout());
        let mut engine = Engine::new(&depot, &spec, BLOCKS as usize);
        let all = u32::try_from(BLOCKS).unwrap();
        assert_eq!(claim(&depot, &spec, BLOCKS + 4), (true, all, all), "{}", depot.stats());
        engine.clear();
        let names: Vec<u64> = (0..BLOCKS).collect();
        assert!(engine.load(&names, &engine.all_pages()).is_empty(), "{}", depot.stats());
        assert!((0..BLOCKS as usize).all(|page| engine.holds(page, page, seed)));
    }

    /// A depot that starts now resets the namespace.
    fn reset(&self, pipeline: &str, slab: &Path) {
        let depot = embedded(self.config(pipeline, slab));
        let spec = spec("row", layout());
        let _engine = Engine::new(&depot, &spec, 1);
        depot.reset(&[spec]).unwrap();
    }

    /// A depot that starts now finds nothing.
    fn serves_nothing(&self, pipeline: &str, slab: &Path) {
        let depot = embedded(self.config(pipeline, slab));
        let spec = spec("row", layout());
        let _engine = Engine::new(&depot, &spec, 1);
        assert_eq!(claim(&depot, &spec, BLOCKS), (true, 0, 0), "{pipeline}: {}", depot.stats());
    }

    fn gets(&self) -> u64 {
        self.gets.swap(0, Ordering::Relaxed)
    }
}

#[test]
fn each_tier_serves_when_those_above_it_cannot() {
    let (mut row, home) = (Row::new(), tempfile::tempdir().unwrap());
    let slab = home.path().join("slab");
    row.store("Cache|Slab|Remote|Object", &slab);
    assert_eq!(row.server.stat("pool_blocks"), BLOCKS);
    assert_eq!(row.bucket.names("/blocks/").len() as u64, BLOCKS);
    row.serves("Cache|Slab|Remote|Object", &slab);
    row.serves("Cache|Slab|Remote|Object", &home.path().join("a new node's"));
    assert_eq!(row.gets(), 0, "slab and pool server are nearer");
    row.serves("Cache|Object|Remote|Slab", &slab);
    assert_eq!(row.gets(), 0, "what a tier knows to have goes before what would have to be asked for");
    row.serves("Cache|Object|Remote|Slab", &home.path().join("a third node's"));
    assert_eq!(row.gets(), BLOCKS, "here the bucket is the nearest");
    row.server.close();
    row.serves("Cache|Slab|Remote|Object", &home.path().join("another new node's"));
    assert_eq!(row.gets(), BLOCKS, "only the bucket has them");
}

/// The bucket may know of a reset that the others missed.
#[test]
fn a_depot_that_starts_without_its_bucket_serves_when_the_bucket_is_back() {
    let (mut row, home) = (Row::new(), tempfile::tempdir().unwrap());
    let (slab, spec) = (home.path().join("slab"), spec("row", layout()));
    row.store("Cache|Slab|Object", &slab);
    row.bucket.stop();
    let mut served = Served::start(row.config("Cache|Slab|Object", &slab));
    let depot = served.attach();
    let _engine = Engine::new(&depot, &spec, 1);
    assert_eq!(claim(&depot, &spec, BLOCKS).1, 0, "{}", depot.stats());
    row.bucket.come_back();
    let all = u32::try_from(BLOCKS).unwrap();
    // Engines ask again for the namespace, once in a while.
    until("it serves from its own disk", || claim(&depot, &spec, BLOCKS).1 == all);
    assert_eq!(row.gets(), 0);
    depot.close();
    served.stop();
}

/// P2, P6: the bucket is the only tier of some depots, and below a disk in others.
#[test]
fn a_bucket_that_hangs_takes_no_other_namespace_from_the_client() {
    for pipeline in ["Cache|Slab|Object", "Cache|Object"] {
        let (mut row, home) = (Row::new(), tempfile::tempdir().unwrap());
        let mut served = Served::start(row.config(pipeline, &home.path().join("slab")));
        // As engines do: their calls take seconds in the background, whatever the requests allow.
        let wait = Duration::from_secs(1);
        let depot = Attachment::connect(served.socket.clone(), None, LONG, wait).unwrap();
        let mut engine = Engine::new(&depot, &spec("row", layout()), BLOCKS as usize);
        engine.fill(3);
        let names: Vec<u64> = (0..BLOCKS).collect();
        assert!(engine.dump(&names, &engine.all_pages()).is_empty());
        row.bucket.plan(|_| Act::Hang);
        depot.register(&spec("another", layout())).unwrap();
        assert!(depot.attached(), "{pipeline}: {}", depot.trouble());
        engine.clear();
        assert!(engine.load(&names, &engine.all_pages()).is_empty(), "{pipeline}: {}", depot.stats());
        assert!((0..BLOCKS as usize).all(|page| engine.holds(page, page, 3)));
        let all = u32::try_from(BLOCKS).unwrap();
        assert_eq!(claim(&depot, &spec("row", layout()), BLOCKS), (true, all, 0), "from the pool");
        // Ends the requests that hang.
        row.bucket.stop();
        drop(engine);
        depot.close();
        served.stop();
        row.server.close();
    }
}

#[test]
fn a_reset_holds_in_every_tier() {
    let (mut row, home) = (Row::new(), tempfile::tempdir().unwrap());
    let (slab, elsewhere) = (home.path().join("slab"), home.path().join("another node's"));
    let all = "Cache|Slab|Remote|Object";
    row.store(all, &slab);
    row.reset(all, &slab);
    // Each tier has stored the epoch, and is not told it by another one.
    row.serves_nothing("Cache|Slab", &slab);
    row.serves_nothing("Cache|Remote", &elsewhere);
    row.serves_nothing("Cache|Object", &elsewhere);
    row.serves_nothing(all, &slab);
    row.store_filled(all, &slab, 5);
    row.serves_filled("Cache|Slab", &slab, 5);
    row.serves_filled("Cache|Remote", &elsewhere, 5);
    row.serves_filled("Cache|Object", &elsewhere, 5);
    row.server.close();
}

/// The other tiers tell it the epoch when it is back.
#[test]
fn a_tier_that_missed_a_reset_serves_nothing_from_before_it() {
    let (mut row, home) = (Row::new(), tempfile::tempdir().unwrap());
    let (slab, elsewhere) = (home.path().join("slab"), home.path().join("another node's"));
    let all = "Cache|Slab|Remote|Object";
    row.store(all, &slab);
    // This node resets without knowing of the bucket.
    row.reset("Cache|Slab|Remote", &slab);
    // The bucket is the nearest tier, and is still in the epoch before.
    row.serves_nothing("Cache|Object|Remote|Slab", &elsewhere);
    row.serves_nothing("Cache|Object", &elsewhere);
    row.store_filled(all, &slab, 5);
    row.serves_filled("Cache|Object", &elsewhere, 5);
    row.server.close();
}

/// What the disk evicts goes to the pool server, and what the disk keeps does not.
#[test]
fn what_the_disk_evicts_is_demoted_to_the_pool_server() {
    const MANY: u64 = 640;
    let (mut row, home) = (Row::new(), tempfile::tempdir().unwrap());
    let slab = home.path().join("slab");
    let placement = json!({"Remote": {"write": "on_demotion"}, "Object": {"write": "on_demotion"}});
    let depot = embedded(row.config_with("Cache|Slab|Remote|Object", &slab, &placement));
    let spec = spec("row", layout());
    let mut engine = Engine::new(&depot, &spec, BLOCKS as usize);
    engine.fill(3);
    for first in (0..MANY).step_by(BLOCKS as usize) {
        let names: Vec<u64> = (first..first + BLOCKS).collect();
        assert!(engine.dump(&names, &engine.all_pages()).is_empty());
        assert!(depot.drain(LONG).unwrap());
        until("everything is demoted", || {
            let stats = pool::stats(&depot);
            let number = |value: &Value| value.as_u64().unwrap();
            number(&stats["tiers"][0]["blocks"]) + number(&stats["tiers"][0]["evict_blocks"])
                == first + BLOCKS
                && number(&stats["demotions_queued"]) + number(&stats["writes_queued"]) == 0
        });
    }
    let stats = pool::stats(&depot);
    let count = |value: &Value| value.as_u64().unwrap();
    let (evicted, demoted) = (count(&stats["tiers"][0]["evict_blocks"]), count(&stats["demote_blocks"]));
    let dropped = count(&stats["demote_blocks_dropped"]) + count(&stats["late_write_blocks_dropped"]);
    // Nothing else happens while a batch is demoted.
    assert!(evicted > MANY / 8 && demoted + 16 >= evicted && demoted < MANY, "{demoted} demoted: {stats}");
    assert!(dropped <= 16, "{dropped} dropped: {stats}");
    let at_server = row.server.stat("pool_blocks");
    assert!(at_server > 0 && at_server <= demoted, "{at_server} of {demoted}");
    drop(engine);
    depot.close();
    drop(depot);
    // The pool is gone: what the disk no longer has comes from the pool server.
    let depot = embedded(row.config("Cache|Slab|Remote|Object", &slab));
    let mut engine = Engine::new(&depot, &spec, BLOCKS as usize);
    let mut lost = 0;
    for n in 0..MANY {
        let page = (n % BLOCKS) as usize;
        engine.clear();
        match engine.load(&[n], &[page as i64]).len() {
            0 => assert!(engine.holds(page, page, 3), "block {n}"),
            _ => lost += 1,
        }
    }
    assert!(lost <= dropped, "{lost} lost, {dropped} dropped");
    row.server.close();
}
