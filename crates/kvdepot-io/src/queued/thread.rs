//! A thread with a queue of the kernel: begins requests, and goes on with them as completions come.

use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded};
use kvdepot_core::limits::{IO_FLIGHT_BYTES_MAX, IO_FLIGHTS_MAX};
use kvdepot_core::{Error, ErrorKind, Result};

use super::flight::{Flight, Step, start as begin};
use super::shared::{Next, Shared};
use crate::engine::{Class, Request};
use crate::kernel::{Completion, Entry, KernelQueue, Wake, Work};
use crate::transfer;

/// Token of the operation that waits for being woken.
const WAKE: u64 = 0;

/// Operations that a thread has with the kernel at most: its requests', and the one that waits for being woken.
const OPERATIONS: usize = IO_FLIGHTS_MAX + 1;

/// How long the proof of a queue may take.
const PROOF_MAX: Duration = Duration::from_secs(10);

/// How often a thread without a queue tries to make one.
const QUEUE_RETRY: Duration = Duration::from_secs(1);

type Queue = Box<dyn KernelQueue>;

/// Starts a thread; what comes back tells whether it could make its queue.
pub(super) fn start(shared: &Arc<Shared>, class: Class) -> Result<Receiver<Result<()>>> {
    let (tell, told) = bounded(1);
    spawn(shared, move |shared, wake| match make(shared, &wake) {
        Ok(queue) => {
            // Entered before anyone hears that the thread is there.
            let number = shared.enter(class, Arc::clone(&wake));
            let _ = tell.send(Ok(()));
            Thread::new(shared, (number, class), wake, queue).run();
            shared.leave(number);
        }
        Err(error) => {
            tracing::debug!(%error, "an I/O thread could not start");
            let _ = tell.send(Err(error));
        }
    })?;
    Ok(told)
}

/// Starts a thread in place of another one. It makes plain calls for as long as it can make no queue.
pub(super) fn replace(shared: &Arc<Shared>, class: Class) -> Result<()> {
    spawn(shared, move |shared, wake| {
        let number = shared.enter(class, Arc::clone(&wake));
        if let Some(queue) = plainly_until_queue(shared, number, &wake) {
            Thread::new(shared, (number, class), wake, queue).run();
        }
        shared.leave(number);
    })
}

fn spawn(shared: &Arc<Shared>, run: impl FnOnce(&Arc<Shared>, Arc<Wake>) + Send + 'static) -> Result<()> {
    let wake = Arc::new(Wake::new()?);
    let mine = Arc::clone(shared);
    std::thread::Builder::new()
        .name(shared.config.name.clone())
        .spawn(move || run(&mine, wake))
        .map(drop)
        .map_err(|e| Error::io("cannot start an I/O thread", e))
}

/// Makes a queue, and proves that it tells of a wake: some systems let a queue be made and forbid to use it, or cannot poll with
/// it. What `wake` told is forgotten.
fn make(shared: &Shared, wake: &Wake) -> Result<Queue> {
    let made = (shared.make)(OPERATIONS).and_then(|mut queue| prove(&mut *queue, wake).map(|()| queue));
    made.map_err(|e| Error::io("cannot make a queue of the kernel for I/O", e).with("engine", shared.name))
}

fn prove(queue: &mut dyn KernelQueue, wake: &Wake) -> std::io::Result<()> {
    wake.wake();
    // SAFETY: no memory is named; the thread keeps the descriptor longer than its queue.
    unsafe { queue.push(wait_for(wake)) }?;
    let (until, mut came) = (Instant::now() + PROOF_MAX, Vec::new());
    while came.is_empty() && Instant::now() < until {
        queue.wait(Some(until.saturating_duration_since(Instant::now())), &mut came)?;
    }
    wake.clear();
    match came.first().map(Completion::outcome) {
        Some(Ok(_)) => Ok(()),
        Some(Err(errno)) => Err(std::io::Error::from_raw_os_error(errno)),
        None => Err(std::io::ErrorKind::TimedOut.into()),
    }
}

fn wait_for(wake: &Wake) -> Entry<'static> {
    Entry { token: WAKE, fd: wake.fd(), work: Work::Readable, pieces: &[], offset: 0 }
}

/// Serves by plain calls until a queue can be made; `None` if the thread is to end first.
fn plainly_until_queue(shared: &Shared, number: usize, wake: &Wake) -> Option<Queue> {
    let mut retry_at = Instant::now();
    let mut told = false;
    loop {
        if Instant::now() >= retry_at {
            match make(shared, wake) {
                Ok(queue) => return Some(queue),
                Err(error) if !told => {
                    tracing::warn!(%error, "an I/O thread makes plain calls until it can make its queue");
                    told = true;
                }
                Err(error) => tracing::debug!(%error, "an I/O thread still makes plain calls"),
            }
            retry_at = Instant::now() + QUEUE_RETRY;
        }
        match shared.next(number, 0, true) {
            Next::Begin(request) => {
                if catch_unwind(AssertUnwindSafe(|| transfer::run(request))).is_err() {
                    tracing::error!("an I/O callback panicked; its thread goes on");
                }
                shared.ended();
            }
            Next::Wait => {
                wake.wait(retry_at.saturating_duration_since(Instant::now()));
                wake.clear();
            }
            Next::Stop => return None,
        }
    }
}

struct Thread<'a> {
    shared: &'a Shared,
    number: usize,
    /// Requests that it has under way at most.
    flights_max: usize,
    wake: Arc<Wake>,
    wake_armed: bool,
    /// By token. What is in here is with the kernel.
    flights: ManuallyDrop<HashMap<u64, Box<Flight>>>,
    bytes: usize,
    token: u64,
    queue: ManuallyDrop<Queue>,
    /// Whether the queue takes nothing any more.
    is_broken: bool,
}

/// Why a thread ends.
enum End {
    /// Its queue takes nothing any more.
    Broken(std::io::Error),
    /// Its queue does not tell that the thread is to wake, and does all else.
    Deaf(std::io::Error),
}

type Outcome = std::result::Result<(), End>;

impl<'a> Thread<'a> {
    fn new(shared: &'a Shared, (number, class): (usize, Class), wake: Arc<Wake>, queue: Queue) -> Self {
        // A write that is prepared may wait for the room of one that ends: that must not be its own thread's to end.
        let flights_max = if class == Class::Write { 1 } else { IO_FLIGHTS_MAX };
        let flights = ManuallyDrop::new(HashMap::new());
        let queue = ManuallyDrop::new(queue);
        let (wake_armed, bytes, token, is_broken) = (false, 0, WAKE, false);
        Self { shared, number, flights_max, wake, wake_armed, flights, bytes, token, queue, is_broken }
    }

    fn run(mut self) {
        let mut came = Vec::new();
        let Err(end) = self.work(&mut came) else { return };
        let engine = self.shared.name;
        let ended = match end {
            End::Deaf(error) => {
                tracing::error!(%error, engine, "an I/O thread cannot be woken: it ends what it has");
                self.shared.retire(self.number);
                self.finish(&mut came)
            }
            broken => Err(broken),
        };
        if let Err(End::Broken(error) | End::Deaf(error)) = ended {
            self.is_broken = true;
            // What the kernel has completed is no longer its own. The queue's error is known.
            let _ = self.queue.wait(Some(Duration::ZERO), &mut came);
            let _ = self.take_all(&mut came);
            let requests = self.flights.len();
            tracing::error!(
                %error, engine, requests,
                "an I/O queue of the kernel broke: what it held never ends, and its memory is kept"
            );
            // Its place is given to another thread.
            self.shared.retire(self.number);
        }
    }

    fn work(&mut self, came: &mut Vec<Completion>) -> Outcome {
        loop {
            loop {
                match self.shared.next(self.number, self.flights.len(), self.has_room()) {
                    Next::Begin(request) => {
                        let under_way = self.flights.len();
                        self.begin(request)?;
                        // It ended at once, as the next ones may: what is with the kernel must not wait for the last of them (P2).
                        if under_way > 0 && self.flights.len() == under_way {
                            self.reap(Some(Duration::ZERO), came)?;
                        }
                    }
                    Next::Wait => break,
                    Next::Stop => return Ok(()),
                }
            }
            self.arm()?;
            self.reap(self.until_late(), came)?;
        }
    }

    /// Ends what is with the kernel, and takes nothing more.
    fn finish(&mut self, came: &mut Vec<Completion>) -> Outcome {
        while !self.flights.is_empty() {
            self.reap(self.until_late(), came)?;
        }
        Ok(())
    }

    /// Waits for completions, at most this long, and goes on with what has come.
    fn reap(&mut self, timeout: Option<Duration>, came: &mut Vec<Completion>) -> Outcome {
        let waited = self.queue.wait(timeout, came).map_err(End::Broken);
        self.is_broken |= waited.is_err();
        let taken = self.take_all(came);
        waited.and(taken)?;
        self.give_up_late();
        Ok(())
    }

    /// Goes on with all of them, also when one finds that the queue is broken.
    fn take_all(&mut self, came: &mut Vec<Completion>) -> Outcome {
        let mut outcome = Ok(());
        for completion in came.drain(..) {
            let taken = self.take(completion);
            outcome = outcome.and(taken);
        }
        outcome
    }

    fn begin(&mut self, request: Request) -> Outcome {
        tracing::trace!(?request, "begin");
        let buffered = self.queue.takes_buffered_reads();
        // A panic in someone's callback must not cost a thread: the others would starve one by one.
        let step = catch_unwind(AssertUnwindSafe(|| begin(request, buffered)));
        self.go_on(step)?;
        self.queue.submit().map_err(End::Broken)
    }

    fn go_on(&mut self, step: std::thread::Result<Step>) -> Outcome {
        match step {
            Ok(Step::Submit(flight)) => self.push(flight),
            Ok(Step::Ended) => {
                self.shared.ended();
                Ok(())
            }
            Err(_) => {
                tracing::error!("an I/O callback panicked; its thread goes on");
                self.shared.ended();
                Ok(())
            }
        }
    }

    fn push(&mut self, flight: Box<Flight>) -> Outcome {
        if self.is_broken {
            self.abandon(flight, "its thread ended before the rest of it");
            return Ok(());
        }
        self.token += 1;
        let (token, fd, work, offset) = (self.token, flight.fd(), flight.work, flight.offset);
        let entry = Entry { token, fd, work, pieces: &flight.pieces, offset };
        // SAFETY: the flight owns file, pieces and buffer. It goes to `flights`, which drops nothing, until its completion has
        // come; the buffer's lender keeps everybody else away from the memory as long.
        match unsafe { self.queue.push(entry) } {
            Ok(()) => {
                self.bytes += flight.bytes();
                self.flights.insert(token, flight);
                Ok(())
            }
            Err(e) => {
                self.is_broken = true;
                // The kernel has not seen this one.
                self.abandon(flight, &e.kind().to_string());
                Err(End::Broken(e))
            }
        }
    }

    /// Ends a request that the kernel has nothing of.
    fn abandon(&self, flight: Box<Flight>, why: &str) {
        let error = Error::new(ErrorKind::Io, "an I/O queue of the kernel broke").with("why", why);
        if catch_unwind(AssertUnwindSafe(|| flight.abandon(error))).is_err() {
            tracing::error!("an I/O callback panicked; its thread ends anyway");
        }
        self.shared.ended();
    }

    fn arm(&mut self) -> Outcome {
        if self.wake_armed {
            return Ok(());
        }
        self.wake_armed = true;
        // SAFETY: no memory is named; the thread keeps the descriptor longer than its queue.
        unsafe { self.queue.push(wait_for(&self.wake)) }.map_err(End::Broken)
    }

    fn take(&mut self, completion: Completion) -> Outcome {
        if completion.token == WAKE {
            self.wake_armed = false;
            self.wake.clear();
            let deaf = |errno| End::Deaf(std::io::Error::from_raw_os_error(errno));
            return completion.outcome().map(drop).map_err(deaf);
        }
        let Some(flight) = self.flights.remove(&completion.token) else { return Ok(()) };
        self.bytes -= flight.bytes();
        self.shared.step(self.number, flight.deadline);
        let step = catch_unwind(AssertUnwindSafe(|| flight.advance(completion, Instant::now())));
        self.go_on(step)
    }

    fn has_room(&self) -> bool {
        self.flights.len() < self.flights_max && self.bytes < IO_FLIGHT_BYTES_MAX
    }

    /// How long until the next of its requests is late.
    fn until_late(&self) -> Option<Duration> {
        let able = self.flights.values().filter(|flight| !flight.cancelled);
        able.map(|flight| flight.deadline.saturating_duration_since(Instant::now())).min()
    }

    /// Asks the kernel to give up what is past its deadline. The memory stays with it until it has (P4).
    fn give_up_late(&mut self) {
        let now = Instant::now();
        for (token, flight) in self.flights.iter_mut() {
            if !flight.cancelled && flight.deadline <= now {
                flight.cancelled = true;
                self.queue.cancel(*token);
            }
        }
        if !self.has_room() && self.flights.values().all(|flight| flight.cancelled) {
            self.shared.is_clogged(self.number);
        }
    }
}

impl Drop for Thread<'_> {
    fn drop(&mut self) {
        if self.flights.is_empty() {
            // SAFETY: dropped once, here; nothing of ours is with the kernel but the wait for being woken.
            unsafe {
                ManuallyDrop::drop(&mut self.queue);
                ManuallyDrop::drop(&mut self.flights);
            }
        } else {
            // The kernel may still write into their memory: neither they nor the queue go, ever (P4).
            std::mem::forget(Arc::clone(&self.wake));
        }
    }
}
