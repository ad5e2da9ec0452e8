//! What the machine says of blocks that went and of claims that found less than they asked for is so.

use kvdepot_core::machine::Effects;
use kvdepot_core::misses::{Fate, Gone, Missed, Short};

use crate::fail::{Fail, Rule, fail};
use crate::model::name;
use crate::world::World;

impl World {
    /// After what lookups see has changed.
    pub(crate) fn check_missed(&mut self, out: &Effects) -> Result<(), Fail> {
        for Gone { key, fate, tier, .. } in &out.gone {
            self.reached.insert("went");
            let left_pool = tier.is_none() && matches!(fate, Fate::Evicted | Fate::Forgotten);
            if left_pool && self.presence.contains(key) {
                return fail(Rule::Misses, format!("{} is reported as {fate:?}, but is there", name(key)));
            }
        }
        for Missed { key, asked, hit, short, namespaces, tiers, .. } in &out.missed {
            self.reached.insert("missed");
            if hit >= asked || !namespaces.contains(&key.namespace) {
                let what = format!("{} is missed by a claim of {hit} of {asked} blocks", name(key));
                return fail(Rule::Misses, what);
            }
            if *short == Short::Excluded && tiers.has_all(self.tiers.len()) {
                return fail(Rule::Misses, format!("{} is reported as excluded, and nothing is", name(key)));
            }
            if *short == Short::Absent && self.presence.contains(key) {
                return fail(Rule::Misses, format!("{} is reported as absent, but is there", name(key)));
            }
        }
        Ok(())
    }
}
