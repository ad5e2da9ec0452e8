//! P1: a process killed with -9 at any moment leaves on its medium everything that was acknowledged and no half-written
//! block. With `KVDEPOT_TEST_SLAB`, the medium is a block device; there `make test-slab` also kills the machine in the middle
//! of `child`, and runs `survivor` after its next start.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;

use kvdepot_io::AlignedBuf;
use kvdepot_tier::conformance::Bench;
use kvdepot_tier::{SlabConfig, SlabTier, Tier};
use rustix::fs::OFlags;

use crate::killed;
use crate::media::{MIB, Media, config, device};

/// Path of the medium on which `child` writes.
const CHILD: &str = "KVDEPOT_TEST_SLAB_CRASH";
/// Set if `child` leaves space for the next ones.
const IS_ONE_OF_MANY: &str = "KVDEPOT_TEST_SLAB_CRASH_MANY";
/// Number of blocks that `survivor` must find.
const ACKNOWLEDGED: &str = "KVDEPOT_TEST_SLAB_ACKNOWLEDGED";
const BYTES: u64 = 128 * MIB;
/// Where `child` marks what was acknowledged, on a device: behind the medium. `tools/vm/power_loss.py` looks for the marks.
const MARK_AT: u64 = BYTES;
/// Fewer than fit on the medium: nothing is evicted.
const BLOCKS: u64 = 4000;
const ROUNDS: u64 = 4;

fn open(config: SlabConfig) -> Bench {
    Bench::new(Arc::new(SlabTier::open(config).unwrap()) as Arc<dyn Tier>)
}

/// Not a test itself: the process that the tests below kill. It writes and reports its progress.
#[test]
fn child() {
    let Ok(path) = std::env::var(CHILD) else { return };
    let bench = open(config(path.as_ref(), BYTES));
    let first = bench.tier.usage().blocks;
    let marks = device().map(|device| {
        let direct = OFlags::DIRECT.bits() as i32;
        std::fs::OpenOptions::new().write(true).custom_flags(direct).open(device).unwrap()
    });
    let end = if std::env::var(IS_ONE_OF_MANY).is_ok() { first + BLOCKS / ROUNDS } else { BLOCKS };
    killed::write(&bench, first..end, |acknowledged| {
        if let Some(marks) = &marks {
            let mut mark = AlignedBuf::zeroed(4096);
            mark[..8].copy_from_slice(&acknowledged.to_le_bytes());
            marks.write_all_at(&mark, MARK_AT).unwrap();
        }
    });
    // Until it is killed.
    loop {
        std::thread::park();
    }
}

/// Checks what a crash left. Fills the gap that it may have left among the last blocks, since the next child continues
/// after what is there; returns the number of blocks then.
fn check(bench: &Bench, acknowledged: u64, what: &str) -> u64 {
    let listed = || bench.tier.keys(bench.spec.id(bench.epoch)).len() as u64;
    let found = listed();
    assert!((0..acknowledged).all(|n| bench.read_is_right(n)), "{what}: all that was acknowledged");
    let right = (0..BLOCKS + 8).filter(|n| bench.read_is_right(*n)).count() as u64;
    // Of blocks that were being written, a start finds the head only. They are misses, and not listed from then on.
    assert!(right <= found && found <= right + 8, "{what}: {right} of {found} listed blocks");
    assert_eq!(right, listed(), "{what}: every listed block reads right");
    let next = right.next_multiple_of(8);
    assert!((0..next).all(|n| bench.write(n).is_ok()));
    next
}

#[test]
fn killed_while_writing() {
    let media = Media::new();
    let medium = media.next(BYTES);
    let mut acknowledged = 0;
    for round in 1..=ROUNDS {
        // However late it is killed, there is something left to write for the next one.
        let variables = [(CHILD, medium.path.as_os_str()), (IS_ONE_OF_MANY, "1".as_ref())];
        acknowledged = killed::kill("crash::child", &variables, acknowledged, round);
        let bench = open(medium.clone());
        acknowledged = check(&bench, acknowledged, &format!("round {round}"));
    }
}

/// Runs after a restart of the machine, on the device where `child` had written, or on a file with what a loss of power
/// leaves there.
#[test]
fn survivor() {
    let (Ok(acknowledged), Some(device)) = (std::env::var(ACKNOWLEDGED), device()) else { return };
    let acknowledged = acknowledged.parse().unwrap();
    let bench = open(config(&device, BYTES));
    println!("\nkept {}", check(&bench, acknowledged, "after a restart of the machine"));
}
