//! Blocks of a Dax tier that clients copy from its medium. P1: what is copied from there counts only while the medium is
//! the depot's.
#![allow(clippy::unwrap_used, reason = "tests fail where they cannot go on")]

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_copy::{CopyBatch, CopyEngine, GroupSink, HostEngine};
use kvdepot_core::runs::IN_PLACE_AT;
use kvdepot_core::{BlockHash, BlockLayout, ErrorKind, NamespaceSpec, Result};
use kvdepot_depot::client::{Attachment, Claim, ClaimGroupSpec, DeviceEngine, Store, TaskState};
use kvdepot_depot::direct::Now;
use kvdepot_depot::message::{Grant, Hashes, Request, Response};
use kvdepot_depot::{Depot, DepotConfig};

const BLOCK_BYTES: usize = 256 << 10;
const BLOCKS: usize = 16;
/// Blocks that fit into the pool.
const POOL_BLOCKS: usize = 4;
/// Reached only if the test hangs; not a measure of speed.
const HANG: Duration = Duration::from_secs(60);

/// The processor, which does something before it copies.
struct Before<F>(HostEngine, F);

impl<F> std::fmt::Debug for Before<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Before")
    }
}

impl<F: Fn(&CopyBatch) + Send + Sync> CopyEngine for Before<F> {
    fn name(&self) -> &'static str {
        "before"
    }

    unsafe fn run(&self, batch: CopyBatch, sink: Arc<dyn GroupSink>) -> Result<()> {
        (self.1)(&batch);
        // SAFETY: the contract of this call.
        unsafe { self.0.run(batch, sink) }
    }
}

/// Like a GPU: it copies from registered memory only.
#[derive(Debug)]
struct Gpu(HostEngine);

impl CopyEngine for Gpu {
    fn name(&self) -> &'static str {
        "gpu"
    }

    fn may_hang(&self) -> bool {
        true
    }

    unsafe fn run(&self, batch: CopyBatch, sink: Arc<dyn GroupSink>) -> Result<()> {
        // SAFETY: the contract of this call.
        unsafe { self.0.run(batch, sink) }
    }
}

struct Lab {
    attachment: Arc<Attachment>,
    spec: Arc<NamespaceSpec>,
    dumped: Vec<u8>,
    loaded: Vec<u8>,
    medium: tempfile::NamedTempFile,
}

fn hashes(blocks: std::ops::Range<usize>) -> Vec<BlockHash> {
    blocks.map(|n| BlockHash::from_engine(&(n as u64).to_le_bytes()).unwrap()).collect()
}

fn depot(pipeline: &str, medium: &Path) -> Depot {
    let config = serde_json::json!({"pipeline": pipeline, "pool_bytes": POOL_BLOCKS * BLOCK_BYTES,
        "timeout_ms": 60_000, "dax": {"device_path": medium, "lease_in_place": true}});
    Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap()
}

impl Lab {
    fn new(pipeline: &str) -> Self {
        let medium = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        medium.as_file().set_len(64 << 20).unwrap();
        let attachment = Attachment::embedded(depot(pipeline, medium.path())).unwrap();
        let layout = BlockLayout::new(vec![vec![BLOCK_BYTES as u64]]).unwrap();
        let spec = Arc::new(NamespaceSpec::new(r#"{"a":1}"#, layout).unwrap());
        let dumped: Vec<u8> =
            (0..BLOCKS * BLOCK_BYTES).map(|i| (i / 3 + i / BLOCK_BYTES * 11) as u8).collect();
        let lab = Self { attachment, spec, dumped, loaded: vec![0; BLOCKS * BLOCK_BYTES], medium };
        let dumps = lab.store(Arc::new(HostEngine::new(1).unwrap()), &lab.dumped);
        for first in (0..BLOCKS).step_by(2) {
            let pages: Vec<i64> = (first as i64..first as i64 + 2).collect();
            // SAFETY: the memory lives in the lab, and nothing writes it.
            let dump = unsafe { dumps.dump_pages(hashes(first..first + 2), &pages, 0) }.unwrap();
            assert!(dump.wait(Some(HANG)) && dump.failed().is_empty(), "{:?}", dump.failed());
            assert!(lab.attachment.drain(HANG).unwrap());
        }
        lab
    }

    fn store(&self, engine: Arc<dyn CopyEngine>, memory: &[u8]) -> Store {
        let device = DeviceEngine::new(engine);
        let store = Store::new(&self.attachment, Arc::clone(&self.spec), device, HANG * 2).unwrap();
        let bases = vec![memory.as_ptr() as u64];
        // SAFETY: the memory lives in the lab, after the stores.
        unsafe { store.register_pages(bases, vec![BLOCK_BYTES as i64], BLOCKS as u64) }.unwrap();
        store
    }

    /// Loads all blocks with this engine.
    fn load(&self, engine: Arc<dyn CopyEngine>) -> Arc<TaskState> {
        let store = self.store(engine, &self.loaded);
        let pages: Vec<i64> = (0..BLOCKS as i64).collect();
        // SAFETY: the memory lives in the lab, and nobody else touches it.
        let task = unsafe { store.load_pages(hashes(0..BLOCKS), &pages, 0) }.unwrap();
        assert!(task.wait(Some(HANG)));
        task
    }

    /// Opens a claim on all blocks. Returns for how many it settles.
    fn hit(&self) -> usize {
        let group = ClaimGroupSpec {
            namespaces: vec![Arc::clone(&self.spec)],
            window_blocks: 0,
            hashes_per_block: 1,
        };
        let claim = Claim::open(&self.attachment, &[group], &hashes(0..BLOCKS), 0, BLOCKS as u32, "");
        let (settled, units, _) = claim.unwrap().wait(HANG);
        assert!(settled);
        units as usize
    }

    fn figure(&self, name: &str) -> u64 {
        self.attachment.stats()["depot"][name].as_u64().unwrap_or_else(|| panic!("no {name}"))
    }
}

fn host() -> Arc<dyn CopyEngine> {
    Arc::new(HostEngine::new(1).unwrap())
}

#[test]
fn blocks_are_copied_from_the_medium_and_not_through_the_pool() {
    for pipeline in ["Dax", "Cache|Dax"] {
        let lab = Lab::new(pipeline);
        for round in 0..3 {
            let task = lab.load(host());
            assert!(task.failed().is_empty(), "{pipeline}, round {round}: {:?}", task.failed());
            assert!(lab.loaded == lab.dumped, "{pipeline}, round {round}");
        }
        let in_pool = if pipeline == "Dax" { 0 } else { POOL_BLOCKS };
        assert_eq!(lab.figure("fetch_blocks"), 0, "{pipeline}");
        // A pool that keeps nothing gives a lease back as soon as nobody reads; others keep some.
        let leases = lab.figure("in_place_blocks");
        let blocks = (BLOCKS - in_pool) as u64;
        assert!((blocks..=3 * blocks).contains(&leases), "{pipeline}: {leases}");
        let is_kept = lab.figure("in_place_leased_blocks") > 0;
        assert_eq!(is_kept, pipeline != "Dax");
    }
}

/// A claim is opened before anybody has loaded: the first one after a depot's start may be longer than its pool, too.
#[test]
fn the_first_claim_finds_blocks_where_they_lie() {
    let lab = Lab::new("Cache|Dax");
    assert_eq!(lab.figure("in_place_blocks"), 0);
    let hit = lab.hit();
    assert!(hit > POOL_BLOCKS, "{hit}");
    assert!(lab.figure("in_place_blocks") > 0);
    assert_eq!(lab.figure("fetch_blocks"), 0);
}

#[test]
fn a_device_that_is_not_the_processor_copies_from_the_pool() {
    let lab = Lab::new("Dax");
    let task = lab.load(Arc::new(Gpu(HostEngine::new(1).unwrap())));
    assert!(task.failed().is_empty() && lab.loaded == lab.dumped, "{:?}", task.failed());
    assert_eq!((lab.figure("fetch_blocks"), lab.figure("in_place_blocks")), (BLOCKS as u64, 0));
}

/// The depot has died and the next one writes to the medium while this process still copies.
#[test]
fn what_is_copied_from_a_medium_of_another_owner_does_not_count() {
    let lab = Lab::new("Dax");
    let medium = lab.medium.reopen().unwrap();
    let take = move |_: &CopyBatch| medium.write_all_at(&[0xee; 16], 128).unwrap();
    let task = lab.load(Arc::new(Before(HostEngine::new(1).unwrap(), take)));
    assert_eq!(task.failed().len(), BLOCKS, "none counts");
    let again = lab.load(host());
    assert_eq!(again.failed().len(), BLOCKS, "and none is read from there from then on");
}

/// P9: what no client can read any more is no hit.
#[test]
fn a_claim_counts_no_block_of_a_medium_that_is_lost() {
    let is_lost: [fn(&std::fs::File); 2] =
        [|medium| medium.write_all_at(&[0xee; 16], 128).unwrap(), |medium| medium.set_len(4096).unwrap()];
    for lose in is_lost {
        let lab = Lab::new("Cache|Dax");
        assert!(lab.load(host()).failed().is_empty());
        assert!(lab.hit() > POOL_BLOCKS);
        assert!(lab.figure("in_place_leased_blocks") > 0, "some stay leased for the next reader");
        lose(&lab.medium.reopen().unwrap());
        // The client finds out when it copies, and the depot when it reads for the client what that cannot.
        for _ in 0..2 {
            assert!(!lab.load(host()).failed().is_empty());
        }
        let hit = lab.hit();
        assert!(hit <= POOL_BLOCKS, "{hit}");
        assert_eq!(lab.load(host()).failed().len(), BLOCKS - hit, "what was promised is there");
        assert_eq!(lab.figure("in_place_leased_blocks"), 0);
    }
}

#[test]
fn a_medium_that_is_truncated_during_a_copy_is_a_miss_and_no_crash() {
    let lab = Lab::new("Dax");
    let medium = lab.medium.reopen().unwrap();
    let cut = move |_: &CopyBatch| medium.set_len(4096).unwrap();
    let task = lab.load(Arc::new(Before(HostEngine::new(1).unwrap(), cut)));
    assert_eq!(task.failed().len(), BLOCKS);
}

/// The wire door and values read the pool's memory only: they get copies, while engines read in place.
#[test]
fn other_doors_get_copies_in_the_pool() {
    let medium = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    medium.as_file().set_len(64 << 20).unwrap();
    let depot = depot("Cache|Dax", medium.path());
    let direct = depot.direct();
    let layout = BlockLayout::new(vec![vec![BLOCK_BYTES as u64]]).unwrap();
    let spec = NamespaceSpec::new(r#"{"a":2}"#, layout).unwrap();
    let opened = direct.open_namespace(spec.canonical()).unwrap();
    for (n, &hash) in hashes(0..BLOCKS).iter().enumerate() {
        let mut slot = direct.reserve(opened, hash).unwrap().unwrap();
        slot.write_at(0, &vec![n as u8; BLOCK_BYTES]).unwrap();
        slot.seal(None).unwrap();
        let drained = depot.session().handle(Request::Drain { wait_ms: 60_000 });
        assert!(matches!(drained, Response::Drained(true)));
    }
    direct.evict_to_percent(0.0);
    let engine = depot.session();
    let all = hashes(0..BLOCKS);
    let bytes = Hashes(all.iter().flat_map(|hash| hash.0).collect::<Vec<u8>>().into());
    let acquire = Request::Acquire {
        namespace: opened.handle,
        hashes: bytes,
        wait_ms: 60_000,
        last: true,
        in_place: true,
    };
    let Response::Grants(grants) = engine.handle(acquire) else { panic!("no grants") };
    let is_in_place =
        |grant: &Grant| matches!(grant, Grant::Leased { runs, .. } if runs[0].offset > IN_PLACE_AT);
    assert!(grants.iter().all(is_in_place), "{grants:?}");
    let keys: Vec<_> =
        all.iter().map(|&hash| kvdepot_core::BlockKey { namespace: opened.id, hash }).collect();
    assert!(direct.read_now(&keys).iter().all(|now| matches!(now, Now::Ask)), "none is in the pool");
    for (n, hash) in all.iter().enumerate() {
        let read = direct.read(opened.handle, opened.id, &[*hash], HANG).unwrap().pop().unwrap();
        let slot = read.unwrap_or_else(|kind: ErrorKind| panic!("block {n}: {kind}"));
        let is_right = |piece: &&[u8]| piece.iter().all(|&byte| byte == n as u8);
        assert!(slot.slices(0, BLOCK_BYTES).iter().all(is_right), "block {n}");
    }
}
