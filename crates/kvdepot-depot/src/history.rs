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
const INTERVAL_S: u64 = 60;
/// Intervals that are kept.
const INTERVALS: usize = 60;

/// Values of [`KEPT`] since the depot started.
pub(crate) type Counts = [u64; KEPT.len()];

/// Takes the kept counters out of all numbers.
pub(crate) fn kept(numbers: &Numbers) -> Counts {
    KEPT.map(|name| numbers.get(name).and_then(Value::as_u64).unwrap_or(0))
}

/// The counts at the end of each minute of the last hour. Times are seconds since the depot started.
#[derive(Debug)]
pub(crate) struct History {
    /// The oldest one first. Its counts are those before the first interval.
    marks: VecDeque<(u64, Counts)>,
}

impl History {
    pub(crate) fn new() -> Self {
        Self { marks: VecDeque::from([(0, Counts::default())]) }
    }

    fn newest_s(&self) -> u64 {
        self.marks.back().map_or(0, |mark| mark.0)
    }

    /// Returns whether an interval has ended.
    pub(crate) fn is_due(&self, now_s: u64) -> bool {
        now_s.saturating_sub(self.newest_s()) >= INTERVAL_S
    }

    /// Ends an interval.
    pub(crate) fn mark(&mut self, now_s: u64, counts: Counts) {
        self.marks.push_back((now_s, counts));
        while self.marks.len() > INTERVALS + 1 {
            self.marks.pop_front();
        }
    }

    /// Returns what was counted in each interval, the oldest first. `counts` are those of now: they end the interval that
    /// is not over.
    pub(crate) fn to_json(&self, now_s: u64, counts: &Counts) -> Value {
        let ends = self.marks.iter().skip(1).copied().chain([(now_s, *counts)]);
        let intervals = self.marks.iter().zip(ends).map(|((from_s, from), (to_s, to))| {
            let mut interval = Numbers::new();
            interval.insert("ago_s".to_owned(), now_s.saturating_sub(to_s).into());
            interval.insert("seconds".to_owned(), to_s.saturating_sub(*from_s).into());
            for (index, name) in KEPT.into_iter().enumerate() {
                interval.insert(name.to_owned(), to[index].saturating_sub(from[index]).into());
            }
            Value::from(interval)
        });
        json!({"interval_s": INTERVAL_S, "intervals": intervals.collect::<Vec<_>>()})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(looked_up: u64) -> Counts {
        let mut counts = Counts::default();
        counts[0] = looked_up;
        counts
    }

    fn told(history: &History, now_s: u64, now: u64) -> Vec<(u64, u64, u64)> {
        let told = history.to_json(now_s, &counts(now));
        let number = |one: &Value, name: &str| one[name].as_u64().expect("a number");
        let all = told["intervals"].as_array().expect("a list");
        all.iter()
            .map(|one| (number(one, "ago_s"), number(one, "seconds"), number(one, "lookup_blocks")))
            .collect()
    }

    #[test]
    fn each_interval_has_what_was_counted_in_it_and_the_last_one_is_not_over() {
        let mut history = History::new();
        assert_eq!(told(&history, 20, 5), [(0, 20, 5)]);
        assert!(!history.is_due(59) && history.is_due(60));
        history.mark(60, counts(7));
        assert!(!history.is_due(119));
        // The machine did not run the depot for a while.
        history.mark(200, counts(7));
        assert_eq!(told(&history, 210, 10), [(150, 60, 7), (10, 140, 0), (0, 10, 3)]);
    }

    #[test]
    fn an_hour_is_kept() {
        let mut history = History::new();
        for minute in 1..=200 {
            history.mark(minute * 60, counts(minute * 10));
        }
        let told = told(&history, 200 * 60, 2000);
        assert_eq!(told.len(), INTERVALS + 1);
        assert_eq!((told[0], told[60]), ((59 * 60, 60, 10), (0, 0, 0)));
        assert_eq!(told.iter().map(|one| one.2).sum::<u64>(), 600);
    }
}
