//! Threads for tiers whose calls block, such as a file system's `stat` or a client library without an asynchronous API.
//!
//! Calls wait in one queue for a bounded number of threads, which are started on demand and exit after being idle for a
//! while. Every call is answered: with its result, at its deadline, or immediately if the queue is full. A call that
//! hangs keeps its thread, but does not affect others until all threads hang.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::Done;

/// Time after which an idle thread exits.
const IDLE_MAX: Duration = Duration::from_secs(1);

/// Limits of the calls of one tier.
#[derive(Clone, Debug)]
pub struct BlockingConfig {
    /// Name of the threads; the system shows 13 bytes of it.
    pub name: String,
    /// Maximum number of calls that run at a time.
    pub threads_max: usize,
    /// Maximum number of calls that wait for a thread.
    pub queue_max: usize,
}

/// Handling of a call that has begun but has not completed by its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Late {
    /// It is answered with `Timeout`, and its result is dropped.
    Answer,
    /// It is answered when it completes, because it uses the caller's memory.
    Wait,
}

/// Runs blocking calls.
pub struct BlockingCalls {
    shared: Arc<Shared>,
}

struct Shared {
    config: BlockingConfig,
    state: Mutex<State>,
    /// Signalled when a call is queued, and on shutdown.
    queued: Condvar,
    /// Signalled when an earlier deadline is added, and on shutdown.
    sooner: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<(Key, Arc<dyn Call>)>,
    /// All calls that are not finished.
    open: BTreeMap<Key, Arc<dyn Call>>,
    threads: usize,
    idle: usize,
    calls: u64,
    is_watched: bool,
    is_stopping: bool,
}

/// A call's deadline, and its number.
type Key = (Instant, u64);

/// A call of any type.
trait Call: Send + Sync {
    /// Runs the call, unless it was abandoned.
    fn run(&self);

    /// Answers the call if it has not begun, or if its completion is not waited for.
    fn give_up(&self, error: &dyn Fn() -> Error);
}

struct Typed<T, W> {
    work: Mutex<Option<W>>,
    done: Mutex<Option<Done<T>>>,
    late: Late,
}

impl<T: Send, W: FnOnce() -> Result<T> + Send> Typed<T, W> {
    fn answer(&self, outcome: impl FnOnce() -> Result<T>) {
        let done = self.done.lock().take();
        if let Some(done) = done {
            done(outcome());
        }
    }
}

impl<T: Send, W: FnOnce() -> Result<T> + Send> Call for Typed<T, W> {
    fn run(&self) {
        let work = self.work.lock().take();
        let Some(work) = work else { return };
        let outcome = catch_unwind(AssertUnwindSafe(work));
        let panicked =
            |_| Err(Error::new(ErrorKind::Io, "a call of a tier panicked; its log line says where"));
        self.answer(|| outcome.unwrap_or_else(panicked));
    }

    fn give_up(&self, error: &dyn Fn() -> Error) {
        // Whoever takes the work decides: this call, or the thread that runs it.
        let work = self.work.lock().take();
        if work.is_some() || self.late == Late::Answer {
            drop(work);
            self.answer(|| Err(error()));
        }
    }
}

impl BlockingCalls {
    /// Makes the calls without starting a thread.
    pub fn new(config: BlockingConfig) -> Self {
        let (state, queued, sooner) = (Mutex::default(), Condvar::new(), Condvar::new());
        Self { shared: Arc::new(Shared { config, state, queued, sooner }) }
    }

    /// Runs `work` on a thread. `done` is called by `deadline` in any case; later results are dropped.
    pub fn run<T: Send + 'static>(
        &self,
        deadline: Instant,
        work: impl FnOnce() -> Result<T> + Send + 'static,
        done: Done<T>,
    ) {
        self.begin(deadline, Late::Answer, work, done);
    }

    /// Like [`Self::run`], for work that uses the caller's memory, such as a slot. It is abandoned at `deadline` only
    /// if it has not begun; otherwise `done` is called when it completes.
    pub fn run_to_end<T: Send + 'static>(
        &self,
        deadline: Instant,
        work: impl FnOnce() -> Result<T> + Send + 'static,
        done: Done<T>,
    ) {
        self.begin(deadline, Late::Wait, work, done);
    }

    fn begin<T: Send + 'static>(
        &self,
        deadline: Instant,
        late: Late,
        work: impl FnOnce() -> Result<T> + Send + 'static,
        done: Done<T>,
    ) {
        let call = Typed { work: Mutex::new(Some(work)), done: Mutex::new(Some(done)), late };
        let call: Arc<dyn Call> = Arc::new(call);
        if deadline <= Instant::now() {
            return call.give_up(&|| self.shared.late());
        }
        if let Err(error) = self.shared.enter(deadline, &call) {
            call.give_up(&|| error.clone());
        }
    }
}

impl Drop for BlockingCalls {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.is_stopping = true;
        let waiting = std::mem::take(&mut state.queue);
        waiting.iter().for_each(|(key, _)| drop(state.open.remove(key)));
        drop(state);
        self.shared.queued.notify_all();
        self.shared.sooner.notify_all();
        for (_, call) in waiting {
            call.give_up(&|| Error::new(ErrorKind::Closed, "the tier is closing"));
        }
    }
}

impl Shared {
    fn late(&self) -> Error {
        Error::new(ErrorKind::Timeout, "a call of a tier did not end by its deadline")
            .with("threads", &self.config.name)
    }

    /// Queues a call and ensures that a thread takes it.
    fn enter(self: &Arc<Self>, deadline: Instant, call: &Arc<dyn Call>) -> Result<()> {
        let mut state = self.state.lock();
        if state.queue.len() >= self.config.queue_max {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "too many calls wait for a tier that does not answer",
            )
            .with("threads", &self.config.name)
            .with("queue_max", self.config.queue_max));
        }
        state.calls += 1;
        let key = (deadline, state.calls);
        if !state.is_watched {
            self.spawn("-t", Self::watch)?;
            state.is_watched = true;
        }
        if state.idle <= state.queue.len() && state.threads < self.config.threads_max {
            match self.spawn("", Self::work) {
                Ok(()) => state.threads += 1,
                Err(error) if state.threads == 0 => return Err(error),
                Err(_) => {}
            }
        }
        state.queue.push_back((key, Arc::clone(call)));
        let is_next = state.open.first_key_value().is_none_or(|(first, _)| key < *first);
        state.open.insert(key, Arc::clone(call));
        drop(state);
        self.queued.notify_one();
        if is_next {
            self.sooner.notify_one();
        }
        Ok(())
    }

    fn spawn(self: &Arc<Self>, suffix: &str, body: fn(&Self)) -> Result<()> {
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name(format!("{}{suffix}", self.config.name));
        let started = thread.spawn(move || body(&shared));
        started.map(drop).map_err(|e| {
            Error::io("cannot start a thread for a tier's calls", e).with("thread", &self.config.name)
        })
    }

    /// Runs calls; the body of a worker thread.
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some((key, call)) = state.queue.pop_front() {
                MutexGuard::unlocked(&mut state, || call.run());
                state.open.remove(&key);
                continue;
            }
            if state.is_stopping {
                break;
            }
            state.idle += 1;
            let idled = self.queued.wait_for(&mut state, IDLE_MAX).timed_out();
            state.idle -= 1;
            if idled && state.queue.is_empty() {
                break;
            }
        }
        state.threads -= 1;
    }

    /// Enforces the deadlines; the body of the watching thread.
    fn watch(&self) {
        let mut state = self.state.lock();
        loop {
            let first = state.open.first_key_value().map(|(key, _)| *key);
            match first {
                Some(key) if key.0 <= Instant::now() => {
                    let call = state.open.remove(&key);
                    state.queue.retain(|(queued, _)| *queued != key);
                    MutexGuard::unlocked(&mut state, || {
                        if let Some(call) = call {
                            call.give_up(&|| self.late());
                        }
                    });
                }
                Some(key) => drop(self.sooner.wait_until(&mut state, key.0)),
                None if state.is_stopping => break,
                None => {
                    let idled = self.sooner.wait_for(&mut state, IDLE_MAX).timed_out();
                    if idled && state.open.is_empty() {
                        break;
                    }
                }
            }
        }
        state.is_watched = false;
    }
}

impl fmt::Debug for BlockingCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.state.lock();
        f.debug_struct("BlockingCalls")
            .field("name", &self.shared.config.name)
            .field("threads", &state.threads)
            .field("queued", &state.queue.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// A deadline that only a hang reaches.
    const HANG: Duration = Duration::from_secs(60);
    /// A deadline that passes while a call hangs.
    const SHORT: Duration = Duration::from_millis(20);

    fn calls(threads_max: usize, queue_max: usize) -> BlockingCalls {
        BlockingCalls::new(BlockingConfig { name: "kvd-test".to_owned(), threads_max, queue_max })
    }

    fn far() -> Instant {
        Instant::now() + HANG
    }

    fn answer<T: Send + 'static>() -> (Done<T>, Receiver<Result<T>>) {
        let (send, receive) = channel();
        (Box::new(move |outcome| drop(send.send(outcome))), receive)
    }

    fn kind<T: std::fmt::Debug>(receive: &Receiver<Result<T>>) -> ErrorKind {
        receive.recv_timeout(HANG).expect("every call is answered").expect_err("it cannot succeed").kind()
    }

    /// Starts a call that completes when the sender is dropped or sends.
    fn hang(calls: &BlockingCalls, deadline: Instant) -> (Sender<()>, Receiver<Result<u32>>) {
        let ((let_go, held), (begun, begins)) = (channel::<()>(), channel());
        let (done, receive) = answer();
        let work = move || {
            begun.send(()).expect("the test waits");
            let _ = held.recv();
            Ok(7)
        };
        calls.run(deadline, work, done);
        begins.recv_timeout(HANG).expect("a thread takes it");
        (let_go, receive)
    }

    #[test]
    fn what_a_call_returns_is_its_answer() {
        let calls = calls(2, 8);
        let answers: Vec<_> = (0..8)
            .map(|n| {
                let (done, receive) = answer();
                calls.run(far(), move || Ok(n), done);
                receive
            })
            .collect();
        for (n, receive) in answers.iter().enumerate() {
            assert_eq!(receive.recv_timeout(HANG).expect("an answer").expect("a success"), n);
        }
    }

    #[test]
    fn a_call_that_hangs_is_answered_at_its_deadline_and_once() {
        let calls = calls(1, 8);
        let (let_go, held) = channel::<()>();
        let (done, receive) = answer::<u32>();
        let work = move || {
            let _ = held.recv();
            Ok(7)
        };
        calls.run(Instant::now() + SHORT, work, done);
        assert_eq!(kind(&receive), ErrorKind::Timeout);
        drop(let_go);
        assert!(receive.recv().is_err(), "answered twice");
    }

    #[test]
    fn many_calls_behind_one_that_hangs_cost_one_wait() {
        let calls = calls(1, 100);
        let (_let_go, _hung) = hang(&calls, far());
        let deadline = Instant::now() + SHORT;
        let waiting: Vec<_> = (0..100)
            .map(|_| {
                let (done, receive) = answer::<u32>();
                calls.run(deadline, || panic!("it must not begin after its deadline"), done);
                receive
            })
            .collect();
        assert!(waiting.iter().all(|receive| kind(receive) == ErrorKind::Timeout));
    }

    #[test]
    fn a_full_queue_answers_at_once() {
        let calls = calls(1, 1);
        let (_let_go, _hung) = hang(&calls, far());
        let (done, waits) = answer::<u32>();
        calls.run(far(), || Ok(1), done);
        let (done, refused) = answer::<u32>();
        calls.run(far(), || Ok(2), done);
        assert_eq!(kind(&refused), ErrorKind::Unavailable);
        assert!(waits.try_recv().is_err(), "the one before it still waits");
    }

    #[test]
    fn a_deadline_that_has_passed_begins_nothing() {
        let calls = calls(1, 1);
        let (done, receive) = answer::<u32>();
        calls.run(Instant::now(), || panic!("too late"), done);
        assert_eq!(kind(&receive), ErrorKind::Timeout);
    }

    #[test]
    fn work_with_the_callers_memory_is_answered_when_it_ends() {
        let calls = calls(2, 8);
        let ((let_go, held), (begun, begins)) = (channel::<()>(), channel());
        let (done, receive) = answer();
        let late = Instant::now() + 2 * SHORT;
        let work = move || {
            begun.send(()).expect("the test waits");
            let _ = held.recv();
            Ok(7)
        };
        calls.run_to_end(late, work, done);
        if begins.recv_timeout(HANG).is_err() {
            // The machine was so slow that the call never began.
            return assert_eq!(kind(&receive), ErrorKind::Timeout);
        }
        // Deadlines are handled in order: when this later one was answered, the earlier one had been checked.
        let (_let_go, later) = hang_until_late(&calls, late);
        assert_eq!(kind(&later), ErrorKind::Timeout);
        assert!(receive.try_recv().is_err(), "its memory is still in use");
        drop(let_go);
        assert_eq!(receive.recv_timeout(HANG).expect("an answer").expect("its own end"), 7);
    }

    /// Starts a call after a deadline that waits until it is abandoned.
    fn hang_until_late(calls: &BlockingCalls, deadline: Instant) -> (Sender<()>, Receiver<Result<u32>>) {
        let (let_go, held) = channel::<()>();
        let (done, receive) = answer();
        let work = move || {
            let _ = held.recv();
            Ok(7)
        };
        calls.run(deadline.max(Instant::now()) + SHORT, work, done);
        (let_go, receive)
    }

    #[test]
    fn a_panic_is_an_answer_and_the_thread_goes_on() {
        let calls = calls(1, 8);
        let (done, receive) = answer::<u32>();
        calls.run(far(), || panic!("a panic for a test"), done);
        assert_eq!(kind(&receive), ErrorKind::Io);
        let (done, receive) = answer();
        calls.run(far(), || Ok(3), done);
        assert_eq!(receive.recv_timeout(HANG).expect("an answer").expect("a success"), 3);
    }

    #[test]
    fn the_end_answers_what_waits() {
        let calls = calls(1, 8);
        let (let_go, hung) = hang(&calls, far());
        let (done, waits) = answer::<u32>();
        calls.run(far(), || panic!("the tier has closed"), done);
        drop(calls);
        assert_eq!(kind(&waits), ErrorKind::Closed);
        drop(let_go);
        assert_eq!(hung.recv_timeout(HANG).expect("an answer").expect("its own end"), 7);
    }
}
