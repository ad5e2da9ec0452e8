//! Blocks of every shape, many at a time.

use std::sync::Arc;

use kvdepot_core::{BlockLayout, ErrorKind};
use kvdepot_io::cut::in_runs;

use super::tools::{Bench, spec};
use crate::{Tier, Written};

fn bench(tier: &Arc<dyn Tier>, layout: BlockLayout) -> Bench {
    Bench::with(Arc::clone(tier), spec("shapes", layout))
}

pub(super) fn blocks_of_every_size(tier: Arc<dyn Tier>) {
    for bytes in [1, 4095, 4096, 4097, 8192, 65_537, 1 << 20] {
        let bench = bench(&tier, BlockLayout::new(vec![vec![bytes]]).expect("a valid layout"));
        bench.write_all(2);
        assert!(bench.read_is_right(0) && bench.read_is_right(1), "{bytes} bytes");
    }
}

/// The pool may provide a slot in pieces, with or without complete pages, and shards may begin anywhere in them.
pub(super) fn slots_of_several_runs(tier: Arc<dyn Tier>) {
    let bench =
        bench(&tier, BlockLayout::new(vec![vec![3000], vec![9000], vec![500]]).expect("a valid layout"));
    let cuts: [&[usize]; 4] = [&[16384], &[4096, 12288], &[4096, 4096, 4096, 4096], &[100, 3900, 8192, 4192]];
    for (n, lengths) in (0..).zip(cuts) {
        let src = in_runs(&bench.slot(), lengths);
        src.write_at(0, &bench.bytes(n));
        assert_eq!(Bench::answer(&bench.begin_write(n, src, Bench::soon())).expect("a write"), Written::New);
    }
    for n in 0..4 {
        for lengths in cuts {
            let dst = in_runs(&bench.slot(), lengths);
            Bench::answer(&bench.begin_read(n, dst.clone(), Bench::soon())).expect("a read");
            assert_eq!(bench.block_of(&dst), bench.bytes(n), "block {n} into runs of {lengths:?}");
        }
    }
}

pub(super) fn many_shards(tier: Arc<dyn Tier>) {
    for shards in [1, 61, 496, 497, 4096] {
        let bench = bench(&tier, BlockLayout::uniform(shards, &[40, 33]).expect("a valid layout"));
        bench.write_all(2);
        assert!(bench.read_is_right(0) && bench.read_is_right(1), "{shards} shards");
    }
}

pub(super) fn many_blocks_at_once(tier: Arc<dyn Tier>) {
    const COUNT: u64 = 300;
    let bench = Bench::new(tier);
    let end = Bench::soon_for(COUNT);
    let writes: Vec<_> = (0..COUNT).map(|n| bench.begin_write(n, bench.filled(n), end)).collect();
    for write in writes {
        assert_eq!(Bench::answer(&write).expect("a write"), Written::New);
    }
    assert_eq!(bench.probe(bench.keys(COUNT + 1)).expect("a probe"), 300);
    let reads: Vec<_> = (0..COUNT)
        .map(|n| {
            let slot = bench.slot();
            (n, slot.clone(), bench.begin_read(n, slot, Bench::soon_for(COUNT)))
        })
        .collect();
    for (n, slot, read) in reads {
        Bench::answer(&read).expect("a read");
        assert_eq!(bench.block_of(&slot), bench.bytes(n));
    }
    let mut keys = bench.tier.keys(bench.spec.id(bench.epoch));
    let mut expected = bench.keys(COUNT);
    keys.sort();
    expected.sort();
    assert_eq!(keys, expected);
}

/// A reader that runs during a write gets the complete block or a miss (P1).
pub(super) fn whole_or_absent_while_written(tier: Arc<dyn Tier>) {
    let bench = Bench::new(tier);
    for n in 0..50 {
        let mut reads = Vec::new();
        let mut read = |bench: &Bench| {
            let slot = bench.slot();
            reads.push((slot.clone(), bench.begin_read(n, slot, Bench::soon())));
        };
        read(&bench);
        let write = bench.begin_write(n, bench.filled(n), Bench::soon());
        for _ in 0..4 {
            read(&bench);
        }
        assert_eq!(Bench::answer(&write).expect("a write"), Written::New);
        for (slot, answer) in reads {
            match Bench::answer(&answer) {
                Ok(()) => assert_eq!(bench.block_of(&slot), bench.bytes(n), "block {n} (P1)"),
                Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "{error}"),
            }
        }
        assert!(bench.read_is_right(n), "block {n} is there once its write has ended");
    }
}
