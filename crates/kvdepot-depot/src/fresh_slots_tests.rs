//! Untouched memory: neither a client nor the depot itself is given a huge page that is not available.

use std::borrow::Cow;
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{BlockHash, BlockLayout, ErrorKind, NamespaceSpec, Priority};
use kvdepot_tier::{FakeTier, Tier};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::direct::OpenNamespace;
use crate::message::{Hashes, Request, Response};
use crate::pool::PoolMapping;
use crate::{Depot, DepotConfig};

const PAGE: u64 = 2 << 20;
const PAGES: u64 = 4;

/// Returns the number of the file's bytes that exist.
fn present(file: &File) -> u64 {
    use std::os::unix::fs::MetadataExt;
    file.metadata().unwrap().blocks() * 512
}

/// Makes a depot whose pool is the file, with a namespace of blocks that take a huge page each. Touching a part cut off
/// the file raises SIGBUS, as where a huge page is refused.
fn depot(tiers: Vec<Arc<dyn Tier>>) -> (File, Depot, OpenNamespace) {
    let fd = memfd_create("kvdepot-test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, PAGES * PAGE).unwrap();
    let file = File::from(fd);
    let pool = PoolMapping::as_of_huge_pages(file.try_clone().unwrap().into(), PAGES * PAGE);
    let config = serde_json::json!({"pipeline": "Cache", "pool_bytes": PAGES * PAGE, "populate": false});
    let config = DepotConfig::from_json(&config.to_string()).unwrap();
    let depot = Depot::with_tiers(config, PoolKind::Cache, tiers, pool).unwrap();
    let spec = NamespaceSpec::new("{}", BlockLayout::uniform(1, &[PAGE]).unwrap()).unwrap();
    let opened = depot.direct().open_namespace(spec.canonical()).unwrap();
    (file, depot, opened)
}

fn hash(n: u8) -> BlockHash {
    BlockHash([n; 16])
}

#[test]
fn no_client_is_given_a_huge_page_that_nobody_has_touched() {
    let (file, depot, opened) = depot(Vec::new());
    let session = depot.session();
    let reserve = |block: u8| {
        let hashes = Hashes(Cow::Owned(vec![block; 16]));
        session.handle(Request::Reserve { namespace: opened.handle, hashes, priority: Priority::Normal })
    };
    assert_eq!(present(&file), 0);
    assert!(matches!(&reserve(1), Response::Grants(grants) if grants.len() == 1));
    assert_eq!(present(&file), PAGE, "all of the slot's page, and no other");
    ftruncate(&file, PAGE).unwrap();
    assert!(matches!(reserve(2), Response::Failed { .. }));
    ftruncate(&file, PAGES * PAGE).unwrap();
    assert!(matches!(&reserve(2), Response::Grants(grants) if grants.len() == 1), "the slot is free again");
    assert_eq!(present(&file), 2 * PAGE);
}

#[test]
fn no_remote_client_s_block_is_received_into_a_huge_page_that_cannot_be_had() {
    let (file, depot, opened) = depot(Vec::new());
    let direct = depot.direct();
    ftruncate(&file, 0).unwrap();
    let refused = direct.reserve(opened, hash(1)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Io, "{refused}");
    ftruncate(&file, PAGES * PAGE).unwrap();
    let mut slot = direct.reserve(opened, hash(1)).unwrap().unwrap();
    assert_eq!(present(&file), PAGE, "before anything is written there");
    slot.write_at(0, b"there").unwrap();
    slot.seal(None).unwrap();
}

#[test]
fn no_tier_reads_into_a_huge_page_that_cannot_be_had() {
    let (file, depot, opened) = depot(vec![Arc::new(FakeTier::new(0))]);
    let direct = depot.direct();
    let mut slot = direct.reserve(opened, hash(1)).unwrap().unwrap();
    slot.write_at(0, b"in the tier").unwrap();
    slot.seal(None).unwrap();
    let drained = depot.session().handle(Request::Drain { wait_ms: 60_000 });
    assert!(matches!(drained, Response::Drained(true)), "{drained:?}");
    direct.evict_to_percent(0.0);
    // The existing page is used.
    let _held = direct.reserve(opened, hash(2)).unwrap().unwrap();
    assert_eq!(present(&file), PAGE);
    ftruncate(&file, PAGE).unwrap();
    let read = || direct.read(opened.handle, opened.id, &[hash(1)], Duration::from_secs(60)).unwrap().pop();
    assert!(matches!(read(), Some(Err(_))), "a miss");
    ftruncate(&file, PAGES * PAGE).unwrap();
    let Some(Ok(slot)) = read() else { panic!("it is in the tier still") };
    assert_eq!(slot.slices(0, 11).concat(), b"in the tier");
}
