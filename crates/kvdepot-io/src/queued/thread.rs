//! A thread with a queue of the kernel: begins requests, and goes on with them as completions come.

use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, bounded};
use kvdepot_core::limits::{IO_FLIGHT_BYTES_MAX, IO_FLIGHTS_MAX};
use kvdepot_core::{Error, Result};

use super::flight::{Flight, Step, start as begin};
use super::shared::{Next, Shared};
use crate::engine::{Class, Request};
use crate::kernel::{Completion, Entry, KernelQueue, Wake, Work};

/// Token of the operation that waits for being woken.
const WAKE: u64 = 0;

/// Operations that a thread has with the kernel at most: its requests', and the one that waits for being woken.
const OPERATIONS: usize = IO_FLIGHTS_MAX + 1;

/// Starts a thread; what comes back tells whether it could make its queue.
pub(super) fn start(shared: &Arc<Shared>, class: Class) -> Result<Receiver<Result<()>>> {
    let wake = Arc::new(Wake::new()?);
    let (tell, told) = bounded(1);
    let mine = Arc::clone(shared);
    let run = move || match (mine.make)(OPERATIONS) {
        Ok(queue) => {
            // Entered before anyone hears that the thread is there.
            let number = mine.enter(class, Arc::clone(&wake));
            let _ = tell.send(Ok(()));
            Thread::new(&mine, (number, class), wake, queue).run();
            mine.leave(number);
        }
        Err(e) => {
            let error = Error::io("cannot make a queue of the kernel for I/O", e).with("engine", mine.name);
            tracing::debug!(%error, "an I/O thread could not start");
            let _ = tell.send(Err(error));
        }
    };
    std::thread::Builder::new()
        .name(shared.config.name.clone())
        .spawn(run)
        .map_err(|e| Error::io("cannot start an I/O thread", e))?;
    Ok(told)
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
    queue: ManuallyDrop<Box<dyn KernelQueue>>,
}

/// Why a thread ends: its queue takes and gives nothing any more.
struct Broken(std::io::Error);

impl<'a> Thread<'a> {
    fn new(
        shared: &'a Shared,
        (number, class): (usize, Class),
        wake: Arc<Wake>,
        queue: Box<dyn KernelQueue>,
    ) -> Self {
        // A write that is prepared may wait for the room of one that ends: that must not be its own thread's to end.
        let flights_max = if class == Class::Write { 1 } else { IO_FLIGHTS_MAX };
        let flights = ManuallyDrop::new(HashMap::new());
        let queue = ManuallyDrop::new(queue);
        Self { shared, number, flights_max, wake, wake_armed: false, flights, bytes: 0, token: WAKE, queue }
    }

    fn run(mut self) {
        if let Err(Broken(error)) = self.work() {
            let (engine, requests) = (self.shared.name, self.flights.len());
            tracing::error!(
                %error, engine, requests,
                "an I/O queue of the kernel broke: what it held never ends, and its memory is kept"
            );
            self.shared.is_clogged(self.number);
            // Only what is with the kernel is kept for ever; the thread's place is given to another one.
        }
    }

    fn work(&mut self) -> std::result::Result<(), Broken> {
        let mut came = Vec::new();
        loop {
            loop {
                match self.shared.next(self.number, self.flights.len(), self.has_room()) {
                    Next::Begin(request) => self.begin(request)?,
                    Next::Wait => break,
                    Next::Stop => return Ok(()),
                }
            }
            self.arm()?;
            let timeout = self.next_deadline().map(|at| at.saturating_duration_since(Instant::now()));
            self.queue.wait(timeout, &mut came).map_err(Broken)?;
            for completion in came.drain(..) {
                self.take(completion)?;
            }
            self.give_up_late();
        }
    }

    fn begin(&mut self, request: Request) -> std::result::Result<(), Broken> {
        tracing::trace!(?request, "begin");
        let buffered = self.queue.takes_buffered_reads();
        // A panic in someone's callback must not cost a thread: the others would starve one by one.
        let step = catch_unwind(AssertUnwindSafe(|| begin(request, buffered)));
        self.go_on(step)?;
        self.queue.submit().map_err(Broken)
    }

    fn go_on(&mut self, step: std::thread::Result<Step>) -> std::result::Result<(), Broken> {
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

    fn push(&mut self, flight: Box<Flight>) -> std::result::Result<(), Broken> {
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
                // The kernel has not seen this one.
                let error = Error::io("an I/O queue of the kernel broke", std::io::Error::from(e.kind()));
                let step = catch_unwind(AssertUnwindSafe(|| flight.abandon(error)));
                if step.is_err() {
                    tracing::error!("an I/O callback panicked; its thread ends anyway");
                }
                self.shared.ended();
                Err(Broken(e))
            }
        }
    }

    fn arm(&mut self) -> std::result::Result<(), Broken> {
        if self.wake_armed {
            return Ok(());
        }
        self.wake_armed = true;
        let entry = Entry { token: WAKE, fd: self.wake.fd(), work: Work::Readable, pieces: &[], offset: 0 };
        // SAFETY: no memory is named; the thread keeps the descriptor longer than its queue.
        unsafe { self.queue.push(entry) }.map_err(Broken)
    }

    fn take(&mut self, completion: Completion) -> std::result::Result<(), Broken> {
        let Completion { token, result } = completion;
        if token == WAKE {
            self.wake_armed = false;
            self.wake.clear();
            return Ok(());
        }
        let Some(flight) = self.flights.remove(&token) else { return Ok(()) };
        self.bytes -= flight.bytes();
        self.shared.step(self.number, flight.deadline);
        let step = catch_unwind(AssertUnwindSafe(|| flight.advance(result, Instant::now())));
        self.go_on(step)
    }

    fn has_room(&self) -> bool {
        self.flights.len() < self.flights_max && self.bytes < IO_FLIGHT_BYTES_MAX
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.flights.values().filter(|flight| !flight.cancelled).map(|flight| flight.deadline).min()
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
