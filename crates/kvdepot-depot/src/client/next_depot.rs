//! How long to wait for the depot that takes a pool over from the attached one.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long the next depot is waited for, counted from the announcement, unless `call_timeout` is longer.
const WAIT: Duration = Duration::from_secs(10);

/// The wait during a take-over; there is none at other times.
#[derive(Debug, Default)]
pub(crate) struct NextDepot(Mutex<Option<Instant>>);

impl NextDepot {
    /// Begins the wait: a depot has announced that another one takes its pool over.
    pub(crate) fn announced(&self, call_timeout: Duration) {
        *self.0.lock() = Some(Instant::now() + WAIT.max(call_timeout));
    }

    /// Ends the wait.
    pub(crate) fn no_more(&self) {
        *self.0.lock() = None;
    }

    /// Returns until when to wait; `None` if no depot is waited for, or not any more.
    pub(crate) fn until(&self) -> Option<Instant> {
        self.0.lock().filter(|&until| Instant::now() < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_depot_is_waited_for_from_the_announcement_until_it_answers() {
        let next = NextDepot::default();
        assert_eq!(next.until(), None);
        next.announced(Duration::from_secs(3600));
        assert!(next.until().is_some_and(|until| until > Instant::now() + WAIT), "call_timeout is longer");
        next.no_more();
        assert_eq!(next.until(), None);
    }

    #[test]
    fn a_depot_that_never_answers_is_not_waited_for_without_end() {
        let next = NextDepot(Mutex::new(Some(Instant::now())));
        assert_eq!(next.until(), None);
    }
}
