//! Length of a prefix hit when layers are in groups. Full attention needs the entire prefix, a sliding window only its
//! end, and groups may cut the tokens into blocks of different sizes.

use std::ops::Range;

/// How one group of layers cuts a prompt. A hash unit is the run of tokens that one engine hash covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupShape {
    /// Number of blocks that attention looks back; 0 = all of them.
    pub window_blocks: usize,
    /// Number of hash units in a block of this group; at least 1.
    pub units_per_block: usize,
}

/// Returns the longest hit in hash units for which every group has the blocks it needs; `skip_units` if there is none.
///
/// A hit is a multiple of every group's block size, above `skip_units` (the engine's own hit) and at most
/// `limit_units`. `has(group, block)` is called at most once for each block. Without groups there is no hit.
pub fn longest_hit(
    groups: &[GroupShape],
    skip_units: usize,
    limit_units: usize,
    has: &mut dyn FnMut(usize, usize) -> bool,
) -> usize {
    let mut search = HitSearch::new(groups, skip_units, limit_units);
    search.go_on(groups, &mut { usize::MAX }, has).unwrap_or(skip_units)
}

/// A search for the longest hit that can be cut into pieces. The answers of `has` must not change during it.
#[derive(Clone, Debug)]
pub struct HitSearch {
    skip_units: usize,
    step: usize,
    /// Upper bound of the hit.
    hit: usize,
    /// The group that is being examined, and its next block, if some were examined already.
    group: usize,
    at: Option<usize>,
    /// Whether the groups with full attention are done, so that windows are examined.
    windows: bool,
    /// `known[g]`: the group has every block from here up to the one where its last check began.
    known: Vec<usize>,
}

impl HitSearch {
    /// Makes a search; see [`longest_hit`].
    pub fn new(groups: &[GroupShape], skip_units: usize, limit_units: usize) -> Self {
        let step = step_units(groups).filter(|_| !groups.is_empty());
        let hit = step.map_or(skip_units, |step| round_down_to(limit_units, step));
        let known = vec![usize::MAX; groups.len()];
        Self { skip_units, step: step.unwrap_or(1), hit, group: 0, at: None, windows: false, known }
    }

    /// Examines up to `looks` blocks, and subtracts the number examined. Returns the hit when it is found.
    pub fn go_on(
        &mut self,
        groups: &[GroupShape],
        looks: &mut usize,
        has: &mut dyn FnMut(usize, usize) -> bool,
    ) -> Option<usize> {
        let mut look = |group, block| {
            *looks = looks.checked_sub(1)?;
            Some(has(group, block))
        };
        while !self.windows {
            let Some(shape) = groups.get(self.group) else {
                (self.windows, self.group) = (true, 0);
                break;
            };
            if shape.window_blocks == 0 {
                let needed = needed_blocks(shape, self.skip_units, self.hit);
                for block in self.at.unwrap_or(needed.start)..needed.end {
                    self.at = Some(block);
                    if !look(self.group, block)? {
                        self.hit = round_down(block, shape, self.step);
                        break;
                    }
                }
            }
            (self.group, self.at) = (self.group + 1, None);
        }
        while self.hit > self.skip_units {
            let Some(shape) = groups.get(self.group) else { return Some(self.hit) };
            if shape.window_blocks == 0 {
                self.group += 1;
                continue;
            }
            let window = needed_blocks(shape, self.skip_units, self.hit);
            let unknown = window.start..window.end.min(self.known[self.group]);
            let mut missing = None;
            for block in (unknown.start..self.at.unwrap_or(unknown.end)).rev() {
                self.at = Some(block + 1);
                if !look(self.group, block)? {
                    missing = Some(block);
                    break;
                }
            }
            self.at = None;
            if !unknown.is_empty() {
                self.known[self.group] = missing.map_or(unknown.start, |block| block + 1);
            }
            match missing {
                // Every shorter hit that still ends after the missing block has it in its window too.
                Some(block) => (self.hit, self.group) = (round_down(block, shape, self.step), 0),
                None => self.group += 1,
            }
        }
        Some(self.skip_units)
    }
}

/// Returns the largest number of units up to `units` that consists of complete blocks in every group.
pub fn whole_blocks(groups: &[GroupShape], units: usize) -> usize {
    step_units(groups).map_or(0, |step| round_down_to(units, step))
}

/// Returns the blocks of one group that a hit of `hit_units` must lease if the engine has the first `skip_units`.
pub fn needed_blocks(shape: &GroupShape, skip_units: usize, hit_units: usize) -> Range<usize> {
    let units = shape.units_per_block.max(1);
    let end = hit_units / units;
    if hit_units <= skip_units {
        // The engine's own hit may end inside a block.
        return end..end;
    }
    debug_assert!(hit_units.is_multiple_of(units), "a hit is whole blocks of every group");
    let first = skip_units / units;
    match shape.window_blocks {
        0 => first..end,
        window => first.max(end.saturating_sub(window))..end,
    }
}

/// Returns the least common multiple of the groups' block sizes; `None` if it exceeds any prompt.
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

/// Returns the longest hit that ends before `missing_block` of the group.
fn round_down(missing_block: usize, shape: &GroupShape, step: usize) -> usize {
    round_down_to(missing_block * shape.units_per_block.max(1), step)
}

const fn round_down_to(units: usize, step: usize) -> usize {
    units - units % step
}
