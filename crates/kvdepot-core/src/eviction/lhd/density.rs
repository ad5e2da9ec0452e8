//! Hit density, learned while the depot runs: the expected hits of a block per unit of time in its slot, depending on how
//! often it was used (its class) and how long ago (its age).

use super::age::{AGES, width};

/// Number of classes of blocks by number of uses.
pub(super) const CLASSES: usize = 8;
/// Smallest number of uses of each class.
pub(super) const CLASS_USES: [u8; CLASSES] = [0, 1, 2, 3, 4, 6, 10, 20];
/// Weight of the average of all classes, in ended waits: a class that has seen fewer of them follows the average.
const PRIOR: f64 = 200.0;
/// Keeps averages finite for blocks of which nothing has been seen.
const LEAST_TIME: f64 = 1e-12;

type ByAge = [f64; AGES];

/// Returns the class of a block with this many uses.
pub(super) fn class_of(uses: u8) -> usize {
    CLASS_USES.iter().rposition(|&least| least <= uses).unwrap_or(0)
}

/// What happened to the blocks of one class, counted by their age at the end of the wait for the next use.
#[derive(Clone, Copy, Debug)]
struct Waits {
    used: ByAge,
    /// Waits that ended because the evicted block was forgotten.
    forgotten: ByAge,
    /// Evictions. The wait continues, and its end is unknown until the block returns or is forgotten.
    evicted: ByAge,
    /// Evicted blocks that returned or were forgotten.
    resolved: f64,
}

impl Waits {
    const NONE: Self =
        Self { used: [0.0; AGES], forgotten: [0.0; AGES], evicted: [0.0; AGES], resolved: 0.0 };

    /// Returns the total time that blocks spent at each age, and the number of waits.
    fn times(&self) -> (ByAge, f64) {
        let evicted: f64 = self.evicted.iter().sum();
        let open = if evicted > 0.0 { ((evicted - self.resolved) / evicted).max(0.0) } else { 0.0 };
        let (mut times, mut older) = ([0.0; AGES], 0.0);
        for age in (0..AGES).rev() {
            let ended = self.used[age] + self.forgotten[age] + open * self.evicted[age];
            times[age] = (older + ended / 2.0) * width(age);
            older += ended;
        }
        (times, older)
    }

    fn halve(&mut self) {
        let halve = |counts: &mut ByAge| counts.iter_mut().for_each(|count| *count /= 2.0);
        halve(&mut self.used);
        halve(&mut self.forgotten);
        halve(&mut self.evicted);
        self.resolved /= 2.0;
    }
}

/// Counts of all classes, and the densities computed from them.
#[derive(Debug)]
pub(super) struct Density {
    waits: [Waits; CLASSES],
    densities: [ByAge; CLASSES],
}

impl Density {
    /// Makes empty counts: all densities are equal, so the oldest block is evicted.
    pub(super) fn new() -> Box<Self> {
        Box::new(Self { waits: [Waits::NONE; CLASSES], densities: [[0.0; AGES]; CLASSES] })
    }

    /// Returns the density of a block as of the last `learn`.
    pub(super) const fn of(&self, class: usize, age: usize) -> f64 {
        self.densities[class][age]
    }

    /// Counts a use.
    pub(super) const fn used(&mut self, class: usize, age: usize) {
        self.waits[class].used[age] += 1.0;
    }

    /// Counts an eviction.
    pub(super) const fn evicted(&mut self, class: usize, age: usize) {
        self.waits[class].evicted[age] += 1.0;
    }

    /// Counts the return of an evicted block.
    pub(super) const fn returned(&mut self, class: usize, age: usize) {
        self.waits[class].resolved += 1.0;
        self.used(class, age);
    }

    /// Counts an evicted block that did not return in time.
    pub(super) const fn forgotten(&mut self, class: usize, age: usize) {
        self.waits[class].resolved += 1.0;
        self.waits[class].forgotten[age] += 1.0;
    }

    /// Halves the weight of everything counted so far.
    pub(super) fn halve(&mut self) {
        self.waits.iter_mut().for_each(Waits::halve);
    }

    /// Computes the densities anew. They never rise with age and never fall with the number of uses. The beginning of a
    /// prompt is used at least as often as its end, so it is evicted after the end. The work does not depend on the number
    /// of blocks.
    pub(super) fn learn(&mut self) {
        let times: [(ByAge, f64); CLASSES] = std::array::from_fn(|class| self.waits[class].times());
        let waits: f64 = times.iter().map(|(_, waits)| waits).sum();
        let share = if waits > 0.0 { PRIOR / waits } else { 0.0 };
        let of_all = |count: &dyn Fn(usize) -> f64| (0..CLASSES).map(count).sum::<f64>() * share;
        let used: ByAge = std::array::from_fn(|age| of_all(&|class| self.waits[class].used[age]));
        let spent: ByAge = std::array::from_fn(|age| of_all(&|class| times[class].0[age]));
        let mut weights = [[0.0; AGES]; CLASSES];
        for class in 0..CLASSES {
            weights[class] = std::array::from_fn(|age| times[class].0[age] + spent[age]);
            let hits: ByAge = std::array::from_fn(|age| self.waits[class].used[age] + used[age]);
            self.densities[class] = falling(&hits, &weights[class]);
        }
        (0..AGES).for_each(|age| self.order_classes(age, &weights));
    }

    /// Makes the densities of an age rise with the number of uses.
    fn order_classes(&mut self, age: usize, weights: &[ByAge; CLASSES]) {
        // From the most used class to the least used one.
        let at = |rank: usize| CLASSES - 1 - rank;
        let time: [f64; CLASSES] = std::array::from_fn(|rank| weights[at(rank)][age].max(LEAST_TIME));
        let hits: [f64; CLASSES] = std::array::from_fn(|rank| self.densities[at(rank)][age] * time[rank]);
        for (rank, density) in falling(&hits, &time).into_iter().enumerate() {
            self.densities[at(rank)][age] = density;
        }
    }
}

/// Returns the sequence closest to `hits / times` that never rises (pool adjacent violators).
fn falling<const N: usize>(hits: &[f64; N], times: &[f64; N]) -> [f64; N] {
    // Each pool has hits, a time and a number of places, and is denser than the next one.
    let mut pools = [(0.0, 0.0, 0); N];
    let mut len = 0;
    for place in 0..N {
        let mut pool = (hits[place], times[place], 1);
        while len > 0 {
            let (hits, time, places) = pools[len - 1];
            if hits * pool.1 > pool.0 * time {
                break;
            }
            pool = (hits + pool.0, time + pool.1, places + pool.2);
            len -= 1;
        }
        pools[len] = pool;
        len += 1;
    }
    let mut out = [0.0; N];
    let mut place = 0;
    for &(hits, time, places) in &pools[..len] {
        out[place..place + places].fill(if time > 0.0 { hits / time } else { 0.0 });
        place += places;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_the_last_one_whose_uses_a_block_has() {
        let classes: Vec<usize> = [0, 1, 3, 4, 5, 6, 9, 10, 19, 20, 255].map(class_of).to_vec();
        assert_eq!(classes, [0, 1, 3, 4, 4, 5, 5, 6, 6, 7, 7]);
    }

    #[test]
    fn neighbours_that_rise_are_pooled() {
        assert_eq!(falling(&[4.0, 1.0, 3.0, 0.0], &[1.0, 1.0, 1.0, 1.0]), [4.0, 2.0, 2.0, 0.0]);
        assert_eq!(falling(&[0.0, 0.0, 6.0], &[0.0, 1.0, 2.0]), [2.0; 3]);
        assert_eq!(falling(&[0.0; 3], &[0.0; 3]), [0.0; 3]);
    }

    #[test]
    fn classes_that_are_used_again_are_denser() {
        let mut density = Density::new();
        for _ in 0..10_000 {
            density.used(3, 8);
            density.evicted(0, 8);
            density.forgotten(0, 12);
        }
        density.learn();
        assert!(density.of(3, 8) > 10.0 * density.of(0, 8), "{density:?}");
        for class in 1..CLASSES {
            assert!((0..AGES).all(|age| density.of(class, age) >= density.of(class - 1, age)), "{class}");
        }
    }

    #[test]
    fn what_returns_counts_like_what_was_kept() {
        let (mut kept, mut returned) = (Density::new(), Density::new());
        for _ in 0..1000 {
            kept.used(1, 9);
            returned.evicted(1, 5);
            returned.returned(1, 9);
        }
        kept.learn();
        returned.learn();
        assert_eq!(kept.densities, returned.densities);
    }
}
