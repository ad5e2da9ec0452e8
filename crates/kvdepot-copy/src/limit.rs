//! Time limits for calls into drivers, which may never return.

use std::cell::Cell;
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};

/// The longest time for attaching to a device: the first context of a machine takes seconds.
pub const ATTACH_WAIT: Duration = Duration::from_secs(60);
/// The longest time for the short measurement at attach, which begins nothing new after 400 ms.
pub const MEASURE_WAIT: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 5 });
/// The longest time that closing an engine or a registration may take from its owner.
pub const CLOSE_WAIT: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 5 });

thread_local! {
    static OF_AN_ENGINE: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as one of an engine: closing the engine waits for the thread, so the thread must not wait for
/// closing.
pub(crate) fn thread_of_an_engine() {
    OF_AN_ENGINE.set(true);
}

/// Returns `CLOSE_WAIT`, or zero in a thread that closing may wait for.
pub(crate) fn close_wait() -> Duration {
    if OF_AN_ENGINE.get() { Duration::ZERO } else { CLOSE_WAIT }
}

/// Runs `work` in a new thread and waits for it, at most `limit`. A thread that exceeds it keeps running and keeps what
/// it works on; its result is dropped there.
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
