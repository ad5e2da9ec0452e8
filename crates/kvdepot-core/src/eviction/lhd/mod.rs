//! Least hit density, after Beckmann, Chen and Cidon ("LHD: improving cache hit rate by maximizing hit density", NSDI
//! 2018).
//!
//! The policy learns how soon blocks are used again, depending on how often they were used and how long ago. It evicts the
//! block with the fewest expected hits per unit of time in its slot. The paper compares a random sample of blocks. Here,
//! blocks with a similar number of uses form a class, each class has a list ordered by last use, and the oldest blocks of
//! all classes are compared. The policy also remembers evicted blocks, so it learns from those that it should have kept.

mod age;
mod density;
mod returns;

use age::{Time, age_class};
use density::{CLASS_USES, CLASSES, Density, class_of};
use returns::Returns;

use super::chunked::Chunked;
use super::list::SlotLists;
use super::policy::{EvictionPolicy, Search, SlotId};
use crate::limits::EVICTION_PASSED_OVER_MAX;

/// Number of turns (as many events as the cache has blocks) after which a count has half its weight.
const HALF_LIFE_TURNS: usize = 32;
/// The densities are computed anew after this fraction of a turn.
const LEARN_DIVISOR: usize = 16;
/// Minimum number of events between two computations, which take microseconds each.
const LEARN_EVENTS_MIN: usize = 64;
/// Maximum of the use counter.
const USES_MAX: u8 = CLASS_USES[CLASSES - 1];

/// Evicts the block with the fewest expected hits per unit of time in its slot.
#[derive(Debug)]
pub struct Lhd {
    /// A list for each class, ordered by last use, except that a row's later blocks are older than its earlier ones.
    lists: SlotLists<CLASSES>,
    /// Uses of each slot's block. Valid only for slots in a list, like the next two fields.
    uses: Chunked<u8>,
    /// Time of each slot's last use.
    used: Chunked<u16>,
    /// Hash of each slot's key.
    fingerprints: Chunked<u32>,
    returns: Returns,
    density: Box<Density>,
    time: Time,
    /// Time when the row began, and the last slot of each class that the row used.
    row: (u16, [Option<SlotId>; CLASSES]),
    events_until_learn: usize,
    events_since_halved: usize,
    /// The last slot that `victim` returned. Only evicted blocks are remembered, not those that leave for another reason.
    chosen: Option<SlotId>,
    /// An interrupted search.
    hunt: Option<Hunt>,
}

/// Position of a search over all lists. An interrupted search resumes at the oldest ends. The slots that it has passed
/// over are at the newest ends by then, except the first few, which it meets again.
#[derive(Clone, Copy, Debug)]
struct Hunt {
    /// Slots left to examine in each list.
    left: [usize; CLASSES],
    /// Slots of each list that were passed over and kept their places.
    kept: [usize; CLASSES],
    is_cut: bool,
}

impl Hunt {
    fn cut(&mut self) {
        self.is_cut = true;
        for (left, kept) in self.left.iter_mut().zip(&mut self.kept) {
            *left += std::mem::take(kept);
        }
    }

    /// Records a slot that may not be evicted. Returns whether to move it to the newest end.
    fn pass_over(&mut self, list: usize) -> bool {
        let moves = self.is_cut || self.kept.iter().sum::<usize>() >= EVICTION_PASSED_OVER_MAX;
        self.kept[list] += usize::from(!moves);
        moves
    }
}

impl Lhd {
    /// Makes an empty policy.
    pub fn new() -> Self {
        Self {
            lists: SlotLists::new(),
            uses: Chunked::new(0),
            used: Chunked::new(0),
            fingerprints: Chunked::new(0),
            returns: Returns::new(),
            density: Density::new(),
            time: Time::default(),
            row: (0, [None; CLASSES]),
            events_until_learn: LEARN_EVENTS_MIN,
            events_since_halved: 0,
            chosen: None,
            hunt: None,
        }
    }

    /// Records a use or an insert.
    fn pass(&mut self) {
        let len = self.len();
        self.time.pass(len);
        self.events_since_halved += 1;
        if self.events_since_halved >= HALF_LIFE_TURNS * len.max(1) {
            self.events_since_halved = 0;
            self.density.halve();
        }
        self.events_until_learn -= 1;
        if self.events_until_learn == 0 {
            self.events_until_learn = (len / LEARN_DIVISOR).max(LEARN_EVENTS_MIN);
            self.density.learn();
        }
    }

    /// Returns how long ago the slot was used. All uses of a row count as happening when it begins.
    fn age(&self, slot: SlotId) -> u16 {
        self.row.0.wrapping_sub(self.used[slot])
    }

    /// Adds a slot that is in no list at the place of one that was just used.
    fn put(&mut self, slot: SlotId) {
        let class = class_of(self.uses[slot]);
        self.used[slot] = self.row.0;
        match self.row.1[class].filter(|&last| self.lists.list_of(last) == Some(class)) {
            Some(last) => self.lists.push_before(last, slot),
            None => self.lists.push(class, slot),
        }
        self.row.1[class] = Some(slot);
    }

    /// Returns the list whose slot in `next` is evicted first: the one with the least density, or the oldest of equals.
    fn coldest_list(&self, next: &[Option<SlotId>; CLASSES]) -> Option<(usize, SlotId)> {
        let mut coldest: Option<(f64, u16, usize, SlotId)> = None;
        for (list, &slot) in next.iter().enumerate() {
            let Some(slot) = slot else { continue };
            let age = self.age(slot);
            let density = self.density.of(list, age_class(age));
            if coldest.is_none_or(|(least, oldest, ..)| (density, oldest) < (least, age)) {
                coldest = Some((density, age, list, slot));
            }
        }
        coldest.map(|(.., list, slot)| (list, slot))
    }
}

impl Default for Lhd {
    fn default() -> Self {
        Self::new()
    }
}

impl EvictionPolicy for Lhd {
    fn begin_row(&mut self) {
        self.row = (self.time.now(), [None; CLASSES]);
    }

    fn insert(&mut self, slot: SlotId, fingerprint: u64) {
        debug_assert!(self.lists.list_of(slot).is_none(), "slot {slot} was inserted twice");
        self.lists.unlink(slot);
        self.uses.reach(slot);
        self.used.reach(slot);
        self.fingerprints.reach(slot);
        self.returns.reach(self.len() + 1);
        self.pass();
        let fingerprint = mixed(fingerprint);
        self.fingerprints[slot] = fingerprint;
        self.uses[slot] = match self.returns.take(fingerprint, self.row.0) {
            Some(past) => {
                self.density.returned(past.class, age_class(past.age));
                (CLASS_USES[past.class] + 1).min(USES_MAX)
            }
            None => 0,
        };
        self.put(slot);
    }

    fn touch(&mut self, slot: SlotId) {
        let Some(class) = self.lists.list_of(slot) else { return };
        self.pass();
        self.density.used(class, age_class(self.age(slot)));
        self.lists.unlink(slot);
        self.uses[slot] = (self.uses[slot] + 1).min(USES_MAX);
        self.put(slot);
    }

    fn remove(&mut self, slot: SlotId) {
        let class = self.lists.unlink(slot);
        let evicted = self.chosen == Some(slot);
        if evicted {
            self.chosen = None;
        }
        let (Some(class), true) = (class, evicted) else { return };
        self.density.evicted(class, age_class(self.age(slot)));
        let (fingerprint, past) = (self.fingerprints[slot], (class, self.used[slot]));
        let Self { returns, density, lists, row, .. } = self;
        let len = (0..CLASSES).map(|list| lists.len(list)).sum::<usize>() + 1;
        returns.remember(fingerprint, past, (len, row.0), |past| {
            density.forgotten(past.class, age_class(past.age));
        });
    }

    fn victim(&mut self, looks: &mut usize, may_evict: &mut dyn FnMut(SlotId) -> bool) -> Search {
        self.chosen = None;
        let mut hunt = self.hunt.take().unwrap_or_else(|| Hunt {
            left: std::array::from_fn(|list| self.lists.len(list)),
            kept: [0; CLASSES],
            is_cut: false,
        });
        let mut next = std::array::from_fn(|list| self.lists.oldest(list).filter(|_| hunt.left[list] > 0));
        while let Some((list, slot)) = self.coldest_list(&next) {
            if *looks == 0 {
                hunt.cut();
                self.hunt = Some(hunt);
                return Search::Later;
            }
            *looks -= 1;
            if may_evict(slot) {
                self.chosen = Some(slot);
                return Search::Found(slot);
            }
            hunt.left[list] -= 1;
            next[list] = self.lists.newer(slot).filter(|_| hunt.left[list] > 0);
            if hunt.pass_over(list) {
                self.lists.move_to(list, slot);
                self.used[slot] = self.row.0;
            }
        }
        Search::Nothing
    }

    fn choose(&mut self, slot: SlotId) {
        self.chosen = Some(slot);
    }

    fn coldest(&self, look: &mut dyn FnMut(SlotId, bool) -> bool) {
        let mut next = std::array::from_fn(|list| self.lists.oldest(list));
        while let Some((list, slot)) = self.coldest_list(&next) {
            if !look(slot, true) {
                return;
            }
            next[list] = self.lists.newer(slot);
        }
    }

    fn len(&self) -> usize {
        (0..CLASSES).map(|list| self.lists.len(list)).sum()
    }
}

/// Mixes a hash into 32 bits, each of which depends on all of it: block numbers of a trace are small.
const fn mixed(fingerprint: u64) -> u32 {
    let folded = (fingerprint ^ (fingerprint >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((folded ^ (folded >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 32) as u32
}
