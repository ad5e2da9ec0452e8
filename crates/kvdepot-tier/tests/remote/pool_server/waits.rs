//! Waits for events that must occur, or fails.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// A time limit that only a hang reaches.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

const POLL: Duration = Duration::from_millis(1);

pub(crate) fn until(what: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !what() {
        assert!(Instant::now() < deadline, "it never came to pass");
        std::thread::sleep(POLL);
    }
}

/// Runs a function that must return.
pub(crate) fn ends<T: Send + 'static>(what: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, ended) = channel();
    std::thread::spawn(move || drop(send.send(what())));
    ended.recv_timeout(PATIENCE).expect("it ends in bounded time (P2)")
}
