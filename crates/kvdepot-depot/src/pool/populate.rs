//! Populates a pool's memory with several threads, piece by piece and in order from the front.

use std::collections::BTreeSet;

use kvdepot_core::Result;
use parking_lot::Mutex;

use super::pages::HUGE_PAGE_BYTES;

/// Largest number of threads chosen automatically: more clear memory no faster.
const CHOSEN_THREADS_MAX: usize = 8;
/// Size of what is touched by one call. The kernel locks the process's address space until such a call ends, and a thread
/// of low priority may be off its processor for long in the middle of it: thread starts, mappings and first touches of
/// other memory wait as long.
pub(crate) const TOUCH_BYTES: u64 = HUGE_PAGE_BYTES;
/// Largest number of threads.
pub(crate) const THREADS_MAX: usize = 64;

/// Returns how many threads populate a pool: the requested number, or for 0 half of the processors, 8 at most.
pub(crate) fn threads(asked: usize) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let chosen = (processors / 2).clamp(1, CHOSEN_THREADS_MAX);
    if asked == 0 { chosen } else { asked.min(THREADS_MAX) }
}

/// The parameters of a population.
pub(crate) struct Population<'a> {
    pub(crate) bytes: u64,
    pub(crate) piece_bytes: u64,
    pub(crate) threads: usize,
    /// Whether to stop; called before each touch.
    pub(crate) stop: &'a (dyn Fn() -> bool + Sync),
    /// Touches a part of a piece of at most [`TOUCH_BYTES`], given by its first byte and its length.
    pub(crate) touch: &'a (dyn Fn(u64, u64) -> Result<()> + Sync),
    /// Called when everything before a byte is populated. Calls come in order.
    pub(crate) reached: &'a (dyn Fn(u64) + Sync),
}

struct Progress {
    next: u64,
    /// Finished pieces after an unfinished one.
    ahead: BTreeSet<u64>,
    reached: u64,
    outcome: Result<()>,
}

impl Population<'_> {
    /// Runs until everything is populated, `stop` returns `true`, or a piece fails: then no thread begins another one.
    pub(crate) fn run(&self) -> Result<()> {
        let progress = Mutex::new(Progress { next: 0, ahead: BTreeSet::new(), reached: 0, outcome: Ok(()) });
        let pieces = usize::try_from(self.bytes.div_ceil(self.piece_bytes)).unwrap_or(usize::MAX);
        std::thread::scope(|scope| {
            for _ in 1..self.threads.min(pieces) {
                let worker = std::thread::Builder::new().name("kvdepot-populat".to_owned());
                // Without another thread it only takes longer.
                let _ = worker.spawn_scoped(scope, || self.work(&progress));
            }
            self.work(&progress);
        });
        progress.into_inner().outcome
    }

    fn work(&self, progress: &Mutex<Progress>) {
        // Low priority, since nothing waits for the memory itself. On Linux it applies to the thread.
        let _ = rustix::process::nice(10);
        loop {
            let start = {
                let mut progress = progress.lock();
                if progress.next >= self.bytes || progress.outcome.is_err() {
                    return;
                }
                let start = progress.next;
                progress.next += self.piece_bytes;
                start
            };
            let len = self.piece_bytes.min(self.bytes - start);
            let outcome = self.touch_piece(start, len);
            let mut progress = progress.lock();
            match outcome {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    progress.outcome = Err(error);
                    return;
                }
            }
            progress.ahead.insert(start);
            while progress.ahead.first() == Some(&progress.reached) {
                progress.ahead.pop_first();
                progress.reached = (progress.reached + self.piece_bytes).min(self.bytes);
                (self.reached)(progress.reached);
            }
        }
    }

    /// Touches a piece. Returns whether all of it is touched, which it is not after a stop.
    fn touch_piece(&self, start: u64, len: u64) -> Result<bool> {
        let end = start + len;
        let mut next = start;
        while next < end {
            if (self.stop)() {
                return Ok(false);
            }
            let len = TOUCH_BYTES.min(end - next);
            (self.touch)(next, len)?;
            next += len;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use kvdepot_core::{Error, ErrorKind};

    use super::*;

    #[test]
    fn every_byte_is_touched_once_and_reported_in_order_by_any_number_of_threads() {
        for (threads, bytes) in [(1, 100), (3, 95), (8, 10), (64, 1000)] {
            let touched: Vec<AtomicUsize> = (0..bytes).map(|_| AtomicUsize::new(0)).collect();
            let reports = Mutex::new(Vec::new());
            let touch = |start: u64, len: u64| {
                for at in start..start + len {
                    touched[at as usize].fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            };
            let reached = |upto: u64| {
                assert!(touched[..upto as usize].iter().all(|byte| byte.load(Ordering::Relaxed) == 1));
                reports.lock().push(upto);
            };
            let stop = || false;
            let all =
                Population { bytes, piece_bytes: 10, threads, stop: &stop, touch: &touch, reached: &reached };
            all.run().unwrap();
            let expected: Vec<u64> = (1..=bytes.div_ceil(10)).map(|n| (n * 10).min(bytes)).collect();
            assert_eq!(reports.into_inner(), expected);
        }
    }

    #[test]
    fn no_call_keeps_the_address_space_for_longer_than_a_huge_page_takes() {
        let touched = Mutex::new(Vec::new());
        let touch = |start: u64, len: u64| {
            touched.lock().push((start, len));
            Ok(())
        };
        let reached = Mutex::new(Vec::new());
        let note = |upto: u64| reached.lock().push(upto);
        let (bytes, piece_bytes, stop) = (5 * TOUCH_BYTES + 7, 2 * TOUCH_BYTES, || false);
        Population { bytes, piece_bytes, threads: 1, stop: &stop, touch: &touch, reached: &note }
            .run()
            .unwrap();
        let mut expected: Vec<(u64, u64)> = (0..5).map(|n| (n * TOUCH_BYTES, TOUCH_BYTES)).collect();
        expected.push((5 * TOUCH_BYTES, 7));
        assert_eq!(touched.into_inner(), expected);
        assert_eq!(
            reached.into_inner(),
            [piece_bytes, 2 * piece_bytes, bytes],
            "pieces are handed over whole"
        );
    }

    #[test]
    fn several_threads_touch_at_the_same_time() {
        // Each of three pieces waits until all three are being touched.
        let together = Barrier::new(3);
        let touch = |_: u64, _: u64| {
            together.wait();
            Ok(())
        };
        let (stop, reached) = (|| false, |_: u64| {});
        Population { bytes: 3, piece_bytes: 1, threads: 3, stop: &stop, touch: &touch, reached: &reached }
            .run()
            .unwrap();
    }

    #[test]
    fn a_piece_that_fails_ends_it_and_nothing_beyond_is_reported() {
        let touched = AtomicUsize::new(0);
        let touch = |start: u64, _: u64| {
            touched.fetch_add(1, Ordering::Relaxed);
            if start == 5 { Err(Error::new(ErrorKind::Io, "no memory")) } else { Ok(()) }
        };
        let last = AtomicUsize::new(0);
        let reached = |upto: u64| last.store(upto as usize, Ordering::Relaxed);
        let stop = || false;
        let failing = Population {
            bytes: 1 << 20,
            piece_bytes: 1,
            threads: 1,
            stop: &stop,
            touch: &touch,
            reached: &reached,
        };
        assert_eq!(failing.run().unwrap_err().kind(), ErrorKind::Io);
        assert_eq!((last.into_inner(), touched.into_inner()), (5, 6));
    }

    #[test]
    fn a_depot_that_ends_waits_for_the_calls_under_way_only() {
        let ending = AtomicBool::new(false);
        let touched = AtomicUsize::new(0);
        let touch = |_: u64, _: u64| {
            ending.store(true, Ordering::Release);
            touched.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let stop = || ending.load(Ordering::Acquire);
        let reached = |_: u64| {};
        Population {
            bytes: 1 << 30,
            piece_bytes: 32 << 20,
            threads: 4,
            stop: &stop,
            touch: &touch,
            reached: &reached,
        }
        .run()
        .unwrap();
        assert!(touched.into_inner() <= 4);
    }

    #[test]
    fn the_chosen_number_of_threads_leaves_processors_to_others() {
        assert!((1..=CHOSEN_THREADS_MAX).contains(&threads(0)));
        assert_eq!((threads(3), threads(1000)), (3, THREADS_MAX));
    }
}
