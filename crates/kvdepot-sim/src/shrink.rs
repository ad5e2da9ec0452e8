//! Shrinks a failing run: fewer operations and features, but the same broken promise.

use crate::fail::Rule;
use crate::mistakes::Mistake;
use crate::plan::{FEATURES, Plan};
use crate::run;

/// Maximum number of runs of a shrinking.
const RUNS_MAX: usize = 3_000;

/// Returns the smallest plan found that breaks the same promise.
pub fn shrink(plan: &Plan, mistake: Option<Mistake>, rule: Rule) -> Plan {
    let mut best = plan.clone();
    let mut runs = 0;
    let mut fails = |plan: &Plan| {
        runs += 1;
        runs <= RUNS_MAX && run(plan, mistake, false).fail.is_some_and(|fail| fail.rule == rule)
    };
    loop {
        let before = best.clone();
        let mut piece = best.ops.len().div_ceil(2).max(1);
        while piece > 0 {
            let mut from = 0;
            while from < best.ops.len() {
                let mut smaller = best.clone();
                smaller.ops.drain(from..(from + piece).min(smaller.ops.len()));
                if fails(&smaller) {
                    best = smaller;
                } else {
                    from += piece;
                }
            }
            piece /= 2;
        }
        for feature in FEATURES {
            let smaller = Plan { features: best.features.without(feature), ..best.clone() };
            if smaller.features != best.features && fails(&smaller) {
                best = smaller;
            }
        }
        while best.shape.tiers.len() > 1 {
            let mut smaller = best.clone();
            smaller.shape.tiers.pop();
            if !fails(&smaller) {
                break;
            }
            best = smaller;
        }
        if best == before {
            return best;
        }
    }
}
