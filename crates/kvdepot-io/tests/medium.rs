//! All kinds of access to a medium behave the same: positional calls on a file, a mapping for its reads, and a mapping of a
//! file or of a DAX device for all.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::time::Duration;

use kvdepot_core::ErrorKind;
use kvdepot_io::SlotBuf;
use kvdepot_io::checksum::crc64;
use kvdepot_io::cut::in_runs;
use kvdepot_io::mapped::{Access, Medium, Piece, open};

fn file(bytes: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(bytes).unwrap();
    file
}

/// Checks all kinds of access on files, and the device that `KVDEPOT_TEST_DAX` names.
fn each(check: impl Fn(&dyn Medium, Option<&tempfile::NamedTempFile>)) {
    for access in [Access::Pread, Access::Mapped, Access::AsDevice] {
        let file = file(4 << 20);
        check(&*open(file.path(), 0, access, Duration::ZERO).unwrap(), Some(&file));
    }
    if let Some(device) = std::env::var_os("KVDEPOT_TEST_DAX") {
        check(&*open(device.as_ref(), 4 << 20, Access::Auto, Duration::from_secs(60)).unwrap(), None);
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
        if let Some(file) = file {
            assert_eq!(std::fs::read(file.path()).unwrap()[5000..905_001], bytes[3..900_004]);
        }
        // Read into fragmented slots, with more runs than one call takes.
        let cut = [100, 4000, 300_000, 1, 95_899, 648_576];
        let slots = [in_runs(&SlotBuf::anonymous(1 << 20), &cut), SlotBuf::anonymous(1 << 20)];
        let tiny: Vec<Piece<'_>> =
            (0..200).map(|n| Piece { slot: &slots[1], from: n * 7, bytes: 7 }).collect();
        let pieces = [&[Piece { slot: &slots[0], from: 50, bytes: 700_000 }][..], &tiny].concat();
        let mut sums = Vec::new();
        medium.read_pieces(5000, &pieces, Some(&mut sums)).unwrap();
        assert_eq!(sums.len(), 201);
        let unsummed = [in_runs(&SlotBuf::anonymous(1 << 20), &cut), SlotBuf::anonymous(1 << 20)];
        let same = |piece: &Piece<'_>, slot| Piece { slot, ..*piece };
        let again: Vec<Piece<'_>> = pieces
            .iter()
            .enumerate()
            .map(|(number, piece)| same(piece, &unsummed[usize::from(number > 0)]))
            .collect();
        medium.read_pieces(5000, &again, None).unwrap();
        for (one, other) in slots.iter().zip(&unsummed) {
            let (mut left, mut right) = (vec![0; 1 << 20], vec![0; 1 << 20]);
            one.read_at(0, &mut left);
            other.read_at(0, &mut right);
            assert!(left == right);
        }
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
                medium.read_pieces(at, &[piece], None).unwrap_err(),
                medium.write_piece(at, piece).unwrap_err(),
            ];
            assert!(errors.iter().all(|error| error.kind() == ErrorKind::Config), "{errors:?}");
        }
        let long = Piece { slot: &slot, from: 1, bytes: 4096 };
        assert_eq!(medium.write_piece(0, long).unwrap_err().kind(), ErrorKind::Config);
    });
}

/// The file would have its length again, and zeros that a reader of its memory could not tell from what was there.
#[test]
fn no_write_makes_a_truncated_file_longer() {
    each(|medium, file| {
        let Some(file) = file else { return };
        let slot = SlotBuf::anonymous(4096);
        let piece = Piece { slot: &slot, from: 0, bytes: 4096 };
        file.as_file().set_len(1 << 20).unwrap();
        assert_eq!(medium.write_piece((4 << 20) - 4096, piece).unwrap_err().kind(), ErrorKind::Io);
        assert!(medium.is_lost());
        assert_eq!(medium.write((4 << 20) - 64, &[1; 64]).unwrap_err().kind(), ErrorKind::Io);
        assert_eq!(file.as_file().metadata().unwrap().len(), 1 << 20);
    });
}

/// Access to the mapping of a truncated file raises SIGBUS, which ends this test process unless it is handled.
#[test]
fn truncation_is_an_error_from_then_on() {
    each(|medium, file| {
        let Some(file) = file else { return };
        let slot = SlotBuf::anonymous(4096);
        let piece = Piece { slot: &slot, from: 0, bytes: 4096 };
        medium.write(3 << 20, &[1; 4096]).unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        assert_eq!(
            medium.read_pieces(3 << 20, &[piece], Some(&mut Vec::new())).unwrap_err().kind(),
            ErrorKind::Io
        );
        assert!(medium.is_lost());
        assert_eq!(medium.read(3 << 20, &mut [0; 4096]).unwrap_err().kind(), ErrorKind::Io);
        if medium.is_memory() {
            assert_eq!(medium.read(0, &mut [0; 64]).unwrap_err().kind(), ErrorKind::Io, "lost as a whole");
            assert_eq!(medium.write_piece(0, piece).unwrap_err().kind(), ErrorKind::Io);
        }
        assert_eq!(medium.persist().unwrap_err().kind(), ErrorKind::Io);
        assert!(medium.is_lost());
        assert!(medium.read_pieces(3 << 20, &[piece], None).is_err(), "it does not come back");
        // Another medium of this process is not affected.
        let other = self::file(4 << 20);
        let other = open(other.path(), 0, Access::AsDevice, Duration::ZERO).unwrap();
        other.write_piece(0, piece).unwrap();
        other.persist().unwrap();
    });
}

/// The kernel lists what is mapped. `KVDEPOT_TEST_MEMORY_DIR` names a directory on persistent memory that is mounted with
/// `dax`.
#[test]
fn auto_maps_a_file_in_memory_and_none_on_a_disk() {
    let persistent = std::env::var("KVDEPOT_TEST_MEMORY_DIR").ok();
    let in_memory: Vec<&str> = persistent.iter().map(String::as_str).chain(["/dev/shm"]).collect();
    for directory in in_memory.iter().copied().chain([env!("CARGO_TARGET_TMPDIR")]) {
        let file = tempfile::NamedTempFile::new_in(directory).unwrap();
        file.as_file().set_len(4 << 20).unwrap();
        let is_mapped = |access| {
            let medium = open(file.path(), 0, access, Duration::from_secs(60)).unwrap();
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let is_mapped = maps.contains(file.path().to_str().unwrap());
            (is_mapped, medium.rests_in_memory(), medium.is_memory())
        };
        let (_, rests_in_memory, _) = is_mapped(Access::Pread);
        // Somebody may build on tmpfs.
        assert!(rests_in_memory || !in_memory.contains(&directory), "{directory}");
        for (access, expected) in
            [(Access::Auto, rests_in_memory), (Access::Pread, false), (Access::Mapped, true)]
        {
            // A file is flushed, wherever it lies.
            assert_eq!(is_mapped(access), (expected, rests_in_memory, false), "{access:?} in {directory}");
        }
    }
}

/// Returns how many faults this thread has had that needed no disk: field 10 of its `stat`.
fn minor_faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let (_, after_name) = stat.rsplit_once(')').unwrap();
    after_name.split_whitespace().nth(7).unwrap().parse().unwrap()
}

/// Reading pages that are new to the process faults. tmpfs maps 16 pages of 4 KiB per fault.
#[test]
fn pages_that_were_mapped_ahead_do_not_fault() {
    const BYTES: usize = 8 << 20;
    let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    std::fs::write(file.path(), vec![7; BYTES]).unwrap();
    let slot = SlotBuf::anonymous(BYTES);
    slot.write_at(0, &vec![1; BYTES]);
    let faults_of_a_read = |is_ahead: bool| {
        let medium = open(file.path(), 0, Access::Auto, Duration::ZERO).unwrap();
        assert!(medium.is_read_from_memory());
        if is_ahead {
            // Any bytes: it maps the pages that hold them.
            assert!(medium.map_ahead(5, BYTES - 5));
        }
        let before = minor_faults();
        medium.read_pieces(0, &[Piece { slot: &slot, from: 0, bytes: BYTES }], None).unwrap();
        minor_faults() - before
    };
    let (cold, warm) = (faults_of_a_read(false), faults_of_a_read(true));
    assert!(warm * 4 < cold, "{warm} faults of pages that were mapped ahead, {cold} of others");
}

#[test]
fn mapping_ahead_never_fails() {
    each(|medium, file| {
        for (at, bytes) in [(0, 4 << 20), (4 << 20, 1), (u64::MAX, 4096), (4096, usize::MAX)] {
            assert!(medium.map_ahead(at, bytes) || !medium.is_read_from_memory());
        }
        if let Some(file) = file {
            file.as_file().set_len(1 << 20).unwrap();
            medium.map_ahead(1 << 20, 1 << 20);
        }
    });
}

/// Otherwise a start would read the whole file, and push others out of the page cache.
#[test]
fn a_file_on_a_disk_is_not_mapped_ahead() {
    for (directory, access, is_ahead) in [
        ("/dev/shm", Access::Mapped, true),
        ("/dev/shm", Access::Pread, false),
        (env!("CARGO_TARGET_TMPDIR"), Access::Mapped, false),
    ] {
        let file = tempfile::NamedTempFile::new_in(directory).unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let medium = open(file.path(), 0, access, Duration::ZERO).unwrap();
        // Somebody may build on tmpfs.
        assert_eq!(
            medium.is_read_from_memory(),
            is_ahead || access == Access::Mapped && medium.rests_in_memory()
        );
    }
}
