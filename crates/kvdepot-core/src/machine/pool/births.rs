//! How long a slot has held its block, or a lease was held, without a time in each: they are numbered in the order in which they
//! were taken, and of some numbers it is known when that was.

use std::collections::VecDeque;

/// Moments that are kept, at most. Beyond, the one is forgotten that is missed least, so that ages are known to a few percent.
const MOMENTS_MAX: usize = 512;
/// How far behind the newest number the oldest one may be.
pub(super) const BEHIND_MAX: u32 = 1 << 30;

/// Serial numbers and the seconds at which they were given, oldest first.
#[derive(Debug, Default)]
pub(super) struct Births {
    moments: VecDeque<(u32, u32)>,
}

impl Births {
    /// A slot or lease of this number was taken. Numbers wrap.
    pub(super) fn came(&mut self, serial: u32, now_s: u32) {
        if self.moments.back().is_some_and(|&(_, at_s)| at_s == now_s) {
            return;
        }
        // Comparisons of wrapped numbers are valid up to 2^31 apart.
        while self.moments.front().is_some_and(|&(oldest, _)| serial.wrapping_sub(oldest) > BEHIND_MAX) {
            self.moments.pop_front();
        }
        if self.moments.len() == MOMENTS_MAX {
            self.forget_one(now_s);
        }
        self.moments.push_back((serial, now_s));
    }

    /// Forgets the moment whose neighbours are nearest to each other, as a share of their age.
    fn forget_one(&mut self, now_s: u32) {
        let at = |place: usize| u64::from(now_s.saturating_sub(self.moments[place].1));
        let share = |place: usize| (at(place - 1) - at(place + 1)) * (1 << 20) / (at(place) + 1);
        let least = (1..self.moments.len() - 1).min_by_key(|&place| share(place));
        if let Some(place) = least {
            self.moments.remove(place);
        }
    }

    /// How long ago the slot or lease of a number was taken, about: not less. None before the first one that is known.
    pub(super) fn age_s(&self, serial: u32, now_s: u32) -> Option<u32> {
        let &(newest, _) = self.moments.back()?;
        // How far behind the newest, so that wrapped numbers are in order.
        let behind = |number: u32| newest.wrapping_sub(number) as i32;
        // A pinned block may be older than numbers can tell.
        if behind(serial) < -(BEHIND_MAX as i32) {
            return None;
        }
        let after = self.moments.partition_point(|&(number, _)| behind(number) >= behind(serial));
        let &(_, at_s) = self.moments.get(after.checked_sub(1)?)?;
        Some(now_s.saturating_sub(at_s))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_known_to_a_few_percent_and_never_too_short() {
        const SECONDS: u32 = 100_000;
        let mut births = Births::default();
        let first = u32::MAX - 700;
        let serial = |second: u32, nth: u32| first.wrapping_add(second * 3 + nth);
        for second in 0..SECONDS {
            for nth in 0..3 {
                births.came(serial(second, nth), second);
            }
        }
        assert!(births.moments.len() <= MOMENTS_MAX);
        for second in (0..SECONDS).step_by(7) {
            let (age, exact) = (births.age_s(serial(second, 2), SECONDS).unwrap(), SECONDS - second);
            assert!((exact..=exact + exact / 10).contains(&age), "{age} of {exact}");
        }
        assert_eq!(births.age_s(serial(SECONDS - 1, 1), SECONDS + 10), Some(11));
        assert_eq!(births.age_s(first.wrapping_sub(1), SECONDS), None);
        assert_eq!(Births::default().age_s(1, 1), None);
    }

    #[test]
    fn ages_stay_right_after_billions_of_slots() {
        const PER_SECOND: u32 = 10_000_000;
        let mut births = Births::default();
        // Twice around the numbers.
        for second in 0..1000_u32 {
            births.came(second.wrapping_mul(PER_SECOND), second);
            let recent = second.saturating_sub(20);
            let age = births.age_s(recent.wrapping_mul(PER_SECOND), second).unwrap();
            assert!((second - recent..=second - recent + 3).contains(&age), "{age} at {second}");
        }
        assert!(births.moments.len() <= 108, "{}", births.moments.len());
        assert_eq!(births.age_s(999_u32.wrapping_mul(PER_SECOND).wrapping_sub(5 << 29), 1000), None);
    }
}
