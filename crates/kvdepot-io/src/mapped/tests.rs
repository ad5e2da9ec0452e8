//! Both kinds of access behave the same.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::time::Duration;

use kvdepot_core::ErrorKind;

use super::*;
use crate::checksum::crc64;
use crate::cut::in_runs;

fn file(bytes: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(bytes).unwrap();
    file
}

fn each(check: impl Fn(&dyn Medium, &tempfile::NamedTempFile)) {
    for access in [Access::Auto, Access::Mapped] {
        let file = file(4 << 20);
        check(&*open(file.path(), 0, access, Duration::ZERO).unwrap(), &file);
    }
}

#[test]
fn pieces_come_back_with_their_checksums() {
    each(|medium, file| {
        let whole = SlotBuf::anonymous(1 << 20);
        let bytes: Vec<u8> = (0..1 << 20).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        whole.write_at(0, &bytes);
        let sum = medium.write_piece(5000, Piece { slot: &whole, from: 3, bytes: 900_001 }).unwrap();
        assert_eq!(sum, crc64(&bytes[3..900_004]));
        medium.persist().unwrap();
        assert_eq!(std::fs::read(file.path()).unwrap()[5000..905_001], bytes[3..900_004]);
        // Read into fragmented slots, with more runs than one call takes.
        let cut = [100, 4000, 300_000, 1, 95_899, 648_576];
        let slots = [in_runs(&SlotBuf::anonymous(1 << 20), &cut), SlotBuf::anonymous(1 << 20)];
        let tiny: Vec<Piece<'_>> =
            (0..200).map(|n| Piece { slot: &slots[1], from: n * 7, bytes: 7 }).collect();
        let pieces = [&[Piece { slot: &slots[0], from: 50, bytes: 700_000 }][..], &tiny].concat();
        let mut sums = Vec::new();
        medium.read_pieces(5000, &pieces, &mut sums).unwrap();
        assert_eq!(sums.len(), 201);
        let mut from = 3;
        for (piece, sum) in pieces.iter().zip(&sums) {
            let mut read = vec![0; piece.bytes];
            piece.slot.read_at(piece.from, &mut read);
            assert!(read == bytes[from..from + piece.bytes] && *sum == crc64(&read));
            from += piece.bytes;
        }
        let mut line = [0; 64];
        medium.write(4 << 10, &[9; 64]).unwrap();
        medium.read(4 << 10, &mut line).unwrap();
        assert_eq!(line, [9; 64]);
    });
}

#[test]
fn nothing_is_accessed_behind_the_end() {
    each(|medium, _| {
        let slot = SlotBuf::anonymous(4096);
        let piece = Piece { slot: &slot, from: 0, bytes: 4096 };
        for at in [(4 << 20) - 4095, 4 << 20, u64::MAX - 10] {
            let errors = [
                medium.read(at, &mut [0; 4096]).unwrap_err(),
                medium.write(at, &[0; 4096]).unwrap_err(),
                medium.read_pieces(at, &[piece], &mut Vec::new()).unwrap_err(),
                medium.write_piece(at, piece).unwrap_err(),
            ];
            assert!(errors.iter().all(|error| error.kind() == ErrorKind::Config), "{errors:?}");
        }
        let long = Piece { slot: &slot, from: 1, bytes: 4096 };
        assert_eq!(medium.write_piece(0, long).unwrap_err().kind(), ErrorKind::Config);
    });
}

/// Access to the mapping of a truncated file raises SIGBUS, which ends this test process unless it is handled.
#[test]
fn truncation_is_an_error_from_then_on() {
    each(|medium, file| {
        let slot = SlotBuf::anonymous(4096);
        let piece = Piece { slot: &slot, from: 0, bytes: 4096 };
        medium.write(3 << 20, &[1; 4096]).unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        assert_eq!(medium.read(3 << 20, &mut [0; 4096]).unwrap_err().kind(), ErrorKind::Io);
        assert_eq!(medium.read_pieces(3 << 20, &[piece], &mut Vec::new()).unwrap_err().kind(), ErrorKind::Io);
        if medium.is_memory() {
            assert_eq!(medium.read(0, &mut [0; 64]).unwrap_err().kind(), ErrorKind::Io, "lost as a whole");
            assert_eq!(medium.write_piece(0, piece).unwrap_err().kind(), ErrorKind::Io);
        }
        assert_eq!(medium.persist().unwrap_err().kind(), ErrorKind::Io);
        // Another medium of this process is not affected.
        let other = self::file(4 << 20);
        let other = open(other.path(), 0, Access::Mapped, Duration::ZERO).unwrap();
        other.write_piece(0, piece).unwrap();
        other.persist().unwrap();
    });
}

#[test]
fn many_are_opened_one_after_another() {
    // A child that another test forks holds the file's lock until it has closed its descriptors.
    let _alone = crate::fork::testing::ONE_AT_A_TIME.lock();
    let file = file(4 << 20);
    for _ in 0..200 {
        let medium = open(file.path(), 1 << 20, Access::Mapped, Duration::ZERO).unwrap();
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
