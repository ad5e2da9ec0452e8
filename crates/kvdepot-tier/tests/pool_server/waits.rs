//! Waiting for what must come, or end.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Only a hang reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

const POLL: Duration = Duration::from_millis(1);

pub(crate) fn until(what: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !what() {
        assert!(Instant::now() < deadline, "it never came to pass");
        std::thread::sleep(POLL);
    }
}

/// Runs what must end.
pub(crate) fn ends<T: Send + 'static>(what: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, ended) = channel();
    std::thread::spawn(move || drop(send.send(what())));
    ended.recv_timeout(PATIENCE).expect("it ends in bounded time (P2)")
}
