//! A volume is a file or a block device. With `KVDEPOT_TEST_SLAB` these tests also run on the block device that it names, as
//! root, one after another (`make test-slab`: on an NVMe disk of a virtual machine); what its first 8 MiB hold is lost.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvdepot_core::ErrorKind;
use kvdepot_io::cut::in_runs;
use kvdepot_io::owner::has_owner;
use kvdepot_io::{AlignedBuf, FileVolume, IoBuf, SlotBuf, Volume};
use rustix::fs::{CWD, FileType, Mode, mknodat};

const MIB: u64 = 1 << 20;
const PAGE: usize = 4096;
/// Reached only by a hang.
const HANG: Duration = Duration::from_secs(60);

/// The block device to test on.
fn device() -> Option<PathBuf> {
    std::env::var_os("KVDEPOT_TEST_SLAB").map(PathBuf::from)
}

/// Checks a file of 8 MiB and the device, with a directory for other names of them.
fn each(check: impl Fn(&Path, &Path)) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = dir.path().join("medium");
    std::fs::File::create(&file).unwrap().set_len(8 * MIB).unwrap();
    for medium in std::iter::once(file).chain(device()) {
        check(&medium, dir.path());
    }
}

fn open(path: &Path) -> FileVolume {
    FileVolume::open(path, HANG).unwrap()
}

/// A number that sysfs tells of a block device.
fn attribute(device: &Path, name: &str) -> u64 {
    let number = std::fs::metadata(device).unwrap().st_rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let text = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{name}")).unwrap();
    text.trim().parse().unwrap()
}

fn page(fill: u8) -> IoBuf {
    let mut page = AlignedBuf::zeroed(PAGE);
    page.fill(fill);
    IoBuf::for_write_owned(AlignedBuf::zeroed(0), page)
}

fn read(volume: &FileVolume, offset: u64, slot: &SlotBuf) -> Vec<u8> {
    volume.read_at(&mut IoBuf::payload(slot.clone(), slot.len()).unwrap(), offset).unwrap();
    let mut bytes = vec![0; slot.len()];
    slot.read_at(0, &mut bytes);
    bytes
}

#[test]
fn what_was_written_is_read() {
    each(|path, _| {
        let volume = open(path);
        let wanted: Vec<u8> =
            (0..1 << 20).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let slot = SlotBuf::anonymous(1 << 20);
        slot.write_at(0, &wanted);
        volume.write_at(&[IoBuf::payload(slot, 1 << 20).unwrap()], MIB).unwrap();
        // More pieces than one call takes.
        let pages: Vec<IoBuf> = (0..1500).map(|n| page(n as u8)).collect();
        volume.write_at(&pages, 2 * MIB).unwrap();
        volume.sync().unwrap();
        let cut = [PAGE, 40 * PAGE, 1 << 19, (1 << 19) - 41 * PAGE];
        let other = FileVolume::open_to_read(path).unwrap();
        for volume in [&volume, &other] {
            assert!(read(volume, MIB, &SlotBuf::anonymous(1 << 20)) == wanted);
            assert!(read(volume, MIB, &in_runs(&SlotBuf::anonymous(1 << 20), &cut)) == wanted);
            let pages = read(volume, 2 * MIB, &SlotBuf::anonymous(1500 * PAGE));
            assert!(pages.chunks(PAGE).zip(0..).all(|(page, n)| page.iter().all(|&byte| byte == n as u8)));
        }
    });
}

#[test]
fn it_ends_where_the_file_or_device_ends() {
    each(|path, _| {
        let volume = open(path);
        let end = volume.bytes();
        volume.write_at(&[page(1)], end - PAGE as u64).unwrap();
        assert!(read(&volume, end - PAGE as u64, &SlotBuf::anonymous(PAGE)) == [1; PAGE]);
        for at in [end - PAGE as u64, end] {
            let mut two = IoBuf::payload(SlotBuf::anonymous(2 * PAGE), 2 * PAGE).unwrap();
            assert_eq!(volume.read_at(&mut two, at).unwrap_err().kind(), ErrorKind::Corrupt);
        }
        if !volume.can_grow() {
            assert!(volume.write_at(&[page(1), page(2)], end - PAGE as u64).is_err());
            assert_eq!(volume.bytes(), end);
        }
    });
}

#[test]
fn a_devices_size_and_alignment_are_those_of_sysfs() {
    let Some(device) = device() else { return };
    let volume = open(&device);
    assert_eq!(volume.bytes(), attribute(&device, "size") * 512);
    let align = volume.direct().expect("O_DIRECT");
    assert_eq!(align.offset_bytes as u64, attribute(&device, "queue/logical_block_size"));
    assert!(!volume.can_grow());
    assert_eq!(volume.allocate(volume.bytes()).unwrap_err().kind(), ErrorKind::Config);
}

/// A device can have many nodes, each with its own locks.
#[test]
fn it_has_one_owner_under_all_its_names() {
    each(|path, dir| {
        let other = dir.join("other");
        if std::fs::metadata(path).unwrap().is_file() {
            std::fs::hard_link(path, &other).unwrap();
        } else {
            let number = std::fs::metadata(path).unwrap().st_rdev();
            mknodat(CWD, &other, FileType::BlockDevice, Mode::RUSR | Mode::WUSR, number).unwrap();
        }
        let owner = open(path);
        for name in [path, &other] {
            assert!(has_owner(name).unwrap());
            let refused = FileVolume::open(name, Duration::ZERO).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
            FileVolume::open_to_read(name).unwrap();
        }
        drop(owner);
        assert!(!has_owner(path).unwrap() && !has_owner(&other).unwrap());
        drop(open(&other));
        std::fs::remove_file(&other).unwrap();
    });
}
