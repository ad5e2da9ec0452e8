//! Requests that no correct client sends: they are refused, and do not affect others.

use kvdepot_core::machine::{ClaimGroup, Event, RemovalId, Request, Reserve, ShardSet, TierSet};
use kvdepot_core::{BlockKey, GroupShape, LeaseId};

use crate::asked::Asked;
use crate::fail::{Fail, Rule, fail};
use crate::specs;
use crate::world::World;

/// A number of no object.
const NOTHING: u64 = 999_999;

impl World {
    pub(crate) fn nonsense(&mut self) -> Result<(), Fail> {
        let client = self.someone();
        let lease = self.lease_of_another(client);
        let (namespace, hashes) = (NOTHING, vec![specs::hash(0, 0)]);
        let claim = NOTHING;
        let request = match self.rng.below(18) {
            0 => Request::Release { leases: vec![lease] },
            1 => Request::Commit { leases: vec![lease], shards: ShardSet::All, crc64: None },
            2 => Request::SetChecksum { lease, crc64: 1 },
            3 => Request::Publish { lease, others: Vec::new() },
            4 => Request::ClaimPoll { claim, settle: true },
            5 => Request::ClaimRelease { claim },
            6 => Request::Reserve { namespace, id: None, hashes, how: Reserve::Block, runs_max: 9 },
            7 => Request::Load {
                namespace,
                id: None,
                hashes,
                fetch_deadline: 0,
                last: true,
                runs_max: 9,
                in_place: false,
            },
            8 => Request::Prefetch { namespace, blocks: Vec::new(), deadline: 0 },
            9 => Request::EnterEpoch { namespace, epoch: 7 },
            10 => Request::Keys { namespaces: vec![namespace], from: usize::MAX },
            11 => {
                let Some(fill) = self.clients[client].fills.first() else { return Ok(()) };
                let shards = ShardSet::Some(vec![NOTHING as u32]);
                Request::Commit { leases: vec![fill.lease], shards, crc64: None }
            }
            12..17 => return self.end_a_removal_again(),
            _ => return self.odd(client),
        };
        self.request_of(Some(client), request, Asked::Refusal)?;
        Ok(())
    }

    /// Makes a tier report a removal's end again. The end of the next removal of that block is then not reported.
    fn end_a_removal_again(&mut self) -> Result<(), Fail> {
        let under_way: Vec<(usize, BlockKey)> = self.removals_under_way().collect();
        let ended = self.removals_ended.iter().filter(|(_, tier, key)| under_way.contains(&(*tier, *key)));
        let ended: Vec<(RemovalId, usize, BlockKey)> = ended.copied().collect();
        if ended.is_empty() {
            return Ok(());
        }
        let (id, tier, key) = ended[self.rng.below(ended.len())];
        self.reached.insert("told twice");
        self.feed_and_answer(Event::Removed { id, tier, key, outcome: Ok(()) })
    }

    /// Returns a lease that another client holds, or none.
    fn lease_of_another(&self, client: usize) -> LeaseId {
        let others = self.clients.iter().enumerate().filter(|&(number, _)| number != client);
        let mut leases = others.flat_map(|(_, other)| {
            other
                .fills
                .iter()
                .map(|fill| fill.lease)
                .chain(other.readings.iter().map(|reading| reading.lease))
        });
        leases.next().unwrap_or(LeaseId(u64::MAX))
    }

    /// Sends odd requests that have an answer.
    fn odd(&mut self, client: usize) -> Result<(), Fail> {
        let handle = self.spaces[0].handle;
        let hashes = vec![specs::hash(0, 0); self.rng.below(3)];
        let shape = GroupShape {
            window_blocks: [0, 1, usize::MAX][self.rng.below(3)],
            units_per_block: [0, 1, 1 << 40, usize::MAX][self.rng.below(4)],
        };
        let group = ClaimGroup { namespaces: vec![handle; self.rng.below(3)], shape };
        let request = Request::ClaimOpen {
            groups: vec![group; self.rng.below(3)],
            hashes,
            skip: [0, 1, usize::MAX][self.rng.below(3)],
            limit: [0, 2, usize::MAX][self.rng.below(3)],
            tiers: TierSet::ALL,
            deadline: 0,
            patience: 0,
            label: None,
        };
        let token = self.request_of(Some(client), request, Asked::Odd)?;
        if self.waiting.contains_key(&token) {
            self.expire(token)?;
        }
        // It ends immediately, because nobody polls it.
        self.feed_and_answer(Event::Tick)?;
        self.feed_and_answer(Event::Expire { token: u64::MAX })?;
        let keys = vec![self.key(0, specs::hash(0, 0)); 2];
        self.request_of(Some(client), Request::LeaseNow { keys: keys.clone() }, Asked::LeaseNow { keys })?;
        if self.waiting.contains_key(&token) {
            return fail(Rule::Replies, "an odd claim has no reply after its time");
        }
        Ok(())
    }
}
