//! The executor: commands leave in FIFO order; tiers complete them in any order, sometimes before the call returns.

use kvdepot_core::machine::{Command, Event, Fetched, Nanos};
use kvdepot_core::runs::Runs;
use kvdepot_core::{BlockKey, Error, ErrorKind};

use crate::fail::{Fail, Rule, fail};
use crate::memory::pages;
use crate::mistakes::Mistake;
use crate::model::name;
use crate::plan::Feature;
use crate::tier::Luck;
use crate::work::{Running, Work};
use crate::world::{WRITE_PATIENCE, World};

/// Returns the keys that a tier is told.
fn keys_of(command: &Command) -> &[BlockKey] {
    match command {
        Command::Read { key, .. }
        | Command::Lease { key, .. }
        | Command::Write { key, .. }
        | Command::Remove { key, .. } => std::slice::from_ref(key),
        Command::Probe { keys, .. } | Command::Touch { keys, .. } => keys,
        Command::EndLeases { .. } => &[],
    }
}

impl World {
    /// Passes the oldest command to its tier.
    pub(crate) fn execute_one(&mut self) -> Result<(), Fail> {
        let Some((number, command)) = self.outbox.pop_front() else { return Ok(()) };
        if let Some(key) = keys_of(&command).iter().find(|key| self.provisional_ids.contains(&key.namespace))
        {
            return fail(
                Rule::Stale,
                format!("a tier hears of {}, which is provisional: {command:?}", name(key)),
            );
        }
        let (tier, work) = match command {
            Command::Read { tier, slot, key, runs, deadline, .. } => {
                self.memory.begin_write(&runs, 1 << 40 | number)?;
                let begun = self.tiers[tier].content(&key);
                // The device has begun to fill the slot.
                if let (Some(tags), Some(&page)) = (&begun, pages(&runs).first()) {
                    self.memory.put(page, tags[0]);
                }
                (tier, Work::Read { slot, key, runs, deadline, begun })
            }
            Command::Lease { tier, slot, key, deadline } => {
                let begun = self.tiers[tier].content(&key);
                (tier, Work::Lease { slot, key, deadline, begun })
            }
            Command::EndLeases { places, .. } => return self.end_leases(&places),
            Command::Write { tier, slot, key, runs } => {
                self.memory.begin_read(&runs)?;
                let mut half = self.memory.tags(&runs);
                half.truncate(half.len().div_ceil(2));
                (tier, Work::Write { slot, key, runs, half })
            }
            Command::Remove { id, tier, key } if self.mistake == Some(Mistake::RemovalNotSent) => {
                return self.feed_and_answer(Event::Removed { id, tier, key, outcome: Ok(()) });
            }
            Command::Remove { id, tier, key } => {
                self.tiers[tier].begin_removal(key);
                (tier, Work::Remove { id, key })
            }
            Command::Probe { tier, ask, keys } => (tier, Work::Probe { ask, keys }),
            Command::Touch { .. } => return Ok(()),
        };
        let hangs = self.luck(Feature::Hangs, 6);
        let until = if hangs { self.at + self.rng.between(5, 120) } else { 0 };
        let running = Running { number, tier, work, until };
        if !hangs && self.luck(Feature::InlineEnds, 30) {
            return self.end(running);
        }
        self.running.push(running);
        Ok(())
    }

    /// Completes an operation that does not hang, chosen at random.
    pub(crate) fn end_one(&mut self) -> Result<(), Fail> {
        let (at, calm) = (self.at, self.calm);
        let may_end: Vec<usize> =
            (0..self.running.len()).filter(|&n| calm || self.running[n].until <= at).collect();
        if may_end.is_empty() {
            return Ok(());
        }
        let chosen = may_end[self.rng.below(may_end.len())];
        let running = self.running.remove(chosen);
        self.end(running)
    }

    fn end(&mut self, running: Running) -> Result<(), Fail> {
        let Running { number, tier, work, .. } = running;
        match work {
            Work::Read { slot, key, runs, deadline, begun } => {
                let outcome = self.end_read(number, tier, &key, &runs, deadline, begun);
                if self.lender().is_some_and(|(lender, _)| lender == tier) {
                    self.placed.copied.insert(key);
                }
                if self.mistake == Some(Mistake::MissSwallowed) && matches!(outcome, Ok(Fetched::Miss)) {
                    return Ok(());
                }
                if matches!(outcome, Ok(Fetched::Whole)) {
                    self.placed.fetched(key, tier);
                }
                self.feed_and_answer(Event::ReadEnded { tier, slot, outcome })
            }
            Work::Lease { slot, key, deadline, begun } => self.end_lease(tier, slot, key, deadline, begun),
            Work::Write { slot, key, runs, half } => {
                let mut tags = self.memory.tags(&runs);
                tags[..half.len()].copy_from_slice(&half);
                self.memory.end_read(&runs);
                let luck = match () {
                    () if self.luck(Feature::WriteErrors, 6) => Luck::Fails,
                    () if self.luck(Feature::WriteErrors, 3) => Luck::Busy,
                    () if self.luck(Feature::StoredErrors, 4) => Luck::FailsStored,
                    () => Luck::Good,
                };
                let mut evicted = Vec::new();
                let before = self.tiers[tier].stored;
                let outcome = self.tiers[tier].write(&key, tags, luck, &mut self.rng, &mut evicted);
                self.given.ended(tier, slot, self.tiers[tier].stored > before);
                if !evicted.is_empty() {
                    self.forgotten.push((tier, evicted, false));
                }
                self.feed_and_answer(Event::WriteEnded { tier, slot, outcome })
            }
            Work::Remove { id, key } => {
                let luck = match () {
                    () if self.luck(Feature::RemovalErrors, 12) => Luck::Fails,
                    () if self.luck(Feature::RemovalErrors, 4) => Luck::FailsStored,
                    () => Luck::Good,
                };
                let outcome = self.tiers[tier].end_removal(&key, luck);
                self.removals_ended.push((id, tier, key));
                self.feed_and_answer(Event::Removed { id, tier, key, outcome })
            }
            Work::Probe { ask, keys } => {
                let outcome = if self.luck(Feature::ProbeErrors, 10) {
                    Err(Error::new(ErrorKind::Timeout, "a probe took too long"))
                } else if !self.answers_reads(tier) {
                    Ok(0)
                } else {
                    Ok(self.tiers[tier].probe(&keys))
                };
                self.feed_and_answer(Event::Probed { ask, outcome })
            }
        }
    }

    fn end_read(
        &mut self,
        number: u64,
        tier: usize,
        key: &BlockKey,
        runs: &Runs,
        deadline: Nanos,
        begun: Option<Vec<u64>>,
    ) -> kvdepot_core::Result<Fetched> {
        let (outcome, tags) = self.tier_reads(tier, key, deadline, begun);
        for (page, tag) in pages(runs).into_iter().zip(tags.unwrap_or_default()) {
            self.memory.put(page, tag);
        }
        self.memory.end_write(runs, 1 << 40 | number);
        if outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Corrupt) {
            self.note_damaged(tier, key);
        }
        outcome
    }

    /// Returns how a tier ends the read of a block, or its lease: with the block's content, or a failure.
    pub(crate) fn tier_reads(
        &mut self,
        tier: usize,
        key: &BlockKey,
        deadline: Nanos,
        begun: Option<Vec<u64>>,
    ) -> (kvdepot_core::Result<Fetched>, Option<Vec<u64>>) {
        if !self.answers_reads(tier) {
            (Err(Error::new(ErrorKind::Unavailable, "a tier is off")), None)
        } else if self.now > deadline && self.rng.chance(50) {
            (Err(Error::new(ErrorKind::Timeout, "a read took too long")), None)
        } else if self.luck(Feature::ReadErrors, 8) || self.chosen_read_fails(key) {
            (Err(Error::new(ErrorKind::Io, "a read failed")), None)
        } else {
            let read = self.tiers[tier].read(key, begun, &mut self.rng);
            if read.0.is_err() {
                self.forgotten.push((tier, vec![*key], true));
            }
            read
        }
    }

    /// Ends an operation by the depot's death: a write has happened completely or not at all.
    pub(crate) fn crash_running(&mut self, running: Running) {
        if let Work::Write { key, runs, half, .. } = running.work
            && self.rng.chance(50)
        {
            let mut tags = self.memory.tags(&runs);
            tags[..half.len()].copy_from_slice(&half);
            let _ = self.tiers[running.tier].write(&key, tags, Luck::Good, &mut self.rng, &mut Vec::new());
        }
    }

    /// Reports blocks to the machine that a tier has forgotten earlier.
    pub(crate) fn tell_forgotten(&mut self) -> Result<(), Fail> {
        if self.forgotten.is_empty() {
            return Ok(());
        }
        let chosen = self.rng.below(self.forgotten.len());
        let (tier, keys, lost) = self.forgotten.remove(chosen);
        if lost && self.lender().is_some_and(|(lender, _)| lender == tier) {
            for key in &keys {
                self.model.damaged(*key, self.at);
                self.note_damaged(tier, key);
            }
        }
        if !lost {
            self.placed.cooled(&keys, tier);
        }
        self.feed_and_answer(Event::TierForgot { tier, keys, lost })
    }

    /// Reports blocks to the machine that a tier will evict soon, as it says: it may do so earlier, later or never.
    pub(crate) fn tell_cooling(&mut self) -> Result<(), Fail> {
        if self.calm || !self.cooling.chance(25) {
            return Ok(());
        }
        let tier = self.cooling.below(self.tiers.len());
        let Some(cooled) = self.tiers.get(tier) else { return Ok(()) };
        let all: Vec<BlockKey> = cooled.kept().map(|(key, _)| *key).collect();
        let first = self.cooling.below(all.len());
        let keys: Vec<BlockKey> = all.into_iter().skip(first).take(self.cooling.between(1, 4)).collect();
        if keys.is_empty() {
            return Ok(());
        }
        self.placed.cooled(&keys, tier);
        self.feed_and_answer(Event::TierCooling { tier, keys })
    }

    /// Returns whether a tier is to read a block into the pool.
    pub(crate) fn is_being_read(&self, key: &BlockKey) -> bool {
        let running = self.running.iter().filter_map(|running| match &running.work {
            Work::Read { key, .. } | Work::Lease { key, .. } => Some(key),
            _ => None,
        });
        let queued = self.outbox.iter().filter_map(|(_, command)| match command {
            Command::Read { key, .. } | Command::Lease { key, .. } => Some(key),
            _ => None,
        });
        let reads: Vec<&BlockKey> = running.chain(queued).collect();
        // Reads beyond what a tier does at a time are in the machine.
        reads.contains(&key) || self.machine.gauges().reads_queued > reads.len()
    }

    /// Returns the removals that tiers have not completed.
    pub(crate) fn removals_under_way(&self) -> impl Iterator<Item = (usize, BlockKey)> {
        let running = self.running.iter().filter_map(|running| match running.work {
            Work::Remove { key, .. } => Some((running.tier, key)),
            _ => None,
        });
        let queued = self.outbox.iter().filter_map(|(_, command)| match command {
            Command::Remove { tier, key, .. } => Some((*tier, *key)),
            _ => None,
        });
        running.chain(queued)
    }

    /// Returns whether a write may count as hung by now.
    pub(crate) fn has_hung(&self, write: u64) -> bool {
        self.has(Feature::Hangs)
            && self.write_times.get(&write).is_some_and(|&begun| self.now >= begun + WRITE_PATIENCE)
    }

    /// Returns the numbers of writes that tiers have not completed and that were ordered already.
    pub(crate) fn writes_ordered(&self) -> impl Iterator<Item = (u64, BlockKey)> {
        let running = self.running.iter().filter_map(|running| match running.work {
            Work::Write { key, .. } => Some((running.number, key)),
            _ => None,
        });
        let queued = self.outbox.iter().filter_map(|(number, command)| match command {
            Command::Write { key, .. } => Some((*number, *key)),
            _ => None,
        });
        running.chain(queued)
    }
}
