//! What a DAX device does and a file does not: its size comes from sysfs, it is mapped in units of its alignment, it has
//! several device nodes, it can be taken away. These tests run with `KVDEPOT_TEST_DAX` (`make test-dax`: on a device of a
//! virtual machine) as root, one after another; without it they pass and test nothing.
#![allow(clippy::unwrap_used)] // a failing test panics

mod dax_media;
#[path = "common/sysfs.rs"]
mod sysfs;

use std::os::linux::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use kvdepot_core::ErrorKind;
use kvdepot_tier::conformance::{Bench, Waiting};
use kvdepot_tier::{DaxConfig, DaxTier, Presence, Tier};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use dax_media::{MIB, Media, config, device, give_up, open, raw};
use sysfs::sysfs;

fn attribute(device: &Path, name: &str) -> u64 {
    std::fs::read_to_string(sysfs(device, "char").join(name)).unwrap().trim().parse().unwrap()
}

fn bench(config: DaxConfig) -> Bench {
    Bench::new(open(config) as Arc<dyn Tier>)
}

#[test]
fn its_size_is_that_of_sysfs() {
    let Some(device) = device() else { return };
    let (bytes, align) = (attribute(&device, "size"), attribute(&device, "align"));
    let all = config(&device, 0);
    give_up(&all);
    let tier = open(all.clone());
    assert_eq!(tier.geometry().medium_bytes, bytes);
    let bench = Bench::new(tier as Arc<dyn Tier>);
    bench.write_all(3);
    drop(bench);
    assert!((0..3).all(|n| self::bench(all.clone()).read_is_right(n)));
    let error = DaxTier::open(config(&device, bytes + 1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains(&bytes.to_string()), "{error}");
    // A mapping has a multiple of the alignment.
    assert_eq!(raw(&config(&device, 2 * align + align / 2)).bytes(), 2 * align);
    let error = DaxTier::open(config(&device, align - 1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("alignment"), "{error}");
    give_up(&all);
}

/// Containers that are given one device each have their own device node, and locks on two nodes both succeed.
#[test]
fn it_has_one_owner_by_whichever_node() {
    if device().is_none() {
        return;
    }
    let media = Media::new();
    let medium = media.next(16 * MIB);
    let number = std::fs::metadata(&medium.device_path).unwrap().st_rdev();
    let other = DaxConfig { device_path: media.dir.path().join("node"), ..medium.clone() };
    mknodat(CWD, &other.device_path, FileType::CharacterDevice, Mode::RUSR | Mode::WUSR, number).unwrap();
    let first = bench(medium.clone());
    first.write_all(4);
    let mut second = bench(other);
    assert!((0..4).all(|n| second.read_is_right(n)));
    second.epoch = second.tier.advance_and_wait(&second.spec, 0).unwrap();
    second.write(9).unwrap();
    assert!(first.read(0).is_err(), "what the second depot has reset (P1)");
    assert_eq!(first.peek(1), Presence::Absent);
    assert!(first.write(20).is_err());
    assert!(first.remove(1).unwrap_err().to_string().contains("another depot"));
    assert!(second.read_is_right(9));
    let epoch = second.epoch;
    drop((first, second));
    let third = bench(medium);
    assert_eq!(third.epoch, epoch);
    assert!(third.read_is_right(9) && third.read(0).is_err() && third.read(20).is_err());
}

/// A device whose driver is unbound takes its pages back; touching them raises SIGBUS, which is an error here.
#[test]
fn one_that_is_taken_away_is_an_error() {
    let Some(device) = device() else { return };
    let media = Media::new();
    let medium = media.next(16 * MIB);
    let bench = bench(medium.clone());
    bench.write_all(20);
    let name = sysfs(&device, "char").file_name().unwrap().to_owned();
    let driver = std::fs::canonicalize(sysfs(&device, "char").join("driver")).unwrap();
    let tell = |file: &str| std::fs::write(driver.join(file), name.as_encoded_bytes()).unwrap();
    tell("unbind");
    let error = bench.read(0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    assert!(error.to_string().contains("taken away"), "{error}");
    assert!((0..20).all(|n| !bench.read_is_right(n)), "nothing is served from the memory in its place (P1)");
    assert_eq!(bench.write(50).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(bench.tier.advance_and_wait(&bench.spec, 0).unwrap_err().kind(), ErrorKind::Io);
    drop(bench);
    tell("bind");
    let bench = self::bench(medium);
    assert!((0..20).all(|n| bench.read_is_right(n)), "all is there again");
    assert!(bench.read(50).is_err());
}

/// A medium is its bytes: copied from a file to a device, all of it is there.
#[test]
fn a_files_content_is_a_medium_of_the_device() {
    if device().is_none() {
        return;
    }
    let media = Media::new();
    let file = config(&media.file(16 * MIB), 0);
    let bench = bench(file.clone());
    bench.write_all(20);
    let epoch = bench.tier.advance_and_wait(&bench.spec, bench.epoch + 1).unwrap();
    let bench = Bench { epoch, ..bench };
    bench.write_all(10);
    drop(bench);
    let medium = media.next(16 * MIB);
    let mut bytes = vec![0; 16 << 20];
    raw(&file).read(0, &mut bytes).unwrap();
    raw(&medium).write(0, &bytes).unwrap();
    let bench = self::bench(medium.clone());
    assert_eq!(bench.epoch, epoch);
    assert_eq!((0..20).filter(|n| bench.read_is_right(*n)).count(), 10);
    drop(bench);
    // A medium that was formatted for more bytes than the device has.
    let error = DaxTier::open(DaxConfig { max_bytes: 8 * MIB, ..medium }).unwrap_err();
    assert!(error.to_string().contains("bytes_formatted"), "{error}");
}
