//! Several blocks per call, and calls that complete later.

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use kvdepot_core::{BlockKey, BlockLayout, ErrorKind, NamespaceSpec, Result};
use kvdepot_io::SlotBuf;

use super::tools::{Bench, Waiting, answer, spec};
use crate::{Fetched, Presence, ReadItem, Tier, WriteItem, Written};

/// Begins one batch of reads. Returns their results, in the batch's order.
fn read(bench: &Bench, items: Vec<(BlockKey, SlotBuf)>, deadline: Instant) -> Vec<Receiver<Result<Fetched>>> {
    let (items, ends) = items
        .into_iter()
        .map(|(key, dst)| {
            let (done, end) = answer();
            (ReadItem::new(key, dst, done), end)
        })
        .unzip();
    bench.tier.read(items, deadline);
    ends
}

/// Begins one batch of writes. Returns their results, in the batch's order.
fn write(
    bench: &Bench,
    items: Vec<(BlockKey, SlotBuf)>,
    deadline: Instant,
) -> Vec<Receiver<Result<Written>>> {
    let (items, ends) = items
        .into_iter()
        .map(|(key, src)| {
            let (done, end) = answer();
            (WriteItem { key, src, done }, end)
        })
        .unzip();
    bench.tier.write(items, deadline);
    ends
}

fn kinds<T>(ends: &[Receiver<Result<T>>]) -> Vec<Option<ErrorKind>> {
    ends.iter().map(|end| Bench::answer(end).err().map(|error| error.kind())).collect()
}

pub(super) fn each_block_of_a_batch_ends_as_it_would_alone(tier: Arc<dyn Tier>) {
    let bench = Bench::new(Arc::clone(&tier));
    let other = Bench::with(tier, spec("another", bench.spec.layout().clone()));
    let small = || SlotBuf::anonymous(4096);
    let closed = bench.spec.id(bench.epoch + 7);
    let stray = BlockKey { namespace: closed, ..bench.key(0) };
    bench.write_all(1);
    let items = vec![
        (bench.key(0), bench.filled(0)),
        (bench.key(1), bench.filled(1)),
        (bench.key(2), small()),
        (stray, bench.filled(0)),
        (other.key(3), other.filled(3)),
        (bench.key(4), bench.filled(4)),
    ];
    let ends = write(&bench, items, Bench::soon());
    let ends: Vec<_> = ends.iter().map(|end| Bench::answer(end).map_err(|error| error.kind())).collect();
    let (new, refused) = (Ok(Written::New), Err(ErrorKind::Config));
    assert_eq!(ends, [Ok(Written::AlreadyThere), new, refused, Err(ErrorKind::NotFound), new, new]);

    let slots: Vec<SlotBuf> = (0..4).map(|_| bench.slot()).collect();
    let items = vec![
        (bench.key(1), slots[0].clone()),
        (bench.key(99), slots[1].clone()),
        (bench.key(4), small()),
        (stray, slots[1].clone()),
        (other.key(3), slots[2].clone()),
        (bench.key(0), slots[3].clone()),
    ];
    let ends = read(&bench, items, Bench::soon());
    let ends: Vec<_> = ends.iter().map(|end| Bench::answer(end).map_err(|error| error.kind())).collect();
    let (whole, miss) = (Ok(Fetched::Whole), Ok(Fetched::Miss));
    assert_eq!(ends, [whole, miss, Err(ErrorKind::Config), miss, whole, whole]);
    assert_eq!(bench.block_of(&slots[0]), bench.bytes(1));
    assert_eq!(other.block_of(&slots[2]), other.bytes(3));
    assert_eq!(bench.block_of(&slots[3]), bench.bytes(0));
    assert!(bench.read_is_right(4), "what the caller did wrong costs no block");
}

pub(super) fn readers_of_one_key_all_get_it(tier: Arc<dyn Tier>) {
    let bench = Bench::new(tier);
    bench.write_all(2);
    let numbers = [0, 1, 0, 0, 99, 1];
    let slots: Vec<SlotBuf> = numbers.iter().map(|_| bench.slot()).collect();
    let items = numbers.iter().zip(&slots).map(|(&n, slot)| (bench.key(n), slot.clone())).collect();
    let ends = read(&bench, items, Bench::soon());
    for ((n, slot), end) in numbers.into_iter().zip(&slots).zip(&ends) {
        match Bench::answer(end).expect("a read") {
            Fetched::Miss => assert_eq!(n, 99),
            _ => assert_eq!(bench.block_of(slot), bench.bytes(n), "block {n}"),
        }
    }
    assert!(bench.read_is_right(0) && bench.read_is_right(1), "they stay");
}

pub(super) fn empty_batches_do_nothing(tier: Arc<dyn Tier>) {
    let bench = Bench::new(tier);
    for deadline in [Bench::soon(), Instant::now()] {
        bench.tier.read(Vec::new(), deadline);
        bench.tier.write(Vec::new(), deadline);
    }
    let (done, end) = answer();
    bench.tier.remove(Vec::new(), done);
    Bench::answer(&end).expect("nothing to forget");
    bench.drain();
    assert_eq!(bench.tier.usage().blocks, 0);
    bench.write_all(1);
    assert!(bench.read_is_right(0));
}

pub(super) fn a_batch_after_its_deadline_is_a_timeout_for_each(tier: Arc<dyn Tier>) {
    let bench = Bench::new(tier);
    bench.write_all(3);
    let past = Instant::now();
    let late = vec![Some(ErrorKind::Timeout); 3];
    let items = (0..3).map(|n| (bench.key(n), bench.slot())).collect();
    assert_eq!(kinds(&read(&bench, items, past)), late);
    let items = (10..13).map(|n| (bench.key(n), bench.filled(n))).collect();
    assert_eq!(kinds(&write(&bench, items, past)), late);
    assert!((0..3).all(|n| bench.read_is_right(n)));
    assert!((10..13).all(|n| bench.write(n).is_ok_and(|written| written == Written::New)));
}

pub(super) fn removed_means_not_found_and_free_to_write(tier: Arc<dyn Tier>) {
    let bench = Bench::new(tier);
    bench.write_all(20);
    let (done, end) = answer();
    // Every other block, and some that never existed.
    bench.tier.remove((0..30).filter(|n| n % 2 == 0).map(|n| bench.key(n)).collect(), done);
    Bench::answer(&end).expect("a removal");
    for n in 0..20 {
        assert_eq!(bench.peek(n) == Presence::Present, n % 2 == 1, "block {n}");
    }
    let items = (0..20).map(|n| (bench.key(n), bench.slot())).collect();
    let ends = read(&bench, items, Bench::soon());
    for (n, end) in (0..).zip(&ends) {
        let expected = if n % 2 == 1 { Fetched::Whole } else { Fetched::Miss };
        assert_eq!(Bench::answer(end).expect("a read"), expected, "block {n}");
    }
    // A removal that has completed does not affect later writes.
    let items = (0..20).map(|n| (bench.key(n), bench.filled(n))).collect();
    for (n, end) in (0..).zip(&write(&bench, items, Bench::soon())) {
        let expected = if n % 2 == 1 { Written::AlreadyThere } else { Written::New };
        assert_eq!(Bench::answer(end).expect("a write"), expected, "block {n}");
    }
    bench.drain();
    assert!((0..20).all(|n| bench.read_is_right(n)));
}

pub(super) fn many_namespaces_open_and_advance_at_once(tier: Arc<dyn Tier>) {
    let layout = BlockLayout::new(vec![vec![100]]).expect("a valid layout");
    let specs: Vec<Arc<NamespaceSpec>> =
        (0..50).map(|n| Arc::new(spec(&format!("space {n}"), layout.clone()))).collect();
    let begun: Vec<_> = specs
        .iter()
        .map(|spec| {
            let (done, end) = answer();
            tier.open_namespace(spec, 2, Bench::soon(), done);
            end
        })
        .collect();
    assert!(begun.iter().all(|end| Bench::answer(end).expect("it opens") == 2));
    let begun: Vec<_> = specs
        .iter()
        .map(|spec| {
            let (done, end) = answer();
            tier.advance_epoch(spec, 0, Bench::soon(), done);
            end
        })
        .collect();
    let epochs: Vec<u32> = begun.iter().map(|end| Bench::answer(end).expect("it advances")).collect();
    assert!(epochs.iter().all(|epoch| *epoch > 2), "{epochs:?}");
    let last = Bench::with(tier, NamespaceSpec::clone(&specs[49]));
    assert_eq!(last.epoch, epochs[49]);
    last.write_all(1);
    assert!(last.read_is_right(0));
}

/// A reset hides old blocks from the moment of the request, however long it takes to store (P1).
pub(super) fn an_advance_hides_what_was_before_it_is_done(tier: Arc<dyn Tier>) {
    let bench = Bench::new(tier);
    bench.write_all(2);
    let (done, end) = answer();
    bench.tier.advance_epoch(&Arc::new(bench.spec.clone()), 0, Bench::soon(), done);
    let slot = bench.slot();
    let read = read(&bench, vec![(bench.key(0), slot)], Bench::soon());
    assert_ne!(bench.peek(1), Presence::Present);
    assert_eq!(Bench::answer(&read[0]).expect("a read"), Fetched::Miss);
    Bench::answer(&end).expect("a new epoch");
}

/// Calls about one namespace may end in any order; after those that succeed, it is open in the last epoch.
pub(super) fn openings_and_resets_of_one_namespace_may_overlap(tier: Arc<dyn Tier>) {
    let mut bench = Bench::new(tier);
    let spec = Arc::new(bench.spec.clone());
    for n in 0..10 {
        let begun = [false, true, false, true].map(|is_reset| {
            let (done, end) = answer();
            match is_reset {
                true => bench.tier.advance_epoch(&spec, 0, Bench::soon(), done),
                false => bench.tier.open_namespace(&spec, 0, Bench::soon(), done),
            }
            end
        });
        let (mut last, mut is_busy) = (0, false);
        for end in &begun {
            match Bench::answer(end) {
                Ok(epoch) => last = last.max(epoch),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
                    is_busy = true;
                }
            }
        }
        if is_busy {
            // A tier may refuse a call that another one overtakes; whoever is refused asks again.
            last = bench.tier.open_and_wait(&spec, last).expect("it opens after all others");
        }
        assert!(last > bench.epoch, "a reset begins a new epoch: {last} after {}", bench.epoch);
        bench.epoch = last;
        assert_eq!(bench.write(n).expect("a write in the last epoch"), Written::New, "epoch {last}");
        assert!(bench.read_is_right(n));
    }
}
