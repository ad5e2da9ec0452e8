//! P1: a block file with any byte changed, or cut at any length, is a miss and is set aside; it never yields other
//! bytes.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::fs;
use std::sync::Arc;

use crate::common::{block_file, config, files_with, open};
use kvdepot_core::{BlockLayout, ErrorKind};
use kvdepot_io::DirectUse;
use kvdepot_tier::Written;
use kvdepot_tier::conformance::{Bench, spec};
use kvdepot_tier::format::BlockHeader;
use proptest::prelude::*;

fn damage(direct: bool, change: impl Fn(&mut Vec<u8>)) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut settings = config(dir.path());
    settings.io_direct = if direct { DirectUse::Always } else { DirectUse::Never };
    let tier = open(settings);
    let bench = Bench::with(
        Arc::clone(&tier) as _,
        spec("rot", BlockLayout::new(vec![vec![3000], vec![2500, 1]]).unwrap()),
    );
    bench.write_all(2);
    // A scan that listed the file before it was set aside counts it once more, until somebody reads it.
    assert!(tier.wait_scanned(Bench::soon()));
    let path = block_file(dir.path(), &bench, 0);
    let mut bytes = fs::read(&path).unwrap();
    change(&mut bytes);
    fs::write(&path, &bytes).unwrap();
    let used = bench.tier.usage().bytes;
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(tier.quarantined(&bench.spec), 1);
    assert_eq!(bench.tier.usage().bytes, used, "a file put aside still takes its room (P5)");
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::NotFound, "it is not served again");
    assert_eq!(files_with(dir.path(), ".bad").len(), 1);
    assert!(bench.read_is_right(1), "its neighbour");
    assert_eq!(bench.write(0).unwrap(), Written::New);
    assert!(bench.read_is_right(0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn one_byte_changed(at in 0usize..12288, by in 1u8..=255, direct: bool) {
        damage(direct, |bytes| bytes[at] ^= by);
    }

    #[test]
    fn cut_at_any_length(len in 0usize..12288, direct: bool) {
        damage(direct, |bytes| bytes.truncate(len));
    }

    #[test]
    fn a_run_overwritten(at in 0usize..12000, len in 1usize..288, byte: u8) {
        // If the run already held these bytes it would not be damaged: make sure that one byte differs.
        damage(false, |bytes| {
            bytes[at] ^= 1;
            let first = bytes[at];
            bytes[at..at + len].fill(byte);
            bytes[at] = first;
        });
    }
}

/// A file in another build's encoding, as long as a plain one or shorter, is a miss and stays.
#[test]
fn another_encoding_is_a_miss_and_left_alone() {
    for cut in [0, 4096] {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let tier = open(config(dir.path()));
        let bench = Bench::new(Arc::clone(&tier) as _);
        bench.write_all(2);
        assert!(tier.wait_scanned(Bench::soon()));
        let path = block_file(dir.path(), &bench, 0);
        let mut bytes = fs::read(&path).unwrap();
        let mut header = BlockHeader::parse(&bytes).unwrap();
        (header.encoding, header.stored_bytes) = (77, 100);
        let pages = header.encode();
        bytes[..pages.len()].copy_from_slice(&pages);
        bytes.truncate(bytes.len() - cut);
        fs::write(&path, &bytes).unwrap();
        assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(fs::read(&path).unwrap(), bytes);
        assert_eq!((tier.quarantined(&bench.spec), files_with(dir.path(), ".bad").len()), (0, 0));
        assert!(bench.read_is_right(1), "its neighbour");
    }
}

/// P8: a complete, valid file under another block's name.
#[test]
fn another_blocks_file_is_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(open(config(dir.path())));
    bench.write_all(2);
    fs::copy(block_file(dir.path(), &bench, 1), block_file(dir.path(), &bench, 0)).unwrap();
    let error = bench.read(0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("another block"), "{error}");
}

#[test]
fn only_a_few_corrupt_files_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(open(config(dir.path())));
    bench.write_all(20);
    // The first scan counts files too.
    bench.drain();
    for n in 0..20 {
        fs::write(block_file(dir.path(), &bench, n), b"rot").unwrap();
        assert_eq!(bench.read(n).unwrap_err().kind(), ErrorKind::Corrupt);
    }
    bench.drain();
    assert_eq!(files_with(dir.path(), ".bad").len(), 16);
    assert_eq!(bench.tier.usage().bytes, 16 * 16384);
}
