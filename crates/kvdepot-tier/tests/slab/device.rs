//! What a block device does and a file does not: it has a size of its own, several device nodes, it can be mounted and it can
//! be taken away. These tests run with `KVDEPOT_TEST_SLAB` (`make test-slab`: on an NVMe disk of a virtual machine) as root,
//! one after another; without it they pass and test nothing.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::os::linux::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{ErrorKind, Result};
use kvdepot_io::{FileVolume, IoBuf, SlotBuf, Volume};
use kvdepot_tier::conformance::{Bench, Waiting, until};
use kvdepot_tier::media::{MediumFacts, MediumKind, inspect};
use kvdepot_tier::{SlabConfig, SlabTier, Tier};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::json;

use crate::media::{HANG, MIB, Media, config, device, wipe};
use crate::sysfs::sysfs;

fn bench(config: SlabConfig) -> Bench {
    Bench::new(Arc::new(SlabTier::open(config).unwrap()) as Arc<dyn Tier>)
}

fn open_at_once(config: &SlabConfig) -> Result<SlabTier> {
    SlabTier::open(SlabConfig { lock_wait: Duration::ZERO, ..config.clone() })
}

fn run(command: &str, arguments: &[&Path]) {
    let output = Command::new(command).args(arguments).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn its_size_is_that_of_the_device() {
    let Some(device) = device() else { return };
    let bytes =
        std::fs::read_to_string(sysfs(&device, "block").join("size")).unwrap().trim().parse::<u64>().unwrap()
            * 512;
    wipe(&device);
    let facts = |formatted_bytes| MediumFacts { kind: MediumKind::BlockDevice, bytes, formatted_bytes };
    let settings = json!({ "path": device, "segment_mb": 8 });
    assert_eq!(inspect("Slab", &settings).unwrap(), facts(None));
    let error = SlabTier::open(config(&device, bytes + 1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("larger than its device"), "{error}");
    let all = config(&device, 0);
    let bench = bench(all.clone());
    let used = bench.tier.usage().bytes_max;
    assert!(used <= bytes && used + all.segment_bytes > bytes, "{used} of {bytes}");
    bench.write_all(3);
    drop(bench);
    assert!((0..3).all(|n| self::bench(all.clone()).read_is_right(n)));
    assert_eq!(inspect("Slab", &settings).unwrap(), facts(Some(used)));
}

/// Containers that are given one device each have their own device node, and locks on two nodes both succeed.
#[test]
fn it_has_one_owner_by_whichever_node() {
    if device().is_none() {
        return;
    }
    let media = Media::new();
    let medium = media.next(32 * MIB);
    let number = std::fs::metadata(&medium.path).unwrap().st_rdev();
    let other = SlabConfig { path: media.dir.path().join("node"), ..medium.clone() };
    mknodat(CWD, &other.path, FileType::BlockDevice, Mode::RUSR | Mode::WUSR, number).unwrap();
    let first = bench(medium.clone());
    first.write_all(4);
    for config in [&medium, &other] {
        let error = open_at_once(config).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        let error = inspect("Slab", &json!({ "path": config.path })).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    }
    drop(first);
    assert!((0..4).all(|n| bench(other.clone()).read_is_right(n)));
}

#[test]
fn one_that_is_mounted_is_left_alone() {
    let Some(device) = device() else { return };
    let media = Media::new();
    let medium = media.next(32 * MIB);
    let at = media.dir.path().join("mount");
    std::fs::create_dir(&at).unwrap();
    run("mkfs.ext4", &["-q".as_ref(), "-F".as_ref(), &device]);
    run("mount", &["-t".as_ref(), "ext4".as_ref(), &device, &at]);
    std::fs::write(at.join("file"), "a user's").unwrap();
    let error = open_at_once(&medium).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains("mounted"), "{error}");
    run("umount", &[&at]);
    let error = SlabTier::open(medium.clone()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("something else"), "{error}");
    run("mount", &["-t".as_ref(), "ext4".as_ref(), &device, &at]);
    assert_eq!(std::fs::read(at.join("file")).unwrap(), b"a user's");
    run("umount", &[&at]);
    wipe(&device);
    // What the file system left elsewhere on the device does not matter.
    let bench = bench(medium.clone());
    bench.write_all(3);
    drop(bench);
    assert!((0..3).all(|n| self::bench(medium.clone()).read_is_right(n)));
}

/// A disk that is pulled out, or whose driver is unbound, is an error as long as the tier is open, and no loss.
#[test]
fn one_that_is_taken_away_is_an_error() {
    let Some(device) = device() else { return };
    let media = Media::new();
    let medium = media.next(32 * MIB);
    let bench = bench(medium.clone());
    bench.write_all(20);
    // Of an NVMe namespace: its controller, whose own device is that of the bus.
    let bus = std::fs::canonicalize(sysfs(&device, "block").join("device/device")).unwrap();
    let driver = std::fs::canonicalize(bus.join("driver")).unwrap();
    let tell =
        |file: &str| std::fs::write(driver.join(file), bus.file_name().unwrap().as_encoded_bytes()).unwrap();
    tell("unbind");
    for _ in 0..2 {
        let error = bench.read(0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    }
    assert!((0..20).all(|n| !bench.read_is_right(n)));
    assert_eq!(bench.write(50).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(bench.tier.advance_and_wait(&bench.spec, 0).unwrap_err().kind(), ErrorKind::Io);
    drop(bench);
    tell("bind");
    until("the device is there again", || std::fs::metadata(&device).is_ok());
    let bench = self::bench(medium);
    assert!((0..20).all(|n| bench.read_is_right(n)), "all is there again");
    assert!(bench.read(50).is_err());
}

/// A medium is its bytes: copied from a file to a device, all of it is there.
#[test]
fn a_files_content_is_a_medium_of_the_device() {
    let Some(device) = device() else { return };
    let media = Media::new();
    let file = config(&media.dir.path().join("file"), 32 * MIB);
    let bench = bench(file.clone());
    bench.write_all(20);
    let epoch = bench.tier.advance_and_wait(&bench.spec, bench.epoch + 1).unwrap();
    let bench = Bench { epoch, ..bench };
    bench.write_all(10);
    drop(bench);
    let slot = SlotBuf::anonymous(32 << 20);
    slot.write_at(0, &std::fs::read(&file.path).unwrap());
    let volume = FileVolume::open(&device, HANG).unwrap();
    volume.write_at(&[IoBuf::payload(slot, 32 << 20).unwrap()], 0).unwrap();
    drop(volume);
    let bench = self::bench(config(&device, 0));
    assert_eq!(bench.epoch, epoch);
    assert_eq!((0..20).filter(|n| bench.read_is_right(*n)).count(), 10);
}
