//! P1: a process killed with -9 at any moment leaves on its medium everything that was acknowledged and no half-written
//! block. With `KVDEPOT_TEST_DAX`, the medium is a DAX device, or a file on persistent memory; there `make test-dax` also
//! kills the machine in the middle of `child`, and runs `survivor` after its next start.
#![allow(clippy::unwrap_used)] // a failing test panics

mod dax_media;
#[path = "common/killed.rs"]
mod killed;

use std::sync::Arc;

use kvdepot_io::mapped::Access;
use kvdepot_tier::conformance::Bench;
use kvdepot_tier::{DaxConfig, Tier};

use dax_media::{MIB, Media, accesses, config, device};

/// Path of the medium on which `child` writes.
const CHILD: &str = "KVDEPOT_TEST_DAX_CRASH";
/// How it is accessed there; by default as a depot does.
const ACCESS: &str = "KVDEPOT_TEST_DAX_CRASH_ACCESS";
/// Set if `child` leaves space for the next ones.
const IS_ONE_OF_MANY: &str = "KVDEPOT_TEST_DAX_CRASH_MANY";
/// Set if a file must survive a crash of the machine.
const DURABLE: &str = "KVDEPOT_TEST_DAX_DURABLE";
/// Number of blocks that `survivor` must find.
const ACKNOWLEDGED: &str = "KVDEPOT_TEST_DAX_ACKNOWLEDGED";
const BYTES: u64 = 64 * MIB;
/// Fewer than fit on the medium: nothing is evicted.
const BLOCKS: u64 = 4000;
const ROUNDS: u64 = 4;

fn open(config: DaxConfig) -> Bench {
    // Without flushes of a file, unless the system dies with the process.
    let async_put = std::env::var_os(DURABLE).is_none();
    Bench::new(dax_media::open(DaxConfig { async_put, ..config }) as Arc<dyn Tier>)
}

/// Not a test itself: the process that the tests below kill. It writes and reports its progress.
#[test]
fn child() {
    let Ok(path) = std::env::var(CHILD) else { return };
    let named = std::env::var(ACCESS).ok();
    let access = named.map_or(Access::Auto, |named| {
        *accesses().iter().find(|access| format!("{access:?}") == named).unwrap()
    });
    let bench = open(DaxConfig { access, ..config(path.as_ref(), BYTES) });
    let first = bench.tier.usage().blocks;
    let end = if std::env::var(IS_ONE_OF_MANY).is_ok() { first + BLOCKS / ROUNDS } else { BLOCKS };
    killed::write(&bench, first..end, |_| {});
    // Until it is killed.
    loop {
        std::thread::park();
    }
}

/// Checks what a crash left. Fills the gap that it may have left among the last blocks, since the next child continues
/// after what is there; returns the number of blocks then.
fn check(bench: &Bench, acknowledged: u64, what: &str) -> u64 {
    let listed = bench.tier.keys(bench.spec.id(bench.epoch)).len() as u64;
    assert!(listed >= acknowledged, "{what}: {listed} of {acknowledged}");
    assert!((0..acknowledged).all(|n| bench.read_is_right(n)), "{what}: all that was acknowledged");
    let right = (0..BLOCKS + 8).filter(|n| bench.read_is_right(*n)).count() as u64;
    assert_eq!(right, listed, "{what}: every listed block reads right");
    let next = listed.next_multiple_of(8);
    assert!((0..next).all(|n| bench.write(n).is_ok()));
    next
}

#[test]
fn killed_while_writing() {
    for &access in accesses() {
        let media = Media::new();
        let medium = DaxConfig { access, ..media.next(BYTES) };
        let mut acknowledged = 0;
        for round in 1..=ROUNDS {
            // However late it is killed, there is something left to write for the next one.
            let named = format!("{access:?}");
            let variables = [
                (CHILD, medium.device_path.as_os_str()),
                (ACCESS, named.as_ref()),
                (IS_ONE_OF_MANY, "1".as_ref()),
            ];
            acknowledged = killed::kill("child", &variables, acknowledged, round);
            let bench = open(medium.clone());
            acknowledged = check(&bench, acknowledged, &format!("{access:?}, round {round}"));
        }
    }
}

/// Runs after a restart of the machine, on the device where `child` had written.
#[test]
fn survivor() {
    let (Ok(acknowledged), Some(device)) = (std::env::var(ACKNOWLEDGED), device()) else { return };
    let acknowledged = acknowledged.parse().unwrap();
    let bench = open(config(&device, BYTES));
    println!("\nkept {}", check(&bench, acknowledged, "after a restart of the machine"));
}
