//! Probes tiers by I/O for the length of a run of blocks. Tiers hold parts of a run in turn, and each continues where
//! the one before had to stop.

use super::event::{Location, TierIndex, TierSet};

/// Blocks in one question to a tier.
pub const PROBE_KEYS_MAX: usize = 4096;

/// The next step of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeStep {
    /// Ask this tier how many of the leading blocks of `from..end` that are not `Location::Tier` it has.
    Ask {
        /// The tier to ask.
        tier: TierIndex,
        /// First block.
        from: usize,
        /// The block after the last one.
        end: usize,
    },
    /// The run ends here.
    Over,
}

/// The probe of one run of blocks, from front to back.
#[derive(Clone, Debug)]
pub struct RunProbe {
    tiers: usize,
    among: TierSet,
    next_tier: TierIndex,
    /// Whether any tier had a block since the first was last asked.
    found: bool,
    /// What was asked, until it is answered.
    asked: Option<(TierIndex, usize, usize)>,
    /// Whether a tier did not answer since the first was asked last.
    unanswered: bool,
    /// Whether the run ended at a block that a tier did not answer about.
    ends_untold: bool,
}

impl RunProbe {
    /// A probe of those of as many tiers that are in a set.
    pub const fn new(tiers: usize, among: TierSet) -> Self {
        Self { tiers, among, next_tier: 0, found: false, asked: None, unanswered: false, ends_untold: false }
    }

    /// Whether a tier is to answer.
    pub const fn is_asked(&self) -> bool {
        self.asked.is_some()
    }

    /// Returns the next step. `locations` is what is known about the run's blocks. The block that ends the run becomes
    /// `Absent`, whether a tier reported that or did not answer.
    pub fn next(&mut self, locations: &mut [Location]) -> ProbeStep {
        let Some(from) = first_unknown(locations) else { return ProbeStep::Over };
        let mut next = self.among.next(self.next_tier, self.tiers);
        if next.is_none() && std::mem::replace(&mut self.found, false) {
            next = self.among.next(0, self.tiers);
            self.unanswered = false;
        }
        let Some(tier) = next else {
            locations[from] = Location::Absent;
            self.ends_untold = self.unanswered;
            return ProbeStep::Over;
        };
        self.next_tier = tier + 1;
        let end = locations.len().min(from + PROBE_KEYS_MAX);
        self.asked = Some((tier, from, end));
        ProbeStep::Ask { tier, from, end }
    }

    /// Whether a tier that may hold the block that ended the run did not answer.
    pub const fn ends_untold(&self) -> bool {
        self.ends_untold
    }

    /// The tier's answer to what was asked last: how many leading blocks it holds; `None` if it did not answer.
    pub fn answered(&mut self, locations: &mut [Location], count: Option<usize>) {
        let Some((tier, from, end)) = self.asked.take() else { return };
        self.unanswered |= count.is_none();
        let asked = locations[from..end].iter_mut().filter(|location| !matches!(location, Location::Tier(_)));
        for location in asked.take(count.unwrap_or(0)) {
            *location = Location::Tier(tier);
            self.found = true;
        }
    }
}

/// Returns the first block that no tier is known to have, if only I/O can tell.
fn first_unknown(locations: &[Location]) -> Option<usize> {
    let first = locations.iter().position(|location| !matches!(location, Location::Tier(_)))?;
    (locations[first] == Location::Unknown).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a probe against tiers that hold the blocks where `held[tier][block]` is true.
    fn run(held: &[&[bool]], mut locations: Vec<Location>) -> (Vec<Location>, usize) {
        let mut probe = RunProbe::new(held.len(), TierSet::ALL);
        let mut asked = 0;
        while let ProbeStep::Ask { tier, from, end } = probe.next(&mut locations) {
            asked += 1;
            let blocks = (from..end).filter(|&block| !matches!(locations[block], Location::Tier(_)));
            let count = blocks.take_while(|&block| held[tier][block]).count();
            probe.answered(&mut locations, Some(count));
        }
        (locations, asked)
    }

    #[test]
    fn tiers_that_hold_parts_by_turns_make_one_run() {
        let first = [true, true, false, false, true, false];
        let second = [false, false, true, true, false, false];
        let (locations, _) = run(&[&first, &second], vec![Location::Unknown; 6]);
        let tiers = [0, 0, 1, 1, 0].map(Location::Tier);
        assert_eq!(locations[..5], tiers);
        assert_eq!(locations[5], Location::Absent);
    }

    /// Whether a run ends untold, where tiers answer in this order.
    fn ends_untold(tiers: usize, mut locations: Vec<Location>, answers: &[Option<usize>]) -> bool {
        let mut probe = RunProbe::new(tiers, TierSet::ALL);
        let mut answers = answers.iter();
        while let ProbeStep::Ask { .. } = probe.next(&mut locations) {
            probe.answered(&mut locations, *answers.next().expect("no more questions"));
        }
        assert!(answers.next().is_none(), "all were asked for");
        probe.ends_untold()
    }

    #[test]
    fn a_run_ends_untold_only_where_a_tier_did_not_answer_about_its_end() {
        let unknown = || vec![Location::Unknown; 3];
        assert!(!ends_untold(2, unknown(), &[Some(0), Some(0)]));
        assert!(ends_untold(2, unknown(), &[None, Some(0)]));
        assert!(ends_untold(2, unknown(), &[Some(0), None]));
        assert!(!ends_untold(2, unknown(), &[None, Some(1), Some(0), Some(0)]), "it answered later");
        assert!(ends_untold(2, unknown(), &[Some(0), Some(1), None, Some(0)]));
        assert!(!ends_untold(1, vec![Location::Tier(0), Location::Absent], &[]));
        let known_end = vec![Location::Unknown, Location::Unknown, Location::Absent];
        assert!(!ends_untold(2, known_end, &[None, Some(2)]), "its end was known");
    }

    #[test]
    fn only_tiers_of_the_set_are_asked() {
        let asked = |among| {
            let (mut probe, mut locations) = (RunProbe::new(3, among), vec![Location::Unknown; 2]);
            let mut asked = Vec::new();
            while let ProbeStep::Ask { tier, .. } = probe.next(&mut locations) {
                asked.push(tier);
                probe.answered(&mut locations, Some(usize::from(asked.len() == 1)));
            }
            (asked, locations)
        };
        let some = TierSet::NONE.with(0).with(2);
        assert_eq!(asked(some), (vec![0, 2, 0, 2], vec![Location::Tier(0), Location::Absent]));
        assert_eq!(asked(TierSet::NONE), (vec![], vec![Location::Absent, Location::Unknown]));
    }

    #[test]
    fn a_run_that_is_known_to_end_asks_nobody() {
        let known = vec![Location::Tier(1), Location::Absent, Location::Unknown];
        assert_eq!(run(&[&[true; 3]], known.clone()), (known, 0));
    }
}
