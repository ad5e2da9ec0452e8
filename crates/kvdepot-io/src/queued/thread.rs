//! A thread with a queue of the kernel: begins requests, and continues them as completions arrive.

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

/// The token of the operation that waits for a wake-up.
const WAKE: u64 = 0;

/// Capacity of a thread's queue: its requests, and the operation that waits for a wake-up.
const OPERATIONS: usize = IO_FLIGHTS_MAX + 1;

/// The longest time for the proof of a queue.
const PROOF_MAX: Duration = Duration::from_secs(10);

/// How often a thread without a queue tries to make one.
const QUEUE_RETRY: Duration = Duration::from_secs(1);

type Queue = Box<dyn KernelQueue>;

/// Starts a thread. The returned channel reports whether it could make its queue.
pub(super) fn start(shared: &Arc<Shared>, class: Class) -> Result<Receiver<Result<()>>> {
    let (tell, told) = bounded(1);
    spawn(shared, move |shared, wake| match make(shared, &wake) {
        Ok(queue) => {
            // Registered before the caller learns that the thread runs.
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

/// Starts a thread as a replacement. It makes plain calls until it can make a queue.
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

/// Makes a queue and proves that it reports a wake-up: some systems let a queue be made and forbid its use, or cannot
/// poll with it. Clears `wake`.
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

/// Serves by plain calls until a queue can be made. Returns `None` if the thread should terminate first.
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
                    tracing::error!("an I/O callback panicked; its thread continues");
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
    /// The largest number of requests in flight.
    flights_max: usize,
    wake: Arc<Wake>,
    wake_armed: bool,
    /// By token. The kernel holds everything in here.
    flights: ManuallyDrop<HashMap<u64, Box<Flight>>>,
    bytes: usize,
    token: u64,
    queue: ManuallyDrop<Queue>,
    /// Whether the queue accepts nothing any more.
    is_broken: bool,
}

/// Why a thread terminates.
enum End {
    /// Its queue accepts nothing any more.
    Broken(std::io::Error),
    /// Its queue no longer reports wake-ups, and does everything else.
    Deaf(std::io::Error),
}

type Outcome = std::result::Result<(), End>;

impl<'a> Thread<'a> {
    fn new(shared: &'a Shared, (number, class): (usize, Class), wake: Arc<Wake>, queue: Queue) -> Self {
        // A write in preparation may wait for space that another write frees when it completes, so its own thread must
        // not be the one to complete it.
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
            // What the kernel has completed it no longer holds. The queue's error is known already.
            let _ = self.queue.wait(Some(Duration::ZERO), &mut came);
            let _ = self.take_all(&mut came);
            let requests = self.flights.len();
            tracing::error!(
                %error, engine, requests,
                "an I/O queue of the kernel broke: its requests never complete, and their memory is kept"
            );
            // The thread's place goes to a replacement.
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
                        // It completed immediately, as the next ones may: operations of the kernel must not wait for
                        // the last of them (P2).
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

    /// Completes what the kernel holds, and takes nothing more.
    fn finish(&mut self, came: &mut Vec<Completion>) -> Outcome {
        while !self.flights.is_empty() {
            self.reap(self.until_late(), came)?;
        }
        Ok(())
    }

    /// Waits for completions, at most this long, and continues their requests.
    fn reap(&mut self, timeout: Option<Duration>, came: &mut Vec<Completion>) -> Outcome {
        let waited = self.queue.wait(timeout, came).map_err(End::Broken);
        self.is_broken |= waited.is_err();
        let taken = self.take_all(came);
        waited.and(taken)?;
        self.give_up_late();
        Ok(())
    }

    /// Continues all of them, even if one finds that the queue is broken.
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
        // A panic in a callback must not cost a thread: the engine would run out of them one by one.
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
                tracing::error!("an I/O callback panicked; its thread continues");
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
        // SAFETY: the flight owns file, pieces and buffer. It goes to `flights`, which drops nothing until its
        // completion has arrived; the buffer's lender keeps all other users away from the memory until then.
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

    /// Fails a request of which the kernel holds nothing.
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

    /// Returns the time until the next of its requests passes its deadline.
    fn until_late(&self) -> Option<Duration> {
        let able = self.flights.values().filter(|flight| !flight.cancelled);
        able.map(|flight| flight.deadline.saturating_duration_since(Instant::now())).min()
    }

    /// Asks the kernel to cancel requests past their deadline. It keeps their memory until it has (P4).
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
            // SAFETY: dropped once, here; the kernel holds nothing of ours but the wait for a wake-up.
            unsafe {
                ManuallyDrop::drop(&mut self.queue);
                ManuallyDrop::drop(&mut self.flights);
            }
        } else {
            // The kernel may still write into their memory, so neither they nor the queue are ever dropped (P4).
            std::mem::forget(Arc::clone(&self.wake));
        }
    }
}
