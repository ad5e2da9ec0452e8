//! Gates that pause requests to a store: after consecutive failures, and for a moment if it reports too many requests.
//!
//! A gate is a state machine without a clock of its own. Reads and writes have separate gates, so that a bucket without
//! write permission is still read.

use std::time::{Duration, Instant};

use kvdepot_core::limits::{OBJECT_CUT_MS, OBJECT_FAILURES_MAX, OBJECT_OFF_MS, OBJECT_SLOW_DOWN_MS};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A gate's answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    /// Go.
    Go,
    /// Not before this time: the store asked for fewer requests.
    NotBefore(Instant),
    /// Not now: the store is failing.
    Off,
}

/// Change caused by the end of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Nothing,
    WentOff(Duration),
    CameBack,
}

#[derive(Debug, Default)]
pub(super) struct Gate {
    failures: u32,
    off_until: Option<Instant>,
    off_for: Duration,
    /// Until this time a trial request is in flight, which shows whether the store is back.
    trial_until: Option<Instant>,
    slow_until: Option<Instant>,
    slow_for: Duration,
    /// Time without an answer in requests that ended too early to count as failures by themselves.
    silent_for: Duration,
    /// Time up to which `silent_for` is counted.
    silent_until: Option<Instant>,
}

impl Gate {
    /// Returns whether requests are paused now.
    pub(super) fn is_off(&self, now: Instant) -> bool {
        self.off_until.is_some_and(|until| now < until)
    }

    /// Decides whether a request that ends by `end` may proceed.
    pub(super) fn ask(&mut self, now: Instant, end: Instant) -> Pass {
        match self.off_until {
            Some(until) if now < until => return Pass::Off,
            Some(_) if self.trial_until.is_some_and(|until| now < until) => return Pass::Off,
            _ => {}
        }
        if let Some(until) = self.slow_until.filter(|until| now < *until) {
            return Pass::NotBefore(until);
        }
        // Only what goes now is a trial.
        self.trial_until = self.off_until.map(|_| end);
        Pass::Go
    }

    /// Records that the store has answered, whatever the answer.
    pub(super) fn answered(&mut self) -> Change {
        self.failures = 0;
        self.silent_for = Duration::ZERO;
        self.slow_for /= 2;
        self.trial_until = None;
        self.off_for = Duration::ZERO;
        if self.off_until.take().is_some() { Change::CameBack } else { Change::Nothing }
    }

    /// Records that the store did not answer, or answered that it cannot.
    pub(super) fn failed(&mut self, now: Instant) -> Change {
        self.failures = self.failures.saturating_add(1);
        let was_trial = self.off_until.is_some_and(|until| until <= now);
        let is_over = self.off_until.is_none() && self.failures >= OBJECT_FAILURES_MAX;
        if !was_trial && !is_over {
            return Change::Nothing;
        }
        self.off_for = (self.off_for * 2).clamp(ms(OBJECT_OFF_MS.0), ms(OBJECT_OFF_MS.1));
        self.off_until = Some(now + self.off_for);
        self.trial_until = None;
        if was_trial { Change::Nothing } else { Change::WentOff(self.off_for) }
    }

    /// Records that a caller's deadline ended a request. Returns whether that counts as a failure: the store was silent
    /// for long enough, in this request or in those that were ended since its last answer or failure. Time in which
    /// several requests waited counts once.
    pub(super) fn cut(&mut self, asked: Instant, now: Instant) -> bool {
        let from = self.silent_until.map_or(asked, |until| until.max(asked));
        self.silent_for += now.saturating_duration_since(from);
        self.silent_until = Some(now.max(from));
        let is_failure = now.saturating_duration_since(asked).max(self.silent_for) >= ms(OBJECT_CUT_MS);
        if is_failure {
            self.silent_for = Duration::ZERO;
        }
        is_failure
    }

    /// Records that the store asked for fewer requests.
    pub(super) fn slow_down(&mut self, now: Instant) {
        self.silent_for = Duration::ZERO;
        // Such an answer ends the trial without a result: the next request is the trial.
        self.trial_until = None;
        // All requests that were in flight when it began to ask count as one signal.
        if self.slow_until.is_none_or(|until| until <= now) {
            self.slow_for = (self.slow_for * 2).clamp(ms(OBJECT_SLOW_DOWN_MS.0), ms(OBJECT_SLOW_DOWN_MS.1));
            self.slow_until = Some(now + self.slow_for);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_in_a_row_shut_it_and_one_trial_opens_it() {
        let (mut gate, now) = (Gate::default(), Instant::now());
        let at = |n| now + ms(n);
        for _ in 1..OBJECT_FAILURES_MAX {
            assert_eq!(gate.failed(now), Change::Nothing);
        }
        assert_eq!(gate.answered(), Change::Nothing);
        for _ in 1..OBJECT_FAILURES_MAX {
            assert_eq!(gate.failed(now), Change::Nothing);
        }
        assert_eq!(gate.failed(now), Change::WentOff(ms(OBJECT_OFF_MS.0)));
        assert!(gate.is_off(now) && gate.ask(at(999), at(5000)) == Pass::Off);
        assert_eq!(gate.ask(at(1000), at(5000)), Pass::Go);
        assert_eq!(gate.ask(at(1001), at(5000)), Pass::Off, "one trial at a time");
        assert_eq!(gate.failed(at(1500)), Change::Nothing);
        assert!(gate.is_off(at(3499)) && !gate.is_off(at(3500)), "twice as long");
        assert_eq!(gate.ask(at(3500), at(4000)), Pass::Go);
        assert_eq!(gate.ask(at(4000), at(5000)), Pass::Go, "a trial that told nothing is over at its end");
        assert_eq!(gate.answered(), Change::CameBack);
        assert_eq!(gate.ask(at(4001), at(5000)), Pass::Go);
    }

    #[test]
    fn silence_adds_up_over_requests_that_end_early() {
        let (mut gate, now) = (Gate::default(), Instant::now());
        let at = |n| now + ms(n);
        assert!(gate.cut(now, at(500)), "long enough by itself");
        assert!(gate.cut(now, at(500)), "and so is each at the same time");
        assert!(!gate.cut(at(600), at(900)) && !gate.cut(at(600), at(900)), "300 ms, twice at the same time");
        assert!(!gate.cut(at(5000), at(5199)), "499 ms");
        assert!(gate.cut(at(6000), at(6001)));
        assert!(!gate.cut(at(7000), at(7499)));
        assert_eq!(gate.answered(), Change::Nothing);
        assert!(!gate.cut(at(8000), at(8499)), "after an answer it begins anew");
        gate.slow_down(at(9000));
        assert!(!gate.cut(at(9000), at(9499)), "that was an answer, too");
    }

    #[test]
    fn too_many_requests_make_all_wait_longer_each_time() {
        let (mut gate, now) = (Gate::default(), Instant::now());
        let at = |n| now + ms(n);
        gate.slow_down(now);
        gate.slow_down(now);
        assert_eq!(gate.ask(now, at(9)), Pass::NotBefore(at(100)));
        assert_eq!(gate.ask(at(100), at(200)), Pass::Go);
        gate.slow_down(at(100));
        assert_eq!(gate.ask(at(101), at(200)), Pass::NotBefore(at(300)));
        assert_eq!(gate.answered(), Change::Nothing);
        gate.slow_down(at(300));
        assert_eq!(gate.ask(at(301), at(400)), Pass::NotBefore(at(500)), "less after an answer");
    }

    #[test]
    fn a_store_that_is_back_and_throttles_is_tried_again_after_its_pause() {
        let (mut gate, now) = (Gate::default(), Instant::now());
        let (at, end) = (|n| now + ms(n), now + Duration::from_secs(3600));
        for _ in 0..OBJECT_FAILURES_MAX {
            gate.failed(now);
        }
        assert_eq!(gate.ask(at(1000), end), Pass::Go);
        gate.slow_down(at(1001));
        assert_eq!(
            gate.ask(at(1002), end),
            Pass::NotBefore(at(1101)),
            "the trial has ended without a result"
        );
        assert_eq!(gate.ask(at(1101), end), Pass::Go, "a request that only waited is not a trial");
        assert_eq!(gate.ask(at(1102), end), Pass::Off);
        assert_eq!(gate.answered(), Change::CameBack);
    }
}
