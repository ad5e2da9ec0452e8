use std::sync::Arc;

use kvdepot_core::machine::{Opened, Proof, Whole};
use kvdepot_core::runs::{Run, Runs};
use kvdepot_core::{BlockHash, BlockKey, BlockLayout, NamespaceId, NamespaceSpec};
use kvdepot_io::checksum::crc64;

use super::layout::{namespace_at, record_at};
use super::left::{LeftLedger, places, prove};
use super::*;
use crate::pool::PoolMapping;

const POOL: u64 = 1 << 20;
const REGIONS: [PoolRegion; 2] =
    [PoolRegion::memory(POOL / 4, Some(0)), PoolRegion::memory(POOL - POOL / 4, Some(1))];

fn block(slot: u32, pages: &[u64]) -> Whole {
    let runs: Runs = pages.iter().map(|&page| Run { offset: page * 4096, len: 4096 }).collect();
    let key = BlockKey { namespace: NamespaceId([slot as u8; 16]), hash: BlockHash([7; 16]) };
    let block_bytes = pages.len() as u64 * 4096 - 100;
    Whole { slot, key, runs, block_bytes, crc64: u64::from(slot) }
}

fn opened(epoch: u32) -> Opened {
    let layout = BlockLayout::uniform(1, &[4096]).unwrap();
    let spec = Arc::new(NamespaceSpec::new("{\"model\":\"ledger\"}", layout).unwrap());
    Opened { handle: 0, id: spec.id(epoch), epoch, has_epoch_id: true, spec }
}

fn left(ledger: &Ledger) -> Result<LeftLedger> {
    LeftLedger::open(ledger.fd().try_clone_to_owned().unwrap())
}

#[test]
fn what_was_written_is_read_and_what_is_gone_is_not() {
    let ledger = Ledger::create(&REGIONS).unwrap();
    ledger.opened(&opened(0));
    ledger.opened(&opened(3));
    for slot in 0..4 {
        ledger.apply(Proof::Whole(block(slot, &[u64::from(slot) * 2, u64::from(slot) * 2 + 1])));
    }
    ledger.apply(Proof::Gone(1));
    ledger.apply(Proof::Whole(block(5, &[20, 22, 24, 26, 28, 30, 32, 34, 36])));
    let left = left(&ledger).unwrap();
    assert_eq!(left.namespaces(), vec![(opened(3).spec.canonical().to_owned(), 3)]);
    let slots: Vec<u32> = left.records().iter().map(|block| block.slot).collect();
    assert_eq!(slots, [0, 2, 3], "one was freed, one lies in too many pieces");
    assert_eq!(left.records()[1], block(2, &[4, 5]));
    assert_eq!(left.clients(), 0);
    ledger.set_clients(70_000);
    assert_eq!(super::tests::left(&ledger).unwrap().clients(), 70_000);
    ledger.words.words()[HEAD_CLIENTS].fetch_xor(1, Ordering::AcqRel);
    assert_eq!(super::tests::left(&ledger).unwrap().clients(), 1, "somebody whose exit nobody knows");
    ledger.close();
    assert!(super::tests::left(&ledger).is_err(), "a closed ledger holds nothing");
}

/// Flips every bit of every used word, one at a time: blocks and namespaces get lost, but never turn into others.
#[test]
fn no_flipped_bit_makes_another_block_or_another_epoch() {
    let ledger = Ledger::create(&REGIONS).unwrap();
    ledger.opened(&opened(3));
    ledger.apply(Proof::Whole(block(0, &[0, 1])));
    ledger.apply(Proof::Whole(block(1, &[4])));
    let before = left(&ledger).unwrap();
    let (blocks, namespaces) = (before.records(), before.namespaces());
    assert_eq!(before.regions(), REGIONS);
    let words =
        (0..9).chain(10..16).chain(namespace_at(0)..namespace_at(0) + 20).chain(record_at(0)..record_at(2));
    let (mut lost, mut refused) = (0, 0);
    for at in words {
        for bit in 0..64 {
            let word = &ledger.words.words()[at];
            word.fetch_xor(1 << bit, Ordering::AcqRel);
            match left(&ledger) {
                Ok(after) => {
                    let (left, known) = (after.records(), after.namespaces());
                    assert_eq!(after.regions(), REGIONS, "word {at}, bit {bit}");
                    assert!(
                        left.iter().all(|block| blocks.contains(block)),
                        "word {at}, bit {bit}: {left:?}"
                    );
                    assert!(
                        known.iter().all(|it| namespaces.contains(it)),
                        "word {at}, bit {bit}: {known:?}"
                    );
                    lost += usize::from(left.len() < blocks.len() || known.len() < namespaces.len());
                }
                Err(_) => refused += 1,
            }
            word.fetch_xor(1 << bit, Ordering::AcqRel);
        }
    }
    assert!(lost > 1000 && refused > 300, "{lost} lost, {refused} refused");
}

#[test]
fn only_bytes_with_the_recorded_checksum_are_proved() {
    let pool = Arc::new(PoolMapping::create(POOL).unwrap());
    let mut blocks = vec![block(0, &[0, 1]), block(1, &[3]), block(2, &[5])];
    for block in &mut blocks {
        let slot = pool.slot(&block.runs).unwrap();
        let bytes = vec![block.slot as u8 + 1; block.block_bytes as usize];
        slot.write_at(0, &bytes);
        block.crc64 = crc64(&bytes);
    }
    // A copy that continues after its depot's end.
    pool.slot(&blocks[1].runs).unwrap().write_at(1000, b"x");
    let proved = prove(blocks.clone(), &pool, &|_| ());
    assert_eq!(proved, [blocks[0].clone(), blocks[2].clone()]);
}

#[test]
fn every_page_belongs_to_one_block_or_to_a_gap() {
    let mut blocks = vec![block(0, &[0, 1]), block(1, &[1]), block(2, &[5, 5]), block(3, &[8])];
    let gaps = places(&mut blocks, &[10 * 4096]);
    assert_eq!(blocks.iter().map(|block| block.slot).collect::<Vec<_>>(), [0, 3]);
    let gaps: Vec<(u64, u64)> = gaps.iter().map(|run| (run.offset / 4096, run.len / 4096)).collect();
    assert_eq!(gaps, [(2, 6), (9, 1)]);
    let gaps = places(&mut blocks, &[3 * 4096, 3 * 4096, 4 * 4096]);
    let gaps: Vec<(u64, u64)> = gaps.iter().map(|run| (run.offset / 4096, run.len / 4096)).collect();
    assert_eq!(gaps, [(2, 1), (3, 3), (6, 2), (9, 1)], "no gap crosses a region");
}

#[test]
fn more_namespaces_than_there_are_places_take_turns() {
    let ledger = Ledger::create(&REGIONS).unwrap();
    let layout = BlockLayout::uniform(1, &[4096]).unwrap();
    let opened = |handle: u64, epoch| {
        let spec = NamespaceSpec::new(&format!("{{\"model\":\"{handle}\"}}"), layout.clone()).unwrap();
        Opened { handle, id: spec.id(epoch), epoch, has_epoch_id: true, spec: Arc::new(spec) }
    };
    let places = NAMESPACES_MAX as u64;
    (0..places).for_each(|handle| ledger.opened(&opened(handle, 0)));
    ledger.opened(&opened(places, 0));
    assert_eq!(left(&ledger).unwrap().namespaces().len(), NAMESPACES_MAX, "there is no place for one more");
    ledger.forgotten(7);
    assert_eq!(left(&ledger).unwrap().namespaces().len(), NAMESPACES_MAX - 1);
    ledger.opened(&opened(places + 1, 5));
    let namespaces = left(&ledger).unwrap().namespaces();
    let named = |handle: u64, epoch: u32| (opened(handle, epoch).spec.canonical().to_owned(), epoch);
    assert!(
        namespaces.contains(&named(places + 1, 5)) && !namespaces.iter().any(|one| one.0 == named(7, 0).0)
    );
    ledger.close();
}
