//! Budgets of written bytes, for media that wear out: pure.

use super::event::{Nanos, TierIndex};
use super::flaw::{Flaw, Flaws};

const HOUR_NS: i128 = 3_600_000_000_000;
const DAY_NS: i128 = 24 * HOUR_NS;

/// What is left of a tier's budget. It refills continuously, and at most an hour's share accumulates. Once it is used up, it
/// stays closed until a quarter of an hour's share has accumulated: a hit needs all blocks of a prompt's beginning, so a
/// run of blocks is worth more than one block now and then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Budget {
    bytes_per_day: u64,
    /// In units of a byte divided by the nanoseconds of a day, so that nothing is lost to rounding. Below 0 after a
    /// block that is larger than what was left, and at least a day's share below.
    left: i128,
    /// The time of `left`.
    at: Nanos,
    is_open: bool,
}

impl Budget {
    const fn new(bytes_per_day: u64) -> Self {
        Self { bytes_per_day, left: Self::most(bytes_per_day), at: 0, is_open: true }
    }

    const fn most(bytes_per_day: u64) -> i128 {
        bytes_per_day as i128 * HOUR_NS
    }

    fn accrue(&mut self, now: Nanos, saves_up: bool) {
        let passed = now.saturating_sub(self.at);
        self.at = self.at.max(now);
        let came = i128::from(self.bytes_per_day).saturating_mul(i128::from(passed));
        if saves_up {
            self.left = self.left.saturating_add(came);
        } else {
            self.give_back(came);
        }
        self.is_open |= self.left >= Self::most(self.bytes_per_day) / 4;
    }

    fn give_back(&mut self, amount: i128) {
        self.left = self.left.saturating_add(amount).min(Self::most(self.bytes_per_day));
    }

    fn spend(&mut self, bytes: u64) {
        let least = -24 * Self::most(self.bytes_per_day);
        self.left = self.left.saturating_sub(i128::from(bytes) * DAY_NS).max(least);
        self.is_open &= self.left > 0;
    }
}

/// The budget of each tier that has one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Budgets {
    tiers: Vec<Option<Budget>>,
    pub(super) flaws: Flaws,
}

impl Budgets {
    /// Makes budgets of so many bytes a day; 0 = no limit.
    pub(crate) fn new(bytes_per_day: &[u64]) -> Self {
        let tiers = bytes_per_day.iter().map(|&bytes| (bytes > 0).then(|| Budget::new(bytes)));
        Self { tiers: tiers.collect(), flaws: Flaws::default() }
    }

    /// Returns whether a write that need not be made would be made now.
    pub(crate) fn is_open(&mut self, tier: TierIndex, now: Nanos) -> bool {
        let saves_up = self.flaws.has(Flaw::BudgetSavesUp);
        let Some(Some(budget)) = self.tiers.get_mut(tier) else { return true };
        budget.accrue(now, saves_up);
        budget.is_open
    }

    /// Spends a block's bytes. Returns false, and spends nothing, if the budget is used up and the write is not one that
    /// `must` be made.
    pub(crate) fn spend(&mut self, tier: TierIndex, now: Nanos, bytes: u64, must: bool) -> bool {
        let pays = self.is_open(tier, now) || must;
        if let Some(Some(budget)) = self.tiers.get_mut(tier).filter(|_| pays) {
            budget.spend(bytes);
        }
        pays
    }

    /// Gives back the bytes of a write that the tier did not make.
    pub(crate) fn refund(&mut self, tier: TierIndex, bytes: u64) {
        if let Some(Some(budget)) = self.tiers.get_mut(tier) {
            budget.give_back(i128::from(bytes) * DAY_NS);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HOUR: Nanos = HOUR_NS as Nanos;

    #[test]
    fn an_hour_s_bytes_are_saved_up_and_come_back_evenly() {
        let mut budgets = Budgets::new(&[0, 24_000]);
        let mut spend = |now, bytes| budgets.spend(1, now, bytes, false);
        assert!(spend(0, 400) && spend(0, 599), "1,000 bytes are an hour's");
        assert!(spend(0, 5_000), "a block larger than what is left, but not a second one");
        assert!(!spend(0, 1) && !spend(4 * HOUR, 1));
        assert!(!spend(5 * HOUR, 1), "there is a byte, and no quarter of an hour's bytes yet");
        assert!(spend(6 * HOUR, 1_000), "what was overspent has come back, and an hour's bytes");
        assert!(!spend(6 * HOUR, 1) && !spend(6 * HOUR + HOUR / 5, 1));
        assert!(
            spend(6 * HOUR + HOUR / 4, 100) && spend(6 * HOUR + HOUR / 4, 100),
            "open until it is used up"
        );
        assert!(spend(1000 * HOUR, 1_000) && !spend(1000 * HOUR, 1), "no more than an hour's are saved up");
        assert!(budgets.spend(0, 0, u64::MAX, false), "a tier without a budget");
    }

    #[test]
    fn what_must_be_written_counts() {
        let mut budgets = Budgets::new(&[24_000]);
        assert!(budgets.spend(0, 0, 2_000, true) && budgets.spend(0, 0, 1_000, true));
        assert!(!budgets.spend(0, HOUR, 1, false) && !budgets.spend(0, 2 * HOUR, 1, false));
        assert!(budgets.spend(0, 2 * HOUR + HOUR / 4, 1, false));
    }

    #[test]
    fn a_debt_is_paid_within_a_day() {
        let mut budgets = Budgets::new(&[24_000]);
        assert!(budgets.spend(0, 0, 1 << 50, true));
        assert!(!budgets.spend(0, 24 * HOUR, 1, false));
        assert!(budgets.spend(0, 25 * HOUR, 1, false));
    }

    #[test]
    fn what_was_not_written_is_given_back() {
        let mut budgets = Budgets::new(&[24_000, 0]);
        assert!(budgets.spend(0, 0, 1_000, false) && !budgets.spend(0, 0, 1, false));
        budgets.refund(0, 249);
        assert!(!budgets.spend(0, 0, 1, false));
        budgets.refund(0, 1);
        assert!(budgets.spend(0, 0, 250, false) && !budgets.spend(0, 0, 1, false));
        budgets.refund(0, u64::MAX);
        assert!(
            budgets.spend(0, 0, 1_000, false) && !budgets.spend(0, 0, 1, false),
            "no more than an hour's"
        );
        budgets.refund(1, 1);
    }

    #[test]
    fn no_number_overflows() {
        let mut budgets = Budgets::new(&[u64::MAX, 1]);
        for now in [0, 1, Nanos::MAX, 0] {
            for tier in 0..2 {
                budgets.spend(tier, now, u64::MAX, true);
                budgets.spend(tier, now, u64::MAX, false);
                budgets.refund(tier, u64::MAX);
            }
        }
    }

    proptest! {
        /// However writes are spread, a span of time sees its share of the day's bytes, an hour's, and one block more.
        #[test]
        fn a_span_of_time_sees_no_more_than_its_share(
            per_day in 1u64..1 << 40,
            writes in prop::collection::vec((0u64..HOUR * 2, 1u64..1 << 32), 1..200),
        ) {
            let mut budgets = Budgets::new(&[per_day]);
            let (mut now, mut spent) = (0, Vec::new());
            for (pause, bytes) in writes {
                now += pause;
                // The rest of a debt larger than that is forgiven.
                let bytes = bytes.min(per_day);
                if budgets.spend(0, now, bytes, false) {
                    spent.push((now, bytes));
                }
            }
            for first in 0..spent.len() {
                let mut sum = 0;
                for &(at, bytes) in &spent[first..] {
                    let span = i128::from(at - spent[first].0);
                    let share = i128::from(per_day) * (span + HOUR_NS);
                    prop_assert!(sum * DAY_NS < share + 1, "before the last block");
                    sum += i128::from(bytes);
                }
            }
        }
    }
}
