//! Checks of all of a medium, and numbers that look random.
#![allow(clippy::unwrap_used)] // a failing test panics

use kvdepot_tier::conformance::Bench;
use kvdepot_tier::scan::Scan;
use kvdepot_tier::stored::{Check, Checked, Finding, InUse, Stored};

pub(crate) fn unused() -> InUse {
    Box::new(|| Ok(false))
}

pub(crate) fn used() -> InUse {
    Box::new(|| Ok(true))
}

/// Reads what is left of a check, in small steps.
pub(crate) fn rest(mut check: Check) -> Checked {
    let mut all = Checked::default();
    while let Some(checked) = check.next(100_000).unwrap() {
        all.blocks += checked.blocks;
        all.bytes += checked.bytes;
        all.read_bytes += checked.read_bytes;
        all.findings.extend(checked.findings);
    }
    all
}

/// Lists a medium and checks all of it.
pub(crate) fn checked(scan: &Scan) -> (Stored, Vec<Finding>) {
    let stored = scan.list().unwrap();
    let all = rest(scan.check(&stored, None));
    assert_eq!(all.blocks, stored.blocks.len() as u64);
    assert_eq!(all.bytes, stored.blocks.iter().map(|block| block.bytes).sum::<u64>());
    (stored, all.findings)
}

/// Asserts that the list has a bench's namespace, with the blocks that its tier has.
pub(crate) fn has_all_of(stored: &Stored, bench: &Bench) {
    let found = stored.namespaces.iter().find(|one| one.root == bench.spec.root()).unwrap();
    let mut keys: Vec<_> =
        stored.blocks.iter().filter(|one| one.root == found.root).map(|one| one.key).collect();
    let mut expected = bench.tier.keys(bench.spec.id(bench.epoch));
    keys.sort_unstable();
    expected.sort_unstable();
    assert_eq!((found.epoch, &found.problem, keys), (bench.epoch, &None, expected));
}

/// Numbers below `bound`.
pub(crate) fn numbers(seed: u64, bound: usize) -> impl Iterator<Item = usize> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % bound
    })
}
