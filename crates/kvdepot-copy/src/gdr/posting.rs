//! Queue pairs, their requests in flight, and the groups of these.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_verbs::{
    Access, Buffer, Completion, CompletionChannel, Cq, Endpoint, Flags, Operation, Payload, Pd, Port, Qp,
    QpConfig, RcAttributes, Remote, SendList, Sge,
};

use crate::batch::Direction;
use crate::gdr::mutation::{Mistake, Mutation};

/// Capacity of each queue pair's send queue.
const PLACES: u32 = 256;
/// Number of requests posted with one ring of the doorbell.
const LIST_MAX: usize = 32;
/// How long completions are polled for before the thread sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// Number of bytes read back to push writes to the device. It is the minimum, because a copy may be that short.
const FLUSH_BYTES: u32 = 1;

/// A queue pair and its requests in flight.
struct Queue {
    qp: Qp,
    list: SendList,
    /// Signalled requests in order: the places that each frees, its group, and whether it is the group's last here.
    marks: VecDeque<Mark>,
    places_used: u32,
    /// The last write of the list's group.
    last_write: Option<Remote>,
}

struct Mark {
    places: u32,
    group: usize,
    ends: bool,
}

/// All queue pairs of a lane.
pub(crate) struct Posting {
    direction: Direction,
    mutation: Mutation,
    timeout: Duration,
    queues: Vec<Queue>,
    cq: Cq,
    scratch: Buffer,
    next: usize,
    /// Number of marks that each group of the batch still waits for.
    waiting: Vec<usize>,
    completions: Vec<Completion>,
}

impl Posting {
    pub(crate) fn new(
        pd: &Pd,
        port: &Port,
        connection: &RcAttributes,
        pairs: usize,
        timeout: Duration,
        direction: Direction,
        mutation: Mutation,
    ) -> Result<Self> {
        let channel = CompletionChannel::new(pd.context())?;
        let entries = PLACES.saturating_mul(u32::try_from(pairs).unwrap_or(u32::MAX));
        let cq = Cq::with_events(&channel, entries, 0)?;
        let queues = (0..pairs)
            .map(|_| {
                let qp = Qp::new(pd, QpConfig::new(&cq, PLACES, 1))?;
                let own = Endpoint::new(&qp, port, qp.number());
                qp.connect(port, Access::ALL, &own, &own, connection)?;
                Ok(Queue {
                    qp,
                    list: SendList::new(),
                    marks: VecDeque::new(),
                    places_used: 0,
                    last_write: None,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            direction,
            mutation,
            timeout,
            queues,
            cq,
            scratch: Buffer::new(pd, FLUSH_BYTES as usize, Access::LOCAL)?,
            next: 0,
            waiting: Vec::new(),
            completions: Vec::new(),
        })
    }

    /// Begins a batch.
    pub(crate) fn begin(&mut self, groups: usize) {
        self.waiting = vec![0; groups];
    }

    /// Adds a copy to a group.
    pub(crate) fn push(&mut self, group: usize, local: Sge, remote: Remote) -> Result<()> {
        let index = self.next % self.queues.len();
        self.next += 1;
        let queue = &mut self.queues[index];
        let (id, first) = (index as u64, queue.list.is_empty());
        let flags = Flags { signaled: first && self.mutation.is(Mistake::SignalFirst), ..Flags::SILENT };
        match self.direction {
            Direction::ToHost => queue.list.push(id, Operation::Read(&[local], remote), flags),
            Direction::ToDevice => {
                queue.list.push(id, Operation::Write(Payload::Sges(&[local]), remote), flags);
                queue.last_write = Some(remote);
            }
        }
        // One place is reserved for the request that pushes writes.
        if queue.list.len() + 1 >= LIST_MAX { self.post(index, group, false) } else { Ok(()) }
    }

    /// Posts the rest of a group. From here on it completes without further calls.
    pub(crate) fn end_group(&mut self, group: usize) -> Result<()> {
        for index in 0..self.queues.len() {
            let queue = &mut self.queues[index];
            if let Some(remote) = queue.last_write.take()
                && !self.mutation.is(Mistake::SkipFlush)
            {
                let back = self.scratch.mr().sge(0, FLUSH_BYTES);
                queue.list.push(index as u64, Operation::Read(&[back], remote), Flags::SILENT);
            }
            if !queue.list.is_empty() {
                self.post(index, group, true)?;
            }
        }
        Ok(())
    }

    fn post(&mut self, index: usize, group: usize, ends: bool) -> Result<()> {
        let places = u32::try_from(self.queues[index].list.len()).unwrap_or(u32::MAX);
        while self.queues[index].places_used + places > PLACES {
            self.wait()?;
        }
        let queue = &mut self.queues[index];
        if !self.mutation.is(Mistake::SignalFirst) {
            queue.list.signal_last();
        }
        let posted = queue.qp.post_send(&mut queue.list);
        queue.list.clear();
        posted.map_err(Error::from)?;
        queue.places_used += places;
        queue.marks.push_back(Mark { places, group, ends });
        self.waiting[group] += 1;
        Ok(())
    }

    /// Returns whether no posted request of a group is in flight.
    pub(crate) fn has_ended(&self, group: usize) -> bool {
        self.waiting[group] == 0
    }

    /// Takes completions without waiting.
    pub(crate) fn poll(&mut self) -> Result<()> {
        self.completions.clear();
        self.cq.poll(&mut self.completions)?;
        self.settle()
    }

    /// Waits for at least one completion.
    pub(crate) fn wait(&mut self) -> Result<()> {
        self.completions.clear();
        let deadline = Instant::now() + self.timeout;
        if self.cq.wait(SPIN, deadline, &mut self.completions)? == 0 {
            return Err(Error::new(
                ErrorKind::Timeout,
                "the RDMA adapter did not complete a copy in time; see its port's state and the kernel's log",
            )
            .with("timeout_ms", self.timeout.as_millis()));
        }
        self.settle()
    }

    fn settle(&mut self) -> Result<()> {
        for completion in &self.completions {
            completion.ok()?;
            let queue = usize::try_from(completion.id).ok().and_then(|index| self.queues.get_mut(index));
            let unknown =
                || Error::new(ErrorKind::Io, "a completion of no request of ours").with("id", completion.id);
            let queue = queue.ok_or_else(unknown)?;
            let mark = queue.marks.pop_front().ok_or_else(unknown)?;
            queue.places_used -= mark.places;
            if self.mutation.is(Mistake::OneQueuePairIsEnough) && mark.ends {
                self.waiting[mark.group] = 0;
            } else {
                self.waiting[mark.group] = self.waiting[mark.group].saturating_sub(1);
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Posting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Posting({:?}, {} queue pairs)", self.direction, self.queues.len())
    }
}
