//! The Dax tier's medium.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use kvdepot_core::{BlockLayout, ErrorKind};
use kvdepot_io::mapped::{HookMedium, MediumCall, MemoryMedium};
use kvdepot_tier::conformance::{Bench, Waiting, spec};
use kvdepot_tier::dax::layout::{Geometry, HEADER_BYTES, SUPERBLOCK_BYTES};
use kvdepot_tier::scan::Scan;
use kvdepot_tier::stored::{InUse, StoredBlock};
use kvdepot_tier::{DaxConfig, DaxTier, Tier, Written};

use crate::tools::{checked, has_all_of, numbers, rest, unused, used};

const BYTES: usize = 512 << 10;

fn open(medium: &MemoryMedium) -> Arc<DaxTier> {
    let config = DaxConfig {
        restore_workers: 1,
        put_workers: 1,
        open_wait: Duration::from_secs(60),
        ..DaxConfig::new("memory")
    };
    Arc::new(DaxTier::open_on(config, Arc::new(medium.clone())).unwrap())
}

fn other() -> kvdepot_core::NamespaceSpec {
    spec("other", BlockLayout::uniform(2, &[3000]).unwrap())
}

/// A closed medium with evicted and removed blocks, free units, a past epoch and two namespaces.
fn filled() -> (MemoryMedium, Geometry) {
    let medium = MemoryMedium::new(vec![0; BYTES]);
    let tier = open(&medium);
    let mut bench = Bench::new(Arc::clone(&tier) as _);
    bench.write_all(100);
    bench.epoch = bench.tier.advance_and_wait(&bench.spec, 3).unwrap();
    bench.write_all(20);
    Bench::with(Arc::clone(&tier) as _, other()).write_all(6);
    bench.remove(4).unwrap();
    (medium, tier.geometry())
}

fn scan(medium: &MemoryMedium, in_use: InUse) -> Scan {
    Scan::of_medium(Arc::new(medium.clone()), in_use).unwrap()
}

fn unit_of(geometry: &Geometry, block: &StoredBlock) -> u32 {
    geometry.unit_at(block.offset_bytes).unwrap()
}

#[test]
fn a_list_is_what_the_tier_finds() {
    let (medium, _) = filled();
    let before = medium.recorded();
    let (stored, findings) = checked(&scan(&medium, unused()));
    assert_eq!(
        (findings, stored.problem, medium.recorded()),
        (Vec::new(), None, before),
        "nothing is written"
    );
    let tier = open(&medium);
    let bench = Bench::new(Arc::clone(&tier) as _);
    let other = Bench::with(Arc::clone(&tier) as _, other());
    for bench in [&bench, &other] {
        has_all_of(&stored, bench);
    }
    assert_eq!((stored.namespaces.len(), bench.epoch), (2, 3));
    assert_eq!(stored.blocks.len() as u64, tier.usage().blocks);
    let newest = stored.blocks.iter().max_by_key(|block| block.order).unwrap();
    assert_eq!(newest.key, other.key(5), "the order is that of writing");
}

#[test]
fn every_flipped_bit_of_a_block_is_found_and_nothing_else() {
    let (medium, geometry) = filled();
    let stored = scan(&medium, unused()).list().unwrap();
    let in_blocks = stored.blocks.iter().flat_map(|block| {
        let (at, header) =
            (block.offset_bytes as usize, geometry.header_at(unit_of(&geometry, block)) as usize);
        // The header, the payload, and what is unused behind it.
        let header_bytes = [0, 20, 33, 41, 49, 55, 60].map(|byte| header + byte);
        header_bytes
            .into_iter()
            .chain([0, 5000, block.bytes as usize - 1, block.bytes as usize].map(|byte| at + byte))
    });
    for (at, bit) in in_blocks.chain(numbers(3, BYTES).take(1500)).zip(numbers(5, 8)) {
        if at < SUPERBLOCK_BYTES {
            continue;
        }
        medium.damage(at as u64, |bytes| bytes[0] ^= 1 << bit);
        let (now, findings) = checked(&scan(&medium, unused()));
        medium.damage(at as u64, |bytes| bytes[0] ^= 1 << bit);
        let at = at as u64;
        let (epochs, headers) = (geometry.epochs_at(), geometry.headers_at());
        if (epochs..headers).contains(&at) {
            // The tier begins a new epoch if a copy of the present one is damaged.
            let doubts = now.problem.is_some() || now.namespaces.iter().any(|one| one.problem.is_some());
            assert_eq!((doubts || now == stored, findings.len()), (true, 0), "byte {at}");
            continue;
        }
        let units = u64::from(geometry.units) * HEADER_BYTES as u64;
        let expected = if (headers..headers + units).contains(&at) {
            Some((at - headers) / HEADER_BYTES as u64 * HEADER_BYTES as u64 + headers)
        } else {
            let is_it =
                |block: &&StoredBlock| (block.offset_bytes..block.offset_bytes + block.bytes).contains(&at);
            stored.blocks.iter().find(is_it).map(|block| block.offset_bytes)
        };
        let found: Vec<u64> = findings.iter().map(|one| one.offset_bytes).collect();
        assert_eq!(found, expected.into_iter().collect::<Vec<_>>(), "byte {at}, bit {bit}: {findings:?}");
    }
}

#[test]
fn a_namespace_with_a_damaged_epoch_is_named() {
    let (medium, geometry) = filled();
    for (at, name) in [(geometry.epochs_at() + 10, "bench"), (geometry.epochs_at() + 128 + 64 + 10, "other")]
    {
        medium.damage(at, |bytes| bytes[0] ^= 1);
        let stored = scan(&medium, unused()).list().unwrap();
        medium.damage(at, |bytes| bytes[0] ^= 1);
        let root = if name == "other" { other().root() } else { Bench::new(open(&medium) as _).spec.root() };
        let named: Vec<_> = stored.namespaces.iter().filter(|one| one.problem.is_some()).collect();
        assert_eq!((named.len(), named[0].root, named[0].blocks), (1, root, 0), "{name}");
    }
    // Both copies.
    medium.damage(geometry.epochs_at(), |bytes| bytes[..128].fill(7));
    assert!(scan(&medium, unused()).list().unwrap().problem.is_some());
}

#[test]
fn a_damaged_header_counts_once_no_depot_may_be_writing_it() {
    let (medium, geometry) = filled();
    let stored = scan(&medium, unused()).list().unwrap();
    let (first, second) = (stored.blocks[0], stored.blocks[1]);
    medium.damage(geometry.header_at(unit_of(&geometry, &first)) + 50, |bytes| bytes[0] ^= 1);
    medium.damage(second.offset_bytes + 9, |bytes| bytes[0] ^= 1);
    let findings = checked(&scan(&medium, unused())).1;
    assert_eq!(findings.len(), 2);
    assert_eq!((findings[0].root, findings[0].hash), (Some(first.root), None));
    let only = checked(&scan(&medium, used())).1;
    assert_eq!((only.len(), only[0].hash), (1, Some(second.key.hash)));
    let of = |root| rest(scan(&medium, unused()).check(&scan(&medium, unused()).list().unwrap(), Some(root)));
    assert_eq!(of(first.root).findings.len() + of(other().root()).findings.len(), 2, "each in its namespace");
}

#[test]
fn blocks_that_are_overwritten_during_a_check_are_no_findings() {
    for damages in [false, true] {
        let (medium, _) = filled();
        let tier = open(&medium);
        let bench = Bench::new(Arc::clone(&tier) as _);
        let stored = scan(&medium, used()).list().unwrap();
        let block = stored.blocks[2];
        if damages {
            medium.damage(block.offset_bytes, |bytes| bytes[7] ^= 1);
        }
        // Before a damaged block is read for the second time, or another one for the first time, all are overwritten.
        let left = AtomicU32::new(if damages { 2 } else { 1 });
        let was_written = Arc::new(AtomicBool::new(false));
        let noted = Arc::clone(&was_written);
        let hook = move |call: MediumCall| {
            let is_it = matches!(call, MediumCall::Read { at, bytes } if at == block.offset_bytes && bytes as u64 == block.bytes);
            if is_it && left.fetch_sub(1, Ordering::AcqRel) == 1 {
                (1000..1100).for_each(|n| assert_eq!(bench.write(n).unwrap(), Written::New));
                noted.store(true, Ordering::Release);
            }
            assert!(matches!(call, MediumCall::Read { .. }), "a reader writes: {call:?}");
            Ok(())
        };
        let hooked = HookMedium::new(Arc::new(medium.clone()), Box::new(hook));
        let scan = Scan::of_medium(Arc::new(hooked), used()).unwrap();
        let all = rest(scan.check(&stored, None));
        assert!(was_written.load(Ordering::Acquire));
        assert_eq!(
            (all.blocks, all.findings),
            (stored.blocks.len() as u64, Vec::new()),
            "damages: {damages}"
        );
        let (now, findings) = checked(&scan);
        assert_eq!((now.blocks.len() as u64, findings.len()), (tier.usage().blocks, 0));
        assert!(now.blocks.iter().all(|one| !stored.blocks.contains(one)), "all were overwritten");
    }
}

#[test]
fn what_is_no_medium_is_refused() {
    let (medium, _) = filled();
    let image = medium.content();
    let kind =
        |image: Vec<u8>| Scan::of_medium(Arc::new(MemoryMedium::new(image)), unused()).unwrap_err().kind();
    let changed = |at: usize| {
        let mut image = image.clone();
        image[at] ^= 1;
        image
    };
    assert_eq!(kind(vec![0; BYTES]), ErrorKind::Config);
    assert_eq!(kind(changed(0)), ErrorKind::Config);
    assert_eq!(kind(changed(8)), ErrorKind::Version);
    assert_eq!(kind(changed(30)), ErrorKind::Corrupt);
    assert_eq!(kind(image[..BYTES / 2].to_vec()), ErrorKind::Config);
    assert_eq!(kind(Vec::new()), ErrorKind::Config);
}
