//! Compares `longest_hit` with its definition, tried for every length.

use std::collections::HashMap;

use kvdepot_core::{GroupShape, HitSearch, longest_hit, needed_blocks};
use proptest::prelude::*;

/// The definition: the longest length, in complete blocks of all groups, whose needed blocks are all present.
fn by_definition(groups: &[GroupShape], skip: usize, limit: usize, there: &[Vec<bool>]) -> usize {
    let whole = |n: usize| groups.iter().all(|shape| n.is_multiple_of(shape.units_per_block));
    let needs = |shape: &GroupShape, block: usize, n: usize| {
        let (start, end) = (block * shape.units_per_block, (block + 1) * shape.units_per_block);
        let in_window = shape.window_blocks == 0 || n / shape.units_per_block - block <= shape.window_blocks;
        end > skip && start < n && in_window
    };
    let complete = |n: usize| {
        groups.iter().zip(there).all(|(shape, there)| {
            (0..n / shape.units_per_block).all(|block| there[block] || !needs(shape, block, n))
        })
    };
    (skip + 1..=limit).rev().find(|&n| !groups.is_empty() && whole(n) && complete(n)).unwrap_or(skip)
}

const UNITS: usize = 48;

fn case() -> impl Strategy<Value = (Vec<GroupShape>, usize, usize, Vec<Vec<bool>>)> {
    let group = (prop_oneof![Just(0usize), 1usize..6], prop::sample::select(vec![1usize, 2, 3, 4]))
        .prop_map(|(window_blocks, units_per_block)| GroupShape { window_blocks, units_per_block });
    let blocks = prop::collection::vec(prop::bool::weighted(0.85), UNITS);
    (prop::collection::vec((group, blocks), 0..4), 0..UNITS / 2, 0..=UNITS).prop_map(
        |(groups, skip, limit)| {
            let (shapes, there) = groups.into_iter().unzip();
            (shapes, skip, limit, there)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn is_the_longest_by_definition((groups, skip, limit, there) in case()) {
        let mut asked: HashMap<(usize, usize), usize> = HashMap::new();
        let hit = longest_hit(&groups, skip, limit, &mut |group, block| {
            *asked.entry((group, block)).or_default() += 1;
            there[group][block]
        });
        prop_assert_eq!(hit, by_definition(&groups, skip, limit, &there));
        prop_assert!(asked.values().all(|&times| times == 1), "asked more than once: {:?}", asked);
        let mut search = HitSearch::new(&groups, skip, limit);
        let mut pieces = 0;
        let in_pieces = loop {
            let mut looks = 1 + pieces % 3;
            pieces += 1;
            prop_assert!(pieces < 1000, "the search gets on");
            let has = &mut |group: usize, block: usize| there[group][block];
            if let Some(hit) = search.go_on(&groups, &mut looks, has) {
                break hit;
            }
            prop_assert_eq!(looks, 0);
        };
        prop_assert_eq!(in_pieces, hit);
        for (group, shape) in groups.iter().enumerate().filter(|_| hit > skip) {
            for block in needed_blocks(shape, skip, hit) {
                prop_assert!(there[group][block] && asked.contains_key(&(group, block)));
            }
        }
    }
}

#[test]
fn a_full_group_is_asked_up_to_its_first_miss() {
    let groups = [
        GroupShape { window_blocks: 0, units_per_block: 1 },
        GroupShape { window_blocks: 2, units_per_block: 1 },
    ];
    let mut asked = Vec::new();
    let hit = longest_hit(&groups, 1, 100, &mut |group, block| {
        asked.push((group, block));
        group == 1 || block < 4
    });
    assert_eq!(hit, 4);
    assert_eq!(asked, [(0, 1), (0, 2), (0, 3), (0, 4), (1, 3), (1, 2)]);
}

#[test]
fn a_window_group_needs_only_the_end() {
    let groups = [GroupShape { window_blocks: 2, units_per_block: 4 }];
    assert_eq!(longest_hit(&groups, 0, 43, &mut |_, block| block >= 8), 40);
    assert_eq!(needed_blocks(&groups[0], 0, 40), 8..10);
    assert_eq!(needed_blocks(&groups[0], 36, 40), 9..10);
}

#[test]
fn extremes_are_no_hit() {
    let huge = GroupShape { window_blocks: 0, units_per_block: usize::MAX };
    let odd = GroupShape { window_blocks: 1, units_per_block: 2 };
    assert_eq!(longest_hit(&[huge, odd], 3, 1000, &mut |_, _| true), 3);
    assert_eq!(longest_hit(&[], 3, 1000, &mut |_, _| true), 3);
    assert_eq!(longest_hit(&[odd], 30, 10, &mut |_, _| true), 30);
    assert_eq!(needed_blocks(&odd, 10, 10), 5..5);
}
