//! Blocks that wait for a call of Mooncake. A call that begins takes many of them at once, because the next blocks of a
//! prompt come one at a time and a call costs about as much for one block as for many.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

/// The deadlines of blocks that share a call differ from the first one's by no more than this. The call ends by the earliest.
const SPREAD_MAX: Duration = Duration::from_millis(100);

/// Limits of one call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) blocks: usize,
    pub(super) bytes: usize,
}

#[derive(Debug)]
struct One<M> {
    number: u64,
    deadline: Instant,
    bytes: usize,
    one: M,
}

/// Blocks in the order in which they came. Each was announced for a call of its own batch; a call takes what is left of
/// its batch, so that none is forgotten, and fills up with the oldest of the others.
#[derive(Debug)]
pub(super) struct Waiting<M> {
    queue: VecDeque<One<M>>,
    next: u64,
}

impl<M> Default for Waiting<M> {
    fn default() -> Self {
        Self { queue: VecDeque::new(), next: 0 }
    }
}

impl<M> Waiting<M> {
    /// Adds blocks with their bytes. Returns the numbers of the blocks of each call that is to be made.
    pub(super) fn push(
        &mut self,
        blocks: impl IntoIterator<Item = (usize, M)>,
        deadline: Instant,
        limits: Limits,
    ) -> Vec<Range<u64>> {
        let (mut batches, mut used) = (Vec::<Range<u64>>::new(), 0);
        for (bytes, one) in blocks {
            let number = self.next;
            self.next += 1;
            match batches.last_mut() {
                Some(batch)
                    if number - batch.start < limits.blocks as u64 && used + bytes <= limits.bytes =>
                {
                    batch.end = self.next;
                    used += bytes;
                }
                _ => {
                    batches.push(number..self.next);
                    used = bytes;
                }
            }
            self.queue.push_back(One { number, deadline, bytes, one });
        }
        batches
    }

    /// Takes the blocks of a call: what is left of its own batch, and the oldest others. Returns them with the earliest of
    /// their deadlines; `None` if nothing waits.
    pub(super) fn take(
        &mut self,
        own: &Range<u64>,
        limits: Limits,
        now: Instant,
    ) -> Option<(Vec<M>, Instant)> {
        let mut taken = self.drain(own);
        let mut bytes: usize = taken.iter().map(|one| one.bytes).sum();
        let mut passed_over = 0;
        while taken.len() < limits.blocks
            && passed_over < limits.blocks
            && let Some(next) = self.queue.get(passed_over)
        {
            let is_near = taken.first().is_none_or(|first| {
                let sooner = first.deadline.min(next.deadline);
                // The later one keeps at least half of its time, and what is late shares with nothing that is not.
                first.deadline.max(next.deadline) - sooner
                    <= SPREAD_MAX.min(sooner.saturating_duration_since(now))
            });
            if is_near && (bytes + next.bytes <= limits.bytes || taken.is_empty()) {
                bytes += next.bytes;
                taken.extend(self.queue.remove(passed_over));
            } else {
                passed_over += 1;
            }
        }
        let deadline = taken.iter().map(|one| one.deadline).min()?;
        Some((taken.into_iter().map(|one| one.one).collect(), deadline))
    }

    /// Takes what is left of a batch whose call will not be made.
    pub(super) fn take_back(&mut self, own: &Range<u64>) -> Vec<M> {
        self.drain(own).into_iter().map(|one| one.one).collect()
    }

    fn drain(&mut self, own: &Range<u64>) -> Vec<One<M>> {
        let start = self.queue.partition_point(|one| one.number < own.start);
        let end = self.queue.partition_point(|one| one.number < own.end);
        self.queue.drain(start..end).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a failing test panics

    use super::*;

    const LIMITS: Limits = Limits { blocks: 4, bytes: 100 };

    fn push(waiting: &mut Waiting<u32>, blocks: Range<u32>, deadline: Instant) -> Vec<Range<u64>> {
        waiting.push(blocks.map(|n| (10, n)), deadline, LIMITS)
    }

    #[test]
    fn blocks_that_came_one_at_a_time_share_a_call() {
        let (mut waiting, now) = (Waiting::default(), Instant::now());
        let own: Vec<_> = (0..6).flat_map(|n| push(&mut waiting, n..n + 1, now)).collect();
        assert_eq!(waiting.take(&own[0], LIMITS, now).unwrap().0, [0, 1, 2, 3]);
        assert_eq!(
            waiting.take(&own[1], LIMITS, now).unwrap().0,
            [4, 5],
            "its own block has gone with another one's"
        );
        assert!(own[2..].iter().all(|own| waiting.take(own, LIMITS, now).is_none()));
    }

    #[test]
    fn blocks_that_came_together_are_several_calls_within_the_limits() {
        let (mut waiting, now) = (Waiting::default(), Instant::now());
        assert_eq!(push(&mut waiting, 0..10, now), [0..4, 4..8, 8..10]);
        let large = [(60, 10), (50, 11), (500, 12), (10, 13)];
        assert_eq!(waiting.push(large, now, LIMITS), [10..11, 11..12, 12..13, 13..14]);
        assert_eq!(waiting.take(&(10..11), LIMITS, now).unwrap().0, [10, 0, 1, 2]);
        assert_eq!(waiting.take_back(&(0..10)), [3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(
            waiting.take(&(12..13), LIMITS, now).unwrap().0,
            [12],
            "larger than a call's limit: alone"
        );
    }

    /// Whatever order the calls begin in, and whichever of them are given up, no block waits for a call that has been.
    #[test]
    fn no_block_is_forgotten_when_calls_begin_in_any_order() {
        let now = Instant::now();
        for seed in 0..2_000_u64 {
            let mut random = seed;
            let mut draw = |bound: u64| {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (random >> 33) % bound
            };
            let (mut waiting, mut calls, mut came, mut gone) =
                (Waiting::default(), Vec::new(), 0, Vec::new());
            for _ in 0..30 {
                if draw(2) == 0 {
                    let (first, count) = (came, draw(6) as u32);
                    came += count;
                    let deadline = now + Duration::from_millis(draw(300));
                    calls.extend(push(&mut waiting, first..came, deadline));
                } else if !calls.is_empty() {
                    let own = calls.swap_remove(draw(calls.len() as u64) as usize);
                    if draw(4) == 0 {
                        gone.extend(waiting.take_back(&own));
                    } else if let Some((taken, _)) = waiting.take(&own, LIMITS, now) {
                        assert!((1..=LIMITS.blocks).contains(&taken.len()), "seed {seed}");
                        gone.extend(taken);
                    }
                }
            }
            for own in calls {
                gone.extend(waiting.take(&own, LIMITS, now).into_iter().flat_map(|(taken, _)| taken));
            }
            gone.sort_unstable();
            assert_eq!(gone, (0..came).collect::<Vec<_>>(), "seed {seed}: each block once");
        }
    }

    #[test]
    fn a_call_ends_by_the_earliest_deadline_and_takes_no_block_of_a_far_one() {
        let (mut waiting, now) = (Waiting::default(), Instant::now());
        let at = |ms: u64| now + Duration::from_millis(ms);
        for (n, ms) in [(0, 1000), (1, 950), (2, 1080), (3, 5000), (4, 1000)] {
            push(&mut waiting, n..n + 1, at(ms));
        }
        assert_eq!(waiting.take(&(4..5), LIMITS, now).unwrap(), (vec![4, 0, 1, 2], at(950)));
        assert_eq!(waiting.take(&(0..1), LIMITS, now).unwrap(), (vec![3], at(5000)));
    }
    /// A block whose time is nearly over would end the call of all others.
    #[test]
    fn a_late_block_shares_with_none_that_is_not() {
        let (mut waiting, now) = (Waiting::default(), Instant::now());
        let at = |ms: u64| now + Duration::from_millis(ms);
        for (n, ms) in [(0, 50), (1, 55), (2, 90), (3, 130)] {
            push(&mut waiting, n..n + 1, at(ms));
        }
        assert_eq!(waiting.take(&(0..1), LIMITS, at(60)).unwrap(), (vec![0], at(50)));
        assert_eq!(
            waiting.take(&(2..3), LIMITS, at(60)).unwrap().0,
            [2],
            "30 ms are left, and block 3 has 70"
        );
        assert_eq!(waiting.take(&(3..4), LIMITS, at(60)).unwrap().0, [3]);
        assert_eq!(waiting.take_back(&(1..2)), [1]);
    }
}
