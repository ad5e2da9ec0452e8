//! Limits for calls into drivers, which may never return.

use std::cell::Cell;
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};

/// How long attaching to a device may take: the first context of a machine takes seconds.
pub const ATTACH_WAIT: Duration = Duration::from_secs(60);
/// How long the short measurement at attach may take; it begins nothing after a tenth of a second.
pub const MEASURE_WAIT: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 5 });
/// How long closing an engine, or a registration, may take of its owner's time.
pub const CLOSE_WAIT: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 5 });

thread_local! {
    static OF_AN_ENGINE: Cell<bool> = const { Cell::new(false) };
}

/// Says that this thread works for an engine: whoever closes the engine waits for it, so it must not wait for that.
pub(crate) fn thread_of_an_engine() {
    OF_AN_ENGINE.set(true);
}

/// `CLOSE_WAIT`, or nothing in a thread that the closing may wait for.
pub(crate) fn close_wait() -> Duration {
    if OF_AN_ENGINE.get() { Duration::ZERO } else { CLOSE_WAIT }
}

/// Runs `work` in a thread of its own and waits for it, at most `limit`. A thread that is late goes on by itself and
/// keeps what it works on; what it returns then is dropped there.
pub fn within<T: Send + 'static>(
    what: &'static str,
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = crossbeam_channel::bounded(1);
    std::thread::Builder::new()
        .name("kvdepot-limited".into())
        .spawn(move || {
            thread_of_an_engine();
            let _ = sender.send(work());
        })
        .map_err(|e| Error::io("cannot start a thread", e))?;
    receiver.recv_timeout(limit).map_err(|e| {
        let text = if e.is_timeout() {
            "a device, or its driver, did not answer in time; see the kernel's log"
        } else {
            "a thread that asked a device panicked"
        };
        Error::new(ErrorKind::Timeout, text).with("doing", what).with("limit_ms", limit.as_millis())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_late_is_named_and_goes_on() {
        let (go, wait) = crossbeam_channel::bounded::<()>(0);
        let (done, ended) = crossbeam_channel::bounded(1);
        let late = within("waiting", Duration::from_millis(1), move || {
            let _ = wait.recv();
            let _ = done.send(());
        });
        let error = late.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.to_string().contains("doing=waiting, limit_ms=1"), "{error}");
        go.send(()).unwrap();
        ended.recv().unwrap();
        assert_eq!(within("adding", CLOSE_WAIT, || 1 + 1).unwrap(), 2);
    }
}
