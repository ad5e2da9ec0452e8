//! Batches of a Posix tier whose files are damaged, and of a tier behind a guard that waits for a trial. P1, P2.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::common::{block_file, config, open, open_faulty};
use kvdepot_core::{ErrorKind, Result};
use kvdepot_io::SlotBuf;
use kvdepot_io::faults::{Fault, FaultOp, Faults};
use kvdepot_tier::conformance::Bench;
use kvdepot_tier::{Fetched, GuardConfig, Guarded, ReadItem, Tier};

/// Reads blocks in one batch.
fn read(
    bench: &Bench,
    items: Vec<(u64, SlotBuf)>,
    deadline: Instant,
) -> Vec<std::result::Result<Fetched, ErrorKind>> {
    let (mut reads, mut ends): (Vec<ReadItem>, Vec<Receiver<Result<Fetched>>>) = Default::default();
    for (n, dst) in items {
        let (send, end) = channel();
        let done = Box::new(move |outcome| drop(send.send(outcome)));
        reads.push(ReadItem::new(bench.key(n), dst, done));
        ends.push(end);
    }
    bench.tier.read(reads, deadline);
    ends.iter().map(|end| Bench::answer(end).map_err(|error| error.kind())).collect()
}

#[test]
fn a_damaged_block_in_a_batch_fails_alone() {
    let dir = tempfile::tempdir().unwrap();
    let tier = open(config(dir.path()));
    let bench = Bench::new(Arc::clone(&tier) as _);
    bench.write_all(4);
    assert!(tier.wait_scanned(Bench::soon()));
    let path = block_file(dir.path(), &bench, 1);
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    bytes[5000] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let slots: Vec<SlotBuf> = (0..4).map(|_| bench.slot()).collect();
    let items = vec![
        (0, slots[0].clone()),
        (1, slots[1].clone()),
        (9, slots[2].clone()),
        (2, SlotBuf::anonymous(4096)),
        (3, slots[3].clone()),
    ];
    let whole = Ok(Fetched::Whole);
    let expected = [whole, Err(ErrorKind::Corrupt), Ok(Fetched::Miss), Err(ErrorKind::Config), whole];
    assert_eq!(read(&bench, items, Bench::soon()), expected);
    assert_eq!(bench.block_of(&slots[0]), bench.bytes(0));
    assert_eq!(bench.block_of(&slots[3]), bench.bytes(3));
    let again = read(&bench, vec![(1, bench.slot()), (2, bench.slot())], Bench::soon());
    assert_eq!(again, [Ok(Fetched::Miss), whole], "a damaged block is an error once");
}

#[test]
fn a_batch_that_comes_when_a_trial_is_due_sends_one_block() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let guard = GuardConfig { failures_max: 3, off_min: Duration::ZERO, off_max: Duration::ZERO };
    let tier = Arc::new(Guarded::new(open_faulty(config(dir.path()), &faults), guard));
    let bench = Bench::new(Arc::clone(&tier) as Arc<dyn Tier>);
    bench.write_all(4);
    let all = || (0..4).map(|n| (n, bench.slot())).collect::<Vec<_>>();
    faults.chance(FaultOp::Read, Fault::Eio, 1.0);
    assert_eq!(read(&bench, all(), Bench::soon()), [Err(ErrorKind::Io); 4]);
    // Off, and its pause is over: the first block is the trial, the others are held back.
    let off = Err(ErrorKind::Unavailable);
    assert_eq!(read(&bench, all(), Bench::soon()), [Err(ErrorKind::Io), off, off, off]);
    faults.set_enabled(false);
    assert_eq!(read(&bench, all(), Bench::soon()), [Ok(Fetched::Whole), off, off, off]);
    assert_eq!(read(&bench, all(), Bench::soon()), [Ok(Fetched::Whole); 4]);
}
