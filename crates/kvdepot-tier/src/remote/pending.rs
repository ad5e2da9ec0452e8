//! Requests that were sent and not answered. However they end, each `done` is called once, outside of the lock.

use std::time::Instant;

use hashbrown::HashMap;
use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use kvdepot_io::IoBuf;
use kvdepot_wire::own::Status;
use parking_lot::Mutex;

use super::job::Opened;
use crate::writing::Writing;
use crate::{Done, Written};

/// The completion of a request, to be called without any lock held.
pub(super) type End = Box<dyn FnOnce() + Send>;

/// A block to receive.
pub(super) struct GetItem {
    pub(super) into: IoBuf,
    pub(super) deadline: Instant,
    pub(super) done: Done<()>,
}

/// A block that was sent.
pub(super) struct PutItem {
    pub(super) key: BlockKey,
    pub(super) done: Done<Written>,
}

/// The request. An expired one is `None` and stays until its answer arrives, so that the answer is recognised.
pub(super) enum Asked {
    Exists {
        count: usize,
        deadline: Instant,
        done: Option<Done<Vec<bool>>>,
    },
    Get {
        items: Vec<Option<GetItem>>,
        /// Blocks whose answers have arrived.
        answered: Vec<bool>,
    },
    /// While `sending`, a thread reads the blocks' memory, and their completions wait for it (P1). An answer may arrive
    /// earlier.
    Put {
        items: Vec<Option<PutItem>>,
        sending: bool,
        early: Option<Result<Vec<Status>>>,
    },
    /// A removal, or the end of a namespace's use.
    Remove {
        deadline: Instant,
        done: Option<Done<()>>,
    },
    Open {
        deadline: Instant,
        done: Option<Done<Opened>>,
    },
    SetEpoch {
        deadline: Instant,
        done: Option<Done<()>>,
    },
}

#[derive(Default)]
pub(super) struct Pending {
    requests: HashMap<u64, Asked>,
    last_id: u64,
    /// Reason of the connection's end.
    pub(super) closed: Option<Error>,
    /// Whether a block's bytes are being received into a slot, or discarded.
    pub(super) receiving: bool,
    /// Whether the server has answered anything.
    pub(super) answered: bool,
    /// Whether the server is known to have ended the connection: it reads nothing more.
    is_ended: bool,
    /// Whether a write was in flight when the connection was closed, which the server may still carry out.
    pub(super) is_parting: bool,
    /// Blocks whose writes have failed for this reason.
    doubtful: Vec<BlockKey>,
    /// Number of those that were reported.
    doubts_told: usize,
}

fn end<T: Send + 'static>(done: Option<Done<T>>, outcome: Result<T>) -> Option<End> {
    done.map(|done| Box::new(move || done(outcome)) as End)
}

impl Asked {
    /// Returns the completions of all items, as failures.
    pub(super) fn fail(self, error: &Error) -> Vec<End> {
        let one = |end: Option<End>| end.into_iter().collect();
        match self {
            Self::Exists { done, .. } => one(end(done, Err(error.clone()))),
            Self::Get { items, .. } => items
                .into_iter()
                .flatten()
                .filter_map(|item| {
                    drop(item.into);
                    end(Some(item.done), Err(error.clone()))
                })
                .collect(),
            Self::Put { items, .. } => items
                .into_iter()
                .flatten()
                .filter_map(|item| end(Some(item.done), Err(error.clone())))
                .collect(),
            Self::Remove { done, .. } | Self::SetEpoch { done, .. } => one(end(done, Err(error.clone()))),
            Self::Open { done, .. } => one(end(done, Err(error.clone()))),
        }
    }

    fn expire(&mut self, now: Instant, error: &Error, out: &mut Vec<End>) {
        fn late<T: Send + 'static>(
            deadline: Instant,
            done: &mut Option<Done<T>>,
            now: Instant,
            error: &Error,
        ) -> Option<End> {
            if deadline > now { None } else { end(done.take(), Err(error.clone())) }
        }
        match self {
            Self::Exists { deadline, done, .. } => out.extend(late(*deadline, done, now, error)),
            Self::Remove { deadline, done } | Self::SetEpoch { deadline, done } => {
                out.extend(late(*deadline, done, now, error));
            }
            Self::Open { deadline, done } => out.extend(late(*deadline, done, now, error)),
            Self::Get { items, .. } => {
                for item in items {
                    if item.as_ref().is_some_and(|item| item.deadline <= now)
                        && let Some(GetItem { into, done, .. }) = item.take()
                    {
                        drop(into);
                        out.extend(end(Some(done), Err(error.clone())));
                    }
                }
            }
            // A caller that is notified of the end may remove the block, which must not overlap with a write that the
            // server may still carry out (P1). A server that does not answer loses the connection.
            Self::Put { .. } => {}
        }
    }
}

/// Returns the completions of a put, by the outcomes of its blocks.
fn stored(items: Vec<Option<PutItem>>, outcome: Result<Vec<Status>>) -> Vec<End> {
    let statuses = match outcome {
        Ok(statuses) => statuses.into_iter().map(written).collect(),
        Err(error) => vec![Err(error); items.len()],
    };
    items
        .into_iter()
        .zip(statuses)
        .filter_map(|(item, status)| end(item.map(|item| item.done), status))
        .collect()
}

fn written(status: Status) -> Result<Written> {
    match status {
        Status::Ok => Ok(Written::New),
        Status::Had => Ok(Written::AlreadyThere),
        Status::Failed(kind) => Err(Error::new(kind, "a remote server did not take a block")),
    }
}

impl Pending {
    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    /// Returns whether the server owes an answer.
    pub(super) fn owes(&self) -> bool {
        self.receiving || !self.requests.is_empty()
    }

    pub(super) const fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Registers a request that is about to be sent. Returns it if the connection has ended.
    pub(super) fn enter(&mut self, id: u64, asked: Asked) -> Option<(Asked, Error)> {
        if let Some(error) = &self.closed {
            return Some((asked, error.clone()));
        }
        self.requests.insert(id, asked);
        None
    }

    /// Records that a request was sent, or failed to be.
    pub(super) fn sent(&mut self, id: u64, error: Option<&Error>) -> Vec<End> {
        let Some(Asked::Put { sending, early, .. }) = self.requests.get_mut(&id) else { return Vec::new() };
        *sending = false;
        let answer = early.take();
        // A closed connection has a reason; the sender's error is only its consequence.
        let lost = self.closed.clone().or_else(|| error.cloned());
        let outcome = match (answer, lost) {
            (Some(answer), _) => answer,
            (None, Some(error)) => Err(error),
            (None, None) => return Vec::new(),
        };
        match self.requests.remove(&id) {
            Some(Asked::Put { items, .. }) => {
                if self.closed.is_some() || error.is_some() {
                    self.doubt(&items, outcome.is_ok());
                }
                stored(items, outcome)
            }
            _ => Vec::new(),
        }
    }

    fn doubt(&mut self, items: &[Option<PutItem>], is_answered: bool) {
        if !is_answered && !self.is_ended {
            self.is_parting = true;
            self.doubtful.extend(items.iter().flatten().map(|item| item.key));
        }
    }

    /// Records that the server has closed the connection, or that it broke.
    pub(super) const fn ended(&mut self) {
        self.is_ended = true;
    }

    /// Records blocks that have become doubtful since the last call: before the failures of their writes are reported,
    /// and before [`Self::parted`] takes them.
    pub(super) fn tell_doubts(&mut self, writing: &Mutex<Writing>) {
        if self.doubts_told < self.doubtful.len() {
            writing.lock().doubt(&self.doubtful[self.doubts_told..]);
            self.doubts_told = self.doubtful.len();
        }
    }

    /// Returns, after the connection's end, all blocks that are doubtful because of it, and whether the server has
    /// ended it.
    pub(super) fn parted(&mut self) -> (Vec<BlockKey>, bool) {
        (std::mem::take(&mut self.doubtful), self.is_ended)
    }

    /// Completes all requests except one that is being sent, which its sender completes.
    pub(super) fn close(&mut self, error: &Error) -> Vec<End> {
        self.closed.get_or_insert_with(|| error.clone());
        self.is_parting |= !self.is_ended && self.requests.values().any(|a| matches!(a, Asked::Put { .. }));
        let over = self.requests.extract_if(|_, asked| !matches!(asked, Asked::Put { sending: true, .. }));
        let over: Vec<Asked> = over.map(|(_, asked)| asked).collect();
        for asked in &over {
            if let Asked::Put { items, .. } = asked {
                self.doubt(items, false);
            }
        }
        over.into_iter().flat_map(|asked| asked.fail(error)).collect()
    }

    pub(super) fn expire(&mut self, now: Instant, error: &Error) -> Vec<End> {
        let mut out = Vec::new();
        self.requests.values_mut().for_each(|asked| asked.expire(now, error, &mut out));
        out
    }

    /// Passes one block of a get to the receiver; `None` inside if it expired. The receiver clears `receiving` when the
    /// block's bytes have arrived.
    pub(super) fn block(&mut self, id: u64, index: u32) -> Result<Option<GetItem>> {
        self.answered = true;
        let Some(Asked::Get { items, answered }) = self.requests.get_mut(&id) else {
            return Err(out_of_turn().with("request", id));
        };
        let (at, count) = (index as usize, items.len());
        // A repeated answer would remove the request before the answer of another of its blocks.
        if answered.get(at).is_none_or(|answered| *answered) {
            return Err(out_of_turn().with("request", id).with("index", index).with("blocks", count));
        }
        answered[at] = true;
        let item = items[at].take();
        if answered.iter().all(|answered| *answered) {
            self.requests.remove(&id);
        }
        self.receiving = true;
        Ok(item)
    }

    /// Processes an answer other than a block.
    pub(super) fn answer(&mut self, id: u64, answer: Answer) -> Result<Vec<End>> {
        self.answered = true;
        if let (Answer::Stored(_) | Answer::Failed(_), Some(Asked::Put { items, sending: true, early })) =
            (&answer, self.requests.get_mut(&id))
        {
            *early = Some(match answer {
                Answer::Stored(statuses) if statuses.len() == items.len() => Ok(statuses),
                Answer::Failed(error) => Err(error),
                _ => return Err(out_of_turn()),
            });
            return Ok(Vec::new());
        }
        let asked = self.requests.remove(&id).ok_or_else(|| out_of_turn().with("request", id))?;
        let one = |end: Option<End>| Ok(end.into_iter().collect());
        match (asked, answer) {
            (asked, Answer::Failed(error)) => Ok(asked.fail(&error)),
            (Asked::Exists { count, done, .. }, Answer::Present(there)) if there.len() == count => {
                one(end(done, Ok(there)))
            }
            (Asked::Put { items, .. }, Answer::Stored(statuses)) if statuses.len() == items.len() => {
                Ok(stored(items, Ok(statuses)))
            }
            (Asked::Remove { done, .. }, Answer::Done) => one(end(done, Ok(()))),
            (Asked::Open { done, .. }, Answer::Namespace(opened)) => one(end(done, Ok(opened))),
            (Asked::SetEpoch { done, .. }, Answer::Namespace(_)) => one(end(done, Ok(()))),
            (asked, _) => {
                // It is completed at the connection's end.
                self.requests.insert(id, asked);
                Err(out_of_turn().with("request", id))
            }
        }
    }
}

/// An answer, as it is kept after its frame.
pub(super) enum Answer {
    Present(Vec<bool>),
    Stored(Vec<Status>),
    Done,
    Namespace(Opened),
    Failed(Error),
}

fn out_of_turn() -> Error {
    Error::new(ErrorKind::Protocol, "a remote server sent an answer without a request")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use kvdepot_io::SlotBuf;

    use super::*;

    const ID: u64 = 7;

    fn asked(pending: &mut Pending, blocks: usize) -> Receiver<usize> {
        let (send, ended) = channel();
        let item = |index| {
            let send = send.clone();
            let into = IoBuf::payload(SlotBuf::anonymous(4096), 4096).unwrap();
            GetItem { into, deadline: Instant::now(), done: Box::new(move |_| send.send(index).unwrap()) }
        };
        let items: Vec<_> = (0..blocks).map(|index| Some(item(index))).collect();
        assert!(pending.enter(ID, Asked::Get { answered: vec![false; blocks], items }).is_none());
        ended
    }

    #[test]
    fn a_block_that_is_answered_twice_ends_the_connection_and_no_other_block_is_forgotten() {
        let mut pending = Pending::default();
        let ended = asked(&mut pending, 2);
        drop(pending.block(ID, 0).unwrap().unwrap());
        assert!(pending.block(ID, 0).is_err());
        assert!(pending.block(ID, 2).is_err(), "there is none");
        pending.close(&out_of_turn()).into_iter().for_each(|end| end());
        assert_eq!(ended.try_iter().collect::<Vec<_>>(), [1]);
    }
}
