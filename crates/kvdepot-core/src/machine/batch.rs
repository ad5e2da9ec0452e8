//! Requests for many blocks, submitted piece by piece.
//!
//! A step takes a bounded number of a request's blocks, and fewer if it has searched long for space. Its reply covers
//! the first blocks, and the rest must be submitted again. A [`Batch`] does that and joins the replies.

use super::event::{Now, Outcome, Reply, Request};
use crate::error::{Error, ErrorKind, Result};

/// Number of a request's blocks that one step takes.
pub const REQUEST_BLOCKS: usize = 64;
/// Maximum number of blocks of one removal. One step processes all of them, because none of them may be visible once
/// the removal was requested. A caller with more blocks sends several removals.
pub const REMOVE_BLOCKS: usize = 128;
/// Number of consecutive steps that may search for space without success before a block is refused.
const FRUITLESS_MAX: usize = 1 << 14;

/// A request for many blocks that is being processed.
#[derive(Debug)]
pub struct Batch {
    /// The complete request.
    request: Request,
    blocks: usize,
    taken: usize,
    fruitless: usize,
    reply: Reply,
}

impl Batch {
    /// Makes a batch. Returns the request as the error if it is not one for many blocks, or if its reply comes later.
    pub fn of(request: Request) -> std::result::Result<Self, Request> {
        let (blocks, reply) = match &request {
            Request::Reserve { hashes, .. } => (hashes.len(), Reply::Slots(Vec::with_capacity(hashes.len()))),
            Request::LeaseNow { keys } | Request::Inspect { keys } => {
                (keys.len(), Reply::Leased(Vec::with_capacity(keys.len())))
            }
            Request::Commit { leases, .. } | Request::Release { leases } => (leases.len(), Reply::Took(0)),
            Request::Prefetch { blocks, .. } => (blocks.len(), Reply::Took(0)),
            _ => return Err(request),
        };
        Ok(Self { request, blocks, taken: 0, fruitless: 0, reply })
    }

    /// Returns the request to submit next.
    pub fn next(&self) -> Request {
        let piece = self.taken..self.blocks.min(self.taken + REQUEST_BLOCKS);
        match &self.request {
            Request::Reserve { namespace, id, hashes, how, runs_max } => {
                let hashes = hashes[piece].to_vec();
                let runs_max = runs_max.saturating_sub(self.runs());
                Request::Reserve { namespace: *namespace, id: *id, hashes, how: *how, runs_max }
            }
            Request::LeaseNow { keys } => Request::LeaseNow { keys: keys[piece].to_vec() },
            Request::Inspect { keys } => Request::Inspect { keys: keys[piece].to_vec() },
            Request::Commit { leases, shards, crc64 } => {
                Request::Commit { leases: leases[piece].to_vec(), shards: shards.clone(), crc64: *crc64 }
            }
            Request::Release { leases } => Request::Release { leases: leases[piece].to_vec() },
            Request::Prefetch { namespace, blocks, deadline } => {
                let blocks = blocks[piece].to_vec();
                Request::Prefetch { namespace: *namespace, blocks, deadline: *deadline }
            }
            _ => unreachable!("only these are batches"),
        }
    }

    /// Returns the number of runs named so far.
    fn runs(&self) -> usize {
        let Reply::Slots(outcomes) = &self.reply else { return 0 };
        let runs = outcomes.iter().map(|outcome| match outcome {
            Outcome::Leased(leased) => leased.runs.len(),
            Outcome::Have | Outcome::Refused(_) => 0,
        });
        runs.sum()
    }

    /// Takes the reply to the submitted piece. Returns the reply to the complete request when it is finished.
    pub fn answered(&mut self, reply: Result<Reply>) -> Option<Result<Reply>> {
        let took = match (reply, &mut self.reply) {
            (Ok(Reply::Slots(some)), Reply::Slots(all)) => join(all, some),
            (Ok(Reply::Leased(some)), Reply::Leased(all)) => join(all, some),
            (Ok(Reply::Took(some)), Reply::Took(all)) => {
                *all += some;
                some
            }
            (Ok(_), _) => {
                let other = Error::new(ErrorKind::Protocol, "the machine gave another reply");
                return Some(Err(other));
            }
            (Err(error), _) => return Some(self.failed(error)),
        };
        self.taken += took;
        self.fruitless = if took == 0 { self.fruitless + 1 } else { 0 };
        if self.taken >= self.blocks {
            return Some(Ok(self.take()));
        }
        (self.fruitless > FRUITLESS_MAX)
            .then(|| self.failed(Error::new(ErrorKind::NoSpace, "no slot of the pool was found that may go")))
    }

    /// Fails the rest of the request. Earlier leases belong to the caller, so the reply includes them.
    fn failed(&mut self, error: Error) -> Result<Reply> {
        let blocks = self.blocks;
        match &mut self.reply {
            Reply::Slots(all) if !all.is_empty() => {
                all.resize_with(blocks, || Outcome::Refused(error.kind()));
            }
            Reply::Leased(all) if !all.is_empty() => all.resize_with(blocks, || Now::Absent),
            _ => return Err(error),
        }
        Ok(self.take())
    }

    const fn take(&mut self) -> Reply {
        std::mem::replace(&mut self.reply, Reply::Done)
    }
}

fn join<T>(all: &mut Vec<T>, mut some: Vec<T>) -> usize {
    let took = some.len();
    if all.is_empty() {
        *all = some
    } else {
        all.append(&mut some)
    }
    took
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{BlockHash, BlockKey, NamespaceId};
    use crate::lease::LeaseId;

    fn release(leases: u64) -> Batch {
        Batch::of(Request::Release { leases: (0..leases).map(LeaseId).collect() }).unwrap()
    }

    #[test]
    fn every_lease_is_asked_for_once_and_few_at_a_time() {
        let mut batch = release(1000);
        let mut asked = Vec::new();
        loop {
            let Request::Release { leases } = batch.next() else { panic!("another request") };
            assert!((1..=REQUEST_BLOCKS).contains(&leases.len()));
            // A step may take fewer blocks than requested.
            let took = leases.len().min(1 + asked.len() % 50);
            asked.extend_from_slice(&leases[..took]);
            if let Some(reply) = batch.answered(Ok(Reply::Took(took))) {
                assert!(matches!(reply, Ok(Reply::Took(1000))), "{reply:?}");
                break;
            }
        }
        assert_eq!(asked, (0..1000).map(LeaseId).collect::<Vec<_>>());
    }

    #[test]
    fn what_was_leased_before_a_failure_is_not_lost() {
        let keys = vec![BlockKey { namespace: NamespaceId([1; 16]), hash: BlockHash([1; 16]) }; 100];
        let mut batch = Batch::of(Request::LeaseNow { keys }).unwrap();
        assert!(batch.answered(Ok(Reply::Leased(vec![Now::Arriving; 64]))).is_none());
        let reply = batch.answered(Err(Error::new(ErrorKind::Unavailable, "the depot hands over")));
        let Some(Ok(Reply::Leased(all))) = reply else { panic!("{reply:?}") };
        assert_eq!((all.len(), &all[63], &all[64]), (100, &Now::Arriving, &Now::Absent));
        let refused = release(100).answered(Err(Error::new(ErrorKind::Unavailable, "the depot hands over")));
        assert!(matches!(refused, Some(Err(_))), "{refused:?}");
    }

    #[test]
    fn a_block_for_which_no_room_is_found_is_refused_in_the_end() {
        let mut batch = release(1);
        assert!((0..FRUITLESS_MAX).all(|_| batch.answered(Ok(Reply::Took(0))).is_none()));
        let end = batch.answered(Ok(Reply::Took(0)));
        assert!(matches!(end, Some(Err(_))), "{end:?}");
    }
}
