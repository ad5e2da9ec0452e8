//! What goes wrong, and when.

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
    /// Looking at files and directories, times, small files.
    Meta,
    /// What takes space besides block files: directories and small files. Each of them is struck by `Meta` first.
    Grow,
    /// Closing a written file, where late errors of its writes come to light.
    Flush,
    /// Handing a request to an engine (only `FaultEngine`).
    Submit,
    /// Giving an operation to a queue of the kernel (only [`FaultQueue`](super::FaultQueue)): whatever the fault, the queue breaks.
    Queue,
}

/// What strikes an operation that a queue is given.
pub(super) enum Drawn {
    /// The queue itself breaks.
    Break,
    /// The operation completes with this error, and the kernel does not see it.
    Errno(i32),
    /// The operation is made, and its completion is changed or held back.
    Fault(Fault),
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Fails with EIO.
    Eio,
    /// Fails with ENOSPC.
    NoSpace,
    /// Fails with ENOMEM.
    NoMemory,
    /// Moves only a part of the bytes (reads and writes).
    Short,
    /// Inverts one bit of what was read.
    Flip,
    /// Takes this much longer.
    Slow(Duration),
    /// Does not return before [`Faults::release`].
    Hang,
}

#[derive(Debug, Default)]
struct Plan {
    /// Drawn for every operation, in order; the first that strikes counts.
    chances: Vec<(FaultOp, Fault, f64)>,
    /// The n-th operation of a kind from the plan's start fails so.
    script: HashMap<(FaultOp, u64), Fault>,
    /// The next operation of a kind on a file or directory of this name fails so.
    named: HashMap<(FaultOp, PathBuf), Fault>,
    counts: HashMap<FaultOp, u64>,
    hang_all: Vec<FaultOp>,
    random: u64,
    disabled: bool,
    disk_bytes: Option<u64>,
    overwriting_forbidden: bool,
    strikes_in_queue: bool,
    cancels: bool,
    /// Counted up by `release`; who hangs waits for the next count.
    releases: u64,
    hung: usize,
}

/// A plan of faults, shared by the device or engine that follows it and the test that steers it.
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
    /// A plan without faults; `seed` decides what later chances draw.
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

    /// Has the device say that no file is overwritten in place of one that goes, as network file systems do.
    pub fn forbid_overwriting(&self) -> &Self {
        self.shared.0.lock().overwriting_forbidden = true;
        self
    }

    /// Leaves reads, writes and syncs to a [`FaultQueue`](super::FaultQueue) that follows this plan, too: the device then hands out the
    /// descriptors of its files.
    pub fn strike_in_queue(&self) -> &Self {
        self.shared.0.lock().strikes_in_queue = true;
        self
    }

    /// Has a [`FaultQueue`](super::FaultQueue) give up what hangs when it is asked to.
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

    pub(super) fn disk_bytes(&self) -> Option<u64> {
        self.shared.0.lock().disk_bytes
    }

    pub(super) fn no_space() -> Error {
        os_error("injected fault: ENOSPC", 28)
    }

    /// Lets all go that hang, and ends what `hang` began.
    pub fn release(&self) {
        let mut plan = self.shared.0.lock();
        plan.hang_all.clear();
        plan.releases += 1;
        // They count no more, though their threads may take a while to notice.
        plan.hung = 0;
        self.shared.1.notify_all();
    }

    /// Waits until `count` operations hang; `false` if the deadline passes first.
    pub fn wait_hung(&self, count: usize, deadline: Instant) -> bool {
        let mut plan = self.shared.0.lock();
        while plan.hung < count {
            if self.shared.1.wait_until(&mut plan, deadline).timed_out() {
                return plan.hung >= count;
            }
        }
        true
    }

    /// Switches all faults off or on again; operations are counted all the same.
    pub fn set_enabled(&self, enabled: bool) {
        self.shared.0.lock().disabled = !enabled;
    }

    /// Operations of a kind so far.
    pub fn count(&self, op: FaultOp) -> u64 {
        self.shared.0.lock().counts.get(&op).copied().unwrap_or(0)
    }

    /// Draws what strikes the next operation of a kind, and lives through what is only time: `Slow` and `Hang`.
    /// Errors come back as such; `Short` and `Flip` are for the caller to act out.
    pub fn strike(&self, op: FaultOp) -> Result<Option<Fault>> {
        self.act(self.draw(op, None))
    }

    /// What strikes an operation that a queue is given: nothing here takes time.
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

    /// Counts one more that hangs; it is let go when `releases` tells another number.
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

    /// A number below `bound` from the plan's seed (0 for a bound of 0).
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
