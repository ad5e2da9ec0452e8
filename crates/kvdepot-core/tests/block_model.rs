//! Compares the block's state machine with plain facts: who has accessed the slot, and who still may.

use std::collections::BTreeSet;

use kvdepot_core::{Block, ErrorKind, Phase};
use proptest::prelude::*;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    ShardFilled(usize),
    FillEndedOk,
    FillFailed,
    Lease,
    Unlease,
    WriteBegun,
    WriteEnded { saved: bool },
    SealClean,
    Doom,
    Abandon,
    QuarantineEnded,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (0usize..4).prop_map(Event::ShardFilled),
        1 => Just(Event::FillEndedOk),
        1 => Just(Event::FillFailed),
        3 => Just(Event::Lease),
        3 => Just(Event::Unlease),
        3 => Just(Event::WriteBegun),
        3 => any::<bool>().prop_map(|saved| Event::WriteEnded { saved }),
        1 => Just(Event::SealClean),
        1 => Just(Event::Doom),
        1 => Just(Event::Abandon),
        2 => Just(Event::QuarantineEnded),
    ]
}

/// History of the block, without states.
#[derive(Clone, Debug, Default)]
struct Facts {
    shards: usize,
    filled: BTreeSet<usize>,
    /// Bytes may still arrive in the slot.
    filling: bool,
    whole: bool,
    abandoned: bool,
    doomed: bool,
    leases: u32,
    writing: bool,
    wanted_by_a_tier: bool,
    saved: bool,
}

impl Facts {
    fn readable(&self) -> bool {
        self.whole && !self.doomed
    }

    /// Returns whether a depot without bugs can raise the event now; shards come from clients, so they may come at any
    /// time.
    fn allows(&self, event: Event) -> bool {
        match event {
            Event::ShardFilled(_) | Event::Doom | Event::Abandon => true,
            Event::FillEndedOk | Event::FillFailed => self.fetching(),
            Event::Lease => self.readable() || (self.fetching() && !self.doomed),
            Event::Unlease => self.leases > 0,
            Event::WriteBegun => self.readable() && !self.writing,
            Event::WriteEnded { .. } => self.writing,
            Event::SealClean => self.whole && !self.writing,
            Event::QuarantineEnded => self.abandoned,
        }
    }

    fn fetching(&self) -> bool {
        self.shards == 0 && self.filling && !self.abandoned
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::ShardFilled(shard) if self.filling && !self.abandoned && shard < self.shards => {
                self.filled.insert(shard);
                if self.filled.len() == self.shards {
                    (self.whole, self.filling) = (true, false);
                    self.wanted_by_a_tier = !self.doomed;
                }
            }
            Event::ShardFilled(_) => {}
            Event::FillEndedOk => (self.whole, self.saved, self.filling) = (true, true, false),
            Event::FillFailed => (self.abandoned, self.filling) = (true, false),
            Event::Lease => self.leases += 1,
            Event::Unlease => self.leases -= 1,
            Event::WriteBegun => self.writing = true,
            Event::WriteEnded { saved } => {
                (self.writing, self.wanted_by_a_tier) = (false, false);
                self.saved |= saved;
            }
            Event::SealClean => self.wanted_by_a_tier = false,
            Event::Doom => (self.doomed, self.wanted_by_a_tier) = (true, false),
            Event::Abandon => self.abandoned |= self.filling,
            Event::QuarantineEnded => self.filling = false,
        }
    }
}

fn send(block: &mut Block, facts: &Facts, event: Event) -> Result<(), TestCaseError> {
    match event {
        Event::ShardFilled(shard) => {
            let mut after = facts.clone();
            after.apply(event);
            match block.shard_filled(shard) {
                Ok(sealed) => prop_assert_eq!(sealed, after.whole && !facts.whole),
                Err(error) => {
                    prop_assert_eq!(error.kind(), ErrorKind::Protocol);
                    prop_assert!(shard >= facts.shards || facts.abandoned);
                }
            }
        }
        Event::FillEndedOk => block.fill_ended_ok(),
        Event::FillFailed => block.fill_failed(),
        Event::Lease => block.lease(),
        Event::Unlease => block.unlease(),
        Event::WriteBegun => block.write_begun(),
        Event::WriteEnded { saved } => block.write_ended(saved),
        Event::SealClean => block.seal_clean(),
        Event::Doom => block.doom(),
        Event::Abandon => block.abandon(),
        Event::QuarantineEnded => block.quarantine_ended(),
    }
    Ok(())
}

fn agree(block: &Block, facts: &Facts) -> Result<(), TestCaseError> {
    let touched = facts.filling || facts.leases > 0 || facts.writing;
    prop_assert_eq!(block.is_readable(), facts.readable());
    prop_assert_eq!(block.is_dirty(), facts.wanted_by_a_tier);
    prop_assert_eq!(block.is_evictable(), facts.readable() && !touched && !facts.wanted_by_a_tier);
    prop_assert_eq!(block.is_freeable(), !touched && (facts.abandoned || (facts.doomed && facts.whole)));
    prop_assert_eq!(
        (block.leases(), block.is_writing(), block.saved()),
        (facts.leases, facts.writing, facts.saved)
    );
    let phase = match (facts.whole, facts.abandoned, facts.shards) {
        (true, _, _) => Phase::Sealed,
        (false, true, _) => Phase::Quarantined,
        (false, false, 0) => Phase::Fetching,
        (false, false, _) => Phase::Filling,
    };
    prop_assert_eq!(block.phase(), phase);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn states_follow_from_facts(shards in 0usize..4, events in prop::collection::vec(event(), 0..60)) {
        let mut block = if shards == 0 { Block::fetching() } else { Block::dumping(shards) };
        let mut facts = Facts { shards, filling: true, ..Facts::default() };
        agree(&block, &facts)?;
        for event in events {
            if facts.allows(event) {
                send(&mut block, &facts, event)?;
                facts.apply(event);
                agree(&block, &facts)?;
            }
        }
        // From any state, the block can be freed when all users of the slot have ended (P4).
        let ends = [Event::Abandon, Event::Doom, Event::QuarantineEnded, Event::WriteEnded { saved: false }];
        for event in ends.into_iter().chain(std::iter::repeat_n(Event::Unlease, 64)) {
            if facts.allows(event) {
                send(&mut block, &facts, event)?;
                facts.apply(event);
                agree(&block, &facts)?;
            }
        }
        prop_assert!(block.is_freeable());
    }
}

#[test]
fn a_block_of_many_shards_seals_with_the_last() {
    let mut block = Block::dumping(4096);
    for shard in (1..4096).rev() {
        assert!(!block.shard_filled(shard).unwrap());
        assert!(!block.shard_filled(shard).unwrap());
    }
    assert!(!block.is_readable());
    assert!(block.shard_filled(0).unwrap() && block.is_readable() && block.is_dirty());
}

#[test]
fn a_write_that_fails_makes_room_all_the_same() {
    let mut block = Block::dumping(1);
    block.shard_filled(0).unwrap();
    block.write_begun();
    block.write_ended(false);
    assert!(block.is_evictable() && !block.saved());
}
