//! Time without a clock: it advances with the uses and inserts of a cache, faster in a small one.

/// Number of units of time in which as many blocks are used or inserted as the cache holds.
const UNITS: usize = 256;
/// Number of classes of ages: two for each doubling.
pub(super) const AGES: usize = 32;

/// Returns the class of an age in units of time.
pub(super) const fn age_class(age: u16) -> usize {
    if age < 2 {
        return age as usize;
    }
    let doubling = age.ilog2();
    (doubling * 2 + ((age >> (doubling - 1)) & 1) as u32) as usize
}

/// Returns how many units of time the class spans.
pub(super) fn width(class: usize) -> f64 {
    if class < 2 { 1.0 } else { f64::from(1u32 << (class / 2 - 1)) }
}

/// The time. It wraps around after 2^16 units, so a block that was not used for so long looks younger.
#[derive(Debug, Default)]
pub(super) struct Time {
    now: u16,
    events: usize,
}

impl Time {
    /// Records a use or an insert in a cache of `len` blocks.
    pub(super) const fn pass(&mut self, len: usize) {
        self.events += 1;
        if self.events * UNITS >= len {
            (self.now, self.events) = (self.now.wrapping_add(1), 0);
        }
    }

    /// Returns the time.
    pub(super) const fn now(&self) -> u16 {
        self.now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_of_ages_follow_one_another_and_are_as_wide_as_they_say() {
        let mut members = [0.0; AGES];
        let mut last = 0;
        for age in 0..=u16::MAX {
            let class = age_class(age);
            assert!(class == last || class == last + 1, "{age}: {class} after {last}");
            last = class;
            members[class] += 1.0;
        }
        assert_eq!(last, AGES - 1);
        assert_eq!(members, std::array::from_fn(width));
    }

    #[test]
    fn a_turn_of_the_cache_is_as_many_units_in_a_large_one_as_in_a_small_one() {
        for len in [256, 25_600] {
            let mut time = Time::default();
            (0..3 * len).for_each(|_| time.pass(len));
            assert_eq!(time.now(), 3 * 256);
        }
    }
}
