//! Reports of the blocks that a tier will evict next.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kvdepot_core::BlockKey;
use parking_lot::Mutex;

use super::tools::{Bench, listen};
use crate::{Presence, Tier, TierEvents};

/// Blocks that fit.
const FIT: u64 = 512;

/// A depot that asks, or not, and notes what it is told.
struct Asker {
    asks: bool,
    tier: Arc<dyn Tier>,
    told: Mutex<Told>,
}

#[derive(Default)]
struct Told {
    cooling: HashSet<BlockKey>,
    /// Those among them that nobody has read since.
    unread: Vec<BlockKey>,
    /// Blocks that were told as evicted, and whether they had been told as cooling.
    evicted: Vec<(BlockKey, bool)>,
    /// Blocks that were not there any more when they were told as cooling, and blocks that were told twice.
    late: usize,
    again: usize,
}

impl TierEvents for Asker {
    fn evicted(&self, keys: &[BlockKey]) {
        let mut told = self.told.lock();
        for key in keys {
            let known = told.cooling.contains(key);
            told.evicted.push((*key, known));
        }
    }

    fn asks_for_cooling(&self) -> bool {
        self.asks
    }

    fn cooling(&self, keys: &[BlockKey]) {
        let mut there = Vec::new();
        self.tier.peek(keys, &mut there);
        let mut told = self.told.lock();
        told.late += there.iter().filter(|there| **there != Presence::Present).count();
        for key in keys {
            told.again += usize::from(!told.cooling.insert(*key));
            told.unread.push(*key);
        }
    }

    fn lost(&self, keys: &[BlockKey]) {
        panic!("no block was lost: {keys:?}");
    }

    fn went_down(&self) {}

    fn came_back(&self) {}

    fn lost_memory(&self) {}
}

/// Writes four times as many blocks as fit, one after another, and does `then` after each.
fn overfill(tier: Arc<dyn Tier>, asks: bool, then: impl Fn(&Bench, &Asker)) -> Told {
    let bench = Bench::new(Arc::clone(&tier));
    let asker = Arc::new(Asker { asks, tier, told: Mutex::default() });
    listen(&*bench.tier, &asker);
    for n in 0..4 * FIT {
        bench.write(n).expect("the tier evicts to make room");
        bench.drain();
        then(&bench, &asker);
    }
    std::mem::take(&mut *asker.told.lock())
}

/// The blocks that were evicted had been reported before.
fn check(told: &Told) {
    assert!(told.evicted.len() as u64 > 2 * FIT, "{} blocks were evicted", told.evicted.len());
    // The first ones go before any eviction has shown that blocks do.
    let unknown = told.evicted.iter().filter(|(_, known)| !known).count();
    assert!(unknown <= 16, "{unknown} of {} evicted blocks were not reported before", told.evicted.len());
    assert_eq!((told.late, told.again), (0, 0), "a block is reported once, and while it can be read");
}

pub(super) fn what_is_evicted_was_reported_while_it_was_there(make: &dyn Fn(u64) -> Arc<dyn Tier>) {
    check(&overfill(make(FIT), true, |_, _| ()));
}

pub(super) fn a_read_for_demotion_does_not_keep_a_block(make: &dyn Fn(u64) -> Arc<dyn Tier>) {
    let numbers: OnceCell<HashMap<BlockKey, u64>> = OnceCell::new();
    let read_all = |bench: &Bench, asker: &Asker| {
        let numbers = numbers.get_or_init(|| (0..4 * FIT).map(|n| (bench.key(n), n)).collect());
        let unread = std::mem::take(&mut asker.told.lock().unread);
        unread.iter().for_each(|key| assert!(bench.read_unused(numbers[key]), "it is still there"));
    };
    check(&overfill(make(FIT), true, read_all));
}

pub(super) fn nobody_who_does_not_ask_is_told(make: &dyn Fn(u64) -> Arc<dyn Tier>) {
    let told = overfill(make(FIT), false, |_, _| ());
    assert!(!told.evicted.is_empty() && told.cooling.is_empty());
}
