//! One direction of an engine: queue pairs, and a thread that posts, waits and reports.

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender};
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_verbs::Port;
use parking_lot::{Condvar, Mutex};

use crate::batch::{CopyBatch, Direction, GroupSink};
use crate::cuda::context::{Context, Priority, Stream};
use crate::cuda::events::{Event, EventPool};
use crate::cuda::types::Handle;
use crate::event::DeviceEvent;
use crate::gdr::config::GdrConfig;
use crate::gdr::engine::Unusable;
use crate::gdr::mutation::{Mistake, Mutation};
use crate::gdr::posting::Posting;
use crate::gdr::regions::{InUse, Regions};
use crate::gdr::trouble::Trouble;
use crate::limit::thread_of_an_engine;

/// Size limit of a request: below every device's limit, and a multiple of a page.
const REQUEST_BYTES_MAX: usize = 1 << 20;

/// The parts that a lane's thread needs.
pub(crate) struct LaneParts {
    pub(crate) context: Arc<Context>,
    pub(crate) regions: Arc<Regions>,
    pub(crate) port: Port,
    pub(crate) config: GdrConfig,
    pub(crate) mutation: Mutation,
    pub(crate) unusable: Unusable,
}

/// See the module.
pub(crate) struct Lane {
    direction: Direction,
    parts: Arc<LaneParts>,
    events: Arc<EventPool>,
    /// Waits for the engines' events, so that the thread can wait for events that are not reused.
    before: Stream,
    queue: Mutex<Option<Sender<Job>>>,
    thread: Option<JoinHandle<()>>,
}

struct Job {
    batch: CopyBatch,
    sink: Arc<dyn GroupSink>,
    /// An event after the event of the batch.
    after: Option<Arc<Event>>,
    submitted: Arc<Submitted>,
}

impl Drop for Job {
    /// However a job ends, a waiting `run` is released (P2).
    fn drop(&mut self) {
        self.submitted.set();
    }
}

/// Notifies `run` that all groups of a load were submitted.
#[derive(Default)]
struct Submitted {
    all: Mutex<bool>,
    changed: Condvar,
}

impl Submitted {
    fn set(&self) {
        *self.all.lock() = true;
        self.changed.notify_all();
    }

    fn wait(&self) {
        let mut all = self.all.lock();
        while !*all {
            self.changed.wait(&mut all);
        }
    }
}

impl Lane {
    pub(crate) fn start(direction: Direction, parts: &Arc<LaneParts>) -> Result<Self> {
        let events = EventPool::new(&parts.context);
        let mut worker = Worker {
            direction,
            parts: Arc::clone(parts),
            events: Arc::clone(&events),
            behind: Stream::new(&parts.context, Priority::Greatest)?,
            posting: None,
            trouble: Trouble::default(),
        };
        worker.posting = Some(worker.connect()?);
        let (sender, receiver) = crossbeam_channel::unbounded();
        let name = if direction == Direction::ToHost { "kvdepot-gdr-dump" } else { "kvdepot-gdr-load" };
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || worker.run(&receiver))
            .map_err(|e| Error::io("cannot start a copy thread", e))?;
        Ok(Self {
            direction,
            parts: Arc::clone(parts),
            events,
            before: Stream::new(&parts.context, Priority::Least)?,
            queue: Mutex::new(Some(sender)),
            thread: Some(thread),
        })
    }

    /// # Safety
    /// As for `CopyEngine::run`.
    pub(crate) unsafe fn run(&self, batch: CopyBatch, sink: Arc<dyn GroupSink>) -> Result<()> {
        let queue = self.queue.lock();
        let closed = || Error::new(ErrorKind::Closed, "the copy engine is shutting down");
        let sender = queue.as_ref().ok_or_else(closed)?;
        let mut after = None;
        if batch.wait_event != 0 && !self.parts.mutation.is(Mistake::SkipComputeWait) {
            let _entered = self.parts.context.enter()?;
            let event = self.events.take()?;
            self.before.wait_event(batch.wait_event as Handle)?;
            event.record(&self.before)?;
            after = Some(event);
        }
        let submitted = Arc::new(Submitted::default());
        let job = Job { batch, sink, after, submitted: Arc::clone(&submitted) };
        sender.send(job).map_err(|_| closed())?;
        drop(queue);
        if self.direction == Direction::ToDevice {
            submitted.wait();
        }
        Ok(())
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        *self.queue.get_mut() = None;
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// The state of the thread.
struct Worker {
    direction: Direction,
    parts: Arc<LaneParts>,
    events: Arc<EventPool>,
    /// The stream on which events of loads are recorded; it never holds anything else.
    behind: Stream,
    /// `None` after a failure, until the next batch.
    posting: Option<Posting>,
    trouble: Trouble,
}

/// Why a batch failed.
enum Failure {
    /// The adapter failed it.
    ByAdapter(Error),
    /// Its deadline passed, or the device failed.
    Otherwise(Error),
}

impl Failure {
    /// The failure of a registration: the adapter's, unless there is no such memory.
    fn of_memory(error: Error) -> Self {
        match error.kind() {
            ErrorKind::Config => Self::Otherwise(error),
            _ => Self::ByAdapter(error),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Otherwise(error)
    }
}

/// The progress of a batch's reports.
struct Reports<'a> {
    job: &'a Job,
    next: usize,
    /// Number of groups posted completely.
    posted: usize,
}

impl Worker {
    fn connect(&self) -> Result<Posting> {
        let (parts, config) = (&self.parts, &self.parts.config);
        Posting::new(
            &parts.regions.pd,
            &parts.port,
            &config.connection,
            config.queue_pairs,
            config.timeout,
            self.direction,
            parts.mutation,
        )
    }

    fn run(mut self, jobs: &Receiver<Job>) {
        thread_of_an_engine();
        for job in jobs {
            let mut reports = Reports { job: &job, next: 0, posted: 0 };
            let mut posting = match self.posting.take().map_or_else(|| self.connect(), Ok) {
                Ok(posting) => posting,
                Err(error) => {
                    self.fail(&mut reports, Failure::ByAdapter(error));
                    continue;
                }
            };
            let regions = Arc::clone(&self.parts.regions);
            let mut in_use = InUse::new(&regions);
            match self.carry_out(&mut posting, &mut in_use, &mut reports) {
                Ok(()) => {
                    self.posting = Some(posting);
                    self.trouble.succeeded();
                }
                Err(failure) => {
                    // Destroyed queue pairs touch no memory any more; only then may the caller have it back.
                    drop(posting);
                    drop(in_use);
                    self.fail(&mut reports, failure);
                }
            }
        }
    }

    fn carry_out(
        &self,
        posting: &mut Posting,
        in_use: &mut InUse<'_>,
        reports: &mut Reports<'_>,
    ) -> Result<(), Failure> {
        let _entered = self.parts.context.enter()?;
        let batch = &reports.job.batch;
        if let Some(after) = &reports.job.after {
            after.synchronize()?;
        }
        posting.begin(batch.ends.len());
        for group in 0..batch.ends.len() {
            batch.check_deadline()?;
            for op in batch.group(group) {
                self.push(posting, in_use, group, (op.device, op.host as u64, op.len))?;
            }
            posting.end_group(group).map_err(Failure::ByAdapter)?;
            reports.posted = group + 1;
            posting.poll().map_err(Failure::ByAdapter)?;
            self.report(posting, reports)?;
        }
        if self.parts.mutation.is(Mistake::RegionsEndEarly) {
            in_use.end_early();
        }
        while reports.next < batch.ends.len() {
            posting.wait().map_err(Failure::ByAdapter)?;
            self.report(posting, reports)?;
        }
        Ok(())
    }

    /// Posts a copy, cut at the ends of regions and at the largest request.
    fn push(
        &self,
        posting: &mut Posting,
        in_use: &mut InUse<'_>,
        group: usize,
        (mut device, mut host, mut left): (u64, u64, usize),
    ) -> Result<(), Failure> {
        while left > 0 {
            // SAFETY: the caller of `run` keeps both ranges valid until the group has ended.
            let (host_mr, host_len) = unsafe { in_use.host(host, left) }.map_err(Failure::of_memory)?;
            // SAFETY: as above; the context is current.
            let (device_mr, device_len) =
                unsafe { in_use.device(device, left) }.map_err(Failure::of_memory)?;
            let len = host_len.min(device_len).min(REQUEST_BYTES_MAX);
            let local = host_mr.sge((host - host_mr.address()) as usize, len as u32);
            let remote = device_mr.remote((device - device_mr.address()) as usize);
            posting.push(group, local, remote).map_err(Failure::ByAdapter)?;
            (device, host, left) = (device + len as u64, host + len as u64, left - len);
        }
        Ok(())
    }

    /// Reports completed groups, in order.
    fn report(&self, posting: &Posting, reports: &mut Reports<'_>) -> Result<()> {
        let at_once = match self.direction {
            Direction::ToHost => self.parts.mutation.is(Mistake::ReportAtOnce),
            Direction::ToDevice => {
                self.parts.mutation.is(Mistake::ReportAtOnce) || self.parts.mutation.is(Mistake::SubmitAtOnce)
            }
        };
        while reports.next < reports.posted && (at_once || posting.has_ended(reports.next)) {
            if self.direction == Direction::ToDevice {
                let event = self.events.take()?;
                event.record(&self.behind)?;
                reports.job.sink.group_submitted(reports.next, DeviceEvent::new(event as _));
                if reports.next + 1 == reports.job.batch.ends.len() {
                    reports.job.submitted.set();
                }
            }
            reports.job.sink.group_ended(reports.next, Ok(()));
            reports.next += 1;
        }
        Ok(())
    }

    /// Reports a failure. Before that it says whether the adapter is of no use any more, so that the next batch finds it.
    fn fail(&mut self, reports: &mut Reports<'_>, failure: Failure) {
        let error = match failure {
            Failure::ByAdapter(error) => {
                if self.trouble.failed(&error) {
                    let _ = self.parts.unusable.set(error.clone());
                }
                error
            }
            Failure::Otherwise(error) => error,
        };
        for group in reports.next..reports.job.batch.ends.len() {
            let wrong = self.parts.mutation.is(Mistake::GoOnAfterFailure) && group > reports.next;
            reports.job.sink.group_ended(group, if wrong { Ok(()) } else { Err(error.clone()) });
        }
    }
}
