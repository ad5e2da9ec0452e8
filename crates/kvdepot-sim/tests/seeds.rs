//! Many seeds keep all promises; each run is the same every time, and none is idle.

use std::collections::BTreeSet;

use kvdepot_sim::{Plan, run, shrink};

/// Seeds of a run of this test, unless `KVDEPOT_SIM_SEEDS` says more.
const SEEDS: u64 = 10_000;

fn seeds() -> u64 {
    match std::env::var("KVDEPOT_SIM_SEEDS") {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("KVDEPOT_SIM_SEEDS={text} is not a number")),
        Err(_) => SEEDS,
    }
}

/// Rare: one in hundreds of thousands. An admitted claim whose room another step took, work that took many rounds, a removal
/// behind a write that was answered as done while a tier owed an earlier one, and a copy of a block leased in place that went
/// before a claim of the block (a known gap).
const ONCE_FAILED: [u64; 4] = [333_655, 491_704, 863_743, 792_871];

#[test]
fn seeds_that_once_failed_keep_all_promises() {
    for seed in ONCE_FAILED {
        let fail = run(&Plan::new(seed), None, false).fail;
        assert!(fail.is_none(), "seed {seed}: {}", fail.unwrap());
    }
}

#[test]
fn every_seed_keeps_all_promises() {
    let mut reached = BTreeSet::new();
    for seed in 0..seeds() {
        let plan = Plan::new(seed);
        let report = run(&plan, None, false);
        if let Some(fail) = report.fail {
            let small = shrink::shrink(&plan, None, fail.rule);
            let trace = run(&small, None, true).trace.join("\n");
            panic!(
                "seed {seed}: {fail}\nagain: cargo run -p kvdepot-sim --release -- --start {seed} --seeds 1\n{trace}"
            );
        }
        reached.extend(report.reached);
    }
    let expected = [
        "asked in pieces",
        "came from chosen tiers",
        "claimed together",
        "closed",
        "cold",
        "crash",
        "demoted",
        "forgotten",
        "hit",
        "hit loaded",
        "in the wished region",
        "killed",
        "lease in place ended",
        "leased in place",
        "lender off",
        "memory lost",
        "missed",
        "not taken over",
        "opened again",
        "over budget",
        "promoted",
        "provisional settled",
        "published",
        "read",
        "recorded",
        "recovered",
        "recovered and held",
        "removal failed",
        "reset",
        "second use",
        "settled",
        "taken over",
        "tier closed",
        "told twice",
        "went",
    ];
    assert_eq!(reached.into_iter().collect::<Vec<_>>(), expected, "the runs are idle");
}

#[test]
fn a_seed_is_the_same_run_every_time() {
    for seed in 0..50 {
        let plan = Plan::new(seed);
        let (first, second) = (run(&plan, None, false), run(&plan, None, true));
        assert_eq!((first.steps, first.fingerprint), (second.steps, second.fingerprint), "seed {seed}");
    }
}

#[test]
fn a_seed_is_the_same_run_in_every_process() {
    let run_seeds = || {
        let command =
            std::process::Command::new(env!("CARGO_BIN_EXE_kvdepot-sim")).args(["--seeds", "50"]).output();
        let output = command.unwrap_or_else(|error| panic!("the simulator does not start: {error}"));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let first = run_seeds();
    assert!(first.contains("fingerprint"), "{first}");
    assert_eq!(first, run_seeds());
}
