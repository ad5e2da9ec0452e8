//! A reader in step: whatever happens to ring, tiers and namespaces, in the end it has reported exactly what the depot has.
//! Seeded runs over a model of a depot, and mistakes that these runs find.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvdepot_core::{BlockHash, BlockKey, NamespaceId};

use super::packed::{pack, unpack};
use super::ring::{Change, Ring};
use crate::client::follow::{Delta, Next, Reader};

const PLACES: u8 = 3;
const HASHES: u64 = 12;
/// Namespaces of each group.
const GROUPS: [usize; 2] = [2, 1];
const SPACES: usize = 3;
/// Changes that may wait to be taken, before nothing more is read.
const WAITING_MAX: usize = 8;
/// Most changes that a last answer adds: events of eight looks, and all places of a block that went.
const ANSWER_DELTAS: usize = 8 + PLACES as usize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    /// A gap is not told.
    HiddenGap,
    /// What a walk does not find again stays.
    KeptStale,
    /// What a tier reported is recorded, in place of what it has.
    Reported,
    /// The caller's room is respected only while removals are reported.
    NoRoom,
    /// The reader asks for a namespace that the depot forgot.
    AsksForGone,
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// A depot: of each namespace and place, slots with blocks.
struct Model {
    random: Random,
    ids: [u8; SPACES],
    /// Namespaces that the depot knows.
    known: [bool; SPACES],
    slots: BTreeMap<(usize, u8), Vec<Option<u8>>>,
    ring: Ring,
    /// Changes of tiers that are not recorded yet, as reported.
    reports: Vec<(usize, u8, u8, u8, bool)>,
    mistake: Mistake,
}

impl Model {
    fn new(seed: u64, mistake: Mistake) -> Self {
        let mut ring = Ring::new(24);
        ring.hides_gaps = mistake == Mistake::HiddenGap;
        let pairs = (0..SPACES).flat_map(|space| (0..PLACES).map(move |place| (space, place)));
        let slots = pairs.map(|pair| (pair, Vec::new())).collect();
        let random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        Self { random, ids: [0, 100, 200], known: [true; SPACES], slots, ring, reports: Vec::new(), mistake }
    }

    fn has(&self, space: usize, place: u8, hash: u8) -> bool {
        self.slots[&(space, place)].contains(&Some(hash))
    }

    fn record(&mut self, id: u8, place: u8, hash: u8, is_stored: bool) {
        let key = BlockKey { namespace: NamespaceId([id; 16]), hash: BlockHash([hash; 16]) };
        self.ring.push(Change { key, place, is_stored });
    }

    fn act(&mut self) {
        let space = self.random.below(SPACES as u64) as usize;
        match self.random.below(100) {
            0 => {
                self.ids[space] += 1;
                (0..PLACES).for_each(|place| self.slots.get_mut(&(space, place)).unwrap().clear());
            }
            1 => self.ring.cut(),
            2 => self.forget_or_learn(space),
            3..30 if !self.reports.is_empty() => self.look(),
            _ => self.change(space),
        }
    }

    /// The depot forgets a namespace with all its blocks, or it is opened again.
    fn forget_or_learn(&mut self, space: usize) {
        self.known[space] = !self.known[space];
        (0..PLACES).for_each(|place| self.slots.get_mut(&(space, place)).unwrap().clear());
    }

    fn change(&mut self, space: usize) {
        if !self.known[space] {
            return;
        }
        let (place, hash) = (self.random.below(PLACES.into()) as u8, self.random.below(HASHES) as u8);
        let stored = !self.has(space, place, hash);
        let at = self.random.below(20) as usize;
        let slots = self.slots.get_mut(&(space, place)).unwrap();
        if stored {
            slots.resize(slots.len().max(at + 1), None);
            match slots[at] {
                Some(_) => slots.push(Some(hash)),
                None => slots[at] = Some(hash),
            }
        } else {
            slots.iter_mut().filter(|slot| **slot == Some(hash)).for_each(|slot| *slot = None);
        }
        match place {
            0 => self.record(self.ids[space], place, hash, stored),
            _ => self.reports.push((space, self.ids[space], place, hash, stored)),
        }
    }

    /// Reports of tiers come in any order; what is recorded is what the tier has.
    fn look(&mut self) {
        let at = self.random.below(self.reports.len() as u64) as usize;
        let (space, id, place, hash, said) = self.reports.swap_remove(at);
        let has = id == self.ids[space] && self.has(space, place, hash);
        self.record(id, place, hash, if self.mistake == Mistake::Reported { said } else { has });
    }

    /// Answers as a session does.
    fn answer(&mut self, reader: &mut Reader, next: &Next) {
        match *next {
            Next::Begin => reader.followed(self.ring.head(), (0..PLACES).collect()),
            Next::Events(after) => {
                let spaces: Vec<usize> = (0..SPACES).filter(|space| self.known[*space]).collect();
                let ids: Vec<_> = spaces.iter().map(|space| [self.ids[*space]; 16]).collect();
                let space = |id: &NamespaceId| {
                    ids.iter().position(|other| *other == id.0).and_then(|at| u16::try_from(at).ok())
                };
                let reading = self.ring.read(after, 1 + self.random.below(8) as usize, space);
                let events = unpack(&pack(&reading.events)).unwrap();
                reader.events(&spaces, &ids, &events, reading.upto, reading.is_gap, reading.has_more);
            }
            // A namespace that is not known has no answer.
            Next::Piece { space, .. } if !self.known[space] => {}
            Next::Piece { space, place, from } => {
                let slots = &self.slots[&(space, place)];
                let from = (from as usize).min(slots.len());
                let end = (from + 1 + self.random.below(6) as usize).min(slots.len());
                let hashes: Vec<_> = slots[from..end].iter().flatten().map(|n| BlockHash([*n; 16])).collect();
                let next = (end < slots.len()).then_some(end as u64);
                reader.piece([self.ids[space]; 16], hashes.into_iter(), next);
            }
            Next::Full => {}
        }
    }

    /// What a reader is to have told: for each group what all of its namespaces have.
    fn expected(&self) -> BTreeSet<(u32, u8, u8)> {
        let mut expected = BTreeSet::new();
        let mut first = 0;
        for (group, count) in GROUPS.into_iter().enumerate() {
            for (place, hash) in
                (0..PLACES).flat_map(|place| (0..HASHES as u8).map(move |hash| (place, hash)))
            {
                if (first..first + count).all(|space| self.has(space, place, hash)) {
                    expected.insert((group as u32, place, hash));
                }
            }
            first += count;
        }
        expected
    }
}

/// One run; what is wrong in the end, if something is.
fn run(seed: u64, mistake: Mistake) -> Result<(), String> {
    let mut model = Model::new(seed, mistake);
    let mut reader = Reader::new(1000);
    reader.view.keeps_stale = mistake == Mistake::KeptStale;
    GROUPS.into_iter().for_each(|count| {
        reader.add_group(count);
    });
    let mut known = [true; SPACES];
    let mut follow_list = |model: &Model, reader: &mut Reader| {
        for (space, known) in known.iter_mut().enumerate() {
            if *known && !model.known[space] {
                reader.space_lost(space);
                if mistake == Mistake::AsksForGone {
                    reader.walk_over(space);
                }
            } else if !*known && model.known[space] {
                reader.walk_over(space);
            }
            *known = model.known[space];
        }
    };
    let mut out = VecDeque::new();
    let mut told = BTreeSet::new();
    let take = |delta: Delta, told: &mut BTreeSet<_>| {
        let entry = (delta.group, delta.place, delta.hash.0[0]);
        let changed = if delta.is_stored { told.insert(entry) } else { told.remove(&entry) };
        if changed { Ok(()) } else { Err(format!("seed {seed}: told twice: {delta:?}")) }
    };
    let steps = 200 + model.random.below(400);
    for _ in 0..steps {
        match model.random.below(100) {
            0..60 => model.act(),
            60 => reader.lost(),
            61 => reader.refresh(),
            62 => reader.suspend(),
            63..67 => {
                for delta in out.drain(..) {
                    take(delta, &mut told)?;
                }
            }
            _ => {
                let room = WAITING_MAX.saturating_sub(out.len());
                follow_list(&model, &mut reader);
                let next = reader.next(if mistake == Mistake::NoRoom { room.max(1) } else { room });
                model.answer(&mut reader, &next);
                out.extend(reader.view.out.drain(..));
            }
        }
        if out.len() > WAITING_MAX + ANSWER_DELTAS {
            return Err(format!("seed {seed}: {} changes wait for who does not take them", out.len()));
        }
    }
    // Everything was reported; nothing changes any more.
    while !model.reports.is_empty() {
        model.look();
    }
    follow_list(&model, &mut reader);
    for _ in 0..10_000 {
        for delta in out.drain(..) {
            take(delta, &mut told)?;
        }
        let next = reader.next(8);
        if matches!(next, Next::Events(_)) && reader.is_in_step() && reader.view.out.is_empty() {
            model.answer(&mut reader, &next);
            if reader.is_in_step()
                && reader.view.out.is_empty()
                && reader.next(8) == Next::Events(model.ring.head())
            {
                let expected = model.expected();
                let wrong: Vec<_> = expected.symmetric_difference(&told).collect();
                return if wrong.is_empty() { Ok(()) } else { Err(format!("seed {seed}: {wrong:?}")) };
            }
        } else {
            model.answer(&mut reader, &next);
        }
        out.extend(reader.view.out.drain(..));
    }
    Err(format!("seed {seed}: never in step"))
}

#[test]
fn a_reader_ends_with_exactly_what_the_depot_has() {
    for seed in 1..3000 {
        run(seed, Mistake::None).unwrap();
    }
}

#[test]
fn planted_mistakes_are_found() {
    use Mistake::{AsksForGone, HiddenGap, KeptStale, NoRoom, Reported};
    for mistake in [HiddenGap, KeptStale, Reported, NoRoom, AsksForGone] {
        let found = (1..3000).find(|&seed| run(seed, mistake).is_err());
        assert!(found.is_some(), "{mistake:?} was not found");
    }
}
