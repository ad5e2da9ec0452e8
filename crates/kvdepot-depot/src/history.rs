//! What a depot counted in each minute of the last hour, for people who open its status page after something happened.

use std::collections::VecDeque;

use serde_json::{Value, json};

use crate::stats::Numbers;

/// Names of the counters that are kept.
pub(crate) const KEPT: [&str; 10] = [
    "lookup_blocks",
    "lookup_hit_blocks",
    "dump_blocks_sealed",
    "dump_blocks_dropped",
    "load_blocks",
    "load_blocks_missed",
    "fetch_bytes",
    "in_place_bytes",
    "write_bytes",
    "evict_blocks",
];
/// Length of an interval. A depot that is not scheduled makes longer ones.
const INTERVAL_MS: u64 = 60_000;
/// Intervals that are kept.
const INTERVALS: usize = 60;

/// Values of [`KEPT`] since the depot started.
pub(crate) type Counts = [u64; KEPT.len()];

/// Takes the kept counters out of all numbers.
pub(crate) fn kept(numbers: &Numbers) -> Counts {
    KEPT.map(|name| numbers.get(name).and_then(Value::as_u64).unwrap_or(0))
}

/// The counts at the end of each minute of the last hour. Times are milliseconds since the depot started.
#[derive(Debug)]
pub(crate) struct History {
    /// The oldest one first. Its counts are those before the first interval.
    marks: VecDeque<(u64, Counts)>,
}

impl History {
    pub(crate) fn new() -> Self {
        Self { marks: VecDeque::from([(0, Counts::default())]) }
    }

    fn newest_ms(&self) -> u64 {
        self.marks.back().map_or(0, |mark| mark.0)
    }

    /// Returns whether an interval has ended.
    pub(crate) fn is_due(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.newest_ms()) >= INTERVAL_MS
    }

    /// Ends an interval.
    pub(crate) fn mark(&mut self, now_ms: u64, counts: Counts) {
        self.marks.push_back((now_ms, counts));
        while self.marks.len() > INTERVALS + 1 {
            self.marks.pop_front();
        }
    }

    /// Returns what was counted in each interval, the oldest first. `counts` are those of now: they end the interval that
    /// is not over.
    pub(crate) fn to_json(&self, now_ms: u64, counts: &Counts) -> Value {
        let ends = self.marks.iter().skip(1).copied().chain([(now_ms, *counts)]);
        let intervals = self.marks.iter().zip(ends).map(|((from_ms, from), (to_ms, to))| {
            let mut interval = Numbers::new();
            interval.insert("ago_s".to_owned(), seconds(now_ms.saturating_sub(to_ms)));
            interval.insert("seconds".to_owned(), seconds(to_ms.saturating_sub(*from_ms)));
            for (index, name) in KEPT.into_iter().enumerate() {
                interval.insert(name.to_owned(), to[index].saturating_sub(from[index]).into());
            }
            Value::from(interval)
        });
        json!({"interval_s": INTERVAL_MS / 1000, "intervals": intervals.collect::<Vec<_>>()})
    }
}

fn seconds(ms: u64) -> Value {
    (ms as f64 / 1000.0).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{EVICTIONS_HELP, Stats};

    #[test]
    fn all_that_is_kept_is_counted() {
        let counted: Vec<&str> = Stats::HELP.iter().chain(EVICTIONS_HELP).map(|one| one.0).collect();
        assert_eq!(KEPT.into_iter().find(|name| !counted.contains(name)), None);
    }

    fn counts(looked_up: u64) -> Counts {
        let mut counts = Counts::default();
        counts[0] = looked_up;
        counts
    }

    fn told(history: &History, now_ms: u64, now: u64) -> Vec<(f64, f64, u64)> {
        let told = history.to_json(now_ms, &counts(now));
        let all = told["intervals"].as_array().expect("a list");
        let number = |one: &Value, name: &str| one[name].as_f64().expect("a number");
        let counted = |one: &Value| one["lookup_blocks"].as_u64().expect("a count");
        all.iter().map(|one| (number(one, "ago_s"), number(one, "seconds"), counted(one))).collect()
    }

    #[test]
    fn each_interval_has_what_was_counted_in_it_and_the_last_one_is_not_over() {
        let mut history = History::new();
        assert_eq!(told(&history, 20_500, 5), [(0.0, 20.5, 5)]);
        assert!(!history.is_due(59_999) && history.is_due(60_000));
        history.mark(60_000, counts(7));
        assert!(!history.is_due(119_000));
        // The machine did not run the depot for a while.
        history.mark(200_000, counts(7));
        let expected = [(150.0, 60.0, 7), (10.0, 140.0, 0), (0.0, 10.0, 3)];
        assert_eq!(told(&history, 210_000, 10), expected);
    }

    #[test]
    fn an_hour_is_kept() {
        let mut history = History::new();
        for minute in 1..=200 {
            history.mark(minute * 60_000, counts(minute * 10));
        }
        let told = told(&history, 200 * 60_000, 2000);
        assert_eq!(told.len(), INTERVALS + 1);
        assert_eq!((told[0], told[60]), ((59.0 * 60.0, 60.0, 10), (0.0, 0.0, 0)));
        assert_eq!(told.iter().map(|one| one.2).sum::<u64>(), 600);
    }
}
