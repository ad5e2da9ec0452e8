//! Requests to the helper, and their answers.
//!
//! Every call ends by its deadline. What a call lends to the helper, an extent of the staging memory, stays lent until
//! the answer comes or the helper is dead, whoever still waits for it (P1, P4).

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use kvdepot_core::limits::{MOONCAKE_HANG_MS, MOONCAKE_PENDING_MAX, MOONCAKE_SEND_MS};
use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

use super::protocol::{MooncakeAnswer, MooncakeOp, MooncakeRequest, encode};
use super::staging::Extent;

/// Called when a request that nobody waits for any more has ended.
pub(super) type Late = Box<dyn FnOnce() + Send>;

/// The helper as its callers see it.
#[derive(Debug, Default)]
pub(super) struct Link {
    state: Mutex<State>,
    /// Signalled when the helper comes up, and at the end.
    changed: Condvar,
    /// One frame at a time.
    sending: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    up: Option<Arc<UnixStream>>,
    requests: u64,
    pending: HashMap<u64, Pending>,
    is_stopping: bool,
    /// Starts that failed, and helpers that ended.
    failures: u64,
    last_error: Option<Error>,
    master: String,
    /// The tries to send since the helper last took bytes.
    unsent: Option<Unsent>,
}

/// Tries to send that had no success.
#[derive(Clone, Copy, Debug)]
struct Unsent {
    first: Instant,
    /// When the last one ended; `None` while one is under way.
    last: Option<Instant>,
}

struct Pending {
    answer: SyncSender<Result<(MooncakeAnswer, Option<Extent>)>>,
    keys: usize,
    lent: Option<Extent>,
    deadline: Instant,
    late: Option<Late>,
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pending({} keys)", self.keys)
    }
}

impl Pending {
    /// Releases what was lent, unless the caller still waits for it.
    fn end(self, outcome: Result<MooncakeAnswer>) {
        let lent = self.lent;
        if let Err(unheard) = self.answer.send(outcome.map(|answer| (answer, lent))) {
            drop(unheard);
        }
        if let Some(late) = self.late {
            late();
        }
    }
}

/// A request without its number.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) op: MooncakeOp,
    pub(super) keys: Vec<String>,
    pub(super) at: Vec<usize>,
    pub(super) bytes: Vec<usize>,
}

/// A call's codes, with the memory that it lent.
pub(super) struct Answered {
    pub(super) codes: Vec<i64>,
    pub(super) lent: Option<Extent>,
}

/// The end of a call without codes.
pub(super) struct Failed {
    pub(super) error: Error,
    /// Whether the helper may still carry it out. `late` is called when it cannot any more.
    pub(super) is_open: bool,
}

/// The failure of a send.
enum SendError {
    /// Nothing of it was sent.
    Whole(Error),
    /// A part of it may have been sent: no other request can follow it.
    Rest(Error),
}

impl Link {
    /// Returns whether there is a helper that has connected to Mooncake.
    pub(super) fn is_up(&self) -> bool {
        self.state.lock().up.is_some()
    }

    /// Waits for a helper that is starting for the first time, until the deadline. After a failure it does not wait: an
    /// engine's start must not last as long as Mooncake is away.
    pub(super) fn wait_until_up(&self, deadline: Instant) -> Result<()> {
        let mut state = self.state.lock();
        while state.up.is_none() {
            if state.is_stopping
                || state.last_error.is_some()
                || self.changed.wait_until(&mut state, deadline).timed_out()
            {
                return Err(state.away());
            }
        }
        Ok(())
    }

    /// Sends a request and waits for its codes until the deadline. `late` is called if the caller gets an error while the
    /// helper may still work, once it cannot any more.
    pub(super) fn call(
        &self,
        call: Call,
        lent: Option<Extent>,
        deadline: Instant,
        late: Option<Late>,
    ) -> Result<Answered, Failed> {
        let failed = |error| Failed { error, is_open: false };
        let (send, receive) = sync_channel(1);
        let keys = call.keys.len();
        let (id, stream) = {
            let mut state = self.state.lock();
            let Some(stream) = state.up.clone() else { return Err(failed(state.away())) };
            if state.pending.len() >= MOONCAKE_PENDING_MAX {
                let what = "too many calls of Mooncake have not ended";
                return Err(failed(
                    Error::new(ErrorKind::Unavailable, what).with("calls_max", MOONCAKE_PENDING_MAX),
                ));
            }
            state.requests += 1;
            let id = state.requests;
            state.pending.insert(id, Pending { answer: send, keys, lent, deadline, late: None });
            (id, stream)
        };
        let Call { op, keys, at, bytes } = call;
        let request = encode(&MooncakeRequest { id, op, keys, at, bytes });
        let sent = request.map_err(SendError::Whole).and_then(|frame| self.send(&stream, &frame, deadline));
        match sent {
            Ok(()) => {}
            Err(SendError::Whole(error)) => {
                let pending = self.state.lock().pending.remove(&id);
                // Otherwise the helper has died, and the request was ended with it.
                if pending.is_some() {
                    return Err(failed(error));
                }
            }
            Err(SendError::Rest(error)) => {
                // The supervisor sees the closed connection, and ends the helper.
                let _ = stream.shutdown(std::net::Shutdown::Both);
                tracing::debug!(%error, "cannot send to the Mooncake tier's helper");
            }
        }
        let wait = deadline.saturating_duration_since(Instant::now());
        match receive.recv_timeout(wait) {
            Ok(outcome) => Self::heard(outcome).map_err(failed),
            Err(_) => {
                let mut state = self.state.lock();
                let Some(pending) = state.pending.get_mut(&id) else {
                    drop(state);
                    // It was answered at this moment.
                    let outcome = receive.recv().unwrap_or_else(|_| Err(too_late()));
                    return Self::heard(outcome).map_err(failed);
                };
                pending.late = late;
                Err(Failed { error: too_late(), is_open: true })
            }
        }
    }

    fn heard(outcome: Result<(MooncakeAnswer, Option<Extent>)>) -> Result<Answered> {
        let (answer, lent) = outcome?;
        match answer.error {
            None => Ok(Answered { codes: answer.codes, lent }),
            Some(text) => {
                Err(Error::new(ErrorKind::Unavailable, "a call of Mooncake failed").with("because", text))
            }
        }
    }

    /// Sends a frame until the deadline.
    fn send(&self, mut stream: &UnixStream, frame: &[u8], deadline: Instant) -> Result<(), SendError> {
        let Some(_turn) = self.sending.try_lock_until(deadline) else {
            return Err(SendError::Whole(too_late()));
        };
        let mut rest = frame;
        while !rest.is_empty() {
            let patience = deadline.saturating_duration_since(Instant::now());
            let sent = if patience.is_zero() {
                Err(std::io::ErrorKind::TimedOut.into())
            } else {
                let first = self.state.lock().unsent.map_or_else(Instant::now, |unsent| unsent.first);
                self.state.lock().unsent = Some(Unsent { first, last: None });
                let sent = stream.set_write_timeout(Some(patience)).and_then(|()| stream.write(rest));
                let failed = Unsent { first, last: Some(Instant::now()) };
                self.state.lock().unsent = sent.is_err().then_some(failed);
                sent
            };
            match sent {
                Ok(count) => rest = &rest[count..],
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => {
                    let is_late =
                        matches!(e.kind(), std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock);
                    let is_whole = rest.len() == frame.len();
                    return Err(match Error::io("cannot send to the Mooncake tier's helper", e) {
                        _ if is_whole && is_late => SendError::Whole(too_late()),
                        error => SendError::Rest(error),
                    });
                }
            }
        }
        Ok(())
    }

    /// Records that a helper is up.
    pub(super) fn came_up(&self, stream: Arc<UnixStream>, master: String) {
        let mut state = self.state.lock();
        (state.up, state.master, state.unsent) = (Some(stream), master, None);
        self.changed.notify_all();
    }

    /// Ends the request that this is the answer to. An answer that fits no request is an error: the helper does not
    /// follow the protocol.
    pub(super) fn answered(&self, answer: MooncakeAnswer) -> Result<()> {
        let pending = self.state.lock().pending.remove(&answer.id);
        let Some(pending) = pending else {
            return Err(Error::new(
                ErrorKind::Protocol,
                "the Mooncake tier's helper sent an answer without a request",
            )
            .with("id", answer.id));
        };
        let (got, wanted) = (answer.codes.len(), pending.keys);
        if answer.error.is_none() && got != wanted {
            let what = "the Mooncake tier's helper did not answer for each key";
            let error = Error::new(ErrorKind::Protocol, what).with("codes", got).with("keys", wanted);
            pending.end(Err(error.clone()));
            return Err(error);
        }
        pending.end(Ok(answer));
        Ok(())
    }

    /// Records that the helper is no longer used. Its requests are still open: call [`Link::died`] when it is dead.
    pub(super) fn went_down(&self, error: &Error) {
        let mut state = self.state.lock();
        state.up = None;
        state.failures += 1;
        state.last_error = Some(error.clone());
        self.changed.notify_all();
    }

    /// Ends the requests of a helper that is dead: it can no longer touch what was lent.
    pub(super) fn died(&self) {
        let (pending, error) = {
            let mut state = self.state.lock();
            (std::mem::take(&mut state.pending), state.away())
        };
        pending.into_values().for_each(|pending| pending.end(Err(error.clone())));
    }

    /// Returns whether the helper reads nothing, or a call is unanswered long after its deadline: only the helper's end
    /// frees what it holds.
    pub(super) fn is_hung(&self, now: Instant) -> bool {
        let (hang, send) = (Duration::from_millis(MOONCAKE_HANG_MS), Duration::from_millis(MOONCAKE_SEND_MS));
        let state = self.state.lock();
        state.unsent.is_some_and(|unsent| unsent.first + send < unsent.last.unwrap_or(now))
            || state.pending.values().any(|pending| pending.deadline + hang < now)
    }

    pub(super) fn stop(&self) {
        self.state.lock().is_stopping = true;
        self.changed.notify_all();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.state.lock().is_stopping
    }

    /// Waits for the end of the tier. Returns whether it came.
    pub(super) fn stops_within(&self, pause: Duration) -> bool {
        let mut state = self.state.lock();
        let until = Instant::now() + pause;
        while !state.is_stopping && !self.changed.wait_until(&mut state, until).timed_out() {}
        state.is_stopping
    }

    /// Returns the master's address, whether the helper is up, its failures, and the last one's reason.
    pub(super) fn describe(&self) -> (String, bool, u64, Option<String>) {
        let state = self.state.lock();
        let error = state.last_error.as_ref().map(ToString::to_string);
        let master = if state.master.is_empty() { "mooncake" } else { &state.master };
        (master.to_owned(), state.up.is_some(), state.failures, error)
    }
}

impl State {
    fn away(&self) -> Error {
        if self.is_stopping {
            return Error::new(ErrorKind::Closed, "the tier is closing");
        }
        let error = Error::new(ErrorKind::Unavailable, "the helper of the Mooncake tier is not up");
        match &self.last_error {
            Some(last) => error.with("because", last),
            None => error.with("because", "it is starting"),
        }
    }
}

fn too_late() -> Error {
    Error::new(ErrorKind::Timeout, "a call of Mooncake did not end by its deadline")
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn exists(name: &str) -> Call {
        Call { op: MooncakeOp::Exists, keys: vec![name.to_owned()], at: Vec::new(), bytes: Vec::new() }
    }

    #[test]
    fn a_helper_that_does_not_read_costs_a_call_no_more_than_its_deadline() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut filled = 0;
        while let Ok(count) = (&ours).write(&[0; 1 << 16]) {
            filled += count;
        }
        ours.set_nonblocking(false).unwrap();
        let link = Link::default();
        link.came_up(Arc::new(ours), String::new());
        let mut patience = Duration::from_millis(100);
        let (tried, took) = loop {
            let begun = Instant::now();
            let failed = link.call(exists("one"), None, Instant::now() + patience, None).err().unwrap();
            assert!(failed.error.kind() == ErrorKind::Timeout && !failed.is_open, "{}", failed.error);
            // On a slow machine the deadline may pass before anything is tried.
            let tried = link.state.lock().unsent;
            if let Some(tried) = tried {
                break (tried, begun.elapsed());
            }
            patience *= 2;
            assert!(patience < Duration::from_secs(60), "no call tries to send");
        };
        assert!(tried.last.is_some());
        if took < Duration::from_millis(MOONCAKE_SEND_MS) {
            assert!(!link.is_hung(Instant::now() + Duration::from_secs(60)), "a short try is no hang");
        }
        // However long the try took on this machine.
        link.state.lock().unsent = Some(Unsent { last: Some(tried.first), ..tried });
        assert!(!link.is_hung(Instant::now()), "since then it may have read");
        link.state.lock().unsent = Some(Unsent { last: None, ..tried });
        assert!(link.is_hung(Instant::now() + Duration::from_secs(60)), "a call waits for it");
        let later = tried.first + Duration::from_secs(60);
        link.state.lock().unsent = Some(Unsent { last: Some(later), ..tried });
        assert!(link.is_hung(later), "another call was not sent, either");

        // Nobody waits behind a call that still sends, and nothing of a call that was too late is sent.
        let turn = link.sending.lock();
        let failed = link.call(exists("two"), None, Instant::now() + Duration::from_millis(100), None);
        assert!(failed.is_err_and(|failed| failed.error.kind() == ErrorKind::Timeout && !failed.is_open));
        drop(turn);
        theirs.read_exact(&mut vec![0; filled]).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let nothing = theirs.read(&mut [0; 1]).unwrap_err();
        assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock, "the connection goes on");
        assert!(link.state.lock().pending.is_empty());
        let up = link.state.lock().up.clone().unwrap();
        assert!(link.send(&up, b"some", Instant::now() + Duration::from_secs(3600)).is_ok());
        assert!(!link.is_hung(Instant::now() + Duration::from_secs(60)), "it reads again");
    }
}
