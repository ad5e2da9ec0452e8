//! Properties of the parts that do no I/O.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::collections::{BTreeMap, HashMap};

use hashbrown::HashSet;
use kvdepot_core::{BlockHash, BlockKey, NamespaceId};
use proptest::prelude::*;

use super::layout::{Entry, EpochRecord, Geometry, HEADER_BYTES, Header};
use super::plan::{CUT_BYTES, Limits, Span, plan};
use super::recover::recover;
use super::slots::Slots;
use super::space::Space;

const UNITS: u32 = 64;

fn key(n: u64) -> BlockKey {
    let mut hash = [0; 16];
    hash[..8].copy_from_slice(&n.to_le_bytes());
    BlockKey { namespace: NamespaceId([7; 16]), hash: BlockHash(hash) }
}

fn geometry() -> Geometry {
    Geometry::of(1 << 20, [3; 16]).unwrap()
}

proptest! {
    /// Every byte is copied exactly once, by waves and regions within their bounds, in contiguous runs.
    #[test]
    fn a_plan_copies_every_byte_once(
        blocks in prop::collection::vec((0..40u64, 1..400_000usize), 0..30),
        regions in 1..6usize,
        wave_kib in 1..1500usize,
    ) {
        let (mut at, mut spans) = (0, Vec::new());
        for (item, (gap, bytes)) in blocks.iter().enumerate() {
            at += gap * 4096 / 20 * 20;
            spans.push(Span { item, at, from: 0, bytes: *bytes });
            at += *bytes as u64;
        }
        let whole = spans.clone();
        spans.reverse();
        let wave_bytes = wave_kib << 10;
        let waves = plan(spans, Limits { regions, wave_bytes });
        let mut copied: HashMap<usize, Vec<Span>> = HashMap::new();
        for wave in &waves {
            prop_assert!(!wave.is_empty() && wave.len() <= regions);
            let bytes = |region: &Vec<super::plan::Run>| -> usize {
                region.iter().flat_map(|run| &run.spans).map(|span| span.bytes).sum()
            };
            let sum: usize = wave.iter().map(bytes).sum();
            prop_assert!(sum <= wave_bytes.max(CUT_BYTES), "{} of {}", sum, wave_bytes);
            let share = sum.div_ceil(regions).next_multiple_of(CUT_BYTES);
            for (number, region) in wave.iter().enumerate() {
                prop_assert!(!region.is_empty());
                // A region ends early if its next cut would exceed its share, so the last one may have more.
                prop_assert!(number + 1 == regions || bytes(region) <= share, "{} of {}", bytes(region), share);
                for pair in region.windows(2) {
                    let last = pair[0].spans.last().unwrap();
                    prop_assert!(last.at + (last.bytes as u64) < pair[1].spans[0].at, "runs that meet are one");
                }
                for run in region {
                    for pair in run.spans.windows(2) {
                        prop_assert_eq!(pair[0].at + pair[0].bytes as u64, pair[1].at);
                    }
                    for span in &run.spans {
                        copied.entry(span.item).or_default().push(*span);
                    }
                }
            }
        }
        for block in &whole {
            let mut parts = copied.remove(&block.item).unwrap_or_default();
            parts.sort_by_key(|part| part.from);
            let mut from = 0;
            for part in &parts {
                prop_assert_eq!((part.from, part.at), (from, block.at + from as u64));
                prop_assert!(part.bytes > 0);
                from += part.bytes;
            }
            prop_assert_eq!(from, block.bytes);
        }
        prop_assert!(copied.is_empty());
    }

    /// Nothing is given out twice, and what was given back is merged again.
    #[test]
    fn space_is_given_once(steps in prop::collection::vec((any::<bool>(), 1..20u32), 1..80)) {
        let mut space = Space::new(UNITS);
        let mut taken: BTreeMap<u32, u32> = BTreeMap::new();
        for (take, length) in steps {
            if take {
                if let Some(start) = space.take(length) {
                    let before = taken.range(..=start).next_back();
                    prop_assert!(before.is_none_or(|(at, units)| at + units <= start));
                    let after = taken.range(start..).next();
                    prop_assert!(after.is_none_or(|(at, _)| start + length <= *at));
                    prop_assert!(start + length <= UNITS);
                    taken.insert(start, length);
                } else {
                    // No hole of this length is between what was taken.
                    let mut end = 0;
                    for (at, units) in taken.iter().map(|(at, units)| (*at, *units)).chain([(UNITS, 0)]) {
                        prop_assert!(at - end < length);
                        end = at + units;
                    }
                }
            } else if let Some((start, units)) = taken.pop_first() {
                space.give(start, units);
            }
            prop_assert_eq!(space.units(), UNITS - taken.values().sum::<u32>());
        }
        taken.iter().for_each(|(start, units)| space.give(*start, *units));
        prop_assert_eq!(space.take(UNITS), Some(0));
    }

    /// P1, P4, P5: a place has one owner; it has none while it is read or while a header may name it.
    #[test]
    fn a_place_has_one_owner(steps in prop::collection::vec((0..8u8, 0..12u64, 1..14u32), 1..120)) {
        let mut slots = Slots::new(UNITS);
        // Places by unit: owners that write, that are found, and that are still read although they are gone.
        let mut writing: BTreeMap<u32, (u64, u32)> = BTreeMap::new();
        let mut found: BTreeMap<u32, (u64, u32)> = BTreeMap::new();
        let mut read: Vec<(u32, u64, u32)> = Vec::new();
        let mut leased: Vec<(u32, u64, u32)> = Vec::new();
        let mut uncleared: Vec<u32> = Vec::new();
        for (step, n, units) in steps {
            match step {
                0 | 1 => {
                    let is_under_way = writing.values().any(|(other, _)| *other == n);
                    if slots.contains(&key(n)) || is_under_way {
                        continue;
                    }
                    if let Some(reserved) = slots.reserve(key(n), 0, units, units * 4096) {
                        for (unit, victim) in &reserved.victims {
                            let (other, _) = found.remove(unit).unwrap();
                            prop_assert_eq!(key(other), *victim);
                            let mut held = read.iter().chain(&leased);
                            prop_assert!(!held.any(|(at, ..)| at == unit), "it is read");
                        }
                        slots.settle(reserved.unit, units);
                        let (from, to) = (reserved.unit, reserved.unit + units);
                        prop_assert!(to <= UNITS);
                        let others = writing.iter().chain(&found).map(|(at, (_, units))| (*at, *units));
                        let held = read.iter().chain(&leased).map(|(at, _, units)| (*at, *units));
                        for (at, units) in others.chain(held) {
                            prop_assert!(at + units <= from || to <= at, "{}..{} and {}+{}", from, to, at, units);
                        }
                        prop_assert!(uncleared.iter().all(|at| *at < from || to <= *at), "a header names it");
                        writing.insert(reserved.unit, (n, units));
                    }
                }
                2 => {
                    if let Some((unit, (n, units))) = writing.pop_first() {
                        slots.begin_publish(unit, 1).unwrap();
                        slots.publish(unit);
                        found.insert(unit, (n, units));
                    }
                }
                3 => {
                    if let Some((unit, _)) = writing.pop_last() {
                        slots.leave(unit);
                    }
                }
                4 => {
                    let pinned = slots.pin(&key(n), true);
                    let held = found.iter().find(|(_, (other, _))| *other == n);
                    prop_assert_eq!(pinned.map(|found| found.unit), held.map(|(unit, _)| *unit));
                    read.extend(held.map(|(unit, (n, units))| (*unit, *n, *units)));
                }
                5 => {
                    if let Some((unit, ..)) = read.pop() {
                        slots.unpin(unit);
                    }
                }
                6 => match read.pop() {
                    Some(block) if n % 2 == 0 => {
                        slots.lease(block.0);
                        leased.push(block);
                    }
                    other => {
                        read.extend(other);
                        leased.pop().into_iter().for_each(|(unit, ..)| slots.end_lease(unit));
                    }
                },
                _ => {
                    if let Some(unit) = slots.take_out(&key(n)) {
                        found.remove(&unit).unwrap();
                        uncleared.push(unit);
                    } else if let Some(unit) = uncleared.pop() {
                        slots.cleared(unit);
                    }
                }
            }
            prop_assert_eq!(slots.len(), found.len());
        }
        read.iter().for_each(|(unit, ..)| slots.unpin(*unit));
        leased.iter().for_each(|(unit, ..)| slots.end_lease(*unit));
        uncleared.iter().for_each(|unit| slots.cleared(*unit));
        writing.keys().for_each(|unit| slots.leave(*unit));
        for (unit, (n, _)) in found {
            prop_assert_eq!(slots.take_out(&key(n)), Some(unit));
            slots.cleared(unit);
        }
        prop_assert_eq!(slots.units_used(), 0);
    }

    /// Any bytes: no panic, and no line counts as intact except the one that was written.
    #[test]
    fn lines_are_whole_or_bad(
        n in any::<u64>(), unit in 0..200u32, bytes in 1..200_000u32, flip in 0..HEADER_BYTES * 8, noise in any::<[u8; 32]>(),
    ) {
        let geometry = geometry();
        let header = Header { key: key(n), generation: n, checksum: !n, bytes, epoch: unit };
        let line = header.encode(unit, &geometry);
        let fits = geometry.units_of(u64::from(bytes)) <= geometry.units.saturating_sub(unit);
        let read = Header::parse(&line, unit, &geometry);
        prop_assert_eq!(read, if fits { Entry::Good(header) } else { Entry::Bad });
        let mut damaged = line;
        damaged[flip / 8] ^= 1 << (flip % 8);
        prop_assert_eq!(Header::parse(&damaged, unit, &geometry), Entry::Bad);
        prop_assert_eq!(Header::parse(&line, unit + 1, &geometry), Entry::Bad, "a line of another place");
        let other = Geometry { id: [4; 16], ..geometry };
        prop_assert_eq!(Header::parse(&line, unit, &other), Entry::Bad, "a line of another medium");
        let mut any = [0; HEADER_BYTES];
        any[..32].copy_from_slice(&noise);
        prop_assert!(matches!(Header::parse(&any, unit, &geometry), Entry::Bad | Entry::Empty));
        prop_assert!(matches!(EpochRecord::parse(&any, &geometry), Entry::Bad | Entry::Empty));
        let record = EpochRecord { root: NamespaceId(noise[..16].try_into().unwrap()), epoch: unit, id: key(n).namespace };
        let mut line = record.encode(&geometry);
        prop_assert_eq!(EpochRecord::parse(&line, &geometry), Entry::Good(record));
        line[flip / 8] ^= 1 << (flip % 8);
        prop_assert_eq!(EpochRecord::parse(&line, &geometry), Entry::Bad);
    }

    /// What is taken in does not overlap, has each key once and its newest version, and everything else is cleared.
    #[test]
    fn recovery_takes_each_place_once(
        lines in prop::collection::vec((0..UNITS, 0..10u64, 1..30_000u32, any::<bool>()), 0..40),
    ) {
        let geometry = Geometry { units: UNITS, ..geometry() };
        let current = HashSet::from([key(0).namespace]);
        let mut entries: BTreeMap<u32, Entry<Header>> = BTreeMap::new();
        for (generation, (unit, n, bytes, is_current)) in (1..).zip(lines) {
            let mut header = Header { key: key(n), generation, checksum: 0, bytes, epoch: 0 };
            if !is_current {
                header.key.namespace = NamespaceId([8; 16]);
            }
            if geometry.units_of(u64::from(bytes)) <= UNITS - unit {
                entries.insert(unit, Entry::Good(header));
            }
        }
        let mut recovered = recover(entries.clone(), &current, &geometry, UNITS);
        prop_assert_eq!(recovered.slots.len() + recovered.clear.len(), entries.len());
        let mut end = 0;
        for (unit, entry) in &entries {
            let Entry::Good(header) = entry else { continue };
            if recovered.clear.contains(unit) {
                continue;
            }
            prop_assert!(*unit >= end, "places that overlap");
            end = unit + geometry.units_of(u64::from(header.bytes));
            prop_assert_eq!(recovered.slots.pin(&header.key, true).unwrap().header, *header);
        }
        // The newest of all is always taken in, if it is of a current epoch.
        let newest = entries.iter().filter_map(|(unit, entry)| match entry {
            Entry::Good(header) if current.contains(&header.key.namespace) => Some((header.generation, *unit)),
            _ => None,
        });
        if let Some((_, unit)) = newest.max() {
            prop_assert!(!recovered.clear.contains(&unit));
        }
    }
}

#[test]
fn the_coldest_makes_room_with_its_neighbours() {
    let mut slots = Slots::new(12);
    for n in 0..4 {
        let place = slots.reserve(key(n), 0, 3, 3 * 4096).unwrap();
        slots.settle(place.unit, 3);
        slots.begin_publish(place.unit, 0);
        slots.publish(place.unit);
    }
    slots.touch(&key(0));
    // The coldest is 1; its right neighbour goes with it, and the excess is free again.
    let place = slots.reserve(key(9), 0, 5, 5 * 4096).unwrap();
    assert_eq!(place.victims.iter().map(|(_, key)| *key).collect::<Vec<_>>(), [key(1), key(2)]);
    slots.settle(place.unit, 5);
    assert_eq!(slots.units_used(), 11);
    assert!(slots.reserve(key(10), 0, 13, 1).is_none(), "larger than all");
    // What is being read does not go.
    slots.pin(&key(3), true).unwrap();
    slots.pin(&key(0), true).unwrap();
    assert!(slots.reserve(key(10), 0, 2, 1).is_none());
}

/// However many leased blocks are colder than the others, a new block finds room.
#[test]
fn leased_blocks_do_not_hide_what_can_go() {
    let mut slots = Slots::new(1000);
    let fill = |slots: &mut Slots, n: u64| {
        let place = slots.reserve(key(n), 0, 1, 4096).unwrap();
        slots.begin_publish(place.unit, 0);
        slots.publish(place.unit);
        place
    };
    (0..1000).for_each(|n| drop(fill(&mut slots, n)));
    let leased: Vec<u32> = (0..500).map(|n| slots.pin(&key(n), true).unwrap().unit).collect();
    leased.iter().for_each(|unit| slots.lease(*unit));
    for n in 1000..3000 {
        assert!(fill(&mut slots, n).victims.iter().all(|(unit, _)| !leased.contains(unit)));
    }
    assert!((0..500).all(|n| slots.contains(&key(n))), "leased blocks stay");
    // Two leases, of which one ends.
    slots.pin(&key(0), true).unwrap();
    slots.lease(leased[0]);
    leased.iter().for_each(|unit| slots.end_lease(*unit));
    (3000..6000).for_each(|n| drop(fill(&mut slots, n)));
    assert!(slots.contains(&key(0)) && !slots.contains(&key(1)));
    slots.end_lease(leased[0]);
    slots.end_lease(leased[0]);
    (6000..9000).for_each(|n| drop(fill(&mut slots, n)));
    assert!(!slots.contains(&key(0)));
}

#[test]
fn a_place_names_the_unit_that_begins_there() {
    let geometry = geometry();
    for unit in [0, 1, geometry.units - 1] {
        assert_eq!(geometry.unit_at(geometry.payload_at(unit)), Some(unit));
        assert_eq!(geometry.unit_at(geometry.payload_at(unit) + 1), None);
    }
    for place in [0, geometry.data_at() - geometry.unit_bytes, geometry.payload_at(geometry.units), u64::MAX]
    {
        assert_eq!(geometry.unit_at(place), None);
    }
}

#[test]
fn geometry_fits_every_size() {
    for bytes in [1 << 20, 5 << 20, (1 << 30) + 4096, 3 << 40, 1 << 50] {
        let geometry = Geometry::of(bytes, [0; 16]).unwrap();
        assert!(geometry.payload_at(geometry.units) <= bytes);
        assert!(u64::from(geometry.units) * geometry.unit_bytes * 10 >= bytes * 9, "{geometry:?}");
        assert_eq!(Geometry::parse(&geometry.encode()).unwrap(), geometry);
    }
    assert!(Geometry::of(4096, [0; 16]).is_err());
    // A forged superblock may contain anything.
    for bytes in [u64::MAX, u64::MAX - 4096, u64::MAX / 2 + 1, (1 << 63) - 1] {
        let _ = Geometry::of(bytes, [0; 16]);
    }
}

/// Bounds the time for which the lock is held while space is made.
#[test]
fn room_is_looked_for_in_few_steps() {
    let fill = |slots: &mut Slots, count: u64| {
        for n in 0..count {
            let place = slots.reserve(key(n), 0, 1, 4096).unwrap();
            slots.begin_publish(place.unit, 0);
            slots.publish(place.unit);
        }
    };
    // Every 150th block is being read: around each candidate there is never enough space, which only shows at the end.
    let mut slots = Slots::new(30_000);
    fill(&mut slots, 30_000);
    (0..30_000).step_by(150).for_each(|n| assert!(slots.pin(&key(n), true).is_some()));
    assert!(slots.reserve(key(90_000), 0, 200, 1).is_none());
    assert!(slots.steps() <= 2000, "{} steps under one hold of the lock", slots.steps());
    // A large block among small ones needs a step for each of its units.
    let mut slots = Slots::new(30_000);
    fill(&mut slots, 30_000);
    let place = slots.reserve(key(90_000), 0, 20_000, 1).unwrap();
    assert_eq!(place.victims.len(), 20_000);
}
