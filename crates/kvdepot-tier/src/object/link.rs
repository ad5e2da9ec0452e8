//! One request to a store: its turn, its deadline and its tries.
//!
//! Whatever a store does, a request ends: after silence of `timeout`, and at the caller's deadline at the latest (P2).

use std::cell::Cell;
use std::future::Future;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvdepot_core::limits::{OBJECT_APART_MAX, OBJECT_PAUSE_MS, OBJECT_TRIES_MAX};
use kvdepot_core::{Error, ErrorKind};
use object_store::{ObjectStore, Result as StoreResult};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant as TokioInstant;

use super::gate::{Change, Gate, Pass};
use super::meter::{Meter, StatusError, one_more};
use crate::{TierEvents, TierServer};

/// Groups of requests that wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    Reads,
    Writes,
    /// They wait for no write: removals that are not done now are owed.
    Removals,
    /// They wait for no other request and are never paused: a reset that is not stored is lost when the depot ends.
    Epochs,
}

/// Why one try failed.
#[derive(Debug)]
pub(super) enum Fault {
    /// There is no such object.
    Missing(Error),
    /// Another object was there first.
    Conflict(Error),
    /// The object is not the requested one.
    Corrupt(Error),
    /// The store refuses the request, and would refuse it again.
    Refused(Error),
    /// Other clients are writing the object at the moment, and nothing was done: the request may be retried.
    Contended(Error),
    /// Too many requests.
    SlowDown(Error),
    /// The store is failing or silent: it may have carried out the request.
    Away(Error),
}

impl Fault {
    pub(super) fn into_error(self) -> Error {
        match self {
            Self::Missing(error)
            | Self::Conflict(error)
            | Self::Corrupt(error)
            | Self::Refused(error)
            | Self::Contended(error)
            | Self::SlowDown(error)
            | Self::Away(error) => error,
        }
    }
}

impl From<object_store::Error> for Fault {
    fn from(error: object_store::Error) -> Self {
        use object_store::Error as E;
        let made = |kind, what: &str, error: E| Error::new(kind, what.to_owned()).with_source(error);
        match error {
            E::NotFound { .. } => {
                Self::Missing(made(ErrorKind::NotFound, "the store has no such object", error))
            }
            E::AlreadyExists { .. } | E::Precondition { .. } | E::NotModified { .. } => {
                Self::Conflict(made(ErrorKind::Busy, "another client wrote the object first", error))
            }
            E::PermissionDenied { .. } | E::Unauthenticated { .. } => {
                let what =
                    "the store refuses it: look at the credentials and what they may do with the bucket";
                Self::Refused(made(ErrorKind::Permission, what, error))
            }
            E::Generic { .. } => match said(&error) {
                Some((status, _, true)) if (400..500).contains(&status) && !matches!(status, 408 | 429) => {
                    let what =
                        "no token for the store: the machine or its token server refuses these credentials";
                    Self::Refused(made(ErrorKind::Permission, what, error))
                }
                Some((429 | 503, ..)) => {
                    Self::SlowDown(made(ErrorKind::Busy, "the store asks for fewer requests", error))
                }
                Some((416, ..)) => Self::Corrupt(made(
                    ErrorKind::Corrupt,
                    "an object ends before the bytes that were asked for",
                    error,
                )),
                // Azure's answer to a write of an object that must not exist.
                Some((409, "BlobAlreadyExists", _)) => {
                    Self::Conflict(made(ErrorKind::Busy, "another client wrote the object first", error))
                }
                // Azure drops the parts of all others when an object is completed.
                Some((409, ..) | (400, "InvalidBlockList", _)) => {
                    let what = "others write the object at this moment";
                    Self::Contended(made(ErrorKind::Busy, what, error))
                }
                Some((status, ..)) if (400..500).contains(&status) && status != 408 => {
                    Self::Refused(made(ErrorKind::Unavailable, "the store refuses it", error))
                }
                _ => Self::Away(made(ErrorKind::Unavailable, "the store cannot be used now", error)),
            },
            _ => Self::Refused(made(ErrorKind::Unsupported, "the store cannot do that", error)),
        }
    }
}

/// Returns the status and the code of an error answer, if there was one, and whether it is about credentials.
fn said(error: &object_store::Error) -> Option<(u16, &str, bool)> {
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        if let Some(said) = error.downcast_ref::<StatusError>() {
            return Some((said.status, &said.code, said.is_for_credentials));
        }
        source = error.source();
    }
    None
}

/// A store, and the state of its gates.
pub(super) struct Link {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) meter: Arc<Meter>,
    pub(super) timeout: Duration,
    address: String,
    /// Indexed by `Lane`.
    lanes: [(Semaphore, Mutex<Gate>); 4],
    pub(super) listener: Mutex<Option<Weak<dyn TierEvents>>>,
    last_error: Mutex<Option<String>>,
}

impl Link {
    pub(super) fn new(
        store: Arc<dyn ObjectStore>,
        meter: Arc<Meter>,
        timeout: Duration,
        requests: usize,
        address: String,
    ) -> Self {
        let writes = (requests / 4).max(1);
        let lane = |requests| (Semaphore::new(requests), Mutex::default());
        let few = requests.min(OBJECT_APART_MAX);
        let lanes = [lane((requests - writes).max(1)), lane(writes), lane(few), lane(few)];
        Self {
            store,
            meter,
            timeout,
            address,
            lanes,
            listener: Mutex::default(),
            last_error: Mutex::default(),
        }
    }

    const fn lane(&self, lane: Lane) -> &(Semaphore, Mutex<Gate>) {
        &self.lanes[lane as usize]
    }

    /// Returns whether reads are paused now.
    pub(super) fn is_off(&self) -> bool {
        self.lane(Lane::Reads).1.lock().is_off(Instant::now())
    }

    /// Returns its state, for `stat`.
    pub(super) fn describe(&self) -> TierServer {
        let failures = self.meter.failures.load(Ordering::Relaxed);
        let (address, last_error) = (self.address.clone(), self.last_error.lock().clone());
        TierServer { address, up: !self.is_off(), connections: 0, failures, last_error }
    }

    pub(super) fn listener(&self) -> Option<Arc<dyn TierEvents>> {
        self.listener.lock().as_ref().and_then(Weak::upgrade)
    }

    /// Returns the store's answer, or a failure when its time is up.
    pub(super) async fn within<T>(
        &self,
        call: impl Future<Output = StoreResult<T>> + Send,
    ) -> Result<T, Fault> {
        match tokio::time::timeout(self.timeout, call).await {
            Ok(outcome) => outcome.map_err(Fault::from),
            Err(_) => {
                one_more(&self.meter.timeouts);
                let error = Error::new(ErrorKind::Timeout, "the store did not answer in time");
                Err(Fault::Away(error.with("timeout_ms", self.timeout.as_millis())))
            }
        }
    }

    /// Waits for a turn, which may have several tries until `deadline`.
    pub(super) async fn turn(&self, lane: Lane, deadline: Instant) -> Result<Turn<'_>, Fault> {
        let permit = tokio::time::timeout_at(TokioInstant::from_std(deadline), self.lane(lane).0.acquire());
        let permit = permit.await.ok().and_then(Result::ok).ok_or_else(|| {
            let what = "a request waited for its turn at the store until its deadline";
            Fault::SlowDown(Error::new(ErrorKind::Busy, what.to_owned()))
        })?;
        let mut turn = Turn { link: self, lane, deadline, tries: 0, asked: Cell::new(None), _permit: permit };
        turn.pass().await?;
        Ok(turn)
    }

    fn changed(&self, lane: Lane, change: Change, error: Option<&Error>) {
        let store = &self.address;
        match change {
            Change::Nothing => return,
            Change::WentOff(pause) => {
                let error = error.map(ToString::to_string).unwrap_or_default();
                tracing::warn!(
                    tier = "object",
                    store,
                    ?lane,
                    pause_ms = pause.as_millis(),
                    error,
                    "circuit breaker opened: the store keeps failing"
                );
            }
            Change::CameBack => {
                tracing::warn!(tier = "object", store, ?lane, "switched on again: the store answers")
            }
        }
        if lane == Lane::Reads
            && let Some(listener) = self.listener()
        {
            if change == Change::CameBack { listener.came_back() } else { listener.went_down() }
        }
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Link({})", self.address)
    }
}

/// Permission to send a request to the store, and to retry it.
pub(super) struct Turn<'a> {
    link: &'a Link,
    lane: Lane,
    deadline: Instant,
    tries: u32,
    /// Start of the try in flight.
    asked: Cell<Option<Instant>>,
    _permit: SemaphorePermit<'a>,
}

impl Turn<'_> {
    /// Records an answer of the store. It does not matter here whether it had the object.
    pub(super) fn good(&self) {
        self.asked.set(None);
        if self.lane == Lane::Epochs {
            return;
        }
        let change = self.link.lane(self.lane).1.lock().answered();
        self.link.changed(self.lane, change, None);
    }

    /// Handles a try that failed: returns when the next one is due, or fails if there is none.
    pub(super) async fn again(&mut self, fault: Fault) -> Result<(), Fault> {
        self.asked.set(None);
        let now = Instant::now();
        let gate = &self.link.lane(self.lane).1;
        let fault = match fault {
            Fault::Missing(_) | Fault::Conflict(_) | Fault::Corrupt(_) => {
                self.good();
                return Err(fault);
            }
            Fault::Contended(error) => {
                self.good();
                Fault::Contended(error)
            }
            Fault::SlowDown(error) => {
                one_more(&self.link.meter.slowed_down);
                gate.lock().slow_down(now);
                Fault::SlowDown(error)
            }
            Fault::Refused(error) => {
                self.note(now, &error);
                return Err(Fault::Refused(error));
            }
            Fault::Away(error) => {
                self.note(now, &error);
                Fault::Away(error)
            }
        };
        self.tries += 1;
        let first = OBJECT_PAUSE_MS.0 << (self.tries - 1).min(16);
        // Prevents requests that failed together from being retried together.
        let jitter = u64::from(now.elapsed().subsec_nanos() ^ std::process::id()) % OBJECT_PAUSE_MS.0;
        let pause = Duration::from_millis(first.min(OBJECT_PAUSE_MS.1) + jitter);
        if self.tries >= OBJECT_TRIES_MAX || now + pause >= self.deadline {
            return Err(fault);
        }
        tokio::time::sleep(pause).await;
        // The gate's answer is about the store, too, but the failure says more.
        self.pass().await.map_err(|_| fault)?;
        one_more(&self.link.meter.tried_again);
        Ok(())
    }

    fn note(&self, now: Instant, error: &Error) {
        one_more(&self.link.meter.failures);
        *self.link.last_error.lock() = Some(error.to_string());
        if self.lane == Lane::Epochs {
            return;
        }
        let change = self.link.lane(self.lane).1.lock().failed(now);
        self.link.changed(self.lane, change, Some(error));
    }

    async fn pass(&mut self) -> Result<(), Fault> {
        loop {
            let now = Instant::now();
            if self.lane == Lane::Epochs {
                self.asked.set(Some(now));
                return Ok(());
            }
            let end = self.deadline.min(now + self.link.timeout);
            let pass = self.link.lane(self.lane).1.lock().ask(now, end);
            match pass {
                Pass::Go => {
                    self.asked.set(Some(now));
                    return Ok(());
                }
                Pass::Off => {
                    let what = "the store keeps failing and is asked nothing for a while";
                    return Err(Fault::Refused(Error::new(ErrorKind::Unavailable, what)));
                }
                Pass::NotBefore(until) if until >= self.deadline => {
                    let what = "the store asks for fewer requests, and this one has no time to wait";
                    return Err(Fault::Refused(Error::new(ErrorKind::Busy, what)));
                }
                Pass::NotBefore(until) => tokio::time::sleep_until(TokioInstant::from_std(until)).await,
            }
        }
    }
}

impl Drop for Turn<'_> {
    /// Deadlines that end tries before `timeout` count as failures, too, if the store had long enough to answer.
    /// Otherwise a store that hangs would cost each caller its deadline, and would never be disabled.
    fn drop(&mut self) {
        let Some(asked) = self.asked.get() else { return };
        let now = Instant::now();
        let is_failure = self.link.lane(self.lane).1.lock().cut(asked, now.min(self.deadline));
        if is_failure {
            let what = "the store did not answer by its callers' deadlines";
            self.note(now, &Error::new(ErrorKind::Timeout, what));
        }
    }
}
