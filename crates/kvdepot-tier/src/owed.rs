//! Answers that a tier owes its callers, and the wait for the last of them.

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

use crate::Done;

/// Number of operations that have not been answered yet.
#[derive(Debug, Default)]
pub(crate) struct Owed {
    count: Mutex<usize>,
    /// Signalled when the last one is answered.
    at_rest: Condvar,
}

impl Owed {
    /// Registers an owed answer.
    pub(crate) fn answer<T>(self: &Arc<Self>, done: Done<T>) -> Answer<T> {
        *self.count.lock() += 1;
        Answer { done: Some(done), owed: Arc::clone(self) }
    }

    /// See [`crate::Tier::drain`].
    pub(crate) fn drain(&self, deadline: Instant) -> bool {
        let mut count = self.count.lock();
        while *count > 0 {
            if self.at_rest.wait_until(&mut count, deadline).timed_out() {
                return *count == 0;
            }
        }
        true
    }
}

/// The result of an operation. It is sent in any case: an answer that is dropped reports that the tier is closing.
pub(crate) struct Answer<T> {
    done: Option<Done<T>>,
    owed: Arc<Owed>,
}

impl<T> Answer<T> {
    pub(crate) fn end(mut self, outcome: Result<T>) {
        if let Some(done) = self.done.take() {
            done(outcome);
        }
    }
}

impl<T> Drop for Answer<T> {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            done(Err(Error::new(ErrorKind::Closed, "the tier is closing")));
        }
        let mut count = self.owed.count.lock();
        *count -= 1;
        if *count == 0 {
            self.owed.at_rest.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_answer_is_sent_once_and_drain_waits_for_all() {
        let owed = Arc::new(Owed::default());
        let (sender, answers) = mpsc::channel();
        let done = |name: &'static str| -> Done<u32> {
            let sender = sender.clone();
            Box::new(move |outcome: Result<u32>| {
                sender.send((name, outcome.map_err(|error| error.kind()))).unwrap();
            })
        };
        let (ended, dropped) = (owed.answer(done("ended")), owed.answer(done("dropped")));
        assert!(!owed.drain(Instant::now()));
        ended.end(Ok(7));
        assert!(!owed.drain(Instant::now()));
        drop(dropped);
        assert!(owed.drain(Instant::now() + Duration::from_secs(60)));
        drop(sender);
        let answers: Vec<_> = answers.iter().collect();
        assert_eq!(answers, [("ended", Ok(7)), ("dropped", Err(ErrorKind::Closed))]);
    }
}
