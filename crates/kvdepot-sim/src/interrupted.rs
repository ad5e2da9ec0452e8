//! Which claims other events came in between the steps of. A dump may take the room that such a claim was promised, and a block
//! that was pinned when the claim looked may have become free: then its hit may be shorter than it was to be.

use std::collections::BTreeSet;

use kvdepot_core::machine::{ClaimId, Event, Job};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Interrupted {
    claims: BTreeSet<ClaimId>,
    /// Whether the claim of this step is one of them.
    this: bool,
    cut: u64,
}

impl Interrupted {
    /// A step begins, while these jobs wait.
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

    /// So many claims have found no room by now: whether one did in this step that nothing interrupted.
    pub(crate) const fn claims_cut(&mut self, cut: u64) -> bool {
        let more = cut > self.cut;
        self.cut = cut;
        more && !self.this
    }
}
