//! Compares eviction policies with plain queues, under random inserts, uses, leases and evictions.

use std::collections::{BTreeSet, HashMap, VecDeque};

use kvdepot_core::eviction::{Search, by_name};
use kvdepot_core::{EvictionPolicy, SlotId};
use proptest::prelude::*;

fn key(number: u32) -> u64 {
    u64::from(number)
}

/// The interface of the real policies, on queues whose front is the oldest.
trait Model {
    fn insert(&mut self, slot: SlotId, key: u64);
    fn touch(&mut self, slot: SlotId);
    fn remove(&mut self, slot: SlotId);
    fn victim(&mut self, leased: &BTreeSet<SlotId>) -> Option<SlotId>;
    fn choose(&mut self, slot: SlotId);
    /// Returns whether the policy may evict `victim` now.
    fn agrees(&mut self, leased: &BTreeSet<SlotId>, victim: Option<SlotId>) -> bool {
        self.victim(leased) == victim
    }
}

#[derive(Default)]
struct LruModel(VecDeque<SlotId>);

impl Model for LruModel {
    fn insert(&mut self, slot: SlotId, _key: u64) {
        self.0.push_back(slot);
    }
    fn touch(&mut self, slot: SlotId) {
        if self.0.contains(&slot) {
            self.remove(slot);
            self.0.push_back(slot);
        }
    }
    fn remove(&mut self, slot: SlotId) {
        self.0.retain(|&s| s != slot);
    }
    fn victim(&mut self, leased: &BTreeSet<SlotId>) -> Option<SlotId> {
        self.0.iter().copied().find(|slot| !leased.contains(slot))
    }
    fn choose(&mut self, _slot: SlotId) {}
}

/// Maximum number of ghosts forgotten for each new one: many removals may lower their limit at once.
const GHOSTS_FORGOTTEN_MAX: usize = 4;

#[derive(Default)]
struct S3FifoModel {
    small: VecDeque<SlotId>,
    main: VecDeque<SlotId>,
    state: HashMap<SlotId, (u8, u64)>,
    ghosts: Vec<(u64, bool)>,
    chosen: Option<SlotId>,
}

impl S3FifoModel {
    fn victim_in_small(&mut self, leased: &BTreeSet<SlotId>) -> Option<SlotId> {
        for slot in self.small.clone().into_iter().filter(|slot| !leased.contains(slot)) {
            let state = self.state.get_mut(&slot).expect("a queued slot has its state");
            if state.0 < 2 {
                return Some(slot);
            }
            state.0 = 0;
            self.small.retain(|&s| s != slot);
            self.main.push_back(slot);
        }
        None
    }
    fn victim_in_main(&mut self, leased: &BTreeSet<SlotId>) -> Option<SlotId> {
        // Repeatedly over the evictable ones, with one use less each time.
        while let Some(slot) = self.main.iter().copied().find(|slot| !leased.contains(slot)) {
            let state = self.state.get_mut(&slot).expect("a queued slot has its state");
            if state.0 == 0 {
                return Some(slot);
            }
            state.0 -= 1;
            self.main.retain(|&s| s != slot);
            self.main.push_back(slot);
        }
        None
    }
}

impl Model for S3FifoModel {
    fn insert(&mut self, slot: SlotId, key: u64) {
        self.state.insert(slot, (0, key));
        let mut known = false;
        for ghost in self.ghosts.iter_mut().filter(|ghost| ghost.0 == key && ghost.1) {
            (known, ghost.1) = (true, false);
        }
        if known { self.main.push_back(slot) } else { self.small.push_back(slot) }
    }
    fn touch(&mut self, slot: SlotId) {
        if let Some(state) = self.state.get_mut(&slot) {
            state.0 = (state.0 + 1).min(3);
        }
    }
    fn remove(&mut self, slot: SlotId) {
        let slots = self.state.len();
        let Some((_, key)) = self.state.remove(&slot) else { return };
        if self.small.contains(&slot) && self.chosen == Some(slot) {
            self.ghosts.push((key, true));
            let excess = self.ghosts.len().saturating_sub(slots);
            self.ghosts.drain(..excess.min(GHOSTS_FORGOTTEN_MAX));
        }
        self.chosen = self.chosen.filter(|&chosen| chosen != slot);
        self.small.retain(|&s| s != slot);
        self.main.retain(|&s| s != slot);
    }
    fn victim(&mut self, leased: &BTreeSet<SlotId>) -> Option<SlotId> {
        self.chosen = None;
        if self.small.len() < (self.state.len() / 10).max(1) {
            self.chosen = self.victim_in_main(leased);
        }
        if self.chosen.is_none() {
            self.chosen = self.victim_in_small(leased).or_else(|| self.victim_in_main(leased));
        }
        self.chosen
    }
    fn choose(&mut self, slot: SlotId) {
        self.chosen = Some(slot);
    }
}

/// Slots by last use, and the uses of those whose blocks never returned: which class is the coldest one is learned, but
/// of a class the oldest goes.
#[derive(Default)]
struct LhdModel {
    order: VecDeque<SlotId>,
    state: HashMap<SlotId, (Option<u8>, u64)>,
    evicted: BTreeSet<u64>,
    chosen: Option<SlotId>,
}

impl LhdModel {
    /// Returns the class of a slot, if it is known.
    fn class(&self, slot: SlotId) -> Option<usize> {
        let uses = self.state.get(&slot)?.0?;
        [20, 10, 6, 4, 3, 2, 1, 0].iter().position(|&least| uses >= least)
    }
}

impl Model for LhdModel {
    fn insert(&mut self, slot: SlotId, key: u64) {
        self.order.push_back(slot);
        self.state.insert(slot, ((!self.evicted.contains(&key)).then_some(0), key));
    }
    fn touch(&mut self, slot: SlotId) {
        let Some(state) = self.state.get_mut(&slot) else { return };
        state.0 = state.0.map(|uses| (uses + 1).min(20));
        self.order.retain(|&s| s != slot);
        self.order.push_back(slot);
    }
    fn remove(&mut self, slot: SlotId) {
        let Some((_, key)) = self.state.remove(&slot) else { return };
        if self.chosen.take_if(|chosen| *chosen == slot).is_some() {
            self.evicted.insert(key);
        }
        self.order.retain(|&s| s != slot);
    }
    fn victim(&mut self, _leased: &BTreeSet<SlotId>) -> Option<SlotId> {
        unreachable!("see `agrees`")
    }
    fn choose(&mut self, slot: SlotId) {
        self.chosen = Some(slot);
    }
    fn agrees(&mut self, leased: &BTreeSet<SlotId>, victim: Option<SlotId>) -> bool {
        self.chosen = victim;
        let Some(victim) = victim else { return self.order.iter().all(|slot| leased.contains(slot)) };
        let older = self.order.iter().take_while(|&&slot| slot != victim);
        let class = self.class(victim);
        let mut rivals = older.filter(|slot| !leased.contains(slot));
        !leased.contains(&victim) && (class.is_none() || rivals.all(|&slot| self.class(slot) != class))
    }
}

fn found(search: Search) -> Option<SlotId> {
    match search {
        Search::Found(slot) => Some(slot),
        Search::Nothing => None,
        Search::Later => panic!("a search without bounds ends"),
    }
}

#[derive(Clone, Debug)]
enum Step {
    Insert {
        key: u32,
    },
    Touch {
        slot: SlotId,
    },
    Remove {
        slot: SlotId,
    },
    Lease {
        slot: SlotId,
    },
    Unlease {
        slot: SlotId,
    },
    Evict,
    /// Out of turn: one of the next to be evicted.
    Choose {
        which: usize,
    },
}

const SLOTS: SlotId = 32;

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0u32..60).prop_map(|key| Step::Insert { key }),
        6 => (0..SLOTS).prop_map(|slot| Step::Touch { slot }),
        1 => (0..SLOTS).prop_map(|slot| Step::Remove { slot }),
        2 => (0..SLOTS).prop_map(|slot| Step::Lease { slot }),
        2 => (0..SLOTS).prop_map(|slot| Step::Unlease { slot }),
        4 => Just(Step::Evict),
        2 => (0usize..8).prop_map(|which| Step::Choose { which }),
    ]
}

fn compare(
    mut policy: Box<dyn EvictionPolicy>,
    mut model: impl Model,
    steps: Vec<Step>,
    walks_in_order: bool,
) -> Result<(), TestCaseError> {
    let (mut used, mut leased) = (BTreeSet::new(), BTreeSet::new());
    for step in steps {
        policy.begin_row();
        match step {
            Step::Insert { key: number } => {
                let Some(slot) = (0..SLOTS).find(|slot| !used.contains(slot)) else { continue };
                policy.insert(slot, key(number));
                model.insert(slot, key(number));
                used.insert(slot);
            }
            Step::Touch { slot } => {
                policy.touch(slot);
                model.touch(slot);
            }
            Step::Remove { slot } => {
                policy.remove(slot);
                model.remove(slot);
                used.remove(&slot);
            }
            Step::Lease { slot } => drop(leased.insert(slot)),
            Step::Unlease { slot } => drop(leased.remove(&slot)),
            Step::Choose { which } => {
                let mut may_go = Vec::new();
                policy.coldest(&mut |slot, goes| {
                    may_go.extend((goes && !leased.contains(&slot)).then_some(slot));
                    may_go.len() <= which
                });
                let Some(&slot) = may_go.get(which) else { continue };
                policy.choose(slot);
                policy.remove(slot);
                model.choose(slot);
                model.remove(slot);
                used.remove(&slot);
            }
            Step::Evict => {
                let (mut seen, mut next) = (BTreeSet::new(), None);
                policy.coldest(&mut |slot, goes| {
                    assert!(seen.insert(slot), "a walk meets each slot once");
                    next = next.or_else(|| (goes && !leased.contains(&slot)).then_some(slot));
                    true
                });
                prop_assert_eq!(&seen, &used);
                let victim = found(policy.victim(&mut { usize::MAX }, &mut |slot| !leased.contains(&slot)));
                prop_assert!(model.agrees(&leased, victim), "{:?} goes", victim);
                prop_assert!(!walks_in_order || next == victim, "{:?} goes, not {:?}", victim, next);
                prop_assert_eq!(
                    victim.is_some(),
                    used.difference(&leased).next().is_some(),
                    "one, if any may go"
                );
                if let Some(slot) = victim {
                    policy.remove(slot);
                    model.remove(slot);
                    used.remove(&slot);
                }
            }
        }
        prop_assert_eq!((policy.len(), policy.is_empty()), (used.len(), used.is_empty()));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn lru_is_a_queue_by_last_use(steps in prop::collection::vec(step(), 0..300)) {
        compare(by_name("lru").unwrap(), LruModel::default(), steps, true)?;
    }

    #[test]
    fn s3fifo_is_two_queues_and_ghosts(steps in prop::collection::vec(step(), 0..300)) {
        compare(by_name("s3fifo").unwrap(), S3FifoModel::default(), steps, false)?;
    }

    #[test]
    fn lhd_is_a_queue_by_last_use_for_each_class(steps in prop::collection::vec(step(), 0..600)) {
        compare(by_name("lhd").unwrap(), LhdModel::default(), steps, true)?;
    }
}
