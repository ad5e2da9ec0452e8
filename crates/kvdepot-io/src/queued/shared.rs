//! State shared by the threads of an engine on queues of the kernel: who waits for work, who is stuck.
//!
//! Invariants, all under the one lock:
//! - a thread serves one class, so writes never keep reads from a thread;
//! - when a request is queued, a thread of its class with capacity is awake, or there is none with capacity;
//! - a thread is written off when one of its own steps passes a request's deadline, or when its capacity is used up by
//!   operations that the kernel holds past their deadlines. It takes nothing more, and ends when the kernel has
//!   returned everything.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::Result;
use kvdepot_core::limits::IO_WORKERS_WRITTEN_OFF_MAX;

use super::{QueuedConfig, thread};
use crate::engine::{Class, Request};
use crate::intake::{self, Intake};
use crate::kernel::{MakeQueue, Wake};
use crate::watchdog::{Found, Stuck, Watched};

/// The longest time for a step that begins after its request's deadline.
const STEP_MAX: Duration = Duration::from_secs(1);

/// How long a thread whose queue broke is not replaced: the first and the last value when queues keep breaking.
const REPLACE_AFTER: Duration = Duration::from_millis(50);
const REPLACE_AFTER_MAX: Duration = Duration::from_secs(10);
/// Breaks that are further apart do not count as a series.
const BREAKS_APART: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Thread {
    class: Class,
    wake: Arc<Wake>,
    /// With how many requests in flight it sleeps and would take more; `None` while it is awake or full.
    asleep: Option<usize>,
    /// When its current step should be finished.
    step_until: Option<Instant>,
    written_off: bool,
}

type State = intake::State<Threads>;

#[derive(Debug, Default)]
pub(super) struct Threads {
    by_number: HashMap<usize, Thread>,
    numbered: usize,
    /// Classes of threads to be replaced, and the earliest time for it.
    replace: Vec<(Class, Instant)>,
    /// Number of breaks in the current series, and the time of the last one.
    breaks: u32,
    broke_at: Option<Instant>,
}

/// State shared by the threads of one engine.
pub(super) struct Shared {
    pub(super) name: &'static str,
    pub(super) config: QueuedConfig,
    pub(super) make: Box<MakeQueue>,
    pub(super) intake: Intake<Threads>,
}

/// The next action of a thread.
#[expect(
    clippy::large_enum_variant,
    reason = "each lives for one step of a thread; a box would cost an allocation"
)]
pub(super) enum Next {
    /// Begin this request.
    Begin(Request),
    /// Wait for completions.
    Wait,
    /// Terminate.
    Stop,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("name", &self.name).field("intake", &self.intake).finish()
    }
}

impl Shared {
    pub(super) fn new(name: &'static str, config: QueuedConfig, make: Box<MakeQueue>) -> Self {
        let intake = Intake::new(config.queue_depth, Threads::default());
        Self { name, config, make, intake }
    }

    pub(super) fn submit(&self, batch: Vec<Request>) {
        let mut woken = Vec::new();
        let refused = self.intake.admit(batch, |state, class| woken.extend(state.rouse(class)));
        woken.iter().for_each(|wake| wake.wake());
        for (request, error) in refused {
            request.fail(error);
        }
    }

    /// Registers a thread and returns its number.
    pub(super) fn enter(&self, class: Class, wake: Arc<Wake>) -> usize {
        let mut state = self.intake.lock();
        let threads = &mut state.own;
        let number = threads.numbered;
        threads.numbered += 1;
        let thread = Thread { class, wake, asleep: None, step_until: None, written_off: false };
        threads.by_number.insert(number, thread);
        number
    }

    /// Returns the next action of a thread with `flights` requests in flight.
    pub(super) fn next(&self, number: usize, flights: usize, has_room: bool) -> Next {
        let mut state = self.intake.lock();
        let State { desk, own: threads, .. } = &mut *state;
        let Some(thread) = threads.by_number.get_mut(&number) else { return Next::Stop };
        thread.step_until = None;
        if has_room && !thread.written_off {
            let class = thread.class;
            if let Some(request) = desk.take(class) {
                thread.step_until = Some(request.deadline);
                thread.asleep = None;
                let next = (desk.waiting(class) > 0).then(|| state.rouse(class)).flatten();
                drop(state);
                if let Some(wake) = next {
                    wake.wake();
                }
                return Next::Begin(request);
            }
        }
        if flights == 0 && (thread.written_off || desk.is_closed()) {
            return Next::Stop;
        }
        thread.asleep = (has_room && !thread.written_off).then_some(flights);
        Next::Wait
    }

    /// Notes that a thread is about to take steps of its own for a request.
    pub(super) fn step(&self, number: usize, deadline: Instant) {
        let until = deadline.max(Instant::now() + STEP_MAX);
        let mut state = self.intake.lock();
        if let Some(thread) = state.own.by_number.get_mut(&number) {
            thread.asleep = None;
            thread.step_until = Some(until);
        }
        self.intake.watch_by(&mut state, until);
    }

    /// Notes that a request handed out by `next` has completed.
    pub(super) fn ended(&self) {
        self.intake.ended(&mut self.intake.lock());
    }

    /// Writes off a thread at capacity whose requests are all past their deadline, so that another one replaces it.
    /// Returns `false` if too many threads are written off.
    pub(super) fn is_clogged(&self, number: usize) -> bool {
        let mut state = self.intake.lock();
        let written_off = state.write_off(number);
        if written_off {
            self.intake.watch_by(&mut state, Instant::now());
        }
        written_off
    }

    /// Removes a thread whose queue has become useless. Another one replaces it after a pause.
    pub(super) fn retire(&self, number: usize) {
        let mut state = self.intake.lock();
        let Some(thread) = state.own.by_number.remove(&number) else { return };
        if thread.written_off {
            // It has been replaced already.
            state.written_off -= 1;
            return;
        }
        let now = Instant::now();
        let at = now + state.own.pause(now);
        state.own.replace.push((thread.class, at));
        self.intake.watch_by(&mut state, at);
    }

    /// Notes that a thread terminates.
    pub(super) fn leave(&self, number: usize) {
        let mut state = self.intake.lock();
        if let Some(thread) = state.own.by_number.remove(&number) {
            state.written_off -= usize::from(thread.written_off);
        }
    }

    /// Ends the engine.
    pub(super) fn close(&self) {
        self.intake.close(|state| state.own.by_number.values().for_each(|thread| thread.wake.wake()));
    }
}

impl Watched for Shared {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn watch(&self) -> Found {
        self.intake.watch(|state, now| {
            let stuck =
                |thread: &Thread| !thread.written_off && thread.step_until.is_some_and(|at| at <= now);
            let threads = state.own.by_number.iter();
            let late: Vec<usize> =
                threads.filter(|(_, thread)| stuck(thread)).map(|(number, _)| *number).collect();
            for number in late {
                state.write_off(number);
            }
            (state.own.due(now), state.own.next_deadline())
        })
    }

    fn expired_ended(&self) {
        self.intake.expired_ended();
    }

    fn replace(self: &Arc<Self>, stuck: Stuck) -> Result<()> {
        let class = stuck.unwrap_or(Class::Read);
        let replaced = thread::replace(self, class);
        if replaced.is_err() {
            let mut state = self.intake.lock();
            let now = Instant::now();
            let at = now + state.own.pause(now);
            state.own.replace.push((class, at));
            self.intake.watch_by(&mut state, at);
        }
        replaced
    }
}

impl State {
    /// Returns the wake of the idlest sleeping thread of the class, for a queued request.
    fn rouse(&mut self, class: Class) -> Option<Arc<Wake>> {
        let able = self.own.by_number.values_mut().filter(|t| t.class == class && !t.written_off);
        let thread = able.filter(|t| t.asleep.is_some()).min_by_key(|t| t.asleep)?;
        thread.asleep = None;
        Some(Arc::clone(&thread.wake))
    }

    fn write_off(&mut self, number: usize) -> bool {
        let Some(thread) = self.own.by_number.get_mut(&number) else { return false };
        if thread.written_off || self.written_off >= IO_WORKERS_WRITTEN_OFF_MAX {
            return thread.written_off;
        }
        thread.written_off = true;
        thread.asleep = None;
        self.written_off += 1;
        self.own.replace.push((thread.class, Instant::now()));
        true
    }
}

impl Threads {
    /// Takes the classes of threads that are to be replaced now.
    fn due(&mut self, now: Instant) -> Vec<Stuck> {
        let (due, later) = self.replace.drain(..).partition::<Vec<_>, _>(|(_, at)| *at <= now);
        self.replace = later;
        due.into_iter().map(|(class, _)| Some(class)).collect()
    }

    /// Returns the pause before a thread that ends now, or could not be started, is replaced.
    fn pause(&mut self, now: Instant) -> Duration {
        let apart = self.broke_at.is_none_or(|at| now.saturating_duration_since(at) > BREAKS_APART);
        self.breaks = if apart { 0 } else { self.breaks.saturating_add(1) };
        self.broke_at = Some(now);
        (REPLACE_AFTER * 2_u32.pow(self.breaks.min(16))).min(REPLACE_AFTER_MAX)
    }

    /// Returns the next time to check: steps of threads that can still be written off, and due replacements.
    fn next_deadline(&self) -> Option<Instant> {
        let able = self.by_number.values().filter(|thread| !thread.written_off);
        let steps = able.filter_map(|thread| thread.step_until);
        let replacements = self.replace.iter().map(|(_, at)| *at);
        steps.chain(replacements).min()
    }
}
