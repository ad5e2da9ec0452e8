//! Times of a client's copies, measured where its requests' leases begin and end. So they are the same for every engine that
//! copies itself. What `Direct` copies for network clients passes no request of a session, and is not measured.
//!
//! A batch is what one request got. It ends with its last lease: clients end the leases of a batch together.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kvdepot_core::machine::Outcome;

/// Batches of one session that are followed, at most. Of more than that the oldest are forgotten.
const FOLLOWED_MAX: usize = 1024;

/// Blocks that a client got together.
#[derive(Debug)]
struct Batch {
    begun: Instant,
    bytes: u64,
    /// Of a dump, the shards that its last block lacks; None: a load.
    lacks: Option<usize>,
}

/// A copy that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copied {
    pub(crate) took: Duration,
    pub(crate) bytes: u64,
}

/// The copies of one session that are under way, by their last leases.
#[derive(Debug, Default)]
pub(crate) struct Copies(BTreeMap<u64, Batch>);

impl Copies {
    /// A client may copy these blocks out of the pool.
    pub(crate) fn load_began(&mut self, now: Instant, outcomes: &[Outcome]) {
        self.began(now, outcomes, None);
    }

    /// A client may fill these blocks, each of so many shards.
    pub(crate) fn dump_began(&mut self, now: Instant, outcomes: &[Outcome], shards: usize) {
        self.began(now, outcomes, Some(shards));
    }

    fn began(&mut self, now: Instant, outcomes: &[Outcome], lacks: Option<usize>) {
        let leased = outcomes.iter().filter_map(|outcome| match outcome {
            Outcome::Leased(leased) => Some((leased.lease.0, leased.block_bytes)),
            Outcome::Have | Outcome::Refused(_) => None,
        });
        let (last, bytes) = leased.fold((None, 0), |(_, sum), (lease, bytes)| (Some(lease), sum + bytes));
        let Some(last) = last else { return };
        if self.0.len() >= FOLLOWED_MAX {
            self.0.pop_first();
        }
        self.0.insert(last, Batch { begun: now, bytes, lacks });
    }

    /// Shards of blocks were filled: so many of each, or all of them (None). Returns the dumps that end with that.
    pub(crate) fn committed(&mut self, now: Instant, leases: &[u64], shards: Option<usize>) -> Vec<Copied> {
        let mut ended = Vec::new();
        for lease in leases {
            let Some(lacks) = self.0.get_mut(lease).and_then(|batch| batch.lacks.as_mut()) else { continue };
            *lacks = shards.map_or(0, |shards| lacks.saturating_sub(shards));
            if *lacks == 0 {
                ended.extend(self.ended(now, *lease));
            }
        }
        ended
    }

    /// Leases were given back. Returns the loads that end with that. A dump that ends so has failed.
    pub(crate) fn released(&mut self, now: Instant, leases: &[u64]) -> Vec<Copied> {
        let mut ended = Vec::new();
        for lease in leases {
            let is_load = self.0.get(lease).is_some_and(|batch| batch.lacks.is_none());
            ended.extend(self.ended(now, *lease).filter(|_| is_load));
        }
        ended
    }

    fn ended(&mut self, now: Instant, lease: u64) -> Option<Copied> {
        let Batch { begun, bytes, .. } = self.0.remove(&lease)?;
        Some(Copied { took: now.saturating_duration_since(begun), bytes })
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_core::ErrorKind;
    use kvdepot_core::lease::LeaseId;
    use kvdepot_core::machine::Leased;
    use kvdepot_core::runs::Runs;

    use super::*;

    fn granted(leases: &[u64]) -> Vec<Outcome> {
        let leased = |&lease| {
            Outcome::Leased(Leased {
                lease: LeaseId(lease),
                slot: 0,
                runs: Runs::new(),
                block_bytes: 10,
                crc64: None,
            })
        };
        leases.iter().map(leased).chain([Outcome::Have, Outcome::Refused(ErrorKind::NoSpace)]).collect()
    }

    fn at(begun: Instant, ms: u64) -> Instant {
        begun + Duration::from_millis(ms)
    }

    fn copied(ms: u64, bytes: u64) -> Vec<Copied> {
        vec![Copied { took: Duration::from_millis(ms), bytes }]
    }

    #[test]
    fn a_load_ends_with_the_last_lease_of_its_batch() {
        let (mut copies, begun) = (Copies::default(), Instant::now());
        copies.load_began(begun, &granted(&[1, 2, 3]));
        copies.load_began(at(begun, 1), &granted(&[4]));
        copies.load_began(begun, &granted(&[]));
        assert_eq!(copies.committed(at(begun, 2), &[3], None), [], "it is no dump");
        assert_eq!(copies.released(at(begun, 5), &[1, 2]), []);
        assert_eq!(copies.released(at(begun, 7), &[4]), copied(6, 10));
        assert_eq!(copies.released(at(begun, 9), &[3]), copied(9, 30));
        assert!(copies.0.is_empty());
    }

    #[test]
    fn a_dump_ends_when_its_last_block_is_whole_and_not_at_all_if_it_is_given_up() {
        let (mut copies, begun) = (Copies::default(), Instant::now());
        copies.dump_began(begun, &granted(&[1, 2]), 3);
        assert_eq!(copies.committed(at(begun, 1), &[1, 2], Some(2)), []);
        assert_eq!(copies.committed(at(begun, 4), &[1, 2], Some(1)), copied(4, 20));
        copies.dump_began(begun, &granted(&[5]), 3);
        assert_eq!(copies.committed(at(begun, 3), &[5], None), copied(3, 10));
        copies.dump_began(begun, &granted(&[6]), 1);
        assert_eq!(copies.released(at(begun, 3), &[6]), []);
        assert!(copies.0.is_empty());
    }

    #[test]
    fn leases_that_never_end_cost_little() {
        let (mut copies, begun) = (Copies::default(), Instant::now());
        for lease in 0..5000 {
            copies.load_began(begun, &granted(&[lease]));
        }
        assert_eq!(copies.0.len(), FOLLOWED_MAX);
        assert_eq!(copies.released(begun, &[0]), []);
        assert_eq!(copies.released(begun, &[4999]), copied(0, 10));
    }
}
