//! The plan of faults: which operation fails, how and when.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::{Error, Result};
use parking_lot::{Condvar, Mutex};

/// Operations that faults strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultOp {
    /// Opening a file for reading.
    Open,
    /// One read call.
    Read,
    /// Creating a temporary file.
    Create,
    /// One write call.
    Write,
    /// The rename that publishes.
    Publish,
    /// Removing a file.
    Unlink,
    /// Metadata: stat, listings, times, small files.
    Meta,
    /// Operations that take space besides those of block files: directories and small files. `Meta` strikes each of
    /// them first.
    Grow,
    /// Closing a written file, when late errors of its writes show up.
    Flush,
    /// Submitting a request to an engine (only `FaultEngine`).
    Submit,
    /// Pushing an operation to a queue of the kernel (only [`FaultQueue`](super::FaultQueue)). Any fault breaks the
    /// queue.
    Queue,
}

/// The effect of a fault on an operation pushed to a queue.
pub(super) enum Drawn {
    /// The queue itself breaks.
    Break,
    /// The operation completes with this error and never reaches the kernel.
    Errno(i32),
    /// The operation runs, and its completion is changed or held back.
    Fault(Fault),
}

/// An injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Fails with EIO.
    Eio,
    /// Fails with ENOSPC.
    NoSpace,
    /// Fails with ENOMEM.
    NoMemory,
    /// Transfers only a part of the bytes (reads and writes).
    Short,
    /// Inverts one bit of the bytes that were read.
    Flip,
    /// Takes this much longer.
    Slow(Duration),
    /// Does not return before [`Faults::release`].
    Hang,
    /// Takes effect, and fails with EIO: the answer was lost (the rename that publishes).
    Late,
}

#[derive(Debug, Default)]
struct Plan {
    /// Drawn in order for every operation; the first one that strikes is used.
    chances: Vec<(FaultOp, Fault, f64)>,
    /// Faults by kind and number of the operation, counted from the plan's start.
    script: HashMap<(FaultOp, u64), Fault>,
    /// Faults of the next operation of a kind on a file or directory of this name.
    named: HashMap<(FaultOp, PathBuf), Fault>,
    counts: HashMap<FaultOp, u64>,
    hang_all: Vec<FaultOp>,
    random: u64,
    disabled: bool,
    disk_bytes: Option<u64>,
    overwriting_forbidden: bool,
    links_forbidden: bool,
    strikes_in_queue: bool,
    cancels: bool,
    /// Incremented by `release`; hanging operations wait for the next value.
    releases: u64,
    hung: usize,
}

/// A plan of faults, shared by the device or engine that follows it and the test that controls it.
#[derive(Clone, Debug)]
pub struct Faults {
    shared: Arc<(Mutex<Plan>, Condvar)>,
}

impl Default for Faults {
    fn default() -> Self {
        Self::seeded(0)
    }
}

impl Faults {
    /// Makes a plan without faults. `seed` determines the draws of later chances.
    pub fn seeded(seed: u64) -> Self {
        Self { shared: Arc::new((Mutex::new(Plan { random: seed, ..Plan::default() }), Condvar::new())) }
    }

    /// Makes operations of a kind fail with this probability.
    pub fn chance(&self, op: FaultOp, fault: Fault, probability: f64) -> &Self {
        self.shared.0.lock().chances.push((op, fault, probability));
        self
    }

    /// Makes the `nth` operation of a kind from now fail (0 = the next).
    pub fn at(&self, op: FaultOp, nth: u64, fault: Fault) -> &Self {
        let mut plan = self.shared.0.lock();
        let from = plan.counts.get(&op).copied().unwrap_or(0);
        plan.script.insert((op, from + nth), fault);
        self
    }

    /// Makes the next operation of a kind on a file or directory of this name fail. Unlike [`at`](Self::at) it does not
    /// depend on what background threads do at the same time.
    pub fn at_name(&self, op: FaultOp, name: &str, fault: Fault) -> &Self {
        self.shared.0.lock().named.insert((op, name.into()), fault);
        self
    }

    /// Makes all operations of a kind hang until `release`.
    pub fn hang(&self, op: FaultOp) -> &Self {
        self.shared.0.lock().hang_all.push(op);
        self
    }

    /// Simulates a disk of this size: everything below the device's directory counts as used, and block files that do
    /// not fit fail with ENOSPC.
    pub fn set_disk_bytes(&self, bytes: Option<u64>) -> &Self {
        self.shared.0.lock().disk_bytes = bytes;
        self
    }

    /// Makes the device refuse to overwrite files in place, as network file systems do.
    pub fn forbid_overwriting(&self) -> &Self {
        self.shared.0.lock().overwriting_forbidden = true;
        self
    }

    /// Makes the device refuse hard links, as some file systems do.
    pub fn forbid_links(&self) -> &Self {
        self.shared.0.lock().links_forbidden = true;
        self
    }

    /// Moves faults of reads, writes and syncs into a [`FaultQueue`](super::FaultQueue) that follows this plan. The
    /// device then hands out the descriptors of its files.
    pub fn strike_in_queue(&self) -> &Self {
        self.shared.0.lock().strikes_in_queue = true;
        self
    }

    /// Lets a [`FaultQueue`](super::FaultQueue) cancel hanging operations on request.
    pub fn let_cancel(&self) -> &Self {
        self.shared.0.lock().cancels = true;
        self
    }

    pub(super) fn is_cancelling(&self) -> bool {
        self.shared.0.lock().cancels
    }

    pub(super) fn is_striking_in_queue(&self) -> bool {
        self.shared.0.lock().strikes_in_queue
    }

    pub(super) fn is_overwriting_forbidden(&self) -> bool {
        self.shared.0.lock().overwriting_forbidden
    }

    pub(super) fn are_links_forbidden(&self) -> bool {
        self.shared.0.lock().links_forbidden
    }

    pub(super) fn disk_bytes(&self) -> Option<u64> {
        self.shared.0.lock().disk_bytes
    }

    pub(super) fn lost_answer() -> Error {
        os_error("injected fault: EIO after the operation", 5)
    }

    pub(super) fn no_space() -> Error {
        os_error("injected fault: ENOSPC", 28)
    }

    /// Releases all hanging operations and ends the effect of `hang`.
    pub fn release(&self) {
        let mut plan = self.shared.0.lock();
        plan.hang_all.clear();
        plan.releases += 1;
        // They no longer count as hung, though their threads may take a while to notice.
        plan.hung = 0;
        self.shared.1.notify_all();
    }

    /// Waits until `count` operations hang. Returns `false` if the deadline passes first.
    pub fn wait_hung(&self, count: usize, deadline: Instant) -> bool {
        let mut plan = self.shared.0.lock();
        while plan.hung < count {
            if self.shared.1.wait_until(&mut plan, deadline).timed_out() {
                return plan.hung >= count;
            }
        }
        true
    }

    /// Enables or disables all faults. Operations are counted either way.
    pub fn set_enabled(&self, enabled: bool) {
        self.shared.0.lock().disabled = !enabled;
    }

    /// Returns the number of operations of a kind so far.
    pub fn count(&self, op: FaultOp) -> u64 {
        self.shared.0.lock().counts.get(&op).copied().unwrap_or(0)
    }

    /// Draws the fault of the next operation of a kind. Sleeps through `Slow` and `Hang`, and returns errors as such;
    /// the caller carries out `Short`, `Flip` and `Late`.
    pub fn strike(&self, op: FaultOp) -> Result<Option<Fault>> {
        self.act(self.draw(op, None))
    }

    /// Draws the fault of an operation pushed to a queue, without waiting.
    pub(super) fn draw_for_queue(&self, op: FaultOp) -> Option<Drawn> {
        if self.draw(FaultOp::Queue, None).is_some() {
            return Some(Drawn::Break);
        }
        self.draw(op, None).map(|fault| match fault {
            Fault::Eio => Drawn::Errno(libc::EIO),
            Fault::NoSpace => Drawn::Errno(libc::ENOSPC),
            Fault::NoMemory => Drawn::Errno(libc::ENOMEM),
            other => Drawn::Fault(other),
        })
    }

    /// Counts one more hanging operation. It is released when `releases` returns another number than this.
    pub(super) fn begin_hang(&self) -> u64 {
        let mut plan = self.shared.0.lock();
        plan.hung += 1;
        self.shared.1.notify_all();
        plan.releases
    }

    pub(super) fn releases(&self) -> u64 {
        self.shared.0.lock().releases
    }

    /// [`strike`](Self::strike) for an operation on this path.
    pub fn strike_at(&self, op: FaultOp, path: &Path) -> Result<Option<Fault>> {
        self.act(self.draw(op, path.file_name().map(Path::new)))
    }

    fn act(&self, drawn: Option<Fault>) -> Result<Option<Fault>> {
        match drawn {
            Some(Fault::Eio) => Err(os_error("injected fault: EIO", 5)),
            Some(Fault::NoSpace) => Err(os_error("injected fault: ENOSPC", 28)),
            Some(Fault::NoMemory) => Err(os_error("injected fault: ENOMEM", 12)),
            Some(Fault::Slow(time)) => {
                std::thread::sleep(time);
                Ok(None)
            }
            Some(Fault::Hang) => {
                self.wait_for_release();
                Ok(None)
            }
            other => Ok(other),
        }
    }

    /// Returns a number below `bound` from the plan's seed (0 for a bound of 0).
    pub fn pick(&self, bound: usize) -> usize {
        let drawn = self.shared.0.lock().next_random();
        (drawn % (bound.max(1) as u64)) as usize
    }

    fn draw(&self, op: FaultOp, name: Option<&Path>) -> Option<Fault> {
        let mut plan = self.shared.0.lock();
        let count = plan.counts.entry(op).or_insert(0);
        let nth = *count;
        *count += 1;
        let named = name.and_then(|name| plan.named.remove(&(op, name.to_owned())));
        let scripted = plan.script.remove(&(op, nth)).or(named);
        if plan.disabled {
            return None;
        }
        if plan.hang_all.contains(&op) {
            return Some(Fault::Hang);
        }
        if scripted.is_some() {
            return scripted;
        }
        for i in 0..plan.chances.len() {
            let (of, fault, probability) = plan.chances[i];
            if of == op && plan.next_fraction() < probability {
                return Some(fault);
            }
        }
        None
    }

    fn wait_for_release(&self) {
        let mut plan = self.shared.0.lock();
        let before = plan.releases;
        plan.hung += 1;
        self.shared.1.notify_all();
        while plan.releases == before {
            self.shared.1.wait(&mut plan);
        }
    }
}

impl Plan {
    /// SplitMix64: small, and the same on every machine.
    const fn next_random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    const fn next_fraction(&mut self) -> f64 {
        (self.next_random() >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn os_error(message: &str, code: i32) -> Error {
    Error::io(message, std::io::Error::from_raw_os_error(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_faults() {
        let run = || {
            let faults = Faults::seeded(7);
            faults.chance(FaultOp::Read, Fault::Eio, 0.3);
            (0..64).map(|_| faults.strike(FaultOp::Read).is_err()).collect::<Vec<_>>()
        };
        assert_eq!(run(), run());
        let struck = run().iter().filter(|&&hit| hit).count();
        assert!((8..=32).contains(&struck), "{struck} of 64");
    }

    #[test]
    fn a_script_strikes_once_and_where_it_says() {
        let faults = Faults::default();
        faults.strike(FaultOp::Write).unwrap();
        faults.at(FaultOp::Write, 1, Fault::NoSpace);
        assert!(faults.strike(FaultOp::Write).is_ok());
        assert_eq!(faults.strike(FaultOp::Write).unwrap_err().kind(), kvdepot_core::ErrorKind::NoSpace);
        assert!(faults.strike(FaultOp::Write).is_ok());
        assert_eq!(faults.count(FaultOp::Write), 4);
    }

    #[test]
    fn a_fault_at_a_name_strikes_once_and_nothing_else() {
        let faults = Faults::default();
        faults.at_name(FaultOp::Publish, "e1", Fault::NoSpace);
        let publish = |path: &str| faults.strike_at(FaultOp::Publish, Path::new(path)).is_ok();
        assert!(publish("a/e2") && faults.strike_at(FaultOp::Unlink, Path::new("a/e1")).is_ok());
        assert!(!publish("a/e1"));
        assert!(publish("a/e1"));
    }
}
