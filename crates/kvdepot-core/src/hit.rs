//! How far a prefix hit goes when layers are in groups: full attention needs all of the prefix, a sliding window
//! only its end, and groups may cut the tokens into blocks of different sizes.

use std::ops::Range;

/// How one group of layers cuts a prompt. A hash unit is the run of tokens that one engine hash covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupShape {
    /// Blocks that attention looks back; 0: all of them.
    pub window_blocks: usize,
    /// Hash units in a block of this group; at least 1.
    pub units_per_block: usize,
}

/// The largest hit in hash units for which every group has what it needs; `skip_units` when there is none.
///
/// A hit is a multiple of every group's block, above `skip_units` (what the engine has already) and at most
/// `limit_units`. `has(group, block)` is asked at most once for each block. Without groups nothing can be hit.
pub fn longest_hit(
    groups: &[GroupShape],
    skip_units: usize,
    limit_units: usize,
    has: &mut dyn FnMut(usize, usize) -> bool,
) -> usize {
    let Some(step) = step_units(groups).filter(|_| !groups.is_empty()) else { return skip_units };
    let mut hit = round_down_to(limit_units, step);
    for (group, shape) in groups.iter().enumerate().filter(|(_, shape)| shape.window_blocks == 0) {
        let mut blocks = needed_blocks(shape, skip_units, hit);
        if let Some(missing) = blocks.find(|&block| !has(group, block)) {
            hit = round_down(missing, shape, step);
        }
    }
    // `known[g]`: the group has every block from here up to the one where its last check began.
    let mut known = vec![usize::MAX; groups.len()];
    while hit > skip_units {
        let mut shorter = hit;
        for (group, shape) in groups.iter().enumerate().filter(|(_, shape)| shape.window_blocks > 0) {
            let window = needed_blocks(shape, skip_units, hit);
            let unknown = window.start..window.end.min(known[group]);
            let missing = unknown.clone().rev().find(|&block| !has(group, block));
            if !unknown.is_empty() {
                known[group] = missing.map_or(unknown.start, |block| block + 1);
            }
            if let Some(missing) = missing {
                // Every shorter hit that still ends after the missing block has it in its window too.
                shorter = round_down(missing, shape, step);
                break;
            }
        }
        if shorter == hit {
            return hit;
        }
        hit = shorter;
    }
    skip_units
}

/// The largest number of units up to `units` that is whole blocks of every group.
pub fn whole_blocks(groups: &[GroupShape], units: usize) -> usize {
    step_units(groups).map_or(0, |step| round_down_to(units, step))
}

/// The blocks of one group that a hit of `hit_units` must lease, when the engine has the first `skip_units`.
pub fn needed_blocks(shape: &GroupShape, skip_units: usize, hit_units: usize) -> Range<usize> {
    let units = shape.units_per_block.max(1);
    let end = hit_units / units;
    if hit_units <= skip_units {
        // What the engine has may end inside a block.
        return end..end;
    }
    debug_assert!(hit_units.is_multiple_of(units), "a hit is whole blocks of every group");
    let first = skip_units / units;
    match shape.window_blocks {
        0 => first..end,
        window => first.max(end.saturating_sub(window))..end,
    }
}

/// Least common multiple of the groups' blocks; none when it is beyond any prompt.
fn step_units(groups: &[GroupShape]) -> Option<usize> {
    groups.iter().try_fold(1usize, |lcm, shape| {
        let units = shape.units_per_block.max(1);
        (lcm / greatest_common_divisor(lcm, units)).checked_mul(units)
    })
}

fn greatest_common_divisor(mut a: usize, mut b: usize) -> usize {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// The longest hit that ends before `missing_block` of the group.
fn round_down(missing_block: usize, shape: &GroupShape, step: usize) -> usize {
    round_down_to(missing_block * shape.units_per_block.max(1), step)
}

const fn round_down_to(units: usize, step: usize) -> usize {
    units - units % step
}
