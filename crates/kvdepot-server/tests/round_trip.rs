//! P1 through both doors: dumped blocks come back complete, and only under their own names.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::sync::Arc;

use common::{Engine, LONG, Served, config, embedded, hash, spec};
use kvdepot_core::BlockLayout;
use kvdepot_depot::client::{Attachment, Claim, ClaimGroupSpec};

fn layouts() -> Vec<BlockLayout> {
    vec![
        BlockLayout::uniform(1, &[65_536]).unwrap(),
        BlockLayout::uniform(4, &[10_000, 6_384]).unwrap(),
        BlockLayout::new(vec![vec![1], vec![4096, 77], vec![300_000]]).unwrap(),
    ]
}

fn both_doors(pool_bytes: u64, mut test: impl FnMut(&Arc<Attachment>)) {
    let no = serde_json::json!({});
    test(&embedded(config(pool_bytes, no.clone())));
    let served = Served::start(config(pool_bytes, no));
    test(&served.attach());
}

#[test]
fn pages_come_back_to_other_pages() {
    both_doors(64 << 20, |attachment| {
        for (i, layout) in layouts().into_iter().enumerate() {
            let mut engine = Engine::new(attachment, &spec(&format!("m{i}"), layout), 20);
            engine.fill(7);
            let hashes: Vec<u64> = (0..10).collect();
            assert!(engine.dump(&hashes, &engine.all_pages()[..10]).is_empty());
            let wanted: Vec<_> = (0..12).map(hash).collect();
            assert_eq!(engine.store.lookup_on_prefix(&wanted), 10);
            assert_eq!(engine.store.lookup(&wanted)[9..], [1, 0, 0]);
            engine.clear();
            let pages: Vec<i64> = (0..10).map(|i| 19 - i).collect();
            assert!(engine.load(&hashes, &pages).is_empty());
            assert!((0..10).all(|i| engine.holds(19 - i, i, 7)), "layout {i}");
            assert_eq!(
                engine.load(&[3, 99, 4], &[0, 1, 2]),
                [1],
                "an unknown block is a miss, the others come"
            );
        }
    });
}

#[test]
fn namespaces_do_not_see_each_other() {
    both_doors(16 << 20, |attachment| {
        let layout = BlockLayout::uniform(1, &[4096]).unwrap();
        let mut one = Engine::new(attachment, &spec("one", layout.clone()), 2);
        let other = Engine::new(attachment, &spec("other", layout), 2);
        one.fill(1);
        assert!(one.dump(&[5], &[0]).is_empty());
        assert_eq!(other.store.lookup(&[hash(5)]), [0]);
        assert_eq!(other.load(&[5], &[0]), [0]);
    });
}

#[test]
fn layer_dumps_are_visible_only_when_whole() {
    both_doors(16 << 20, |attachment| {
        let mut engine =
            Engine::new(attachment, &spec("layers", BlockLayout::uniform(3, &[8192]).unwrap()), 8);
        engine.fill(3);
        let hashes: Vec<_> = (0..4).map(hash).collect();
        // SAFETY: the engine's tensors live until the end of this test, and nothing writes them before the task is
        // done.
        let dump = unsafe { engine.store.begin_dump_pages(hashes.clone(), &[0, 1, 2, 3]) }.unwrap();
        dump.submit_shard(0, 0).unwrap();
        dump.submit_shard(2, 0).unwrap();
        assert!(dump.state().wait_shard(0, Some(LONG)) && dump.state().wait_shard(2, Some(LONG)));
        assert!(!dump.state().done());
        assert_eq!(engine.store.lookup_on_prefix(&hashes), 0);
        dump.submit_shard(1, 0).unwrap();
        assert!(dump.state().wait(Some(LONG)));
        assert_eq!(engine.store.lookup_on_prefix(&hashes), 4);
        engine.clear();
        assert!(engine.load(&[0, 1, 2, 3], &[4, 5, 6, 7]).is_empty());
        assert!((0..4).all(|i| engine.holds(4 + i, i, 3)));
    });
}

#[test]
fn a_dump_given_up_half_way_leaves_nothing() {
    both_doors(8 << 20, |attachment| {
        let mut engine =
            Engine::new(attachment, &spec("half", BlockLayout::uniform(2, &[1 << 20]).unwrap()), 4);
        engine.fill(3);
        for round in 0..5 {
            // SAFETY: as above; the copy of shard 0 has completed when `wait_shard` returns.
            let dump =
                unsafe { engine.store.begin_dump_pages(vec![hash(round), hash(100 + round)], &[0, 1]) }
                    .unwrap();
            dump.submit_shard(0, 0).unwrap();
            assert!(dump.state().wait_shard(0, Some(LONG)));
        }
        // All of the pool is free again as soon as the depot has noticed the end of the lanes: the next dump needs all
        // of it.
        let end = std::time::Instant::now() + LONG;
        let filled = std::iter::from_fn(|| (std::time::Instant::now() < end).then_some(())).any(|()| {
            std::thread::yield_now();
            engine.dump(&[50, 51, 52, 53], &[0, 1, 2, 3]).is_empty()
        });
        assert!(filled, "half-way dumps leaked pool space: {}", attachment.stats());
    });
}

#[test]
fn shards_may_come_in_several_tasks() {
    both_doors(8 << 20, |attachment| {
        let spec = spec("shards", BlockLayout::uniform(2, &[5000]).unwrap());
        let engine = Engine::new(attachment, &spec, 1);
        let (a, b) = (vec![1u8; 5000], vec![2u8; 5000]);
        let (h, store) = (hash(9), &engine.store);
        for (shard, source) in [(1, &b), (0, &a)] {
            assert_eq!(store.lookup(&[h]), [0]);
            // SAFETY: `a` and `b` outlive the task.
            let task = unsafe { store.dump(vec![h], &[shard], &[source.as_ptr() as u64], 0) }.unwrap();
            assert!(task.wait(Some(LONG)) && task.failed().is_empty());
        }
        assert_eq!(store.lookup(&[h]), [1]);
        let mut out = vec![0u8; 10_000];
        let at = out.as_mut_ptr() as u64;
        // SAFETY: `out` outlives the task.
        let task = unsafe { store.load(vec![h, h], &[0, 1], &[at, at + 5000], 0) }.unwrap();
        assert!(task.wait(Some(LONG)) && task.failed().is_empty());
        assert!(out[..5000] == a[..] && out[5000..] == b[..]);
    });
}

#[test]
fn the_pool_evicts_what_is_old_and_keeps_what_is_claimed() {
    both_doors(1 << 20, |attachment| {
        let spec = spec("evict", BlockLayout::uniform(1, &[65_536]).unwrap());
        let mut engine = Engine::new(attachment, &spec, 40);
        engine.fill(1);
        let first: Vec<u64> = (0..8).collect();
        assert!(engine.dump(&first, &engine.all_pages()[..8]).is_empty());
        let group =
            ClaimGroupSpec { namespaces: vec![Arc::clone(&spec)], window_blocks: 0, hashes_per_block: 1 };
        let hashes: Vec<_> = (0..20).map(hash).collect();
        let mut claim = Claim::open(attachment, &[group], &hashes, 0, 20, "").unwrap();
        assert_eq!(claim.wait(LONG), (true, 8, 0));
        let many: Vec<u64> = (100..130).collect();
        assert!(engine.dump(&many, &engine.all_pages()[..30]).is_empty());
        assert_eq!(engine.store.lookup_on_prefix(&hashes), 8, "claimed blocks were evicted");
        claim.release();
        assert!(
            engine
                .dump(
                    &[200, 201, 202, 203, 204, 205, 206, 207, 208, 209, 210, 211, 212, 213, 214, 215],
                    &engine.all_pages()[..16]
                )
                .is_empty()
        );
        assert_eq!(engine.store.lookup_on_prefix(&hashes), 0, "old blocks stayed");
    });
}
