//! Compares the allocator with a map of pages: nothing is allocated twice, nothing is lost, no run crosses an extent.

use kvdepot_core::limits::{BLOCK_ALIGN_BYTES as PAGE, SLOT_RUNS_MAX};
use kvdepot_core::runs::Run;
use kvdepot_core::{RunAllocator, Runs};
use proptest::prelude::*;

const EXTENT_PAGES: u64 = 16;
const EXTENTS: u64 = 4;

#[derive(Clone, Debug)]
enum Step {
    Alloc { pages: u64 },
    Free { pick: usize },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1u64..12).prop_map(|pages| Step::Alloc { pages }),
        2 => any::<usize>().prop_map(|pick| Step::Free { pick }),
    ]
}

/// Returns the lengths of the free runs in the page map, in pages.
fn free_runs(taken: &[bool]) -> Vec<u64> {
    let extents = taken.chunks(EXTENT_PAGES as usize);
    let runs = extents.flat_map(|pages| pages.split(|&t| t).map(|run| run.len() as u64));
    runs.filter(|&len| len > 0).collect()
}

fn mark(taken: &mut [bool], runs: &Runs, value: bool) {
    for run in runs {
        assert!(run.offset % PAGE == 0 && run.len % PAGE == 0 && run.len > 0);
        assert_eq!(
            run.offset / PAGE / EXTENT_PAGES,
            (run.end() / PAGE - 1) / EXTENT_PAGES,
            "crosses an extent"
        );
        for page in run.offset / PAGE..run.end() / PAGE {
            assert_ne!(taken[page as usize], value, "page {page} changes hands twice");
            taken[page as usize] = value;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn pages_have_one_owner(steps in prop::collection::vec(step(), 1..120)) {
        let mut allocator = RunAllocator::new(EXTENT_PAGES * PAGE);
        allocator.add_extent(0, EXTENT_PAGES * PAGE * (EXTENTS - 1));
        allocator.add_extent(EXTENT_PAGES * PAGE * (EXTENTS - 1), EXTENT_PAGES * PAGE);
        let mut taken = vec![false; (EXTENT_PAGES * EXTENTS) as usize];
        let mut held: Vec<Runs> = Vec::new();
        for step in steps {
            let before = free_runs(&taken);
            match step {
                Step::Alloc { pages } => {
                    let runs = allocator.alloc(pages * PAGE);
                    // Every run is at least a page, and no test slot has more pages than a slot may have runs.
                    prop_assert_eq!(runs.is_some(), before.iter().sum::<u64>() >= pages);
                    if let Some(runs) = runs {
                        prop_assert_eq!(runs.iter().map(|r| r.len).sum::<u64>(), pages * PAGE);
                        let mut longest_first = before.clone();
                        longest_first.sort_unstable_by(|a, b| b.cmp(a));
                        let mut rest = pages;
                        let fewest = longest_first.iter().take_while(|&&len| {
                            let more = rest > 0;
                            rest = rest.saturating_sub(len);
                            more
                        });
                        prop_assert_eq!(runs.len(), fewest.count());
                        mark(&mut taken, &runs, true);
                        held.push(runs);
                    }
                }
                Step::Free { pick } if !held.is_empty() => {
                    let runs = held.swap_remove(pick % held.len());
                    mark(&mut taken, &runs, false);
                    allocator.free(&runs);
                }
                Step::Free { .. } => {}
            }
            let after = free_runs(&taken);
            prop_assert_eq!(allocator.free_bytes(), after.iter().sum::<u64>() * PAGE);
            prop_assert_eq!(allocator.largest_run_bytes(), after.iter().max().copied().unwrap_or(0) * PAGE);
        }
        for runs in held {
            allocator.free(&runs);
        }
        prop_assert_eq!(allocator.free_bytes(), allocator.total_bytes());
        prop_assert_eq!(allocator.largest_run_bytes(), EXTENT_PAGES * PAGE);
    }
}

#[test]
fn the_tightest_run_is_taken() {
    let mut allocator = RunAllocator::new(EXTENT_PAGES * PAGE);
    allocator.add_extent(0, 8 * PAGE);
    let slots: Vec<Runs> = [3, 1, 2, 1].iter().map(|pages| allocator.alloc(pages * PAGE).unwrap()).collect();
    allocator.free(&slots[0]);
    allocator.free(&slots[2]);
    assert_eq!(allocator.alloc(2 * PAGE).unwrap(), slots[2]);
}

#[test]
fn a_slot_has_a_limit_of_runs() {
    let pages = 2 * (SLOT_RUNS_MAX as u64 + 1);
    let mut allocator = RunAllocator::new(pages * PAGE);
    allocator.add_extent(0, pages * PAGE);
    let slots: Vec<Runs> = (0..pages).map(|_| allocator.alloc(PAGE).unwrap()).collect();
    slots.iter().step_by(2).for_each(|runs| allocator.free(runs));
    assert_eq!(allocator.largest_run_bytes(), PAGE);
    assert!(allocator.alloc((SLOT_RUNS_MAX as u64 + 1) * PAGE).is_none());
    assert_eq!(allocator.alloc(SLOT_RUNS_MAX as u64 * PAGE).unwrap().len(), SLOT_RUNS_MAX);
    assert_eq!(allocator.free_bytes(), PAGE);
}

#[test]
fn an_extent_may_come_in_parts() {
    let mut allocator = RunAllocator::new(EXTENT_PAGES * PAGE);
    allocator.add_extent(4 * PAGE, 4 * PAGE);
    allocator.add_extent(0, 4 * PAGE);
    assert_eq!(allocator.largest_run_bytes(), 8 * PAGE);
    let runs = allocator.alloc(8 * PAGE).unwrap();
    allocator.free(&runs);
}

#[test]
#[should_panic(expected = "freed twice")]
fn a_double_free_is_a_bug() {
    let mut allocator = RunAllocator::new(EXTENT_PAGES * PAGE);
    allocator.add_extent(0, EXTENT_PAGES * PAGE);
    let runs = allocator.alloc(PAGE).unwrap();
    allocator.free(&runs);
    allocator.free(&runs);
}

#[test]
#[should_panic(expected = "added twice")]
fn space_is_added_once() {
    let mut allocator = RunAllocator::new(EXTENT_PAGES * PAGE);
    allocator.add_extent(0, 4 * PAGE);
    allocator.add_extent(3 * PAGE, PAGE);
}

#[test]
fn exactly_these_runs_are_taken_or_none() {
    let run = |page: u64, pages: u64| Run { offset: page * PAGE, len: pages * PAGE };
    let mut alloc = RunAllocator::new(8 * PAGE);
    alloc.add_extent(0, 16 * PAGE);
    assert!(alloc.take(&[run(2, 3), run(10, 6)]));
    assert_eq!((alloc.free_bytes(), alloc.largest_run_bytes()), (7 * PAGE, 3 * PAGE));
    // Taken, across two extents, outside, empty, not a whole page, the same twice: each with a free run before it.
    let crooked = Run { offset: 1, len: PAGE };
    let endless = Run { offset: u64::MAX - PAGE + 1, len: PAGE };
    for bad in [run(4, 1), run(7, 2), run(15, 2), run(5, 0), crooked, endless, run(0, 2)] {
        assert!(!alloc.take(&[run(0, 1), bad]), "{bad:?}");
        assert_eq!(alloc.free_bytes(), 7 * PAGE, "{bad:?}");
    }
    alloc.free(&[run(2, 3), run(10, 6)]);
    assert!(alloc.take(&[run(0, 8), run(8, 8)]));
    assert_eq!(alloc.free_bytes(), 0);
}
