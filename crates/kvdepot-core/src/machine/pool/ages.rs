//! How old blocks get in the pool before they are evicted.

/// Upper bounds of the ages that are counted together, in seconds. Older blocks are counted together, too.
pub const EVICT_AGE_BOUNDS_S: [u32; 12] =
    [1, 5, 15, 60, 300, 900, 3_600, 14_400, 43_200, 86_400, 259_200, 604_800];

/// Evicted blocks by age: the time from when a block came into the pool until it was evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EvictAges {
    /// Number of blocks above the bound before and up to this one; the last one has no bound.
    pub blocks: [u64; EVICT_AGE_BOUNDS_S.len() + 1],
    /// Sum of their ages in seconds.
    pub sum_s: u64,
}

impl EvictAges {
    pub(super) fn count(&mut self, age_s: u32) {
        self.blocks[EVICT_AGE_BOUNDS_S.partition_point(|&bound_s| bound_s < age_s)] += 1;
        self.sum_s += u64::from(age_s);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_counts_below_the_first_bound_that_it_does_not_exceed() {
        let mut ages = EvictAges::default();
        for age_s in [0, 1, 2, 604_800, 604_801] {
            ages.count(age_s);
        }
        let mut expected = [0; EVICT_AGE_BOUNDS_S.len() + 1];
        (expected[0], expected[1], expected[11], expected[12]) = (2, 1, 1, 1);
        assert_eq!(ages, EvictAges { blocks: expected, sum_s: 3 + 604_800 + 604_801 });
    }
}
