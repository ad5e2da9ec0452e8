//! Tracks claims that other events interrupted between their steps. A dump may take the space that such a claim was
//! promised, and a block that was pinned when the claim checked may have been freed. Its hit may then be shorter than
//! expected.

use std::collections::BTreeSet;

use kvdepot_core::machine::{ClaimId, Event, Job};

/// Interrupted claims; see the module.
#[derive(Debug, Default)]
pub(crate) struct Interrupted {
    claims: BTreeSet<ClaimId>,
    /// Whether the claim of this step is one of them.
    this: bool,
    cut: u64,
}

impl Interrupted {
    /// Records the start of a step, while these jobs wait.
    pub(crate) fn step(&mut self, event: &Event, jobs: &[Job]) {
        let own = match event {
            Event::Continue(Job::Claim(claim)) => Some(*claim),
            _ => None,
        };
        let waiting = jobs.iter().filter_map(|job| match job {
            Job::Claim(claim) if Some(*claim) != own => Some(*claim),
            _ => None,
        });
        self.claims.extend(waiting);
        self.this = own.is_some_and(|claim| self.claims.contains(&claim));
    }

    /// Takes the number of claims that have found no space so far. Returns whether one did in this step without an
    /// interruption.
    pub(crate) const fn claims_cut(&mut self, cut: u64) -> bool {
        let more = cut > self.cut;
        self.cut = cut;
        more && !self.this
    }
}
