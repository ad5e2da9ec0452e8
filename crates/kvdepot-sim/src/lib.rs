//! Simulates a depot's decisions: one seed determines one run, which is the same on every machine.
//!
//! The machine of `kvdepot_core` takes no lock and reads no clock, so the world around it can be simulated: tiers that
//! hang, forget and fill up, clients that die in the middle of a copy, crashes and restarts, replies in any order. A
//! run is checked against a reference after every step; [`Rule`] lists the promises. A failing seed is
//! [shrunk](shrink).
#![forbid(unsafe_code)]

mod asked;
mod chosen;
mod claiming;
mod client;
mod ending;
mod fail;
mod forgetting;
mod given;
mod handover;
mod interrupted;
mod leases;
mod ledger;
mod memory;
mod missed;
mod mistakes;
mod model;
mod nonsense;
mod ops;
mod placed;
mod plan;
mod recorded;
mod recovery;
mod regions;
mod replies;
mod rng;
mod running;
pub mod shrink;
mod specs;
mod tier;
mod work;
mod world;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub use fail::{Fail, Rule};
pub use mistakes::Mistake;
pub use plan::{FEATURES, Feature, Features, OPS_MAX, Plan, Shape, TierShape};
pub use rng::Rng;

use world::World;

/// Result of a run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Number of the machine's steps.
    pub steps: usize,
    /// Kinds of events that happened, so that tests see that runs are not idle.
    pub reached: BTreeSet<&'static str>,
    /// Events and commands, if requested.
    pub trace: Vec<String>,
    /// A number that is the same only for runs with the same course.
    pub fingerprint: u64,
    /// The first promise that was broken.
    pub fail: Option<Fail>,
}

/// Runs a plan.
pub fn run(plan: &Plan, mistake: Option<Mistake>, trace: bool) -> Report {
    let mut world = World::new(plan, mistake, trace);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        world.open_spaces(&[], |_| true)?;
        for (at, &op) in plan.ops.iter().enumerate() {
            world.at = at;
            world.op(op)?;
        }
        world.finish()
    }));
    let fail = match outcome {
        Ok(outcome) => outcome.err(),
        Err(panic) => Some(Fail { rule: Rule::Panic, what: panic_text(&*panic) }),
    };
    Report {
        steps: world.steps,
        reached: world.reached,
        trace: world.trace.unwrap_or_default(),
        fingerprint: world.fingerprint,
        fail,
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()))
        .unwrap_or_else(|| "a panic without text".to_owned())
}
