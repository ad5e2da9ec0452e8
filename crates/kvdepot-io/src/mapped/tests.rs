//! Locks, and flushes that fail. tests/medium.rs tests what both kinds of access have in common.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::time::Duration;

use kvdepot_core::ErrorKind;

use super::*;

fn file(bytes: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(bytes).unwrap();
    file
}

#[test]
fn many_are_opened_one_after_another() {
    // A child that another test forks holds the file's lock until it has closed its descriptors.
    let _alone = crate::fork::testing::ONE_AT_A_TIME.lock();
    let file = file(4 << 20);
    for _ in 0..200 {
        let medium = open(file.path(), 1 << 20, Access::AsDevice, Duration::ZERO).unwrap();
        assert_eq!(medium.bytes(), 1 << 20);
        let again = open(file.path(), 0, Access::Auto, Duration::ZERO).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::Busy);
    }
}

/// Linux reports a write-back error once: the next caller would see success.
#[test]
fn a_flush_that_failed_stays_failed() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static ASKED: AtomicUsize = AtomicUsize::new(0);
    let file = file(1 << 20);
    let fd = rustix::fs::open(file.path(), rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()).unwrap();
    let mut medium = FileMedium::new(file.path(), fd, 1 << 20);
    medium.persist().unwrap();
    medium.flush =
        |_| if ASKED.fetch_add(1, Ordering::SeqCst) == 0 { Err(rustix::io::Errno::IO) } else { Ok(()) };
    let begin = std::sync::Barrier::new(8);
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let flush = || {
            begin.wait();
            medium.persist()
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(flush)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(
        outcomes.iter().all(|outcome| outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Io))
    );
    assert_eq!(medium.persist().unwrap_err().kind(), ErrorKind::Io, "until the depot is restarted");
    assert_eq!(ASKED.load(Ordering::SeqCst), 1);
}
