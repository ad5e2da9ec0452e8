//! The thread that serves connections: takes completions, and advances the requests that waited for them.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use kvdepot_core::{Error, Result};
use kvdepot_verbs::{Completion, CompletionChannel, Cq, Done, SendList, WcStatus};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::finder::Job;
use super::inbox::Inbox;
use super::inboxes::Inboxes;
use super::link::Link;
use super::mailbox::{Command, Mailbox};
use super::means::Means;
use super::regions::Regions;
use super::request::Waits;
use crate::wire::counters::Counters;

/// How long the queue is polled before the thread sleeps.
const SPIN: Duration = Duration::from_micros(20);
/// How often a put that found no space is retried.
const ROOM_TICK: Duration = Duration::from_millis(5);
/// How often all connections are checked.
const TICK: Duration = Duration::from_millis(250);
/// Number of completions handled before connections are advanced.
const TURN: usize = 256;

/// The configuration and resources of a poller.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) channel: CompletionChannel,
    pub(super) cq: Cq,
    pub(super) inboxes: Inboxes,
    pub(super) regions: Arc<Regions>,
    pub(super) counters: Arc<Counters>,
    pub(super) finder: Sender<Job>,
    pub(super) mailbox: Arc<Mailbox>,
    /// Limits of outstanding work requests of one connection, and of all.
    pub(super) link_requests_max: u32,
    pub(super) requests_max: u32,
    /// Capacity of the completion queue, receives and markers included.
    pub(super) completions_max: usize,
    pub(super) sges_max: usize,
    pub(super) bytes_max: usize,
    pub(super) put_wait: Duration,
    pub(super) stall: Duration,
}

/// A poller. Its connections are dropped before the resources that they use.
#[derive(Debug)]
pub(super) struct Poller {
    links: HashMap<u64, Box<Link>>,
    plan: Plan,
    commands: Receiver<Command>,
    serials: HashMap<u32, u64>,
    /// Connections to be advanced, and whether any waits only for time to pass.
    again: VecDeque<u64>,
    waits_for_time: bool,
    /// Number of work requests that may still be posted.
    free: u32,
    list: SendList,
    looked_over: Instant,
    /// Connections that were stopped and are not known to be over.
    ending: Vec<u64>,
    /// Connections that were over when the queue was last known to be drained, and the number of completions taken
    /// since.
    over: Vec<u64>,
    taken: usize,
}

impl Poller {
    pub(super) fn new(plan: Plan, commands: Receiver<Command>) -> Self {
        Self {
            links: HashMap::new(),
            free: plan.requests_max,
            plan,
            commands,
            serials: HashMap::new(),
            again: VecDeque::new(),
            waits_for_time: false,
            list: SendList::new(),
            looked_over: Instant::now(),
            ending: Vec::new(),
            over: Vec::new(),
            taken: 0,
        }
    }

    /// Serves until it is stopped.
    pub(super) fn run(mut self) {
        let outcome = self.serve();
        // Senders get an error from now on, and late connections are refused.
        self.plan.mailbox.close();
        if let Err(error) = outcome {
            tracing::error!("RDMA has ended, and all of its connections: {error}");
        }
    }

    fn serve(&mut self) -> Result<()> {
        let mut completions = Vec::new();
        let mut idle_since = None;
        loop {
            let Some(told) = self.pass(&mut completions)? else { return Ok(()) };
            let idle = !told && completions.is_empty();
            completions.clear();
            if !idle {
                idle_since = None;
            } else if idle_since.get_or_insert_with(Instant::now).elapsed() >= SPIN {
                self.sleep(&mut completions)?;
            }
        }
    }

    /// Handles `completions`, further ones in the queue, and messages. Returns whether there was any message; `None` at
    /// the end.
    fn pass(&mut self, completions: &mut Vec<Completion>) -> Result<Option<bool>> {
        let mut is_drained = false;
        while completions.len() < TURN && !is_drained {
            is_drained = self.plan.cq.poll(completions)? == 0;
        }
        self.taken = self.taken.saturating_add(completions.len());
        // Before completions: a connection is opened before its client can send anything.
        let Some(told) = self.listen()? else { return Ok(None) };
        for completion in &*completions {
            self.completed(completion);
        }
        self.plan.inboxes.post()?;
        let now = Instant::now();
        // After as many completions as the queue can hold, none of its earlier content is left, however busy it is.
        if is_drained || self.taken >= self.plan.completions_max {
            self.bury(now);
        }
        if now.saturating_duration_since(self.looked_over) >= TICK {
            self.look_over(now);
        }
        self.go_on();
        Ok(Some(told))
    }

    /// Handles messages. Returns whether there were any; `None` at the end.
    fn listen(&mut self) -> Result<Option<bool>> {
        let mut any = false;
        while let Ok(command) = self.commands.try_recv() {
            any = true;
            match command {
                Command::Open(link) => {
                    let serial = link.serial();
                    let has_receives = self.plan.inboxes.has(link.generation());
                    self.serials.insert(link.qp_number(), serial);
                    self.links.insert(serial, link);
                    if !has_receives {
                        self.end(serial);
                    }
                }
                Command::Close(serial) => self.end(serial),
                Command::Found { link, request, index, value } => {
                    if let Some(open) = self.links.get_mut(&link).filter(|open| open.is_open()) {
                        open.found(request, index, value);
                        self.again.push_back(link);
                    }
                }
                Command::Look => {}
                Command::Stop => return Ok(None),
            }
        }
        Ok(Some(any))
    }

    fn completed(&mut self, completion: &Completion) {
        let link = self.serials.get(&completion.qp_number).copied();
        if Inbox::owns(completion) {
            if completion.status != WcStatus::SUCCESS {
                self.plan.inboxes.give_back(completion);
                if let Some(serial) = link {
                    if let Some(link) = self.links.get_mut(&serial) {
                        link.set_gave_back();
                    }
                    self.failed(serial, completion);
                }
                return;
            }
            let bytes = self.plan.inboxes.take(completion);
            if let (Some(bytes), Some(serial), Done::Receive) = (bytes, link, completion.done) {
                self.received(serial, &bytes);
            }
            return;
        }
        let Some(serial) = link else { return };
        let Some(open) = self.links.get_mut(&serial) else { return };
        if completion.status == WcStatus::SUCCESS || !open.is_open() {
            // For a stopped queue pair only the marker counts; its work requests count until it is dropped.
            if completion.status == WcStatus::SUCCESS || Link::is_marker(completion.id) {
                self.free += open.ended(completion.id);
                self.again.push_back(serial);
            }
            return;
        }
        self.failed(serial, completion);
    }

    fn received(&mut self, serial: u64, bytes: &[u8]) {
        let Some(mut link) = self.links.remove(&serial) else { return };
        if link.is_open() {
            let (values, answer_to) = (link.values().clone(), Arc::clone(&self.plan.mailbox));
            let finder = self.plan.finder.clone();
            let outcome = link.receive(bytes, &self.means(&link), |request, index, hash| {
                let (values, answer_to) = (values.clone(), Arc::clone(&answer_to));
                // The threads live as long as this sender.
                let _ = finder.send(Job { values, hash, link: serial, request, index, answer_to });
            });
            if let Err(error) = outcome {
                tracing::warn!("an RDMA connection is ended: {error}");
                link.end(&mut self.list);
                self.ending.push(serial);
            }
        }
        self.links.insert(serial, link);
        self.again.push_back(serial);
    }

    fn failed(&mut self, serial: u64, completion: &Completion) {
        if self.links.get(&serial).is_some_and(|link| link.is_open()) {
            if let Err(error) = completion.ok() {
                let hint = if completion.status == WcStatus::LOCAL_LENGTH {
                    " (a request was longer than the receives: raise `receive_bytes`)"
                } else {
                    ""
                };
                self.plan.counters.failed(error.kind());
                tracing::warn!("an RDMA connection broke{hint}: {error}");
            }
            self.end(serial);
        }
    }

    fn end(&mut self, serial: u64) {
        if let Some(link) = self.links.get_mut(&serial).filter(|link| link.is_open()) {
            link.end(&mut self.list);
            self.ending.push(serial);
        }
    }

    fn means(&mut self, link: &Link) -> Means<'_> {
        let plan = &self.plan;
        Means {
            regions: &plan.regions,
            counters: &plan.counters,
            list: &mut self.list,
            put_wait: plan.put_wait,
            sges_max: plan.sges_max,
            bytes_max: plan.bytes_max,
            room: plan.link_requests_max.saturating_sub(link.outstanding()).min(self.free),
            last_id: 0,
        }
    }

    /// Advances connections with new events and those that wait for others, each once.
    fn go_on(&mut self) {
        self.waits_for_time = false;
        let mut seen = std::collections::HashSet::new();
        for _ in 0..self.again.len() {
            let Some(serial) = self.again.pop_front() else { break };
            if !seen.insert(serial) {
                continue;
            }
            let Some(mut link) = self.links.remove(&serial) else { continue };
            if link.is_open() {
                let before = link.outstanding();
                let outcome = link.pump(&mut self.means(&link));
                self.free -= link.outstanding() - before;
                match outcome {
                    Ok(Waits::No) => {}
                    Ok(Waits::Time) => {
                        self.waits_for_time = true;
                        self.again.push_back(serial);
                    }
                    // Its own completions bring it back here; if it has none outstanding, those of others do.
                    Ok(Waits::Budget) if link.outstanding() > 0 => {}
                    Ok(Waits::Budget) => self.again.push_back(serial),
                    Err(error) => {
                        tracing::warn!("an RDMA connection is ended: {error}");
                        link.end(&mut self.list);
                        self.ending.push(serial);
                    }
                }
            }
            self.links.insert(serial, link);
        }
    }

    /// Ends connections whose peers have stalled, or that may themselves wait forever (P2).
    fn look_over(&mut self, now: Instant) {
        self.looked_over = now;
        let stall = self.plan.stall;
        let stalled: Vec<u64> = self
            .links
            .values()
            .filter(|link| link.is_stalled(now, stall))
            .map(|link| link.serial())
            .collect();
        for serial in stalled {
            tracing::warn!("an RDMA connection is ended: its peer made no progress for {stall:?}");
            self.end(serial);
        }
        let inboxes = &self.plan.inboxes;
        let is_starved = |link: &&Link| link.is_open() && inboxes.is_starved(link.generation(), now, stall);
        let starved: Vec<u64> =
            self.links.values().map(|link| &**link).filter(is_starved).map(Link::serial).collect();
        for serial in starved {
            tracing::warn!(
                "an RDMA connection is ended: others that ended may have lost all of its receives"
            );
            self.end(serial);
        }
    }

    /// Handles a drained queue: it holds nothing, receives included, of queue pairs that were over before, so their
    /// connections are dropped. Those that are over now wait for the next time.
    fn bury(&mut self, now: Instant) {
        let mut any = false;
        for serial in std::mem::take(&mut self.over) {
            if let Some(link) = self.links.remove(&serial) {
                self.free += link.outstanding();
                self.serials.remove(&link.qp_number());
                if link.may_hold_receive() {
                    self.plan.inboxes.buried_one(link.generation(), now);
                }
                any = true;
            }
        }
        let links = &self.links;
        let is_over = |serial: &u64| links.get(serial).is_none_or(|link| link.is_over(now));
        (self.over, self.ending) = std::mem::take(&mut self.ending).into_iter().partition(is_over);
        self.taken = 0;
        if any {
            let links = &self.links;
            self.plan.inboxes.renew(|generation| links.values().any(|link| link.generation() == generation));
        }
    }

    /// Waits for a completion, a message, or the next check of the connections.
    fn sleep(&self, completions: &mut Vec<Completion>) -> Result<()> {
        let plan = &self.plan;
        let is_ending = !self.ending.is_empty() || !self.over.is_empty();
        let timeout = if self.waits_for_time || is_ending { ROOM_TICK } else { TICK };
        plan.mailbox.hush();
        plan.cq.request_event(false)?;
        // A completion between the last poll and the request raises no event.
        if plan.cq.poll(completions)? > 0 || !self.commands.is_empty() {
            return Ok(());
        }
        let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(timeout.subsec_nanos()) };
        match poll(
            &mut [PollFd::new(&plan.channel, PollFlags::IN), PollFd::new(&plan.mailbox, PollFlags::IN)],
            Some(&timeout),
        ) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(Error::io("cannot wait for RDMA completions", e.into())),
        }
        while plan.channel.take()?.is_some() {}
        Ok(())
    }
}

#[cfg(test)]
mod tests;
