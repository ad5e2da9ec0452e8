//! Recovery: the depot is killed, but its pool and ledger are kept, and the next depot takes over the proven blocks.
//!
//! Clients of the killed depot continue to copy until they exit. While one of them is left, the next depot holds the
//! entire pool.

use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::machine::{Event, Handed, HandedState, Location, Owner, Whole};
use kvdepot_core::runs::{Run, Runs};
use kvdepot_core::{BlockKey, Priority};

use crate::client::Hold;
use crate::fail::Fail;
use crate::memory::pages;
use crate::mistakes::Mistake;
use crate::model::tag;
use crate::plan::Feature;
use crate::tier::SimTier;
use crate::work::Work;
use crate::world::World;

/// Content of a page that nobody dumped.
const STRAY: u64 = 0xBAD0_0000_0000_0000;

impl World {
    /// Kills the depot; the next one recovers its pool.
    pub(crate) fn crash_keeping_pool(&mut self) -> Result<(), Fail> {
        self.note(|| "CRASH, and the pool is kept".to_owned());
        self.forget_what_ran();
        for client in &mut self.clients {
            client.alive = false;
            client.claims.clear();
        }
        self.clients.retain(|client| !client.fills.is_empty() || !client.readings.is_empty());
        for tier in &mut self.tiers {
            tier.crash(&mut self.rng);
        }
        // Versions that a tier still has may come back.
        for (_, tags) in self.tiers.iter().flat_map(SimTier::kept) {
            tags.iter().for_each(|tag| self.model.come_back((tag >> 8) as usize));
        }
        let mut records = self.ledger.take();
        // A record that was being written is lost.
        records.retain(|_| !self.rng.chance(5));
        self.damage_pool(&records);
        self.replace_machine();
        self.begin_anew()?;
        records.retain(|block| self.is_current(&block.key) && self.is_proved(block));
        let clients: Vec<Owner> = self.clients.iter().map(|client| client.owner).collect();
        let is_held = !clients.is_empty() && self.mistake != Some(Mistake::RecoveredNotHeld);
        let holder = is_held.then(|| self.number());
        let handed = self.left(&records, is_held);
        self.hold = holder.map(|owner| Hold { owner, clients });
        let pool_bytes = self.plan.shape.pool_pages as u64 * BLOCK_ALIGN_BYTES;
        self.adopt(handed, holder.as_slice(), pool_bytes)?;
        self.reached.insert(if is_held { "recovered and held" } else { "recovered" });
        Ok(())
    }

    /// Forgets everything that the old depot had in flight, including commands at the tiers.
    fn forget_what_ran(&mut self) {
        for operation in std::mem::take(&mut self.running) {
            let (number, runs) = match &operation.work {
                Work::Read { runs, .. } | Work::Write { runs, .. } => (operation.number, runs.clone()),
                Work::Lease { .. } | Work::Remove { .. } | Work::Probe { .. } => {
                    (operation.number, Runs::new())
                }
            };
            match &operation.work {
                Work::Read { .. } => self.memory.end_write(&runs, 1 << 40 | number),
                _ => self.memory.end_read(&runs),
            }
            self.crash_running(operation);
        }
        self.take_memory_away();
        self.outbox.clear();
        self.forgotten.clear();
        self.jobs.clear();
        self.answers.clear();
        self.waiting.clear();
        self.presence.clear();
        self.opened.clear();
    }

    /// Damages the pool while no depot can see it, as a device or faulty memory would.
    fn damage_pool(&mut self, records: &[Whole]) {
        if records.is_empty() || !self.rng.chance(50) {
            return;
        }
        let chosen = pages(&records[self.rng.below(records.len())].runs);
        let page = chosen[self.rng.below(chosen.len())];
        if !self.memory.is_in_use(page) {
            self.memory.put(page, STRAY);
        }
    }

    fn is_current(&self, key: &BlockKey) -> bool {
        self.known_space(key).is_some()
    }

    /// Returns whether the bytes of a block have the recorded checksum.
    fn is_proved(&self, block: &Whole) -> bool {
        let version = (block.crc64 & 0xFFFF_FFFF) as usize;
        let tags = self.memory.tags(&block.runs);
        let is_right = tags.iter().enumerate().all(|(page, &found)| found == tag(version, page));
        is_right || self.mistake == Some(Mistake::UnprovenTaken)
    }

    /// Returns what the next depot takes over: proven blocks, and the rest of the pool if a client may still copy.
    fn left(&self, records: &[Whole], is_held: bool) -> Vec<Handed> {
        let holders = if is_held { vec![0] } else { Vec::new() };
        let mut handed: Vec<Handed> = records
            .iter()
            .map(|block| {
                let location = self.locate(&[block.key])[0];
                let saved = if let Location::Tier(tier) = location { 1 << tier } else { 0 };
                let state = HandedState::Block {
                    key: block.key,
                    saved,
                    to_write: !saved,
                    value: false,
                    crc64: Some(block.crc64),
                    priority: Priority::Normal,
                };
                Handed { runs: block.runs.clone(), state, holders: holders.clone() }
            })
            .collect();
        let taken: Vec<usize> = records.iter().flat_map(|block| pages(&block.runs)).collect();
        let gaps = (0..self.plan.shape.pool_pages_max).filter(|page| is_held && !taken.contains(page));
        handed.extend(gaps.map(|page| {
            let run = Run { offset: page as u64 * BLOCK_ALIGN_BYTES, len: BLOCK_ALIGN_BYTES };
            let runs = Runs::from_slice(&[run]);
            Handed { runs, state: HandedState::Busy, holders: holders.clone() }
        }));
        handed
    }

    /// A client of the earlier depot has exited. The last one ends the hold.
    pub(crate) fn let_go(&mut self, client: Owner) -> Result<(), Fail> {
        let Some(hold) = &mut self.hold else { return Ok(()) };
        hold.clients.retain(|&other| other != client);
        if !hold.clients.is_empty() {
            return Ok(());
        }
        let owner = hold.owner;
        self.hold = None;
        self.feed_and_answer(Event::OwnerEnded { owner })
    }

    /// Decides whether the kept pool survives this crash.
    pub(crate) fn keeps_pool(&mut self) -> bool {
        self.luck(Feature::KeptPools, 12)
    }
}
